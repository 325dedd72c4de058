"""The `optimizer:` and `lr_scheduler:` sections."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from automodel.config.section import CountOrZero, NonNegative, Positive, Section, Share, ShareBelowOne


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """`optimizer:` AdamW by default."""

    SLOT: ClassVar[str | None] = "optimizer"
    SHORTHAND: ClassVar[str | None] = "name"
    ALIASES: ClassVar[dict[str, str]] = {"learning_rate": "lr", "optim": "name"}

    target: str | None = None
    """An optimizer class, e.g. `torch.optim.AdamW`; other keys of the section go to its constructor."""
    name: Literal["adamw", "adamw_torch", "adamw_torch_fused", "sgd"] = "adamw"
    """Optimizer by name, when there is no `_target_`."""
    lr: Positive = 5e-5
    """Peak learning rate."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay; not applied to biases and norms (`decay_norms_and_biases`)."""
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.999)
    """Adam's moment decay rates."""
    eps: Positive = 1e-8
    """Adam's epsilon."""
    decay_norms_and_biases: bool = False
    """Apply weight decay to every parameter, as a bare torch optimizer would."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further constructor arguments of the `_target_` (`amsgrad: true`)."""


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig(Section):
    """`lr_scheduler:` linear decay without warm-up by default, as in HF Trainer."""

    SHORTHAND: ClassVar[str | None] = "name"
    ALIASES: ClassVar[dict[str, str]] = {
        "lr_scheduler_type": "name",
        "lr_decay_style": "name",
        "num_warmup_steps": "warmup_steps",
        "lr_warmup_steps": "warmup_steps",
    }

    name: Literal["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt", "wsd", "polynomial"] = (
        "linear"
    )
    """Shape of the decay after the warm-up."""
    warmup_steps: CountOrZero | None = None
    """Optimizer steps of linear warm-up."""
    warmup_ratio: Share | None = None
    """Warm-up as a share of all steps; give this or `warmup_steps`."""
    min_lr: NonNegative = 0.0
    """Where the decay ends."""
    decay_ratio: Share = 0.2
    """`wsd`: share of the steps in the final decay."""
    power: Positive = 1.0
    """`polynomial`: the exponent."""
