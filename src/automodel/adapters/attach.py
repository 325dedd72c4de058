"""An adapter as a value, and the model it is attached to.

`resolve` reads the `peft:` section against the model's modules (on torch's meta device, before a weight is loaded) and
returns an `Adapter`; `attach` swaps the chosen linear layers on the instance and freezes the rest. Everything that is
trained is then exactly what `requires_grad` says: the A and B of each layer, and the modules trained in full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from automodel.adapters.choose import choose_saved, choose_targets, in_short
from automodel.adapters.config import DEFAULT_ALPHA, DEFAULT_DIM, PeftConfig
from automodel.adapters.dora import DoraLinear
from automodel.adapters.lora import LoraLinear, is_linear, sizes
from automodel.config.errors import UserError

_ON_MODEL = "_automodel_adapter"


@dataclass(frozen=True)
class Adapter:
    """Where an adapter stands and how it is scaled."""

    ranks: Mapping[str, int]
    """Rank by module, in the model's order."""
    alphas: Mapping[str, float]
    saved: tuple[str, ...]
    """Modules trained in full."""
    task_type: str
    """PEFT's name of the head that the adapter stands under: `CAUSAL_LM`, `SEQ_CLS`, `TOKEN_CLS`, `SEQ_2_SEQ_LM`."""
    base: str
    """The model it belongs to: an absolute folder, or a name on the hub."""
    revision: str | None = None
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    """Whether directions and lengths of the weights are trained apart (DoRA)."""
    before: str = ""
    """The model that it was trained beside so far, where that is another."""
    start: Mapping[str, Tensor] | None = field(default=None, compare=False, repr=False)
    """Tensors to begin with, by the model's names; none: a new adapter."""

    def scale(self, name: str) -> float:
        rank = self.ranks[name]
        return self.alphas[name] / (math.sqrt(rank) if self.rslora else rank)

    def in_words(self) -> str:
        """`rank 8, alpha 32 on q_proj ×2, v_proj ×2; in full: classifier`."""
        ranks, alphas = sorted(set(self.ranks.values())), sorted(set(self.alphas.values()))
        shown = f"rank {'/'.join(map(str, ranks))}, alpha {'/'.join(f'{a:g}' for a in alphas)}"
        shown += ", scaled by the root of the rank" if self.rslora else ""
        shown += ", lengths of rows apart (DoRA)" if self.dora else ""
        shown += f", dropout {self.dropout:g}" if self.dropout else ""
        full = f"; in full: {', '.join(self.saved)}" if self.saved else ""
        before = f"; it was trained beside another model so far, {self.before}" if self.before else ""
        return f"{shown} on {in_short(self.ranks)}{full}{before}"


def resolve(section: PeftConfig, model: Any, task_type: str, base: str, revision: str | None = None) -> Adapter:
    """The section against the model's modules; a `UserError` for whatever does not fit."""
    rank, alpha = section.dim or DEFAULT_DIM, section.alpha or DEFAULT_ALPHA
    saved = choose_saved(model, task_type, section.modules_to_save)
    targets = choose_targets(model, section.target_modules, section.exclude_modules, saved)
    return Adapter(
        ranks=dict.fromkeys(targets, rank),
        alphas=dict.fromkeys(targets, float(alpha)),
        saved=saved,
        task_type=task_type,
        base=base,
        revision=revision,
        dropout=section.dropout or 0.0,
        rslora=section.use_rslora,
        dora=section.use_dora,
    )


def count_trained(adapter: Adapter, model: nn.Module) -> int:
    """Numbers that are trained."""
    widths = {name: sizes(model.get_submodule(name)) for name in adapter.ranks}
    added = sum(rank * sum(widths[name]) for name, rank in adapter.ranks.items())
    added += sum(outputs for _, outputs in widths.values()) if adapter.dora else 0
    whole = {id(p): p.numel() for name in adapter.saved for p in model.get_submodule(name).parameters()}
    return added + sum(whole.values())


def attach(
    model: Any, adapter: Adapter, *, seed: int = 42, hold: torch.dtype | None = None, everything: bool = False
) -> None:
    """Freezes the model, puts the adapter in, and loads what it starts from. `hold`: the dtype that frozen products are
    computed in, where that is not the one they were loaded in; they are then kept in it, half as large and with the
    very numbers that autocast would make of them in every step. `everything`: so are tables and norms, for steps that
    compute without autocast."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, rank in adapter.ranks.items():
        parent, _, child = name.rpartition(".")
        kind = DoraLinear if adapter.dora else LoraLinear
        layer = kind(model.get_submodule(name), rank, adapter.scale(name), adapter.dropout)
        layer.draw(generator)
        setattr(model.get_submodule(parent), child, layer)
    for name in adapter.saved:
        model.get_submodule(name).requires_grad_(True)
    setattr(model, _ON_MODEL, adapter)
    if adapter.start is not None:
        _load(model, adapter.start)
    if hold is not None:
        _hold_frozen(model, hold, everything)


def adapter_of(model: Any) -> Adapter | None:
    """What is attached; none for a model that is trained whole."""
    return getattr(model, _ON_MODEL, None)


def set_adapter(model: Any, adapter: Adapter) -> None:
    """Notes what is attached now, after its numbers were put in."""
    setattr(model, _ON_MODEL, adapter)


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All that training changes, by the model's names. Checkpoints of an adapter hold these and nothing of the base."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def merge(model: Any) -> int:
    """Adds the adapters to their weights and puts plain linear layers back; the number of layers. The model is then
    what it was before `attach`, with other numbers in it."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    homes: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            homes[id(parameter)] = homes.get(id(parameter), 0) + 1
    for name, layer in layers.items():
        if layer.packed_base is not None:
            raise UserError(f"the adapter of '{name}' stands beside a weight in few bits. Load the base as it is.")
        if homes[id(layer.weight)] > 1:
            raise UserError(
                f"the adapter of '{name}' cannot be merged: its weight is shared with another module (tied), which "
                "would change too. Keep the adapter folder as it is."
            )
    for name, layer in layers.items():
        layer.weight.copy_(layer.merged())
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _plain(layer))
    if hasattr(model, _ON_MODEL):
        delattr(model, _ON_MODEL)
    return len(layers)


def _plain(layer: LoraLinear) -> nn.Module:
    if layer.transposed:
        from transformers.pytorch_utils import Conv1D

        plain: Any = Conv1D(layer.out_features, layer.in_features)
    else:
        plain = nn.Linear(layer.in_features, layer.out_features, device="meta")
    plain.register_parameter("weight", layer.weight)
    plain.register_parameter("bias", layer.bias)
    return plain.train(layer.training)


@torch.no_grad()
def _load(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    own = trained_tensors(model)
    for name, tensor in tensors.items():
        own[name].copy_(tensor)  # names and shapes were compared when the folder was read


@torch.no_grad()
def _hold_frozen(model: nn.Module, dtype: torch.dtype, everything: bool) -> None:
    """Weights of frozen products; not the tied ones, which are also read as a table, unless everything is."""
    homes: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            homes[id(parameter)] = homes.get(id(parameter), 0) + 1
    for module in model.modules():
        product = isinstance(module, LoraLinear) or is_linear(module)
        for parameter in module.parameters(recurse=False):
            chosen = everything or (product and homes[id(parameter)] == 1)
            if chosen and not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
