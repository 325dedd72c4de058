"""Languages of a multilingual encoder-decoder (mBART, NLLB, M2M100): a code among the tokens says which one it is.

The tokenizer writes the codes of its `src_lang` and `tgt_lang`; left alone, it would write one and the same language
before sources and targets. Generating starts with the target's code too, wherever the model was taught to have it: as
the first token that is made (mBART-50, NLLB, M2M100), or as what the decoder starts from (mBART).
"""

from __future__ import annotations

from typing import Any

from automodel.config.errors import UserError
from automodel.config.names import near
from automodel.data.config import DatasetConfig


def has_languages(tokenizer: Any) -> bool:
    return hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")


def name_languages(tokenizer: Any, dataset: DatasetConfig, validation: DatasetConfig | None) -> None:
    """Tells the tokenizer which languages the data are in, and to keep that when it is saved."""
    for key, attribute in (("source_lang", "src_lang"), ("target_lang", "tgt_lang")):
        language = getattr(dataset, key)
        other = getattr(validation, key) if validation is not None else None
        if other not in (None, language):
            raise UserError(f"validation_dataset.{key} is '{other}', but a run has one: that of dataset.{key}.")
        if language is None:
            continue
        if not has_languages(tokenizer):
            raise UserError(
                f"dataset.{key}: {type(tokenizer).__name__} has no codes for languages. Remove it; models such as T5 "
                "are told by dataset.source_prefix what to do."
            )
        if language not in _codes(tokenizer):
            guess = near(language, list(_codes(tokenizer)), cutoff=0.5)
            raise UserError(
                f"dataset.{key}: the tokenizer has no language '{language}'."
                + (f" Did you mean '{guess}'?" if guess else "")
            )
        setattr(tokenizer, attribute, language)
        tokenizer.init_kwargs[attribute] = language  # what save_pretrained writes


def start_with_language(model: Any, tokenizer: Any) -> None:
    """Makes generating start with the code of the target language, where the tokenizer has one."""
    config = getattr(model, "generation_config", None)
    if config is None or not has_languages(tokenizer) or tokenizer.tgt_lang is None:
        return
    code, target = _codes(tokenizer).get(tokenizer.tgt_lang), tokenizer(text_target="a")["input_ids"]
    if target[0] == code:
        config.forced_bos_token_id = code
    elif target[-1] == code:
        config.decoder_start_token_id = code


def _codes(tokenizer: Any) -> dict[str, int]:
    """Languages and their tokens: no words, of which `de` is one, too. M2M100 writes `en` as `__en__`."""
    tokens = {**tokenizer.get_added_vocab(), **getattr(tokenizer, "lang_token_to_id", {})}
    return {name.strip("_"): number for name, number in tokens.items()}
