"""The `loss_fn:` section."""

from __future__ import annotations

from dataclasses import dataclass

from automodel.config.section import NonNegative, Section, ShareBelowOne


@dataclass(frozen=True, kw_only=True)
class LossConfig(Section):
    """`loss_fn:` chosen by the task; these adjust it."""

    label_smoothing: ShareBelowOne = 0.0
    """Share of the target spread over all classes (cross-entropy only)."""
    class_weights: tuple[NonNegative, ...] | None = None
    """A weight for each class; the mean is weighted, as in torch's CrossEntropyLoss."""
