"""What the models room knows of a task: which head it trains, and what that head gives.

A task of `automodel/tasks/` picks one of these. Nothing here loads torch or transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Wants = Literal["pooled", "tokens", "vocabulary"]


@dataclass(frozen=True)
class TaskHead:
    """A kind of head, as transformers has it."""

    auto_class: str
    """transformers' class that loads a model with this head."""
    wants: Wants
    """`pooled`: a row of scores for each document. `tokens`: a row of class scores for each token. `vocabulary`: a row
    with a score for each word of the vocabulary."""
    adapter_type: str
    """PEFT's `task_type` of an adapter under this head."""
    encoder_decoder: bool = False
    """The model reads a source with an encoder and writes the target with a decoder."""

    @property
    def has_classes(self) -> bool:
        """Whether the head scores the classes of the data. Such a head is new to most checkpoints."""
        return self.wants != "vocabulary"

    @property
    def next_token(self) -> bool:
        """Whether the head scores the next token of the stream it reads: labels stand one place to the right."""
        return self.wants == "vocabulary" and not self.encoder_decoder


POOLED = TaskHead("AutoModelForSequenceClassification", "pooled", "SEQ_CLS")
TOKENS = TaskHead("AutoModelForTokenClassification", "tokens", "TOKEN_CLS")
NEXT_TOKEN = TaskHead("AutoModelForCausalLM", "vocabulary", "CAUSAL_LM")
TARGET = TaskHead("AutoModelForSeq2SeqLM", "vocabulary", "SEQ_2_SEQ_LM", encoder_decoder=True)

HEADS = (POOLED, TOKENS, NEXT_TOKEN, TARGET)
