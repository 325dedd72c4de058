"""The launches of a run, made with tensors of a few rows, so that they can be written down and compiled ahead.

A recipe is a function that calls the public operations of this room the way the models do, forward and backward.
Nothing is computed: `ahead_worker.py` catches every launch. So the launch code that a run goes through also says here
which kernels are needed, with their dtypes, alignments and compile-time constants, and a change of it needs no change
here.

To add a kernel:

1. Write a function with one argument, a `Bench`, that calls the operation on `bench.rows(…)` and `bench.vector(…)` of
   the widths the model has, learns from the result (`learn`), and evaluates where that launches something else.
2. Put `@recipe("its_forward_kernel", "its_backward_kernel", blocks=("post-norm",))` on it: the kernels it launches, and
   which kinds of blocks (`ahead_facts.Shape.blocks`) need it.
3. A new family gets its line in `ahead_facts.FAMILIES`.

A kernel that no recipe can name stands in `EXEMPT`, with the reason. `tests/unit/kernels/test_ahead_recipes.py` fails
for a kernel that is in neither, for a recipe that names others than it launches, and for a fused model whose training
launches anything that the recipes did not.

Kernels that take long to compile come first: recipes are followed in the order in which they stand here, and compiling
begins with the first launch. Numbers of rows are of no consequence as long as kernels do not specialise on them
(`do_not_specialize`), with one exception: a small batch decides how the second of two vectors in one allocation is
aligned.

Legend: T tokens, N width, D documents.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from automodel.kernels.adamw import adamw_step
from automodel.kernels.add_norm import add_norm
from automodel.kernels.ahead_facts import Facts, Shape
from automodel.kernels.attention import FORWARD, Attention, attention
from automodel.kernels.bias_gelu import bias_gelu, geglu
from automodel.kernels.column_sum import rows_sum
from automodel.kernels.dispatch import power_of_two_above
from automodel.kernels.embedding import position_embedding, word_embedding
from automodel.kernels.flat_adamw import FlatAdamW
from automodel.kernels.flat_parameters import BLOCK
from automodel.kernels.lazy_rows import lazy_rows_of
from automodel.kernels.pooled_attention import pooled_attention
from automodel.kernels.rope import rope_, rope_table

TOKENS, DOCUMENTS, VOCABULARY = 64, 4, 64

DECODERS_LATER = "decoder blocks have no recipe yet; their first run on a machine compiles them itself"
EXEMPT: dict[str, str] = {
    "rms_norm_forward_kernel": DECODERS_LATER,
    "rms_norm_backward_kernel": DECODERS_LATER,
    "swiglu_forward_kernel": DECODERS_LATER,
    "swiglu_backward_kernel": DECODERS_LATER,
    "heads_forward_kernel": DECODERS_LATER,
    "heads_backward_kernel": DECODERS_LATER,
}

DTYPES = {"bf16": torch.bfloat16, "bf16-pure": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Bench:
    """What a recipe works with."""

    facts: Facts

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return DTYPES.get(self.facts.precision, torch.float32)

    @property
    def seed(self) -> Tensor:
        """What dropout reads."""
        return torch.zeros(1, dtype=torch.int64)

    def rows(self, count: int, width: int) -> Tensor:
        """Activations with a gradient. An intermediate result, as they are in a model."""
        return torch.zeros((count, width), dtype=self.dtype, requires_grad=True) * 1.0

    def vector(self, width: int) -> Tensor:
        """A weight or bias."""
        return torch.zeros(width, dtype=self.dtype, requires_grad=True)

    @property
    def modes(self) -> tuple[bool, ...]:
        """Whether to learn: yes, and no where the run evaluates."""
        return (True, False) if self.facts.evaluation_batch else (True,)

    def row_counts(self) -> Iterator[tuple[int, bool]]:
        """Rows that a block may have to normalise, and whether it learns from them: all tokens, or one a document."""
        for learns in self.modes:
            yield TOKENS, learns
            if self.facts.shape.pools:
                yield self.facts.batch if learns else self.facts.evaluation_batch, learns


class Recipe(NamedTuple):
    name: str
    run: Callable[[Bench], None]
    kernels: tuple[str, ...]
    blocks: tuple[str, ...]


RECIPES: list[Recipe] = []


def recipe(*kernels: str, blocks: tuple[str, ...]) -> Callable[[Any], Callable[[Bench], None]]:
    def register(run: Any) -> Callable[[Bench], None]:
        RECIPES.append(Recipe(run.__name__, run, kernels, blocks))
        return run

    return register


def recipes_for(facts: Facts) -> list[Recipe]:
    return [r for r in RECIPES if facts.shape.blocks in r.blocks]


def documents() -> Tensor:
    """Boundaries of a few documents."""
    return torch.arange(DOCUMENTS + 1, dtype=torch.int32) * (TOKENS // DOCUMENTS)


def learn(*results: Tensor) -> None:
    """A backward pass from all of them. (Gradients handed to it would make torch import sympy, half a second.)"""
    torch.stack([r.sum() for r in results]).sum().backward()


@recipe(
    "attention_forward_kernel", "attention_delta_kernel", "attention_backward_kernel",
    blocks=("post-norm", "modernbert"),
)  # fmt: skip
def attentions(bench: Bench) -> None:
    """Everywhere, and within a window in the layers that have one."""
    shape = bench.facts.shape
    if power_of_two_above(shape.width // shape.heads) not in FORWARD:
        return  # torch's own kernel
    for window, learns in itertools.product(sorted({-1, shape.window}), bench.modes):
        with torch.set_grad_enabled(learns):
            how = attention_of(shape, window, learns)
            out = attention(bench.rows(TOKENS, 3 * shape.width), documents(), TOKENS, how, bench.seed)
            if learns:
                learn(out)


@recipe("pooled_forward_kernel", "pooled_backward_kernel", blocks=("post-norm", "modernbert"))
def pooled_attentions(bench: Bench) -> None:
    """One query a document, in the last block of a classifier."""
    shape = bench.facts.shape
    for learns in bench.modes if shape.pools else ():
        with torch.set_grad_enabled(learns):
            queries, keys_values = bench.rows(DOCUMENTS, shape.width), bench.rows(TOKENS, 2 * shape.width)
            out = pooled_attention(queries, keys_values, documents(), attention_of(shape, -1, learns), bench.seed)
            if learns:
                learn(out)


def attention_of(shape: Shape, window: int, learns: bool) -> Attention:
    dropout = shape.attention_dropout if learns else 0.0
    return Attention(shape.heads, shape.heads, shape.width // shape.heads, 1.0, window=window, dropout=dropout)


@recipe(
    "add_norm_forward_kernel", "add_norm_backward_kernel", "column_sum_kernel", "position_backward_kernel",
    blocks=("post-norm",),
)  # fmt: skip
def embedding_sum(bench: Bench) -> None:
    """Words, positions and types, normed. Without text pairs types are a bias, else they are in the sum before."""
    shape = bench.facts.shape
    width = shape.embedding_width
    table = torch.zeros((TOKENS, width), dtype=bench.dtype, requires_grad=True)
    learn(position_embedding(torch.zeros(TOKENS, dtype=torch.int64), table, documents()))
    for typed in {shape.token_types, shape.token_types and not shape.pairs_have_types}:
        bias = bench.vector(width) if typed else None
        for learns in bench.modes:
            add(bench, TOKENS, width, learns=learns, linear_bias=bias, norm_bias=True)


def add(
    bench: Bench,
    count: int,
    width: int,
    *,
    learns: bool,
    residual: bool = True,
    linear_bias: Tensor | None = None,
    norm_bias: bool = False,
    dropout: float = 0.0,
    return_sum: bool = False,
) -> None:
    """One residual, dropout and norm."""
    with torch.set_grad_enabled(learns):
        out = add_norm(
            bench.rows(count, width),
            bench.rows(count, width) if residual else None,
            bench.vector(width),
            bench.vector(width) if norm_bias else None,
            linear_bias=linear_bias,
            dropout_p=dropout if learns else 0.0,
            seed=bench.seed,
            return_sum=return_sum,
        )
        if learns:
            learn(*(out if isinstance(out, tuple) else (out,)))


@recipe("add_norm_forward_kernel", "add_norm_backward_kernel", "column_sum_kernel", blocks=("post-norm",))
def post_norms(bench: Bench) -> None:
    shape = bench.facts.shape
    for dropout in sorted({shape.out_dropout, shape.down_dropout}, reverse=True):
        for count, learns in bench.row_counts():
            bias = bench.vector(shape.width)
            add(bench, count, shape.width, learns=learns, linear_bias=bias, norm_bias=True, dropout=dropout)


@recipe("bias_gelu_forward_kernel", "bias_gelu_backward_kernel", "column_sum_kernel", blocks=("post-norm",))
def post_norm_mlp(bench: Bench) -> None:
    inner = bench.facts.shape.inner
    learn(bias_gelu(bench.rows(TOKENS, inner), bench.vector(inner), added=True))


@recipe("rows_sum_kernel", "column_sum_kernel", blocks=("post-norm",))
def joined_biases(bench: Bench) -> None:
    """Gradients of the biases of query, key and value: together, or in a pooled block the query's alone."""
    shape = bench.facts.shape
    for layers in (3, 2, 1) if shape.pools else (3,):
        rows_sum(bench.rows(TOKENS, layers * shape.width).detach())


