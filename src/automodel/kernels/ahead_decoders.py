"""Recipes for the blocks of decoders (`models/fused_decoder.py`). Documents are taken to be short: long ones get
torch's own attention, and then one kernel that turns gradients is not foreseen."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from automodel.kernels.ahead_bench import TOKENS, Bench, documents, learn, recipe
from automodel.kernels.ahead_facts import Shape
from automodel.kernels.attention import WIDEST_HEAD, Attention, Turned, attention, can_turn
from automodel.kernels.column_sum import rows_sum
from automodel.kernels.linear_cross_entropy import CrossEntropy, linear_cross_entropy, linear_cross_entropy_scores
from automodel.kernels.rms_norm import rms_norm
from automodel.kernels.rope import rope_, rope_table
from automodel.kernels.rope_heads import HeadNorms, Heads, rope_heads, rope_joined
from automodel.kernels.swiglu import swiglu_linear
from automodel.kernels.take_rows import take_rows
from automodel.kernels.token_scores import TokenScores

NARROW = 8  # outputs of a product that is not looked at


def _normed(bench: Bench, x: Tensor, residual: bool = False) -> tuple[Tensor, Tensor]:
    shape, width = bench.facts.shape, x.shape[1]
    return rms_norm(
        x,
        bench.rows(TOKENS, width) if residual else None,
        bench.vector(width),
        offset=shape.norm_offset,
        round_first=shape.round_first,
    )


@recipe("rms_norm_forward_kernel", "rms_norm_backward_kernel", "column_sum_kernel", blocks=("decoder",))
def rms_norms(bench: Bench) -> None:
    """Before the products of the first block, of all others, at the end; of a branch, in families that do so."""
    shape = bench.facts.shape
    if shape.norms in ("before", "around"):
        learn(*_normed(bench, bench.rows(TOKENS, shape.width)))
        learn(*_normed(bench, bench.rows(TOKENS, shape.width), residual=True))
    if shape.norms in ("after", "around"):
        learn(_normed(bench, bench.rows(TOKENS, shape.width))[0])
    learn(_normed(bench, bench.rows(TOKENS, shape.width), residual=True)[0])


def _heads(shape: Shape) -> list[Heads]:
    """Of the joined product; in a pooled block, of the queries alone and of keys and values."""
    joined = Heads(shape.heads, shape.key_heads, shape.head_dim)
    return [joined, joined._replace(keys=0), joined._replace(queries=0)] if shape.pools else [joined]


def _width(heads: Heads) -> int:
    return (heads.queries + 2 * heads.keys) * heads.dim


def _angles(shape: Shape) -> tuple[Tensor, Tensor]:
    return torch.zeros(TOKENS, dtype=torch.int64), rope_table(torch.zeros(shape.turning_dim // 2), TOKENS)


@recipe("rope_kernel", "heads_forward_kernel", "heads_backward_kernel", "column_sum_kernel", blocks=("decoder",))
def heads_of_products(bench: Bench) -> None:
    """Side by side for our own attention, which short documents get; apart for torch's."""
    shape = bench.facts.shape
    for heads in _heads(shape) if shape.head_norms != "all" else ():
        norms = None
        if shape.head_norms == "each":
            weights = bench.vector(shape.head_dim), bench.vector(shape.head_dim)
            norms = HeadNorms(*weights, 1e-6, shape.norm_offset, shape.round_first)
        joined = heads.queries > 0 and heads.keys > 0 and (heads.dim <= WIDEST_HEAD or shape.softcap > 0.0)
        made = (rope_joined if joined else rope_heads)(bench.rows(TOKENS, _width(heads)), *_angles(shape), heads, norms)
        learn(*(part for part in ([made] if isinstance(made, Tensor) else made) if part.numel()))


