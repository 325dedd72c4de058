"""Which tokens of a tokenizer are special."""

from __future__ import annotations

from typing import Any


def special_ids(tokenizer: Any) -> set[int]:
    """Those with a name of their own, and those that only the list of added tokens marks (Gemma's `<end_of_turn>`)."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {*tokenizer.all_special_ids, *added}
