"""What goes into checkpointed layers waits in host memory instead of on the GPU.

A layer that is computed again in the backward pass (`checkpointing.py`) keeps its inputs until then: 16 layers of
Llama-3.2-1B hold 1 GiB of them at 8,192 tokens, 36 of Qwen3-8B 4.5 GiB. The forward pass of a layer takes longer than
its inputs need to cross the bus, so they may leave meanwhile, on a stream of their own; in the backward pass those of
the layer before come back while this layer is computed. Three layers' inputs are on the GPU at a time: one on its way,
one in use, and those of the last layer, which would have to come back before they had left.

Everything has a fixed place, in page-locked memory that is allocated once, so CUDA graphs can record the copies: the
second stream forks from the step's and is joined again before the step ends. Buffers grow to the largest batch, which
is tried before anything is recorded; a larger one later gets new buffers, and graphs keep those they know.

The checkpoint itself is ours, too, also where inputs stay: `torch.utils.checkpoint` would hold on to what it is given,
and compute a layer again to the very end, where a fused block may leave out its last product (`kernels/recompute.py`).
Random states are not put back, so layers that drop something at random are not for this. Without a GPU the same code
copies in place, which is how it is tested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from automodel.config.errors import UserError
from automodel.kernels.recompute import compute_again
from automodel.models.decoder_parts import DECODERS

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]
ON_THEIR_WAY = 1
"""Layers whose inputs are kept on the GPU behind the one that is being computed, until they have left."""


class Kept:
    """Inputs of layers that stay where they are."""

    def __init__(self):
        self.here: dict[int, list[Tensor]] = {}

    def send(self, layer: int, tensors: Sequence[Tensor]) -> None:
        self.here[layer] = list(tensors)

    def fetch(self, layer: int, device: torch.device) -> None:
        """They are here."""

    def take(self, layer: int, device: torch.device) -> list[Tensor]:
        return self.here.pop(layer)

    def forget(self) -> None:
        """What a pass that broke off has left."""
        self.here.clear()


class HostMemory:
    """Inputs of layers, by the layer's number, on their way to the host, there, or on their way back."""

    def __init__(self, layers: int):
        self.last = layers - 1
        self.buffers: dict[tuple[int, int], Tensor] = {}
        self.outgrown: list[Tensor] = []
        """Buffers that were too small once; graphs that know them still use them."""
        self.shapes: dict[int, list[tuple[torch.Size, torch.dtype]]] = {}
        self.leaving: deque[tuple[torch.cuda.Event, Sequence[Tensor]]] = deque()
        self.here: dict[int, tuple[torch.cuda.Event | None, list[Tensor]]] = {}
        self._stream: torch.cuda.Stream | None = None

    def send(self, layer: int, tensors: Sequence[Tensor]) -> None:
        """Queues the way to the host; those of the last layer stay."""
        self.shapes[layer] = [(t.shape, t.dtype) for t in tensors]
        if layer == self.last:
            self.here[layer] = (None, list(tensors))
            return
        places = [self._place(layer, index, t) for index, t in enumerate(tensors)]
        stream = self._forked(tensors[0])
        if stream is None:
            for place, tensor in zip(places, tensors):
                place.copy_(tensor)
            return
        with torch.cuda.stream(stream):
            for place, tensor in zip(places, tensors):
                place.copy_(tensor, non_blocking=True)
            self.leaving.append((stream.record_event(), tensors))
        if len(self.leaving) > ON_THEIR_WAY:
            gone, _ = self.leaving.popleft()
            torch.cuda.current_stream().wait_event(gone)  # before somebody else gets their memory

    def fetch(self, layer: int, device: torch.device) -> None:
        """Queues the way back, if it is not queued yet."""
        if layer < 0 or layer in self.here:
            return
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.shapes[layer]]
        places = [self._place(layer, index, t) for index, t in enumerate(tensors)]
        stream = self._forked(tensors[0])
        if stream is None:
            self.here[layer] = (None, [t.copy_(place) for t, place in zip(tensors, places)])
            return
        with torch.cuda.stream(stream):
            for place, tensor in zip(places, tensors):
                tensor.copy_(place, non_blocking=True)
            self.here[layer] = (stream.record_event(), tensors)

    def take(self, layer: int, device: torch.device) -> list[Tensor]:
        """The inputs of a layer, for the last time."""
        while self.leaving:  # those that left last, in the forward pass
            gone, _ = self.leaving.popleft()
            torch.cuda.current_stream().wait_event(gone)
        self.fetch(layer, device)
        arrived, tensors = self.here.pop(layer)
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)
        return tensors

    def forget(self) -> None:
        """What a pass that broke off has left: events that nobody may wait for where it was being recorded, and inputs
        that the next one would take for its own."""
        self.leaving.clear()
        self.here.clear()

    def _place(self, layer: int, index: int, like: Tensor) -> Tensor:
        """The part of the buffer that has the tensor's shape."""
        size = like.numel() * like.element_size()
        buffer = self.buffers.get((layer, index))
        if buffer is None or buffer.numel() < size:
            if buffer is not None:
                self.outgrown.append(buffer)
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=like.is_cuda)
            self.buffers[layer, index] = buffer
        return buffer[:size].view(like.dtype).view(like.shape)

    def _forked(self, tensor: Tensor) -> torch.cuda.Stream | None:
        """The second stream, behind what the current one has queued so far; None without a GPU."""
        if not tensor.is_cuda:
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        return self._stream


