"""Texts for classifiers that read the end-of-sequence token.

transformers' encoder-decoder classifiers (T5, BART) pool at a text's last end-of-sequence token, and stop where texts
of one batch have different numbers of them: a `</s>` that stands in a review would end the run at whatever step it
comes up. The tokens are all there beforehand, so this is found before anything is trained.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from automodel.config.errors import UserError
from automodel.data.prepare import PreparedData

SHOWN = 5


def check_ends(data: PreparedData | None, hf_config: Any, section: str) -> None:
    """Raises `UserError` with the rows whose number of end-of-sequence tokens differs from the others'."""
    if data is None or data.row_format.labels != "document" or not getattr(hf_config, "is_encoder_decoder", False):
        return
    end, store, kind = hf_config.eos_token_id, data.store, hf_config.model_type
    if not isinstance(end, int):
        return
    counts = np.add.reduceat((np.asarray(store.input_ids) == end).astype(np.int64), store.offsets[:-1])
    usual = int(np.bincount(counts).argmax())
    if usual == 0:
        raise UserError(
            f"{section}: texts do not end with the model's end-of-sequence token (id {end}), which {kind} classifiers "
            "read. Use the model's own tokenizer; rows that are tokenised already need the token at their end."
        )
    odd = np.flatnonzero(counts != usual)
    if len(odd):
        rows = ", ".join(f"row {int(store.rows[i])} has {int(counts[i])}" for i in odd[:SHOWN])
        raise UserError(
            f"{section}: {len(odd):,} of {len(counts):,} texts hold the end-of-sequence token (id {end}) another "
            f"number of times than the others, which hold it {usual} time{'s' if usual > 1 else ''}: {rows}"
            f"{', …' if len(odd) > SHOWN else ''} (rows are counted from 0). {kind} classifiers can only read texts "
            "that agree in this: remove the token's text from those rows."
        )
