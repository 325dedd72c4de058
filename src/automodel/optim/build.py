"""Optimizers, and their state as plain tensors and numbers.

Weight decay leaves biases and norms alone, as HF Trainer does; `decay_norms_and_biases` gives a bare torch
optimizer's behaviour. State travels by parameter *name*, so a checkpoint does not depend on the order of groups.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from automodel.config.errors import UserError
from automodel.optim.config import OptimizerConfig

NAMED = {
    "adamw": torch.optim.AdamW,
    "adamw_torch": torch.optim.AdamW,
    "adamw_torch_fused": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies by default: matrices yes; biases, norms and T5's position bias no."""
    return parameter.ndim >= 2 and "bias" not in name


def parameter_groups(model: nn.Module, cfg: OptimizerConfig) -> list[dict[str, Any]]:
    """Trainable parameters in two groups, with and without weight decay; empty groups are left out. Matrices come first
    even where all are in one group: those of one product (query, key, value) are then neighbours in a flat buffer."""
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    trainable.sort(key=lambda named: not decays(*named))
    if not trainable:
        raise UserError("The model has no trainable parameter: everything is frozen.")
    with_decay = [p for n, p in trainable if cfg.decay_norms_and_biases or decays(n, p)]
    without = [p for n, p in trainable if not (cfg.decay_norms_and_biases or decays(n, p))]
    groups = [{"params": with_decay, "weight_decay": cfg.weight_decay}, {"params": without, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


def build_optimizer(model: nn.Module, cfg: OptimizerConfig, target: type | None = None) -> torch.optim.Optimizer:
    """The optimizer over `model`'s trainable parameters; `target` is the class behind `_target_`, already gated."""
    cls = target or NAMED[cfg.name]
    accepted = inspect.signature(cls).parameters
    arguments: dict[str, Any] = {"lr": cfg.lr, "betas": cfg.betas, "eps": cfg.eps, "weight_decay": cfg.weight_decay}
    arguments = {k: v for k, v in arguments.items() if k in accepted} | cfg.extra
    if cls in (torch.optim.AdamW, torch.optim.Adam):
        # One fused launch; the CPU has it as well. It cannot be combined with foreach.
        arguments.setdefault("fused", not arguments.get("foreach"))
    groups = parameter_groups(model, cfg)
    if "weight_decay" not in accepted:
        for group in groups:
            del group["weight_decay"]
    try:
        return cls(groups, **arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer: {cls.__module__}.{cls.__qualname__} refused its arguments: {error}.") from error


def state_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state as `{"exp_avg/encoder.weight": tensor}` and the few values that are not tensors."""
    names: dict[Tensor, str] = {p: n for n, p in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            target = tensors if isinstance(value, Tensor) else values
            target[f"{key}/{names[parameter]}"] = value
    return tensors, values


def load_state_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor], values: dict[str, Any]
) -> None:
    """Puts back what `state_tensors` gave, exactly (no dtype change, step counters included)."""
    parameters = dict(model.named_parameters())
    # Fused and capturable optimizers keep their step counts beside the parameters, all others on the host.
    counted_there = {p for g in optimizer.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
    optimizer.state.clear()
    for path, value in {**tensors, **values}.items():
        key, name = path.split("/", 1)
        if name not in parameters:
            raise UserError(
                f"The checkpoint's optimizer has state for '{name}', which this model does not have. "
                "Resume with the config the run was started with."
            )
        parameter = parameters[name]
        if isinstance(value, Tensor) and (value.ndim > 0 or parameter in counted_there):
            value = value.to(parameter.device)
        optimizer.state[parameter][key] = value


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
