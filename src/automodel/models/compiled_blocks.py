"""torch.compile for the blocks of a model: one block's worth of compiling for all of them.

A transformer is the same block many times over. Compiling the whole model unrolls it and compiles twelve copies;
compiling the block by itself compiles one, and the others find its code already there, since parameters are inputs of
it. Blocks that differ (a window here, a first norm missing there) get their own. Embeddings and heads stay as they are:
they are a few kernels of a step.

Token counts are symbols (`dynamic=True`), so every bucket runs the same code. Only training is compiled: an evaluation
would need code of its own, compiled in the middle of a run. The swap is made on the instances (`block.forward`);
parameters, names and saved files stay the same, and `restore_blocks` is the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class CompiledBlock:
    """Takes the place of a block's `forward`."""

    def __init__(self, block: nn.Module, compiled: Callable[..., Any]):
        self.block, self.plain, self.compiled = block, block.forward, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        with _without_wide_gradients(self.block):
            return self.compiled(self.block, *(_not_a_view(value) for value in args), **kwargs)


def _not_a_view(value: Any) -> Any:
    """To torch.compile a view is another kind of input, and where a linear layer stands before the first block (ALBERT,
    ELECTRA), that block alone gets one. A copy costs microseconds, code of its own as much as all other blocks."""
    return value.clone() if isinstance(value, Tensor) and value._is_view() else value


@contextmanager
def _without_wide_gradients(block: nn.Module) -> Generator[None]:
    """Parameters without their gradients where those are of another dtype: micro-batches are summed in fp32 beside bf16
    parameters, and torch.compile refuses to trace such a pair. The forward pass needs none of them."""
    hidden = [(p, p.grad) for p in block.parameters() if p.grad is not None and p.grad.dtype != p.dtype]
    for parameter, _ in hidden:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in hidden:
            parameter.grad = gradient


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of the outermost module lists: an encoder's layers, a decoder's layers, ALBERT's groups."""
    return [block for blocks in _outermost_lists(model) for block in blocks]


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)


def compile_blocks(model: nn.Module, **options: Any) -> int:
    """Lets every block be compiled at its first call; `options` are torch.compile's. Returns how many there are."""
    import automodel.models.attention_op  # noqa: F401  the operation must be known before anything is traced

    _equal_sizes_are_one_symbol(False)
    blocks = repeated_blocks(model)
    compiled = {kind: torch.compile(kind.forward, **options) for kind in {type(block) for block in blocks}}
    for block in blocks:
        block.forward = CompiledBlock(block, compiled[type(block)])
    return len(blocks)


def restore_blocks(model: nn.Module) -> None:
    """Blocks run kernel by kernel again, and everything that was compiled in this process is forgotten."""
    for block in repeated_blocks(model):
        block.__dict__.pop("forward", None)
    _equal_sizes_are_one_symbol(True)
    torch.compiler.reset()


def _equal_sizes_are_one_symbol(yes: bool) -> None:
    """Torch takes sizes that happen to be equal for the same size. If the first batch has as many tokens as the model
    is wide (768), its code is for 768 tokens only, and the next batch is compiled anew. A switch of the whole process,
    read while tracing."""
    import torch.fx.experimental._config as config

    config.use_duck_shape = yes  # ty: ignore[invalid-assignment]
