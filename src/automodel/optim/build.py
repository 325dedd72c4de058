"""Optimizers, and their state as plain tensors and numbers.

Weight decay leaves biases and norms alone, by the rule of HF Trainer (`decaying`); `decay_norms_and_biases` gives a
bare torch optimizer's behaviour. State travels by parameter *name*, so a checkpoint does not depend on the order of
groups.

What torch has is torch's. Adafactor is transformers', as in HF Trainer: torch's scales every step by the size of the
weights, so the same learning rate means something else there. Lion is our own (`lion.py`), Muon is torch's beside AdamW
(`muon.py`), 8-bit and paged state comes from bitsandbytes (`quantized.py`); captured steps have AdamW of their own,
also with 8-bit moments (`kernels/flat_adamw.py`).
"""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from automodel.config.errors import UserError
from automodel.optim.config import OptimizerConfig, torchs_own
from automodel.optim.kinds import KINDS, Kind
from automodel.optim.lion import Lion
from automodel.optim.muon import LR_FACTOR, muon_with_adamw
from automodel.optim.quantized import build_quantized, is_quantized, load_quantized_state

TORCH = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


_NEVER_DECAYS = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names, in small letters, that HF Trainer takes for those of biases and norms."""


def decaying(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay applies to, as HF Trainer's `get_decay_parameter_names` has them: all
    but biases and norms. It goes by names and by the class `LayerNorm`, never by shapes: a state's decay rates, an
    attention's sinks and a gate decay although they are vectors."""
    norms = tuple(f"{name}." for name, module in model.named_modules() if name and isinstance(module, nn.LayerNorm))
    names = (name for name, _ in model.named_parameters())
    return {name for name in names if not name.startswith(norms) and not _NEVER_DECAYS.search(name.lower())}


def parameter_groups(model: nn.Module, cfg: OptimizerConfig, adapter_b_ratio: float = 1.0) -> list[dict[str, Any]]:
    """Trainable parameters in two groups, with and without weight decay; empty groups are left out. Matrices come first
    even where all are in one group: those of one product (query, key, value) are then neighbours in a flat buffer.
    `adapter_b_ratio` (LoRA+): the B of adapters are a third group, with so many times the learning rate."""
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    # Of adapters, all A and then all B: those A that read the same input are neighbours, too.
    decayed = decaying(model)
    trainable.sort(key=lambda named: (named[0] not in decayed, named[0].endswith("lora_B")))
    if not trainable:
        raise UserError("The model has no trainable parameter: everything is frozen.")
    faster = [p for n, p in trainable if adapter_b_ratio != 1.0 and n.endswith("lora_B")]
    elsewhere = {id(p) for p in faster}
    trainable = [(n, p) for n, p in trainable if id(p) not in elsewhere]
    with_decay = [p for n, p in trainable if cfg.decay_norms_and_biases or n in decayed]
    without = [p for n, p in trainable if not (cfg.decay_norms_and_biases or n in decayed)]
    decay = {} if cfg.decay is None else {"weight_decay": cfg.decay}  # what a group does not have is the class's own
    groups = [{"params": with_decay, **decay}, {"params": without, "weight_decay": 0.0}]
    groups.append({"params": faster, **decay, "lr": cfg.lr * adapter_b_ratio, LR_FACTOR: adapter_b_ratio})
    return [g for g in groups if g["params"]]


def build_optimizer(
    model: nn.Module,
    cfg: OptimizerConfig,
    target: type | None = None,
    kind: Kind | None = None,
    adapter_b_ratio: float = 1.0,
) -> torch.optim.Optimizer:
    """The optimizer over `model`'s trainable parameters. `target` is the class behind `_target_`, already gated; `kind`
    is the plan's choice where it is not what the name says (no paging on the CPU). `adapter_b_ratio`: LoRA+."""
    groups = parameter_groups(model, cfg, adapter_b_ratio)
    kind = kind or KINDS[cfg.name]
    try:
        if target is not None:
            return _from_class(target, groups, cfg)
        return _by_name(kind, model, groups, cfg)
    except UserError:
        raise
    except Exception as error:  # a class of the user's may fail in any way
        name = f"{target.__module__}.{target.__qualname__}" if target else cfg.name
        raise UserError(f"optimizer: {name} refused its arguments: {error}. Change or remove them.") from error


