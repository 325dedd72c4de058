"""The `optimizer:` and `lr_scheduler:` sections."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from automodel.config.section import Count, CountOrZero, Decay, Rate, Section, Share, ShareBelowOne


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """`optimizer:` AdamW by default."""

    SLOT: ClassVar[str | None] = "optimizer"
    SHORTHAND: ClassVar[str | None] = "name"
    ALIASES: ClassVar[dict[str, str]] = {"learning_rate": "lr", "optim": "name"}
    EXTRA: ClassVar[dict[str, Any]] = {
        "momentum|beta1": ShareBelowOne | None,
        "dampening|alpha|lr_decay": Share,
        "initial_accumulator_value": Annotated[float, Ge(0), Le(1000)],
        "clip_threshold": Annotated[float, Gt(0), Le(1000)],
        "decay_rate": Annotated[float, Ge(-1), Lt(0)],
        "ns_steps": Annotated[int, Ge(1), Le(99)],  # torch takes fewer than 100
        "nesterov|centered|amsgrad|decoupled_weight_decay|scale_parameter|maximize|capturable|differentiable": bool,
        "foreach|fused": bool | None,
    }
    USUAL: ClassVar[dict[str, Any]] = {"betas": (0.9, 0.999), "eps": 1e-8}  # Adam's

    target: str | None = None
    """An optimizer class, e.g. `torch.optim.AdamW`; other keys of the section go to its constructor."""
    name: Literal[
        "adamw",
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_hf",
        "adamw_apex_fused",
        "adamw_8bit",
        "adamw_bnb_8bit",
        "adamw_torch_8bit",
        "paged_adamw",
        "paged_adamw_32bit",
        "paged_adamw_8bit",
        "lion",
        "lion_32bit",
        "lion_8bit",
        "paged_lion",
        "paged_lion_32bit",
        "paged_lion_8bit",
        "adafactor",
        "muon",
        "sgd",
        "rmsprop",
        "adagrad",
    ] = "adamw"
    """Optimizer by name, when there is no `_target_`. 8-bit and paged ones need a GPU and bitsandbytes
    (`automodel-finetune[quant]`), except that 8-bit AdamW has a form of its own in captured steps; a paged one of 32
    bits is the plain one wherever its state fits. `muon` updates the matrices of hidden layers, AdamW the rest.
    `adafactor` is HF Trainer's, without scaling by the size of weights."""
    lr: Rate = 5e-5
    """Peak learning rate."""
    weight_decay: Decay | None = None
    """Decoupled weight decay; not applied to biases and norms, as in HF Trainer (`decay_norms_and_biases`). Default 0;
    with a `_target_`, what that class has (`torch.optim.AdamW`: 0.01)."""
    betas: tuple[ShareBelowOne, ShareBelowOne] | None = None
    """Moment decay rates. Default `[0.9, 0.999]` for AdamW and Lion; with a `_target_`, what that class has."""
    eps: Annotated[float, Gt(0), Le(1)] | None = None
    """What is added to denominators. Default what the optimizer has: 1e-8 for AdamW, 1e-10 for Adagrad."""
    decay_norms_and_biases: bool = False
    """Apply weight decay to every parameter, as a bare torch optimizer would."""
    muon_lr: Rate | None = None
    """`muon`: peak learning rate of the matrices; default `lr`: Muon's steps are scaled to the size of AdamW's."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer (`amsgrad: true`, `momentum: 0.9`)."""

    @property
    def adam(self) -> dict[str, Any]:
        """`betas` and `eps` of Adam and its kin."""
        given = {key: getattr(self, key) for key in self.USUAL}
        return self.USUAL | {key: value for key, value in given.items() if value is not None}

    @property
    def decay(self) -> float | None:
        """The weight decay; None where only a class of the user's own knows it. Who names one of torch's by `_target_`,
        as NeMo's recipes do, gets what its constructor would give: 0.01 for AdamW."""
        if self.weight_decay is not None or self.target is None:
            return self.weight_decay or 0.0
        own = torchs_own(self.target)
        return None if own is None else float(own.get("weight_decay", 0.0))


def torchs_own(target: str) -> dict[str, Any] | None:
    """The defaults in the signature of a class of torch's; None for other classes. It imports torch, which reading a
    config does not need."""
    if not target.startswith("torch.optim."):
        return None
    import torch

    cls = getattr(torch.optim, target.rpartition(".")[2], None)
    accepted = inspect.signature(cls).parameters if cls else {}
    return {name: parameter.default for name, parameter in accepted.items()}


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig(Section):
    """`lr_scheduler:` linear decay without warm-up by default, as in HF Trainer."""

    SHORTHAND: ClassVar[str | None] = "name"
    ALIASES: ClassVar[dict[str, str]] = {
        "lr_scheduler_type": "name",
        "lr_decay_style": "name",
        "num_warmup_steps": "warmup_steps",
        "lr_warmup_steps": "warmup_steps",
        "lr_end": "min_lr",
        "min_lr_rate": "min_lr_ratio",
        "num_decay_steps": "decay_steps",
        "lr_wsd_decay_steps": "decay_steps",
    }
    INLINE: ClassVar[tuple[str, ...]] = ("lr_scheduler_kwargs",)

    name: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "wsd",
        "warmup_stable_decay",
        "reduce_lr_on_plateau",
        "greedy",
    ] = "linear"
    """Shape of the decay after the warm-up, as transformers defines it. `wsd` is its `warmup_stable_decay` with a
    linear decay. The last two are refused: they are no functions of the step."""
    warmup_steps: CountOrZero | ShareBelowOne | None = None
    """Optimizer steps of linear warm-up; below 1, a share of all steps."""
    warmup_ratio: Share | None = None
    """Warm-up as a share of all steps; give this or `warmup_steps`."""
    min_lr: Annotated[float, Ge(0), Le(100)] | None = None
    """Where the decay ends; default 0 (`polynomial`: 1e-7, as in transformers)."""
    min_lr_ratio: Share | None = None
    """The same as a share of the peak; give this or `min_lr`."""
    decay_steps: Count | None = None
    """`wsd`, `warmup_stable_decay`: steps of the final decay."""
    decay_ratio: Share = 0.2
    """The same as a share of all steps; give this or `decay_steps`."""
    decay_type: Literal["linear", "cosine", "1-sqrt"] | None = None
    """Shape of that decay; default `linear` for `wsd`, `cosine` for `warmup_stable_decay`."""
    power: Annotated[float, Gt(0), Le(100)] = 1.0
    """`polynomial`: the exponent."""
    num_cycles: Annotated[float, Gt(0), Le(10**6)] | None = None
    """`cosine` and its kin: waves, default half a one; `cosine_with_restarts`: restarts, default 1."""
    timescale: Count | None = None
    """`inverse_sqrt`: steps after which the rate has fallen to 71 % of its peak; default the warm-up, or 10,000."""
