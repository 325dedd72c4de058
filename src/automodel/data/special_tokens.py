"""Which tokens of a tokenizer are special."""

from __future__ import annotations

from typing import Any


def special_ids(tokenizer: Any) -> set[int]:
    """Those with a name of their own, and those that only the list of added tokens marks (Gemma's `<end_of_turn>`)."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {*tokenizer.all_special_ids, *added}


def has_segments(tokenizer: Any) -> bool:
    """Whether even a single text has segments other than 0 (XLNet). Zeros are what models assume anyway."""
    return any(tokenizer("a", return_token_type_ids=True)["token_type_ids"])