def check_arguments(cfg: OptimizerConfig, target: type | None) -> None:
    """Builds the optimizer over one small layer. Raises `UserError` where it refuses its arguments, which would
    otherwise be known only once the weights are loaded."""
    kind = KINDS[cfg.name]
    if target is not None or kind.plain:  # the other ones take no arguments but those of the section
        build_optimizer(nn.Sequential(nn.Linear(2, 2)), cfg, target)


def _by_name(kind: Kind, model: nn.Module, groups: list[dict[str, Any]], cfg: OptimizerConfig) -> torch.optim.Optimizer:
    adam = cfg.adam
    if not kind.plain:
        moments = adam if kind.algorithm == "adamw" else {"betas": adam["betas"]}
        return build_quantized(model, kind, groups, lr=cfg.lr, **moments, **cfg.extra)
    if kind.algorithm == "lion":
        return Lion(groups, lr=cfg.lr, betas=adam["betas"], **cfg.extra)
    if kind.algorithm == "muon":
        return muon_with_adamw(model, groups, lr=cfg.lr, muon_lr=cfg.muon_lr, **adam, **cfg.extra)
    if kind.algorithm == "adafactor":
        from transformers.optimization import Adafactor

        given = {"scale_parameter": False, **cfg.extra}
        return Adafactor(groups, lr=cfg.lr, relative_step=False, warmup_init=False, **given)
    return _from_class(TORCH[kind.algorithm], groups, cfg)


def _from_class(cls: type, groups: list[dict[str, Any]], cfg: OptimizerConfig) -> torch.optim.Optimizer:
    accepted = inspect.signature(cls).parameters
    # Others than Adam have defaults of their own for these; what the section leaves open is left to them.
    given = {key: getattr(cfg, key) for key in cfg.USUAL if key in accepted and getattr(cfg, key) is not None}
    arguments: dict[str, Any] = given | {"lr": cfg.lr} | cfg.extra
    if cls in (torch.optim.AdamW, torch.optim.Adam):
        # One fused launch; the CPU has it as well. It cannot be combined with foreach.
        arguments.setdefault("fused", not arguments.get("foreach"))
    if "weight_decay" not in accepted:
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    return cls(groups, **arguments)


def left_open(cfg: OptimizerConfig) -> dict[str, Any]:
    """What stands for `betas`, `eps` and `weight_decay` where a section leaves them open. What a class of the user's
    own has is not known here; the usual `betas` and `eps` stand for it."""
    kind = KINDS.get(cfg.name)
    named = TORCH.get(kind.algorithm) if kind else None
    target = cfg.target or (f"torch.optim.{named.__name__}" if named else "")
    own = {key: number for key, number in (torchs_own(target) or {}).items() if key in cfg.USUAL}
    decay = replace(cfg, weight_decay=None).decay
    return cfg.USUAL | own | ({} if decay is None else {"weight_decay": decay})


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
    states = _states_by_parameter(model, {**tensors, **values})
    if is_quantized(optimizer):
        load_quantized_state(optimizer, states)
        return
    # Fused and capturable optimizers keep their step counts beside the parameters, all others on the host.
    counted_there = {p for g in optimizer.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
    optimizer.state.clear()
    for parameter, state in states.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and (key != "step" or parameter in counted_there):
                value = value.to(parameter.device)
            optimizer.state[parameter][key] = value


def _states_by_parameter(model: nn.Module, saved: dict[str, Any]) -> dict[Tensor, dict[str, Any]]:
    parameters = dict(model.named_parameters())
    states: dict[Tensor, dict[str, Any]] = {}
    for path, value in saved.items():
        key, name = path.split("/", 1)
        if name not in parameters:
            raise UserError(
                f"The checkpoint's optimizer has state for '{name}', which this model does not have. "
                "Resume with the config the run was started with."
            )
        states.setdefault(parameters[name], {})[key] = value
    return states


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The rate of the next step; a group may have its own multiple of it (`muon.py`)."""
    for group in optimizer.param_groups:
        own = lr * group.get(LR_FACTOR, 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own
