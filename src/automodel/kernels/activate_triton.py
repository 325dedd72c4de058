"""The Triton half of `activate`: one kernel for both directions."""

import triton
import triton.language as tl

from automodel.kernels.add_norm_triton import dropout_keep
from automodel.kernels.bias_gelu_triton import cdf, gelu_slope
from automodel.kernels.triton_keys import settle_keys


@triton.jit
def value_and_slope(z, FUNCTION: tl.constexpr):
    if FUNCTION == "relu":
        return tl.maximum(z, 0.0), tl.where(z > 0.0, 1.0, 0.0)
    elif FUNCTION == "tanh":
        small = tl.exp(-2.0 * tl.abs(z))
        t = (1.0 - small) / (1.0 + small)
        t = tl.where(z < 0.0, -t, t)
        return t, 1.0 - t * t
    elif FUNCTION == "gelu":
        phi, bell = cdf(z, False)
        return z * phi, gelu_slope(z, phi, bell, False)
    else:
        return z, tl.full(z.shape, 1.0, tl.float32)


@triton.jit(do_not_specialize=["n_rows", "site", "threshold"])
def activate_kernel(
    X, BIAS, DY, SEED, OUT, n_rows, site, threshold, scale,
    N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, FUNCTION: tl.constexpr,
):  # fmt: skip
    """OUT is y, or dx where DY is given."""
    tile = tl.program_id(0)
    rows = tile * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_N)
    inside = (rows < n_rows)[:, None] & (cols < N)[None, :]
    at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    z = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS is not None:
        z += tl.load(BIAS + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    value, slope = value_and_slope(z, FUNCTION)
    out = value
    if DY is not None:
        out = slope * tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
    if SEED is not None:
        keep = dropout_keep(SEED, site, tile * ROWS // 4, tile * ROWS % 4, cols, threshold, ROWS)
        out = tl.where(keep, out * scale, 0.0)
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=inside)


settle_keys(globals())
