"""Which heads a model can have: transformers' tables of classes, and the classes that come with a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from automodel.models.task_head import HEADS, NEXT_TOKEN, TARGET, TaskHead

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def heads_of(hf_config: PreTrainedConfig) -> tuple[TaskHead, ...]:
    """The heads that a model of this config can be fine-tuned with."""
    from transformers.models.auto import modeling_auto as auto

    own = getattr(hf_config, "auto_map", None) or {}  # classes that come with the model
    has_class = [head for head in HEADS if head in _heads_in_transformers(hf_config) or head.auto_class in own]
    if NEXT_TOKEN in has_class and not _predicts_the_next_token(hf_config, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES):
        has_class.remove(NEXT_TOKEN)
    if TARGET in has_class and not _has_source_and_target(hf_config):
        has_class.remove(TARGET)
    return tuple(has_class)


def _heads_in_transformers(hf_config: PreTrainedConfig) -> set[TaskHead]:
    return {head for head in HEADS if hf_config.model_type in classes_in_transformers(head)}


def classes_in_transformers(head: TaskHead) -> dict[str, str]:
    """transformers' model classes with this head, by model type."""
    from transformers.models.auto import modeling_auto as auto

    tables = {
        "AutoModelForSequenceClassification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "AutoModelForTokenClassification": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        "AutoModelForCausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForSeq2SeqLM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    return tables[head.auto_class]


def forget_code_that_is_not_run(hf_config: PreTrainedConfig) -> None:
    """Drop the model's own code, which the command line does not trust, where transformers has the classes. Some models
    have code beside a class in transformers (Phi-3), which then is the one that is trained: as fast as without that
    code, and saved without a word of files that are not saved. A class that transformers lacks stays named, for the
    message that asks for trust."""
    own = getattr(hf_config, "auto_map", None) or {}
    lacking = {head.auto_class for head in HEADS if head not in _heads_in_transformers(hf_config)}
    if own and not lacking & set(own):
        del hf_config.auto_map


def _has_source_and_target(hf_config: PreTrainedConfig) -> bool:
    """transformers lists decoders that listen to audio (Voxtral, Qwen2-Audio) beside the encoder-decoders; their text
    is one stream, without a source."""
    own = getattr(hf_config, "auto_map", None) or {}
    return bool(getattr(hf_config, "is_encoder_decoder", False)) or TARGET.auto_class in own


def _predicts_the_next_token(hf_config: PreTrainedConfig, masked_lm_names) -> bool:
    """BERT and BART have causal classes for use inside other models; alone, BERT sees the token it should predict and
    BART lacks its encoder."""
    if getattr(hf_config, "is_encoder_decoder", False):
        return False
    return hf_config.model_type not in masked_lm_names or bool(getattr(hf_config, "is_decoder", False))
