"""One call of a model with packed attention and, where they run, fused blocks; before and after it, the model is stock.

Engine runs switch a model once and train it. In somebody else's loop, anything may happen between two calls: saving,
generating, a move to another device, a hook. So the switch lasts for one call. What it takes is small: the name of the
attention in the config (in each of them, where layers were copied), and the `forward` of embeddings, blocks and final
norm on their instances (`fuse.py`).

Layers under gradient checkpointing run a second time in the backward pass, long after the call. Each brings its own
switch along (`_AgainPacked`), so that what is recomputed is what was computed.

Weights that one product reads (query, key and value; gate and up) must be neighbours in memory. They are laid side by
side before the first fused call, and again after a move has torn them apart; parameters stay the objects they are, so
an optimizer over them goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from automodel.data.batch import PackedBatch
from automodel.kernels.dispatch import triton_installed
from automodel.kernels.side_by_side import joined_view
from automodel.models.decoder_parts import DECODERS, decoder_parts
from automodel.models.forward import attention_configs
from automodel.models.fuse import SWAPS, fuse, will_fuse
from automodel.models.fused_encoder import fusable_layers
from automodel.models.packed_attention import PACKED_ATTENTION, register_packed_attention

SHORTEST_TABLE = 512  # positions that rotation tables are made for at least; longer rows double it
HALVES = (torch.bfloat16, torch.float16)
_LEFT_BEHIND = "transformers.utils.output_capturing"


def kernels_run(model: Any) -> bool:
    """Whether fused blocks can compute here and now: half precision on a GPU with flash attention."""
    weight = model.get_input_embeddings().weight
    if not weight.is_cuda or not triton_installed() or torch.cuda.get_device_capability(weight.device) < (8, 0):
        return False
    return compute_dtype(model) in HALVES


def compute_dtype(model: Any) -> torch.dtype:
    """Of products: autocast's, or the weights' own."""
    kind = model.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype


@dataclass
class Blocks:
    """Fused blocks of one model, ready to be put in."""

    swaps: list[tuple[nn.Module, Any]]
    addresses: tuple[int, ...]
    """Of the weights they were made over."""
    longest: int

    def fit(self, model: Any, longest: int) -> bool:
        return longest <= self.longest and self.addresses == _addresses(model)

    def prepare(self, seed: Tensor | None, batch: PackedBatch) -> None:
        """For one call. The seed of its dropout is a tensor of its own: its backward pass reads it again."""
        for _, swap in self.swaps:
            if seed is not None and hasattr(swap, "seed"):
                swap.seed = seed
            if hasattr(swap, "bind"):
                swap.bind(batch)


def _addresses(model: Any) -> tuple[int, ...]:
    return tuple(p.data_ptr() for p in model.parameters())


def neighbours(model: Any) -> list[list[nn.Parameter]]:
    if model.config.model_type in DECODERS:
        parts = [decoder_parts(layer, model.config) for layer in model.model.layers]
        return [[m.weight for m in linears] for p in parts for linears in (p.qkv, p.gate_up)]  # ty: ignore[invalid-return-type]
    return [parts.neighbours() for _, parts in fusable_layers(model)]


@torch.no_grad()
def lay_side_by_side(weights: Sequence[nn.Parameter]) -> None:
    """Moves matrices into one piece of memory, in this order."""
    storages = {w.untyped_storage().data_ptr() for w in weights}  # two pieces of memory may touch by chance
    if len(storages) > 1 or joined_view(weights) is None:
        joined = torch.cat([w.detach() for w in weights])
        for weight, part in zip(weights, joined.split([w.shape[0] for w in weights])):
            weight.data = part


def make_blocks(model: Any, longest: int, laid: bool = False) -> Blocks | None:
    """Fused blocks over the model's weights; None where the model has none. `untouched` was asked. `laid`: neighbours
    lie side by side already."""
    if not laid:
        if not will_fuse(model):
            return None
        for weights in neighbours(model):
            lay_side_by_side(weights)
    longest = max(SHORTEST_TABLE, 1 << (longest - 1).bit_length())
    seed = torch.zeros(1, dtype=torch.int64, device=model.device)
    fused = fuse(model, seed, None, longest)
    swapped = [module for module in model.modules() if isinstance(module.__dict__.get("forward"), SWAPS)]
    swaps = [(module, module.__dict__.pop("forward")) for module in swapped]
    return Blocks(swaps, _addresses(model), longest) if fused else None


def untouched(model: Any, modules: Sequence[nn.Module] = ()) -> bool:
    """Whether every module is as transformers left it: plain parameters, no adapter around a linear layer, nobody's
    `forward` on an instance. accelerate's autocast around the whole model is outside of what happens in here. Whether
    the modules are those that transformers made, `changed.as_made` tells. `modules`: the model's, from callers that
    have them at hand (here and below)."""
    wrapped = "_original_forward" in model.__dict__
    for module in modules or model.modules():
        if "forward" in module.__dict__ and not (wrapped and module is model):
            return False
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            return False
        if not all(type(p) is nn.Parameter and p.numel() for p in module._parameters.values() if p is not None):
            return False
    return True


def has_hooks(model: Any, modules: Sequence[nn.Module] = ()) -> bool:
    """Whether somebody looks at what goes through the model's inner modules. The hook of `enable_input_require_grads`
    only marks the embeddings, whatever their shape; those that transformers leaves behind once hidden states or
    attentions were asked for do nothing in a call that does not ask."""
    marks = hasattr(model, "_require_grads_hook") or hasattr(model, "_require_grads_hooks")
    marked = model.get_input_embeddings() if marks else None
    return any(
        m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks or (m._forward_hooks and _looks(m))
        for m in modules or model.modules()
        if m is not model and m is not marked
    )


def _looks(module: nn.Module) -> bool:
    return any(getattr(hook, "__module__", "") != _LEFT_BEHIND for hook in module._forward_hooks.values())


def recomputed_layers(model: Any, modules: Sequence[nn.Module] = ()) -> list[Any]:
    """Layers under gradient checkpointing."""
    if not model.training:
        return []
    able = (m for m in modules or model.modules() if _func(m) is not None)
    return [m for m in able if getattr(m, "gradient_checkpointing", False)]


def recomputes_by_saved_tensors(layers: Sequence[Any]) -> bool:
    """Whether checkpointing is torch's own, not the reentrant one, which only carries tensors from layer to layer."""
    return all(isinstance(_func(m), partial) and _func(m).keywords.get("use_reentrant") is False for m in layers)


