"""One layer of a post-norm encoder on the CPU as one node of autograd.

    q, k, v = x [Wq; Wk; Wv]ᵀ + b
    a       = attention(q, k, v)                          within documents (`cpu_attention.py`)
    h       = LayerNorm(x + drop(a Woᵀ + bo))
    y       = LayerNorm(h + drop(gelu(h Wuᵀ + bu) Wdᵀ + bd))

The products are two thirds of a layer's time and are made by `cpu_products.py`. What is saved lies around them: query,
key and value are one product, three where stock layers have nine; a residual is what a product is added to, in place
where the library can, forward and backward (`dx = dz + dqkv W`), and no pass of its own; the gradients of three layers
are parts of one tensor. A step has a twentieth of the nodes.

Where products are made in bf16, so are attention's, and GELU reads and writes bf16. Layers take and give fp32:
residuals are added, and norms computed, in fp32.

Legend: T tokens, N width, F inner width, H heads, D head dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from automodel.kernels.cpu_attention import (
    Documents,
    attend,
    attend_backward,
    document_attention_reference,
    flattened,
    gathered,
)
from automodel.kernels.cpu_dropout import draw_kept, kept_scale
from automodel.kernels.cpu_products import Fp32Products, Products

_norm, _norm_backward = torch.native_layer_norm, torch.ops.aten.native_layer_norm_backward
_gelu_backward = torch.ops.aten.gelu_backward


class LayerWeights(NamedTuple):
    """Matrices are (outputs, inputs), as `nn.Linear` has them."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_bias: Tensor
    key_bias: Tensor
    value_bias: Tensor
    out: Tensor
    out_bias: Tensor
    first_norm: Tensor
    first_norm_bias: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    last_norm: Tensor
    last_norm_bias: Tensor


class Matrices(NamedTuple):
    """The matrices of a layer and their biases, as its products take them."""

    joined: Tensor
    """Of query, key and value, one below the other."""
    joined_bias: Tensor
    out: Tensor
    out_bias: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor


class LayerShape(NamedTuple):
    heads: int
    eps: float
    """Of the first norm, inside the root."""
    last_eps: float
    out_dropout: float = 0.0
    down_dropout: float = 0.0


def post_norm_layer_reference(x_TN: Tensor, w: LayerWeights, shape: LayerShape, documents: Documents) -> Tensor:
    """The definition, in steps."""
    linears = ((w.query, w.query_bias), (w.key, w.key_bias), (w.value, w.value_bias))
    q, k, v = (F.linear(x_TN, *linear).unflatten(1, (shape.heads, -1)) for linear in linears)
    attended = document_attention_reference(q, k, v, documents).flatten(1)
    projected = F.dropout(F.linear(attended, w.out, w.out_bias), shape.out_dropout)
    h = F.layer_norm(x_TN + projected, x_TN.shape[1:], w.first_norm, w.first_norm_bias, shape.eps)
    inner = F.dropout(F.linear(F.gelu(F.linear(h, w.up, w.up_bias)), w.down, w.down_bias), shape.down_dropout)
    return F.layer_norm(h + inner, x_TN.shape[1:], w.last_norm, w.last_norm_bias, shape.last_eps)


def _around(
    products: Products, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, p: float
) -> tuple[Tensor, Tensor | None]:
    """residual + drop(x weightᵀ + bias), and the factors that dropped."""
    if p == 0.0:
        return products.add_linear(residual, x, weight, bias), None
    projected = products.linear(x, weight, bias).float()
    factors = draw_kept(projected.shape, p).mul_(kept_scale(p))
    return projected.mul_(factors).add_(residual), factors


