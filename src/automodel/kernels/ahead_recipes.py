"""The launches of a run, made with tensors of a few rows, so that they can be written down and compiled ahead.

A recipe is a function that calls the public operations of this room the way the models do, forward and backward.
Nothing is computed: `ahead_worker.py` catches every launch. So the launch code that a run goes through also says here
which kernels are needed, with their dtypes, alignments and compile-time constants, and a change of it needs no change
here.

To add a kernel:

1. Write a function with one argument, a `Bench` (`ahead_bench.py`), that calls the operation on `bench.rows(…)` and
   `bench.vector(…)` of the widths the model has, learns from the result (`learn`), and evaluates where that launches
   something else.
2. Put `@recipe("its_forward_kernel", "its_backward_kernel", blocks=("post-norm",))` on it: the kernels it launches, and
   which kinds of blocks (`ahead_facts.Shape.blocks`) need it. List it in `RECIPES`.
3. A new family gets its line in `ahead_facts.FAMILIES`.

A kernel that no recipe can name stands in `EXEMPT`, with the reason. `tests/unit/kernels/test_ahead_recipes.py` fails
for a kernel that is in neither, for a recipe that names others than it launches, and for a fused model whose training
launches anything that the recipes did not.

Kernels that take long to compile come first: recipes are followed in the order of `RECIPES`, and compiling begins with
the first launch. Numbers of rows are of no consequence as long as kernels do not specialise on them
(`do_not_specialize`), with one exception: a small batch decides how the second of two vectors in one allocation is
aligned.
"""

from __future__ import annotations

from typing import Any

import torch

from automodel.kernels import ahead_decoders, ahead_encoders
from automodel.kernels.adamw import adamw_step
from automodel.kernels.ahead_bench import TOKENS, Bench, Recipe, learn, recipe
from automodel.kernels.ahead_facts import Facts
from automodel.kernels.embedding import word_embedding
from automodel.kernels.flat_adamw import FlatAdamW
from automodel.kernels.flat_parameters import BLOCK
from automodel.kernels.lazy_rows import lazy_rows_of
from automodel.kernels.square_sums import UNIT, sum_run
from automodel.kernels.weight_gradient import ALIGNED, makes_full_rounds, squared_product

VOCABULARY = 64

EXEMPT: dict[str, str] = {
    "update8_kernel": "8-bit moments are asked for by name, and compile in a second beside a model that is loaded",
    "amax_kernel": "FP8 is asked for, and for large models, whose weights take longer to load than this to compile",
    "quantise_kernel": "as `amax_kernel`",
    "expand_kernel": "only under quantised bases, first used while their weights are packed: before any step",
    "expand_rows_kernel": "as `expand_kernel`, for 8 bits",
    "with_room_kernel": "only beside adapters, and compiled in a moment: it copies",
}
"""Kernels without a recipe, and why."""


@recipe(
    "square_sums_kernel", "prepare_kernel", "update_kernel", "word_backward_kernel", "idle_steps_kernel",
    "row_squares_kernel", "update_rows_kernel", "square_run_kernel", "update_run_kernel",
    blocks=("post-norm", "modernbert", "decoder"),
)  # fmt: skip
def words_and_optimizer(bench: Bench) -> None:
    """The word table and AdamW, which may know each other."""
    facts = bench.facts
    optimizer, words = make_optimizer(facts, facts.shape.embedding_width)
    if facts.head.tied and words.grad is None:
        words.grad = torch.zeros_like(words)  # that of the head, which the embedding's is added to
    ids, runs = torch.zeros(TOKENS, dtype=torch.int64), torch.zeros((2, TOKENS), dtype=torch.int32)
    learn(word_embedding(ids, words, runs, 0, lazy_rows_of(words)))
    for part in range(len(optimizer.flat.late_parts)):
        optimizer.update_late(part, beside=True)
    step(optimizer)
    optimizer.settle()


@recipe("square_sums_kernel", "square_run_kernel", "prepare_kernel", "update_kernel", blocks=("stock",))
def optimizer_alone(bench: Bench) -> None:
    step(make_optimizer(bench.facts, 1)[0])


@recipe("weight_gradient_kernel", blocks=("post-norm", "modernbert", "decoder"))
def weight_gradients(bench: Bench) -> None:
    """Of weights that are updated late, where one suits the product that sums up squares. Its size is no matter."""
    facts, device = bench.facts, torch.device("cpu")
    if not facts.accumulates and any(makes_full_rounds(*size, device) for size in facts.shape.matrices()):
        dy, x = (torch.zeros((TOKENS, ALIGNED), dtype=bench.dtype) for _ in range(2))
        squared_product(dy, x, torch.zeros((ALIGNED, ALIGNED), dtype=bench.dtype), torch.zeros(UNIT))


class QuietAdamW(FlatAdamW):
    """The same, without the decorator through which torch imports its compiler, a second."""

    add_param_group = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", FlatAdamW.add_param_group)


def make_optimizer(facts: Facts, width: int) -> tuple[FlatAdamW, torch.nn.Parameter]:
    """As `engine/steps.py` makes it, over the word table, a matrix that is updated late where any is, and the rest."""
    held = torch.bfloat16 if facts.precision == "bf16-pure" else torch.float32
    words = torch.nn.Parameter(torch.zeros((VOCABULARY, width), dtype=held))
    matrix, rest = (torch.nn.Parameter(torch.zeros(size, dtype=held)) for size in (2 * BLOCK, BLOCK))
    groups: list[dict[str, Any]] = [{"params": [words, matrix, rest]}]
    if facts.groups == 2:
        groups = [{"params": [words, matrix]}, {"params": [rest]}]
    late = facts.shape.blocks != "stock" and not facts.accumulates
    optimizer = QuietAdamW(
        groups,
        max_norm=1.0,
        copy_dtype={"bf16": torch.bfloat16, "fp16": torch.float16}.get(facts.precision),
        flat_gradients=facts.accumulates,
        lr_factors=torch.ones(4, dtype=torch.float64),
        initial_loss_scale=1.0 if facts.precision == "fp16" else None,
        lazy=words if facts.lazy else None,
        late=[[matrix]] if late else [],
    )
    return optimizer, words


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
        chosen=optimizer.flat.blocks_at_once,
    )
    for dtype in optimizer.flat.gradient_dtypes:  # a real model has long gradients
        sum_run(torch.zeros(BLOCK, dtype=dtype), optimizer.device_state.squares.buffer)


RECIPES: tuple[Recipe, ...] = (
    ahead_encoders.attentions,
    ahead_encoders.pooled_attentions,
    ahead_decoders.causal_attentions,
    ahead_encoders.post_norms,
    ahead_encoders.pre_norms,
    ahead_encoders.embedding_sum,
    ahead_encoders.post_norm_mlp,
    ahead_encoders.gated_mlp,
    ahead_encoders.rotations,
    ahead_encoders.joined_biases,
    ahead_encoders.classifying_head,
    ahead_decoders.rms_norms,
    ahead_decoders.heads_of_products,
    ahead_decoders.wide_head_norms,
    ahead_decoders.swiglu_mlp,
    ahead_decoders.decoder_biases,
    ahead_decoders.rows_that_are_read,
    ahead_decoders.language_model_loss,
    words_and_optimizer,
    weight_gradients,
    optimizer_alone,
)


def recipes_for(facts: Facts) -> list[Recipe]:
    return [r for r in RECIPES if facts.shape.blocks in r.blocks]