def _func(layer: Any) -> Any:
    return layer.__dict__.get("_gradient_checkpointing_func")


@dataclass
class PackedCode:
    """What a model runs on for as long as one call lasts."""

    model: Any
    blocks: Blocks | None
    batch: PackedBatch
    seed: Tensor | None = None
    layers: list[Any] = field(default_factory=list)
    """Those under gradient checkpointing."""
    modules: InitVar[Sequence[nn.Module]] = ()
    configs: list[Any] = field(init=False)

    def __post_init__(self, modules: Sequence[nn.Module]) -> None:
        self.configs = attention_configs(self.model, modules)

    @contextmanager
    def call(self) -> Generator[None]:
        """A forward pass."""
        before = [(layer, _func(layer)) for layer in self.layers]
        for layer, func in before:
            layer._gradient_checkpointing_func = _AgainPacked(func, self)
        try:
            with self.switched():
                yield
        finally:
            for layer, func in before:
                layer._gradient_checkpointing_func = func

    @contextmanager
    def switched(self) -> Generator[None]:
        """Packed attention and fused blocks inside, whatever was there before after it."""
        swaps = [] if self.blocks is None else self.blocks.swaps
        before = [module.__dict__.get("forward") for module, _ in swaps]
        attentions = [config._attn_implementation for config in self.configs]
        for config in self.configs:
            config._attn_implementation_internal = register_packed_attention()
        assert self.model.config._attn_implementation == PACKED_ATTENTION
        if self.blocks is not None:
            self.blocks.prepare(self.seed, self.batch)
        for module, swap in swaps:
            module.__dict__["forward"] = swap
        try:
            yield
        finally:
            for config, attention in zip(self.configs, attentions):
                config._attn_implementation_internal = attention
            for (module, _), forward in zip(swaps, before):
                if forward is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = forward


@dataclass
class _AgainPacked:
    """Takes the place of a layer's checkpointing function: the layer is switched whenever it runs."""

    func: Callable[..., Any]
    code: PackedCode

    def __call__(self, layer: Callable[..., Any], *args: Any) -> Any:
        def switched(*inputs: Any) -> Any:
            with self.code.switched():
                return layer(*inputs)

        return self.func(switched, *args)
