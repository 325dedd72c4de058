"""What a model's own settings take from its tokenizer, wherever a model was loaded: the pad token, the language it
answers in."""

from __future__ import annotations

from typing import Any

from automodel.models.families import FAMILIES
from automodel.models.languages import start_with_language


def match_tokenizer(model: Any, tokenizer: Any) -> None:
    """Call after the weights are in: an embedding built with a pad token freezes that row."""
    _align_pad_token(model, tokenizer)
    start_with_language(model, tokenizer)


def _align_pad_token(model: Any, tokenizer: Any) -> None:
    """Writes the tokenizer's pad token into the config of a decoder that has none or another: its classifier finds the
    last token of a padded row by it."""
    config = model.config
    pad = tokenizer.pad_token_id
    own = getattr(config, "pad_token_id", None)  # configs with code of their own need not have one
    family = FAMILIES.get(config.model_type)
    if pad is None or own == pad or (own is not None and not (family and family.decoder)):
        return
    config.pad_token_id = pad
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None and generation_config.pad_token_id is None:
        generation_config.pad_token_id = pad
