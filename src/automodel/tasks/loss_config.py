"""The `loss_fn:` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from automodel.config.section import NonNegative, Section, ShareBelowOne


@dataclass(frozen=True, kw_only=True)
class LossConfig(Section):
    """`loss_fn:` chosen by the task; these adjust it."""

    SLOT: ClassVar[str | None] = "loss_fn"

    target: str | None = None
    """A cross-entropy by NeMo's name (`…MaskedCrossEntropy`, `…FusedLinearCrossEntropy`, …). All are the same sum over
    labelled tokens; how it is computed is told by the plan."""
    fused: bool | None = None
    """Whether a language model's last product is part of the loss, so that logits are never stored. Default: wherever
    the model's head is a plain product. The numbers are the same."""
    label_smoothing: ShareBelowOne = 0.0
    """Share of the target spread over all classes (cross-entropy only). A language model's validation loss and
    perplexity are without it."""
    z_loss: Annotated[float, Ge(0), Le(100)] = 0.0
    """How much of (log of the softmax's sum)² is added for each label in training (1e-4 is usual): it keeps logits from
    drifting (cross-entropy only)."""
    class_weights: tuple[NonNegative, ...] | None = None
    """A weight for each class; the mean is weighted, as in torch's CrossEntropyLoss."""
