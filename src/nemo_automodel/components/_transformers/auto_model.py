"""Alias of `automodel.models.auto`."""

from typing import Any

from automodel.models.auto import (
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

HAS_LIGER_KERNEL: bool


def __getattr__(name: str) -> Any:
    if name == "HAS_LIGER_KERNEL":  # looked up when it is read: the answer may ask the GPU
        from automodel.models import auto

        return auto.HAS_LIGER_KERNEL
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
