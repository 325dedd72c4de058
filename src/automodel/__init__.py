"""automodel: fine-tune Hugging Face models several times faster than the stock Trainer, to the same loss.

Names here load on first use, so that `import automodel` and `automodel --help` never import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from automodel.models.auto import (
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        NeMoAutoModelForCausalLM,
        NeMoAutoModelForSeq2SeqLM,
        NeMoAutoModelForSequenceClassification,
        NeMoAutoModelForTokenClassification,
    )
    from automodel.tasks.squad_dataset import make_squad_dataset
    from automodel.tasks.text_classification_dataset import TextClassificationDataset
    from automodel.trainer.arguments import TrainingArguments
    from automodel.trainer.sft import SFTConfig, SFTTrainer
    from automodel.trainer.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "NeMoAutoModelForCausalLM",
    "NeMoAutoModelForSeq2SeqLM",
    "NeMoAutoModelForSequenceClassification",
    "NeMoAutoModelForTokenClassification",
    "SFTConfig",
    "SFTTrainer",
    "TextClassificationDataset",
    "Trainer",
    "TrainingArguments",
    "__version__",
    "make_squad_dataset",
]

_HOME = {name: "automodel.models.auto" for name in __all__ if "AutoModelFor" in name} | {
    "TextClassificationDataset": "automodel.tasks.text_classification_dataset",
    "make_squad_dataset": "automodel.tasks.squad_dataset",
    "SFTConfig": "automodel.trainer.sft",
    "SFTTrainer": "automodel.trainer.sft",
    "Trainer": "automodel.trainer.trainer",
    "TrainingArguments": "automodel.trainer.arguments",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'automodel' has no attribute {name!r}")
    home = _HOME[name]
    if home.startswith("automodel.trainer"):
        import_module("torch")
        import_module("automodel.kernels.ahead").import_kernels()  # beside the import of transformers, which is longer
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
