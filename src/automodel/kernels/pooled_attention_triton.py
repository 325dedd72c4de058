"""The Triton half of `pooled_attention`: a program for one document and head."""

import triton
import triton.language as tl

from automodel.kernels.attention_triton import LOG2_E, kept, key_words, row_words


@triton.jit(do_not_specialize=["n_queries", "site", "threshold"])
def pooled_forward_kernel(
    Q, KV, OUT, LSE, CU, SEED, n_queries, scale, site, threshold, kept_scale,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(CU + row)
    length = tl.load(CU + row + 1) - begin
    dims = tl.arange(0, BLOCK_D)
    stream = KV + begin.to(tl.int64) * (2 * H * D) + head * D
    q = tl.load(Q + row * (H * D) + head * D + dims, mask=dims < D, other=0.0).to(tl.float32) * (scale * LOG2_E)
    # Every key of the tile is a lane of its own: running maxima, sums and outputs meet only at the end.
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    out = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    if SEED is not None:
        word = row_words(SEED, site, head, row + tl.arange(0, BLOCK) * 0)
    for first in range(0, length, BLOCK):
        keys = first + tl.arange(0, BLOCK)
        inside = keys < length
        at = keys[:, None] * (2 * H * D) + dims[None, :]
        real = inside[:, None] & (dims < D)[None, :]
        k = tl.load(stream + at, mask=real, other=0.0).to(tl.float32)
        v = tl.load(stream + at + H * D, mask=real, other=0.0).to(tl.float32)
        scores = tl.where(inside, tl.sum(k * q[None, :], 1), float("-inf"))
        higher = tl.maximum(highest, scores)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(scores - level)
        shrink = tl.exp2(highest - level)
        total = total * shrink + p
        if SEED is not None:
            p = tl.where(kept(word + key_words(begin + keys), threshold), p, 0.0)
        out = out * shrink[:, None] + p[:, None] * v
        highest = higher
    peak = tl.max(highest, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    share = tl.exp2(highest - peak)
    sum_of_all = tl.sum(total * share, 0)
    divisor = tl.where(length > 0, sum_of_all, 1.0)
    result = tl.sum(out * share[:, None], 0) / divisor
    if SEED is not None:
        result *= kept_scale
    tl.store(OUT + row * (H * D) + head * D + dims, result.to(OUT.dtype.element_ty), mask=dims < D)
    tl.store(LSE + head * n_queries + row, peak + tl.log2(divisor))


@triton.jit(do_not_specialize=["n_queries", "site", "threshold"])
def pooled_backward_kernel(
    Q, KV, OUT, DOUT, LSE, DQ, DKV, CU, SEED, n_queries, scale, site, threshold, kept_scale,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(CU + row)
    length = tl.load(CU + row + 1) - begin
    dims = tl.arange(0, BLOCK_D)
    stream = KV + begin.to(tl.int64) * (2 * H * D) + head * D
    gradient = DKV + begin.to(tl.int64) * (2 * H * D) + head * D
    asked = row < n_queries
    place = row * (H * D) + head * D + dims
    q = tl.load(Q + place, mask=asked & (dims < D), other=0.0).to(tl.float32)
    dout = tl.load(DOUT + place, mask=asked & (dims < D), other=0.0).to(tl.float32)
    out = tl.load(OUT + place, mask=asked & (dims < D), other=0.0).to(tl.float32)
    delta = tl.sum(dout * out, 0)
    lse = tl.load(LSE + head * n_queries + row, mask=asked, other=float("inf"))
    dq = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    if SEED is not None:
        word = row_words(SEED, site, head, row + tl.arange(0, BLOCK) * 0)
    for first in range(0, length, BLOCK):
        keys = first + tl.arange(0, BLOCK)
        inside = keys < length
        at = keys[:, None] * (2 * H * D) + dims[None, :]
        real = inside[:, None] & (dims < D)[None, :]
        k = tl.load(stream + at, mask=real, other=0.0).to(tl.float32)
        v = tl.load(stream + at + H * D, mask=real, other=0.0).to(tl.float32)
        p = tl.exp2(tl.sum(k * q[None, :], 1) * (scale * LOG2_E) - lse)  # without a query: exp2(-inf) = 0
        dp = tl.sum(v * dout[None, :], 1)
        weight = p
        if SEED is not None:
            keep = kept(word + key_words(begin + keys), threshold)
            weight = tl.where(keep, p * kept_scale, 0.0)
            dp = tl.where(keep, dp * kept_scale, 0.0)
        ds = tl.where(inside, p * (dp - delta) * scale, 0.0)  # past the end p may be infinite, and k is zero
        dq += ds[:, None] * k
        dk = ds[:, None] * q[None, :]
        dv = weight[:, None] * dout[None, :]
        tl.store(gradient + at, dk.to(DKV.dtype.element_ty), mask=real)
        tl.store(gradient + at + H * D, dv.to(DKV.dtype.element_ty), mask=real)
    if asked:
        tl.store(DQ + place, tl.sum(dq, 0).to(DQ.dtype.element_ty), mask=dims < D)