class _Caught(torch.autograd.Function):
    """Hands a gradient to a list instead of accumulating it, which would copy where two inputs share one."""

    @staticmethod
    def forward(ctx: Any, box: dict[int, Tensor], index: int, x: Tensor) -> Tensor:
        ctx.box, ctx.index = box, index
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):
        ctx.box[ctx.index] = gradient
        return None, None, None


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, memory: HostMemory | Kept, layer: int, run: Run, anchor: Tensor, *tensors: Tensor):
        memory.send(layer, tensors)
        ctx.memory, ctx.layer, ctx.run, ctx.device = memory, layer, run, tensors[0].device
        ctx.set_materialize_grads(False)
        return tuple(run(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None):
        tensors = ctx.memory.take(ctx.layer, ctx.device)
        ctx.memory.fetch(ctx.layer - 1, ctx.device)
        caught: dict[int, Tensor] = {}
        with torch.enable_grad(), compute_again():
            leaves = [t.detach().requires_grad_() for t in tensors]
            outputs = ctx.run([_Caught.apply(caught, index, leaf) for index, leaf in enumerate(leaves)])
        known = [(y, dy) for y, dy in zip(outputs, gradients) if dy is not None]
        torch.autograd.backward([y for y, _ in known], [dy for _, dy in known])
        return None, None, None, None, *(caught.get(index) for index in range(len(leaves)))


class Checkpoint:
    """Takes the place of a layer's checkpoint function: called with the layer and what goes into it."""

    def __init__(self, memory: HostMemory | Kept, layer: int):
        self.memory, self.layer = memory, layer
        self.kind: Any = None
        """Of what the layer gives, where that is a named tuple and no tensor."""
        self.anchor: Tensor | None = None
        """Requires a gradient, so that a layer is learned from whose input does not."""

    def __call__(self, layer: Callable[..., Any], hidden: Any, *rest: Any) -> Any:
        if not torch.is_grad_enabled():
            return layer(hidden, *rest)
        assert not any(isinstance(t, Tensor) and t.requires_grad for t in rest), "only the first input is learned from"
        kind_in: Any = type(hidden) if isinstance(hidden, tuple) else None

        def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            made = layer(kind_in._make(tensors) if kind_in else tensors[0], *rest)
            self.kind = type(made) if isinstance(made, tuple) else None
            return made if self.kind else (made,)

        tensors = tuple(hidden) if kind_in else (hidden,)
        if self.anchor is None:
            self.anchor = torch.zeros((), device=tensors[0].device, requires_grad=True)
        outputs = _Recomputed.apply(self.memory, self.layer, run, self.anchor, *tensors)
        return self.kind._make(outputs) if self.kind else outputs[0]


def will_recompute(model: Any) -> bool:
    """Whether the fused blocks of this model have something to leave out the second time."""
    return model.config.model_type in DECODERS


def use_own_checkpoints(model: Any, offload: bool) -> HostMemory | Kept:
    """Checkpointed layers without dropout are recomputed by the code above, their inputs kept here or on the host;
    `use_gradient_checkpointing` comes first. Where layers cannot be told apart, torch's own way is left in place."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    layers = [layer for layer in found if layer.gradient_checkpointing]
    if offload and not layers:
        raise UserError(
            f"training_optimizations.activation_offload: the layers of {type(model).__name__} cannot be told apart, so "
            "what goes into them cannot be moved. Remove the key."
        )
    memory = HostMemory(len(layers)) if offload else Kept()
    for index, layer in enumerate(layers):
        layer._gradient_checkpointing_func = Checkpoint(memory, index)
    return memory


def forget_pass(model: torch.nn.Module) -> None:
    """For whoever goes on after a forward or backward pass of this model that broke off."""
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if isinstance(function, Checkpoint):
            function.memory.forget()
