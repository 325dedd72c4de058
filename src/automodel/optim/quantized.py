"""AdamW and Lion with 8-bit or paged state: from bitsandbytes, and, in captured steps, our own 8-bit AdamW.

8-bit: both moments in blocks of 256 numbers with one scale each: 2 bytes a parameter where fp32 moments take 8. Word
tables keep 32-bit state, as in HF Trainer: few of their rows have a gradient in a step, and what is left of a first
moment may be divided by next to nothing. Ours makes one exception: a table that is the head as well has a gradient in
every row, and is a fifth of a small model (`eight_bit_parameters`). Biases and norms, whatever has less than 4,096
elements, are 32-bit in both.

bitsandbytes notes such exceptions in one place for the whole process, by the number of a parameter; each optimizer gets
a place of its own here, so that two runs of one process do not mix them up.

Paged: the state lies in memory that the driver moves between GPU and host as it is needed. Such a tensor cannot be
replaced by a loaded one: what a checkpoint holds is copied into it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from automodel.config.errors import UserError
from automodel.kernels.adamw8 import SMALLEST
from automodel.optim.kinds import INSTALL, Kind

CLASSES = {
    Kind("adamw", bits=8): "AdamW8bit",
    Kind("adamw", paged=True): "PagedAdamW32bit",
    Kind("adamw", bits=8, paged=True): "PagedAdamW8bit",
    Kind("lion", bits=8): "Lion8bit",
    Kind("lion", paged=True): "PagedLion32bit",
    Kind("lion", bits=8, paged=True): "PagedLion8bit",
}


def build_quantized(model: nn.Module, kind: Kind, groups: list[dict[str, Any]], **options: Any) -> Any:
    """The optimizer of `kind` over the model's parameter groups."""
    try:
        library = import_module("bitsandbytes.optim")
    except ImportError as error:
        raise UserError(
            f"optimizer.name: {kind.in_words} come from bitsandbytes, which is not installed: {INSTALL}."
        ) from error
    optimizer = getattr(library, CLASSES[kind])(groups, **options)
    exceptions = object.__new__(library.GlobalOptimManager)
    exceptions.initialize()
    optimizer.mng = exceptions
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    exceptions.override_config([p for p in tables if p.requires_grad], "optim_bits", 32)
    exceptions.register_parameters(optimizer.param_groups)
    return optimizer


def eight_bit_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters whose moments our own AdamW keeps in 8 bits (`kernels/adamw8.py`)."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    tied = getattr(head, "weight", None)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) and m.weight is not tied}
    return [p for p in model.parameters() if p.requires_grad and p.numel() >= SMALLEST and id(p) not in tables]


def is_quantized(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("bitsandbytes.")


def load_quantized_state(optimizer: Any, states: dict[Tensor, dict[str, Any]]) -> None:
    """Puts loaded state into the optimizer's own buffers, exactly. State that another form of optimizer wrote is
    refused: other keys, shapes or types."""
    optimizer.state.clear()
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter not in states:
                continue
            optimizer.init_state(group, parameter, group_index, index)
            own, loaded = optimizer.state[parameter], states[parameter]
            if own.keys() != loaded.keys():
                raise _other_form(sorted(own), sorted(loaded))
            for key, value in loaded.items():
                if not isinstance(value, Tensor):
                    own[key] = value
                elif value.shape != own[key].shape or value.dtype != own[key].dtype:
                    raise _other_form(f"{key} {tuple(own[key].shape)}", f"{key} {tuple(value.shape)}")
                else:
                    own[key].copy_(value)


def _other_form(own: Any, loaded: Any) -> UserError:
    return UserError(
        f"The checkpoint's optimizer state has {loaded}, but this optimizer keeps {own}. Resume with the config the "
        "run was started with (run/config.yaml), and the same version of bitsandbytes."
    )