@recipe("add_norm_forward_kernel", "add_norm_backward_kernel", "column_sum_kernel", blocks=("modernbert",))
def pre_norms(bench: Bench) -> None:
    """The norm of the embeddings, that before attention, and that before the MLP."""
    shape = bench.facts.shape
    for learns in bench.modes:
        add(bench, TOKENS, shape.width, learns=learns, residual=False)
        add(bench, TOKENS, shape.width, learns=learns, residual=False, return_sum=True)
    for count, learns in bench.row_counts():
        add(bench, count, shape.width, learns=learns, dropout=shape.out_dropout, return_sum=True)


@recipe("geglu_forward_kernel", "geglu_backward_kernel", blocks=("modernbert",))
def gated_mlp(bench: Bench) -> None:
    learn(geglu(bench.rows(TOKENS, 2 * bench.facts.shape.inner)))


@recipe("rope_kernel", blocks=("modernbert",))
def rotations(bench: Bench) -> None:
    """Query and key turn, value does not; in a pooled block the query is alone, and keys stand beside values."""
    shape = bench.facts.shape
    table = rope_table(torch.zeros(shape.width // shape.heads // 2), TOKENS)
    positions = torch.zeros(TOKENS, dtype=torch.int64)
    joined = [(3, 2 * shape.heads), *([(1, shape.heads), (2, shape.heads)] if shape.pools else [])]
    for layers, turning in joined:
        learn(rope_(bench.rows(TOKENS, layers * shape.width), positions, table, turning))


@recipe(
    "square_sums_kernel", "prepare_kernel", "update_kernel", "word_backward_kernel", "idle_steps_kernel",
    "row_squares_kernel", "update_rows_kernel", blocks=("post-norm", "modernbert"),
)  # fmt: skip
def words_and_optimizer(bench: Bench) -> None:
    """The word table and AdamW, which may know each other."""
    facts = bench.facts
    for optimizer, words in optimizers(facts, facts.shape.embedding_width):
        ids, runs = torch.zeros(TOKENS, dtype=torch.int64), torch.zeros((2, TOKENS), dtype=torch.int32)
        learn(word_embedding(ids, words, runs, 0, lazy_rows_of(words)))
        step(optimizer)
        optimizer.settle()


@recipe("square_sums_kernel", "prepare_kernel", "update_kernel", blocks=("stock",))
def optimizer_alone(bench: Bench) -> None:
    for optimizer, _ in optimizers(bench.facts, 1):
        step(optimizer)


class QuietAdamW(FlatAdamW):
    """The same, without the decorator through which torch imports its compiler, a second."""

    add_param_group = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", FlatAdamW.add_param_group)


def optimizers(facts: Facts, width: int) -> Iterator[tuple[FlatAdamW, torch.nn.Parameter]]:
    """As `engine/build.py` makes them. Two things are not known beforehand: whether the number of blocks is a multiple
    of 16, and whether that of parameters is even, which decides how the second row of a table of addresses is
    aligned."""
    held = torch.bfloat16 if facts.precision == "bf16-pure" else torch.float32
    for remainder, count in itertools.product((1, 0), (1, 2)):
        words = torch.nn.Parameter(torch.zeros((VOCABULARY, width), dtype=held))
        walked = 0 if facts.lazy else -(-words.numel() // BLOCK)
        blocks = next(n for n in range(2, 18) if (walked + n) % 16 == remainder)
        sizes = [blocks * BLOCK] if count == 1 else [(blocks - 1) * BLOCK, BLOCK]
        others = [torch.nn.Parameter(torch.zeros(size, dtype=held)) for size in sizes]
        groups: list[dict[str, Any]] = [{"params": [words, *others]}]
        if facts.groups == 2:
            groups = [{"params": [words, *others[:-1]]}, {"params": others[-1:]}]
        yield (
            QuietAdamW(
                groups,
                max_norm=1.0,
                copy_dtype={"bf16": torch.bfloat16, "fp16": torch.float16}.get(facts.precision),
                flat_gradients=facts.accumulates,
                lr_factors=torch.ones(4, dtype=torch.float64),
                initial_loss_scale=1.0 if facts.precision == "fp16" else None,
                lazy=words if facts.lazy else None,
            ),
            words,
        )


def step(optimizer: FlatAdamW) -> None:
    """A step as it is captured: with the second row of the table of addresses."""
    adamw_step(
        optimizer.flat,
        optimizer.device_state,
        [None] * len(optimizer.flat.places),
        optimizer._tables[1],
        max_norm=optimizer.max_norm,
        skip_nonfinite=optimizer.skip_nonfinite,
        zero_gradients=bool(optimizer.gradient_buffers),
    )