@recipe(
    "attention_forward_kernel", "attention_delta_kernel", "attention_backward_kernel", "rope_kernel",
    blocks=("decoder",),
)  # fmt: skip
def causal_attentions(bench: Bench) -> None:
    """Its backward turns gradients back, unless heads are normed before they turn. Some layers may not turn at all."""
    shape = bench.facts.shape
    sizes = (shape.heads, shape.key_heads, shape.head_dim)
    suits = shape.head_dim <= WIDEST_HEAD or shape.softcap > 0.0
    windows = [shape.window] if shape.all_windowed else sorted({-1, shape.window})
    for window, learns in itertools.product(windows if suits else (), bench.modes):
        dropout = shape.attention_dropout if learns else 0.0
        with torch.set_grad_enabled(learns):
            how = Attention(*sizes, 1.0, causal=True, window=window, dropout=dropout, softcap=shape.softcap)
            angles = _angles(shape)
            inside = not shape.head_norms and can_turn(angles[1], how)
            ways = [Turned(*angles)] if inside else []
            for turned in ways if shape.all_turn and inside else [*ways, None]:
                product = bench.rows(TOKENS, _width(Heads(*sizes)))
                out = attention(product, documents(), TOKENS, how, bench.seed, turned)
                if learns:
                    learn(out)


@recipe("rms_norm_forward_kernel", "rms_norm_backward_kernel", "column_sum_kernel", "rope_kernel", blocks=("decoder",))
def wide_head_norms(bench: Bench) -> None:
    """OLMo2: norms over all query heads and over all key heads."""
    shape = bench.facts.shape
    for heads in _heads(shape) if shape.head_norms == "all" else ():
        sizes = [n * heads.dim for n in (heads.queries, heads.keys, heads.keys)]
        *turning, _ = bench.rows(TOKENS, _width(heads)).split(sizes, dim=1)
        parts = [(part, count) for part, count in zip(turning, heads[:2]) if count]
        learn(*(rope_(_normed(bench, part)[0], *_angles(shape), count, heads.dim) for part, count in parts))


@recipe("swiglu_forward_kernel", "swiglu_backward_kernel", blocks=("decoder",))
def swiglu_mlp(bench: Bench) -> None:
    """What it gives may be kept or made again; which, follows from the memory."""
    shape = bench.facts.shape
    weight = torch.zeros((NARROW, shape.inner), dtype=bench.dtype, requires_grad=True)
    for keep in (False, True):
        learn(swiglu_linear(bench.rows(TOKENS, 2 * shape.inner), weight, None, shape.activation, keep=keep))


@recipe("put_rows_kernel", blocks=("decoder",))
def rows_that_are_read(bench: Bench) -> None:
    """Of the last block, by whoever reads more than one row a document."""
    shape = bench.facts.shape
    for width in () if shape.pools else sorted({shape.width, shape.heads * shape.head_dim}):
        learn(take_rows(bench.rows(TOKENS, width), torch.arange(NARROW)))


@recipe("cross_entropy_rows_kernel", blocks=("decoder",))
def language_model_loss(bench: Bench) -> None:
    """A few rows, as wide as the vocabulary; the kernel knows nothing of the hidden width."""
    head = bench.facts.head
    form = CrossEntropy(head.logit_scale, head.softcap, head.z_loss, head.label_smoothing)
    labels, weight = torch.zeros(NARROW, dtype=torch.int64), torch.zeros((head.words, NARROW), dtype=bench.dtype)
    tally = TokenScores("cpu") if head.counts else None
    if head.words:
        linear_cross_entropy(bench.rows(NARROW, NARROW), weight, labels, form=form, tally=tally).backward()
    if head.words and False in bench.modes:
        form = form._replace(z_loss=0.0)
        linear_cross_entropy_scores(bench.rows(NARROW, NARROW), weight, labels, form=form, tally=tally)


@recipe("rows_sum_kernel", "column_sum_kernel", blocks=("decoder",))
def decoder_biases(bench: Bench) -> None:
    """Gradients of biases, of the products that have them."""
    shape = bench.facts.shape
    widths = [_width(heads) for heads in _heads(shape)] if shape.qkv_bias else []
    widths += [shape.width] if shape.out_bias or shape.mlp_bias else []
    widths += [2 * shape.inner] if shape.mlp_bias else []
    for width in widths:
        rows_sum(bench.rows(TOKENS, width).detach())
