"""Texts with tokens that the model has no embedding for.

A tokenizer may have tokens beyond the model's embedding: Gemma 3's text models are published with a token for images,
and people add tokens without resizing the model. That does not matter until a text has one: then the run would end with
an index out of range, at whatever step it comes up. The tokens are all there beforehand, so it is found before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from automodel.config.errors import UserError
from automodel.data.store import TokenStore

SHOWN = 5


def check_tokens(store: TokenStore, tokenizer: Any, hf_config: Any, section: str) -> None:
    """Raises `UserError` with the rows that have tokens beyond the model's embedding."""
    size = getattr(hf_config, "vocab_size", None)
    if size is None or len(tokenizer) <= size:
        return
    samples, unknown = set[int](), set[int]()
    for ids, offsets in ((store.input_ids, store.offsets), (store.target_ids, store.target_offsets)):
        if ids is not None and offsets is not None:
            beyond = np.flatnonzero(np.asarray(ids) >= size)
            samples.update((np.searchsorted(offsets, beyond, side="right") - 1).tolist())
            unknown.update(np.unique(ids[beyond]).tolist())
    if samples:
        rows = list(dict.fromkeys(int(store.rows[i]) for i in sorted(samples)))
        tokens = [tokenizer.convert_ids_to_tokens(i) for i in sorted(unknown)[:SHOWN]]
        shown = ", ".join(map(str, rows[:SHOWN])) + (", …" if len(rows) > SHOWN else "")
        raise UserError(
            f"{section}: {len(rows):,} row{'s have' if len(rows) > 1 else ' has'} tokens that the model's embedding of "
            f"{size:,} rows does not reach ({', '.join(map(repr, tokens))}): row {shown} (counted from 0). Remove them "
            "from the texts, or save the model with `resize_token_embeddings(len(tokenizer))` first."
        )
