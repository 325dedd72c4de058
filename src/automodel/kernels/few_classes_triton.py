"""The Triton half of `few_classes`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_rows"])
def few_classes_kernel(
    HIDDEN, WEIGHT, BIAS, LABELS, SCALE, DHIDDEN, PARTIAL, LOSSES, n_rows,
    N: tl.constexpr, BLOCK_N: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """PARTIAL is (programs, C·N + C): the weight's gradient, then the bias's. A label below 0 counts for nothing."""
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_N)
    classes = tl.arange(0, BLOCK_C)
    inside = (rows < n_rows)[:, None] & (cols < N)[None, :]
    at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    hidden = tl.load(HIDDEN + at, mask=inside, other=0.0).to(tl.float32)
    label = tl.load(LABELS + rows, mask=rows < n_rows, other=-1)

    logits = tl.full((ROWS, BLOCK_C), float("-inf"), tl.float32)
    for c in tl.static_range(C):
        weight = tl.load(WEIGHT + c * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        logit = tl.sum(hidden * weight[None, :], axis=1)
        if BIAS is not None:
            logit += tl.load(BIAS + c).to(tl.float32)
        logits = tl.where(classes[None, :] == c, logit[:, None], logits)

    highest = tl.max(logits, axis=1)
    shares = tl.exp(logits - highest[:, None])
    total = tl.sum(shares, axis=1)
    own = classes[None, :] == label[:, None]
    counts = label >= 0
    scale = tl.load(SCALE)
    wanted = tl.sum(tl.where(own, logits, 0.0), axis=1)
    loss = tl.where(counts, highest + tl.log(total) - wanted, 0.0)
    tl.store(LOSSES + program, tl.sum(loss, axis=0) * scale)
    dlogits = tl.where(counts[:, None], shares / total[:, None] - tl.where(own, 1.0, 0.0), 0.0) * scale

    dhidden = tl.zeros((ROWS, BLOCK_N), tl.float32)
    sums = PARTIAL + program * (C * N + C)
    for c in tl.static_range(C):
        weight = tl.load(WEIGHT + c * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        of_class = tl.sum(tl.where(classes[None, :] == c, dlogits, 0.0), axis=1)
        dhidden += of_class[:, None] * weight[None, :]
        tl.store(sums + c * N + cols, tl.sum(of_class[:, None] * hidden, axis=0), mask=cols < N)
        tl.store(sums + C * N + c, tl.sum(of_class, axis=0))
    tl.store(DHIDDEN + at, dhidden.to(DHIDDEN.dtype.element_ty), mask=inside)
