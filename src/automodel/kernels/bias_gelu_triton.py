"""The Triton half of `bias_gelu` and `geglu`.

Programs take a column block of a chunk of rows. Backward, a program walks down its rows with the bias gradient of
its columns in registers and leaves one row of partial sums. Everything is computed in fp32 and rounded once.
"""

import triton
import triton.language as tl

from automodel.kernels.triton_keys import settle_keys

INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
MINUS_2_SQRT_2_OVER_PI = tl.constexpr(-1.5957691216057308)
CUBIC = tl.constexpr(0.044715)
# Abramowitz and Stegun 7.1.26 with |z| / sqrt(2) put in: Φ(-|z|) = exp(-z²/2) · t · P(t) / 2, t = 1 / (1 + S |z|).
# Its error is below 8e-8, fp32's own resolution near 1, and the exponential is the one that the slope needs as well:
# libdevice's erf cost as much as the memory traffic of the whole backward pass.
S = tl.constexpr(0.23164189)
P1 = tl.constexpr(0.127414796)
P2 = tl.constexpr(-0.142248368)
P3 = tl.constexpr(0.7107068705)
P4 = tl.constexpr(-0.7265760135)
P5 = tl.constexpr(0.5307027145)


@triton.jit
def cdf(z, TANH: tl.constexpr):
    """(Φ(z), exp(-z²/2)), exact or by tanh; (1 + tanh(u)) / 2 is sigmoid(2u), and exp is what every backend has."""
    bell = tl.exp(-0.5 * z * z)
    if TANH:
        return 1.0 / (1.0 + tl.exp((z + z * z * z * CUBIC) * MINUS_2_SQRT_2_OVER_PI)), bell
    else:
        t = 1.0 / (1.0 + S * tl.abs(z))
        tail = bell * t * (P1 + t * (P2 + t * (P3 + t * (P4 + t * P5))))
        return tl.where(z < 0.0, tail, 1.0 - tail), bell


@triton.jit
def gelu_slope(z, phi, bell, TANH: tl.constexpr):
    """Derivative of z · Φ(z), given Φ(z) and exp(-z²/2)."""
    if TANH:
        return phi - z * phi * (1.0 - phi) * (z * z * CUBIC * 3.0 + 1.0) * MINUS_2_SQRT_2_OVER_PI
    else:
        return phi + z * bell * INV_SQRT_2PI


@triton.jit
def tile_of(WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Columns and rows of this program; programs that lie side by side in a row follow each other. All along one axis:
    a second one ends at 65,535 programs, which are 262,140 tokens."""
    ACROSS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    return program % ACROSS * BLOCK + tl.arange(0, BLOCK), program // ACROSS * ROWS + tl.arange(0, ROWS)


@triton.jit(do_not_specialize=["n_rows"])
def bias_gelu_forward_kernel(
    X, BIAS, Y, n_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TANH: tl.constexpr
):
    cols, rows = tile_of(WIDTH, BLOCK, ROWS)
    inside = (rows < n_rows)[:, None] & (cols < WIDTH)[None, :]
    at = rows.to(tl.int64)[:, None] * WIDTH + cols[None, :]
    z = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS is not None:
        z += tl.load(BIAS + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)[None, :]
    phi, _ = cdf(z, TANH)
    tl.store(Y + at, (z * phi).to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def bias_gelu_backward_kernel(
    X, BIAS, DY, DX, PARTIAL, n_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    ACROSS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    cols = tl.program_id(0) % ACROSS * BLOCK + tl.arange(0, BLOCK)
    in_row = cols < WIDTH
    chunk = tl.program_id(0) // ACROSS
    bias_sum = tl.zeros((BLOCK,), tl.float32)
    for first in range(chunk * ROWS, n_rows, tl.num_programs(0) // ACROSS * ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < n_rows)[:, None] & in_row[None, :]
        at = rows.to(tl.int64)[:, None] * WIDTH + cols[None, :]
        z = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
        if BIAS is not None:
            z += tl.load(BIAS + cols, mask=in_row, other=0.0).to(tl.float32)[None, :]
        phi, bell = cdf(z, TANH)
        dx = dy * gelu_slope(z, phi, bell, TANH)
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
        if PARTIAL is not None:
            bias_sum += tl.sum(dx, axis=0)
    if PARTIAL is not None:
        tl.store(PARTIAL + chunk * WIDTH + cols, bias_sum, mask=in_row)


@triton.jit(do_not_specialize=["n_rows"])
def geglu_forward_kernel(
    X, Y, n_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TANH: tl.constexpr
):
    """X is (rows, 2·WIDTH), value half first, then the gate half; Y is (rows, WIDTH)."""
    cols, rows = tile_of(WIDTH, BLOCK, ROWS)
    inside = (rows < n_rows)[:, None] & (cols < WIDTH)[None, :]
    row = rows.to(tl.int64)[:, None] * WIDTH
    z = tl.load(X + 2 * row + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(X + 2 * row + WIDTH + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    phi, _ = cdf(z, TANH)
    tl.store(Y + row + cols[None, :], (z * phi * gate).to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def geglu_backward_kernel(
    X, DY, DX, n_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TANH: tl.constexpr
):
    cols, rows = tile_of(WIDTH, BLOCK, ROWS)
    inside = (rows < n_rows)[:, None] & (cols < WIDTH)[None, :]
    row = rows.to(tl.int64)[:, None] * WIDTH
    z = tl.load(X + 2 * row + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(X + 2 * row + WIDTH + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(DY + row + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    phi, bell = cdf(z, TANH)
    dz = dy * gate * gelu_slope(z, phi, bell, TANH)
    tl.store(DX + 2 * row + cols[None, :], dz.to(DX.dtype.element_ty), mask=inside)
    tl.store(DX + 2 * row + WIDTH + cols[None, :], (dy * z * phi).to(DX.dtype.element_ty), mask=inside)


settle_keys(globals())