def _parts(qkv: Tensor, shape: LayerShape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, (T, H, D) each."""
    q, k, v = qkv.unflatten(1, (3, shape.heads, -1)).unbind(1)
    return q, k, v


class _PostNormLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shape: LayerShape,
        documents: Documents,
        products: Products,
        matrices: Matrices,
        *weights: Tensor,
    ) -> Tensor:
        w, width, m = LayerWeights(*weights), list(x.shape[1:]), matrices
        rounded = products.rounded(x)
        qkv = products.linear(rounded, m.joined, m.joined_bias)
        attended = qkv.new_empty(x.shape)
        found = attend(_parts(qkv, shape), documents, attended.unflatten(1, (shape.heads, -1)))
        z1, factors1 = _around(products, attended, m.out, m.out_bias, x, shape.out_dropout)
        h, *first = _norm(z1, width, w.first_norm, w.first_norm_bias, shape.eps)
        rounded_h = products.rounded(h)
        inner = products.linear(rounded_h, m.up, m.up_bias)
        active = F.gelu(inner)
        z2, factors2 = _around(products, active, m.down, m.down_bias, h, shape.down_dropout)
        y, *last = _norm(z2, width, w.last_norm, w.last_norm_bias, shape.last_eps)
        ctx.shape, ctx.documents, ctx.products = shape, documents, products
        ctx.save_for_backward(
            rounded, qkv, attended, z1, factors1, *first, rounded_h, inner, active, z2, factors2, *last,
            m.joined, m.out, m.up, m.down, w.first_norm, w.first_norm_bias, w.last_norm, w.last_norm_bias,
            *flattened(found),
        )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        (
            x, qkv, attended, z1, factors1, mean1, rstd1, h, inner, active, z2, factors2, mean2, rstd2,
            joined, out, up, down, norm1, norm1_bias, norm2, norm2_bias, *kept,
        ) = ctx.saved_tensors  # fmt: skip
        products, width, all3 = ctx.products, list(x.shape[1:]), [True, True, True]
        dz2, d_norm2, d_norm2_bias = _norm_backward(dy, z2, width, mean2, rstd2, norm2, norm2_bias, all3)
        dprojected = products.rounded(dz2 if factors2 is None else dz2 * factors2)
        d_down, d_down_bias = products.weight_gradient(dprojected, active), products.bias_gradient(dprojected)
        dinner = _gelu_backward(products.input_gradient(dprojected, down), inner)
        d_up, d_up_bias = products.weight_gradient(dinner, h), products.bias_gradient(dinner)
        dh = products.add_input_gradient(dz2, dinner, up)
        dz1, d_norm1, d_norm1_bias = _norm_backward(dh, z1, width, mean1, rstd1, norm1, norm1_bias, all3)
        dprojected = products.rounded(dz1 if factors1 is None else dz1 * factors1)
        d_out, d_out_bias = products.weight_gradient(dprojected, attended), products.bias_gradient(dprojected)
        dattended = products.input_gradient(dprojected, out).unflatten(1, (ctx.shape.heads, -1))
        dqkv = torch.empty_like(qkv)
        inputs, places = _parts(qkv, ctx.shape), _parts(dqkv, ctx.shape)
        attend_backward(dattended, inputs, ctx.documents, gathered(kept), places)
        gradients = LayerWeights(
            *products.weight_gradient(dqkv, x).chunk(3), *products.bias_gradient(dqkv).chunk(3), d_out, d_out_bias,
            d_norm1, d_norm1_bias, d_up, d_up_bias, d_down, d_down_bias, d_norm2, d_norm2_bias,
        )  # fmt: skip
        return products.add_input_gradient(dz1, dqkv, joined), None, None, None, None, *gradients


def post_norm_layer(
    x_TN: Tensor,
    weights: LayerWeights,
    shape: LayerShape,
    documents: Documents,
    products: Products | None = None,
    matrices: Matrices | None = None,
) -> Tensor:
    """(T, N) in fp32 on the CPU. All of `documents` together have T tokens. Every weight gets a gradient. `matrices`:
    what products read instead of the weights; none: the weights themselves, which is for products in fp32."""
    if matrices is None:
        w = weights
        joined, bias = torch.cat(w[0:3]).detach(), torch.cat(w[3:6]).detach()
        matrices = Matrices(joined, bias, w.out, w.out_bias, w.up, w.up_bias, w.down, w.down_bias)
    return _PostNormLayer.apply(x_TN, shape, documents, products or Fp32Products(), matrices, *weights)
