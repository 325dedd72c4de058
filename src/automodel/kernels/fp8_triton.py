"""The Triton half of `fp8`: the largest magnitude of a tensor, and its numbers in 8 bits, both ways round."""

import triton
import triton.language as tl


@triton.jit
def amax_kernel(X, PARTIAL, n_elements, BLOCK: tl.constexpr):
    """One maximum a program. Programs walk side by side, from the end to the beginning."""
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    chunk = tl.cdiv(n_elements, BLOCK) - 1 - tl.program_id(0)
    while chunk >= 0:
        at = chunk.to(tl.int64) * BLOCK + lanes
        x = tl.load(X + at, mask=at < n_elements, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
        chunk -= tl.num_programs(0)
    tl.store(PARTIAL + tl.program_id(0), tl.max(largest, axis=0))


@triton.jit(do_not_specialize=["n_rows", "n_partials"])
def quantise_kernel(
    X, PARTIAL, SCALE, ROWS, COLUMNS, n_rows, n_columns, n_padded, n_partials,
    LARGEST: tl.constexpr, TINIEST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """One tile. The scale comes from PARTIAL, and is written, or, where that is None, is read."""
    tile = tl.program_id(0)
    across = tl.cdiv(n_columns, BLOCK_C)
    rows = tile // across * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tile % across * BLOCK_C + tl.arange(0, BLOCK_C)
    at = rows[:, None].to(tl.int64) * n_columns + columns[None, :]
    x = tl.load(X + at, mask=(rows < n_rows)[:, None] & (columns < n_columns)[None, :], other=0.0).to(tl.float32)
    if PARTIAL is not None:
        parts = tl.arange(0, PARTIALS)
        largest = tl.max(tl.load(PARTIAL + parts, mask=parts < n_partials, other=0.0), axis=0)
        scale = tl.maximum(largest, TINIEST) / LARGEST
        tl.store(SCALE, scale, mask=tl.program_id(0) == 0)
    else:
        scale = tl.load(SCALE)
    x = tl.minimum(tl.maximum(x * (1.0 / scale), -LARGEST, tl.PropagateNan.ALL), LARGEST, tl.PropagateNan.ALL)
    if ROWS is not None:
        here = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
        tl.store(ROWS + at, x.to(ROWS.dtype.element_ty), mask=here)
    if COLUMNS is not None:
        here = (rows < n_padded)[None, :] & (columns < n_columns)[:, None]
        turned = columns[:, None].to(tl.int64) * n_padded + rows[None, :]
        tl.store(COLUMNS + turned, tl.trans(x.to(COLUMNS.dtype.element_ty)), mask=here)
