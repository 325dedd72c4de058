"""Recipes for the blocks of encoders: post-norm ones (`models/fused_encoder.py`) and ModernBERT's."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from automodel.kernels.activate import Dropout, activate
from automodel.kernels.add_norm import Norm, add_norm
from automodel.kernels.ahead_bench import DOCUMENTS, TOKENS, Bench, documents, learn, recipe
from automodel.kernels.ahead_facts import Shape
from automodel.kernels.attention import FORWARD, Attention, Turned, attention, can_turn
from automodel.kernels.bias_gelu import bias_gelu, geglu
from automodel.kernels.column_sum import rows_sum
from automodel.kernels.dispatch import power_of_two_above
from automodel.kernels.embed_norm import Stream, embed_norm
from automodel.kernels.few_classes import MOST_CLASSES, few_classes_cross_entropy
from automodel.kernels.pooled_attention import pooled_attention
from automodel.kernels.rope import rope_, rope_table


@recipe(
    "attention_forward_kernel", "attention_delta_kernel", "attention_backward_kernel", "rope_kernel",
    blocks=("post-norm", "modernbert"),
)  # fmt: skip
def attentions(bench: Bench) -> None:
    """Everywhere, and within a window in the layers that have one."""
    shape = bench.facts.shape
    if power_of_two_above(shape.width // shape.heads) not in FORWARD:
        return  # torch's own kernel
    for window, learns in itertools.product(sorted({-1, shape.window}), bench.modes):
        with torch.set_grad_enabled(learns):
            how, turned = attention_of(shape, window, learns), None
            if shape.blocks == "modernbert":
                angles = rope_table(torch.zeros(shape.width // shape.heads // 2), TOKENS)
                turned = Turned(torch.zeros(TOKENS, dtype=torch.int64), angles) if can_turn(angles, how) else None
            out = attention(bench.rows(TOKENS, 3 * shape.width), documents(), TOKENS, how, bench.seed, turned)
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
    """Words, positions and types, normed and dropped out: at once, and, for text pairs, in parts."""
    shape = bench.facts.shape
    width, dropout = shape.embedding_width, shape.embedding_dropout
    words, places = (torch.zeros((TOKENS, width), dtype=bench.dtype, requires_grad=learns) for learns in (False, True))
    ids, runs = torch.zeros(TOKENS, dtype=torch.int64), torch.zeros((2, TOKENS), dtype=torch.int32)
    for learns in bench.modes:
        norm = Norm(1e-5, dropout if learns else 0.0, bench.seed if learns and dropout else None)
        types = bench.vector(width) if shape.token_types else None
        with torch.set_grad_enabled(learns):
            out = embed_norm(
                Stream(ids, ids, documents(), runs), words, places, bench.vector(width), bench.vector(width), types,
                norm=norm,
            )  # fmt: skip
            if learns:
                learn(out)
        if shape.pairs_have_types:
            add(bench, TOKENS, width, learns=learns, norm_bias=True, dropout=dropout, drop_last=True)


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
    drop_last: bool = False,
    return_sum: bool = False,
    shares: bool = False,
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
            drop_last=drop_last,
            return_sum=return_sum,
            shares=shares,
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
    learn(bias_gelu(bench.rows(TOKENS, inner), bench.vector(inner)))


@recipe("rows_sum_kernel", "column_sum_kernel", blocks=("post-norm",))
def joined_biases(bench: Bench) -> None:
    """Gradients of the biases of query, key and value: together, or in a pooled block the query's alone."""
    shape = bench.facts.shape
    for layers in (3, 2, 1) if shape.pools else (3,):
        rows_sum(bench.rows(TOKENS, layers * shape.width).detach())


@recipe("add_norm_forward_kernel", "add_norm_backward_kernel", "column_sum_kernel", blocks=("modernbert",))
def pre_norms(bench: Bench) -> None:
    """The norm of the embeddings, that before attention, that before the MLP, and the last."""
    shape = bench.facts.shape
    for learns in bench.modes:
        add(bench, TOKENS, shape.width, learns=learns, residual=False)
        add(bench, TOKENS, shape.width, learns=learns, return_sum=True, shares=True)
    for count, learns in bench.row_counts():
        add(bench, count, shape.width, learns=learns, dropout=shape.out_dropout, return_sum=True, shares=True)
        add(bench, count, shape.width, learns=learns, shares=True)


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


@recipe("activate_kernel", "few_classes_kernel", "rows_sum_kernel", "column_sum_kernel", blocks=("post-norm",))
def classifying_head(bench: Bench) -> None:
    """Of a text classifier that learns; evaluation uses the model's own head."""
    shape, rows, classes = bench.facts.shape, bench.facts.batch, bench.facts.classes
    if not shape.pools or not 0 < classes <= MOST_CLASSES:
        return
    dropout = Dropout(shape.head_dropout, bench.seed)
    if shape.head_drops_first and shape.head_dropout:
        learn(activate(bench.rows(rows, shape.width), None, "none", dropout))
    pooled = activate(bench.rows(rows, shape.width), bench.vector(shape.width), shape.head_function, dropout)
    weight = torch.zeros((classes, shape.width), dtype=bench.dtype, requires_grad=True)
    labels, bias = torch.zeros(rows, dtype=torch.int64), bench.vector(classes)
    few_classes_cross_entropy(pooled, weight, bias, labels, torch.ones(())).backward()
