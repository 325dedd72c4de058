"""Alias of `automodel.models.auto`."""

from automodel.models.auto import (
    HAS_LIGER_KERNEL,
    NeMoAutoModelForCausalLM,
    NeMoAutoModelForSeq2SeqLM,
    NeMoAutoModelForSequenceClassification,
    NeMoAutoModelForTokenClassification,
)

__all__ = [
    "HAS_LIGER_KERNEL",
    "NeMoAutoModelForCausalLM",
    "NeMoAutoModelForSeq2SeqLM",
    "NeMoAutoModelForSequenceClassification",
    "NeMoAutoModelForTokenClassification",
]
