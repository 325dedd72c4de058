"""The loss of a language model without its logits.

    z_v  = cap(s · (h·W_v + b_v))                cap(x) = c·tanh(x / c) where there is a soft-cap c, else x
    lse  = log Σ_v exp z_v
    loss = Σ_rows [ (1 − ε)·(lse − z_y) + ε·(lse − mean_v z_v) + ζ·lse² ] · scale            rows with a label only
    dz_v = [ (1 + 2ζ·lse)·exp(z_v − lse) − (1 − ε)·(v = y) − ε/V ] · scale

The gradient of a row needs nothing but that row's logits, so it is made at once, in the forward pass: for a chunk of
rows, the product h Wᵀ into a buffer, one kernel that turns the buffer into dz where it lies, and the products dz W and
dzᵀ h. Then the buffer belongs to the next chunk. The backward pass only hands on what is there. This works because
`scale` (one over the number of labels of the whole step, times fp16's loss scale) is known beforehand: it goes into dz
before that is rounded. An upstream gradient other than 1 is multiplied in afterwards; `unit_upstream` says that there
is none.

`into_grad` leaves the weight's gradient in `.grad`, where autograd would bring it: the products add to what is there,
or what they made is put there in the backward pass. That saves a tensor as large as the weight, and a pass over it,
where gradients accumulate, and where the weight is also the input embedding, whose own gradient then adds a few rows to
it (`embedding.py`).

What is rounded: logits and dz to the compute dtype, as torch does under autocast; sums, exponentials and losses are
fp32. dW is summed over chunks in its own dtype, in place, inside the product (fp32 in its accumulators, rounded when
stored): in bf16 k chunks round k times, a relative error of about 2⁻⁹·√k, where one product has 2⁻⁹. With buffers of
1 GiB (`logits_memory.py`) 8,192 tokens of Llama 3 are two chunks. `tests/unit/kernels/test_linear_cross_entropy.py`
holds eight of them against fp64.

Where ranks have parts of the vocabulary (`vocabulary_parallel.py`), the same code runs over each part, and a few
numbers of every row are exchanged: see `Words`.

If wanted, whether each row's label has the highest logit, and the entropy of its distribution, are counted on the way.
Without gradients (evaluation), only these and the losses are made.

Shapes: R rows, N width, V words, C rows of a chunk.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from automodel.kernels.dispatch import power_of_two_above, runs_triton
from automodel.kernels.few_classes import are_few, few_classes_cross_entropy
from automodel.kernels.logits_memory import padded_width, rows_at_a_time
from automodel.kernels.side_by_side import fixed_place

if TYPE_CHECKING:
    from automodel.kernels.token_scores import TokenScores

IGNORE = -100
WARPS, VEC = 32, 16
FP32_BYTES = 4
LOWEST_BELOW = -1e4  # of a logit, under the highest one of its row: its probability is 0


class CrossEntropy(NamedTuple):
    """What is made of a row of logits."""

    logit_scale: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0


PLAIN = CrossEntropy()


class Scores(NamedTuple):
    """Of all rows together; 0-dim, on their device."""

    loss: Tensor
    right: Tensor
    """Rows whose label has the highest logit (the first of equal ones)."""


def linear_cross_entropy_reference(
    hidden_RN: Tensor,
    weight_VN: Tensor,
    labels_R: Tensor,
    *,
    scale: Tensor | float = 1.0,
    bias: Tensor | None = None,
    form: CrossEntropy = PLAIN,
) -> Tensor:
    """The definition, with all logits at once, in fp32 at least."""
    logits_RV = F.linear(hidden_RN, weight_VN, bias)
    return (
        cross_entropy_sum(logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float(), labels_R, form) * scale
    )


def cross_entropy_sum(
    logits_RV: Tensor, labels_R: Tensor, form: CrossEntropy, class_weights: Tensor | None = None
) -> Tensor:
    """Summed loss of logits that are there already, in their own dtype. `class_weights`: of a handful of classes."""
    z_RV = logits_RV if form.logit_scale == 1.0 else logits_RV * form.logit_scale
    if form.softcap is not None:
        z_RV = form.softcap * torch.tanh(z_RV / form.softcap)
    smoothing = form.label_smoothing
    loss = F.cross_entropy(
        z_RV, labels_R, weight=class_weights, ignore_index=IGNORE, label_smoothing=smoothing, reduction="sum"
    )
    if form.z_loss:
        loss = loss + form.z_loss * torch.where(labels_R == IGNORE, 0.0, z_RV.logsumexp(1).square()).sum()
    return loss


class Words(Protocol):
    """The words that a rank has, and what it must know of the others. Numbers of rows (…_C) go in for this rank's words
    and come out for all words."""

    @property
    def most(self) -> int | None:
        """Words of the rank that has the most; none where one rank has them all."""

    def own(self, labels_C: Tensor, words: int) -> tuple[Tensor, Tensor | None]:
        """Where each label stands among the rank's words, and whether it does; none: every label does."""

    def highest(self, highest_C: Tensor) -> Tensor: ...

    def sums(self, *own_C: Tensor) -> tuple[Tensor, ...]: ...

    def count(self, own: int) -> int: ...

    def mean(self, z_CV: Tensor) -> Tensor: ...

    def best(self, logits_CV: Tensor) -> Tensor: ...

    def join(self, dhidden_RN: Tensor) -> None:
        """Makes the gradient of the hidden states that of all words, in place."""


class AllWords:
    """The whole vocabulary on every rank."""

    most: int | None = None

    def own(self, labels_C: Tensor, words: int) -> tuple[Tensor, Tensor | None]:
        return torch.where(labels_C == IGNORE, 0, labels_C), None

    def highest(self, highest_C: Tensor) -> Tensor:
        return highest_C

    def sums(self, *own_C: Tensor) -> tuple[Tensor, ...]:
        return own_C

    def count(self, own: int) -> int:
        return own

    def mean(self, z_CV: Tensor) -> Tensor:
        return z_CV.mean(1)

    def best(self, logits_CV: Tensor) -> Tensor:
        return logits_CV.argmax(1)

    def join(self, dhidden_RN: Tensor) -> None:
        pass


ALL_WORDS = AllWords()


class RowScores(NamedTuple):
    """Of each row: its loss, whether its label has the highest logit, and the entropy of its distribution."""

    losses_R: Tensor
    right_R: Tensor | None = None
    entropy_R: Tensor | None = None


def cross_entropy_rows_reference(
    logits_CV: Tensor,
    labels_C: Tensor,
    scale: Tensor | float,
    form: CrossEntropy,
    learns: bool,
    scores: bool = False,
    entropy: bool = False,
    words: Words = ALL_WORDS,
) -> RowScores:
    """Losses of rows, and what else is wanted of them; logits are overwritten by their gradients where `learns`. In
    place and in few passes: on a CPU the traffic is what this costs."""
    right_C = (words.best(logits_CV) == labels_C).int() if scores else None  # neither scale nor cap changes the order
    z_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if form.logit_scale != 1.0:
        z_CV = z_CV.mul_(form.logit_scale)
    slope_CV = None
    if form.softcap is not None:
        z_CV = z_CV.div_(form.softcap).tanh_()
        slope_CV = 1.0 - z_CV.square() if learns else None
        z_CV = z_CV.mul_(form.softcap)
    counts_C = (labels_C != IGNORE).to(z_CV.dtype)
    at_C, here_C = words.own(labels_C, z_CV.shape[1])
    at_C1 = at_C.unsqueeze(1)
    highest_C = words.highest(z_CV.amax(1))
    wanted_C = z_CV.gather(1, at_C1).squeeze(1)
    if here_C is not None:
        wanted_C = torch.where(here_C, wanted_C, 0.0)
    mean_C = words.mean(z_CV) if form.label_smoothing else None
    below_CV = z_CV.sub_(highest_C.unsqueeze(1))
    z_CV = below_CV.exp() if entropy else below_CV.exp_()
    sums_C, wanted_C = words.sums(z_CV.sum(1), wanted_C)
    lse_C = highest_C + sums_C.log()
    entropy_C = None
    if entropy:  # a logit of -inf has probability 0, and 0 · -inf is no number
        (below_C,) = words.sums(below_CV.clamp_(min=LOWEST_BELOW).mul_(z_CV).sum(1))
        entropy_C = torch.where(labels_C == IGNORE, 0.0, sums_C.log() - below_C / sums_C)
    losses_C = lse_C - wanted_C
    if mean_C is not None:
        losses_C = (1.0 - form.label_smoothing) * losses_C + form.label_smoothing * (lse_C - mean_C)
    losses_C = (losses_C + form.z_loss * lse_C.square()) * counts_C
    if learns:
        unit_C = counts_C * scale * form.logit_scale
        z_CV.mul_((unit_C * (1.0 + 2.0 * form.z_loss * lse_C) / sums_C).unsqueeze(1))
        at_label_C = unit_C * (form.label_smoothing - 1.0)
        z_CV.scatter_add_(1, at_C1, (at_label_C if here_C is None else at_label_C * here_C).unsqueeze(1))
        if form.label_smoothing:
            z_CV.sub_((unit_C * (form.label_smoothing / words.count(z_CV.shape[1]))).unsqueeze(1))
        if slope_CV is not None:
            z_CV.mul_(slope_CV)
        if z_CV is not logits_CV:
            logits_CV.copy_(z_CV)
    return RowScores(losses_C, right_C, entropy_C)


@functools.cache
def launch_shape(vocabulary: int) -> tuple[int, int, int]:
    """(lanes, columns of a lane, warps) of one row's program."""
    lanes = min(32 * WARPS, max(32, power_of_two_above(-(-vocabulary // VEC))))
    return lanes, VEC, lanes // 32


def _rows(
    logits_CV: Tensor,
    labels_R: Tensor,
    first: int,
    scale: Tensor,
    form: CrossEntropy,
    into: RowScores,
    learns: bool,
    words: Words,
) -> None:
    """One chunk's losses, and what else there is a place for, into `into`; its logits become gradients where
    `learns`."""
    losses_R, right_R, entropy_R = into
    (rows, vocabulary), stride = logits_CV.shape, logits_CV.stride(0)
    if words is not ALL_WORDS or not runs_triton(logits_CV):
        chunk, wanted = slice(first, first + rows), (right_R is not None, entropy_R is not None)
        made = cross_entropy_rows_reference(logits_CV, labels_R[chunk], scale, form, learns, *wanted, words)
        for place_R, values in zip(into, made):
            if place_R is not None and values is not None:
                place_R[chunk] = values
        return
    from automodel.kernels.linear_cross_entropy_triton import cross_entropy_rows_kernel

    lanes, vec, warps = launch_shape(vocabulary)
    cross_entropy_rows_kernel[(rows,)](
        logits_CV, labels_R, scale, losses_R, right_R, entropy_R, first,
        V=vocabulary, STRIDE=stride, LANES=lanes, VEC=vec, IGNORE=IGNORE,
        LOGIT_SCALE=float(form.logit_scale), SOFTCAP=float(form.softcap or 0.0), Z_LOSS=float(form.z_loss),
        SMOOTHING=float(form.label_smoothing), LEARNS=learns, num_warps=warps,
    )  # fmt: skip


class _Made(NamedTuple):
    rows: RowScores
    dhidden_RN: Tensor | None
    dweight_VN: Tensor | None
    dbias_V: Tensor | None


def _chunk_by_chunk(
    hidden_RN: Tensor,
    weight_VN: Tensor,
    bias_V: Tensor | None,
    labels_R: Tensor,
    scale: Tensor,
    form: CrossEntropy,
    chunk_rows: int | None,
    wanted: tuple[bool, bool, bool] = (False, False, False),
    scores: bool = False,
    entropy: bool = False,
    onto_VN: Tensor | None = None,
    place_VN: Tensor | None = None,
    words: Words = ALL_WORDS,
) -> _Made:
    """`wanted`: which of the gradients of hidden, weight and bias. `onto_VN`: what the weight's is added to.
    `place_VN`: where it is made."""
    R, V, device = hidden_RN.shape[0], weight_VN.shape[0], hidden_RN.device
    if words.most is not None:
        chunk = chunk_rows or rows_at_a_time(R, words.most, FP32_BYTES, device.type)
    else:
        chunk = chunk_rows or rows_at_a_time(R, V, hidden_RN.element_size(), device.type)
    wide = torch.promote_types(hidden_RN.dtype, torch.float32)
    losses_R = torch.empty(R, dtype=wide, device=device)
    right_R = torch.empty(R, dtype=torch.int32, device=device) if scores else None
    entropy_R = torch.empty(R, dtype=wide, device=device) if entropy else None
    into = RowScores(losses_R, right_R, entropy_R)
    dhidden_RN = torch.empty_like(hidden_RN) if wanted[0] else None
    dweight_VN = onto_VN
    if wanted[1] and R == 0 and onto_VN is None:
        dweight_VN = torch.zeros_like(weight_VN) if place_VN is None else place_VN.zero_()
    dbias_V = torch.zeros(V, dtype=wide, device=device) if wanted[2] else None
    buffer = torch.empty((min(chunk, R), padded_width(V)), dtype=hidden_RN.dtype, device=device)
    for first in range(0, R, chunk):
        rows_CN = hidden_RN[first : first + chunk]
        logits_CV = buffer[: rows_CN.shape[0], :V]
        if bias_V is None:
            torch.mm(rows_CN, weight_VN.t(), out=logits_CV)
        else:
            torch.addmm(bias_V, rows_CN, weight_VN.t(), out=logits_CV)
        _rows(logits_CV, labels_R, first, scale, form, into, any(wanted), words)
        if dhidden_RN is not None:
            torch.mm(logits_CV, weight_VN, out=dhidden_RN[first : first + chunk])
        if wanted[1]:
            dz_VC = logits_CV.t()
            if dweight_VN is None:
                dweight_VN = torch.mm(dz_VC, rows_CN, out=place_VN)
            else:
                dweight_VN.addmm_(dz_VC, rows_CN)
        if dbias_V is not None:
            dbias_V += logits_CV.sum(0, dtype=wide)
    if dhidden_RN is not None:
        words.join(dhidden_RN)
    if dbias_V is not None and bias_V is not None:
        dbias_V = dbias_V.to(bias_V.dtype)
    return _Made(into, dhidden_RN, dweight_VN, dbias_V)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RN: Tensor,
        weight_VN: Tensor,
        bias_V: Tensor | None,
        labels_R: Tensor,
        scale: Tensor,
        form: CrossEntropy,
        chunk_rows: int | None,
        unit_upstream: bool,
        into_grad: bool,
        tally: TokenScores | None,
        words: Words,
    ) -> Tensor:
        wanted = tuple(ctx.needs_input_grad[:3])
        into_grad = into_grad and wanted[1] and weight_VN.is_leaf
        onto = weight_VN.grad if into_grad and _takes_products(weight_VN) else None
        # A gradient that waits for the next step has its place (`flat_parameters.py`), which is free by now.
        place = fixed_place([weight_VN]) if into_grad and weight_VN.grad is None else None
        counts = tally is not None
        made = _chunk_by_chunk(
            hidden_RN, weight_VN, bias_V, labels_R, scale, form, chunk_rows, wanted, counts, counts, onto, place,
            words,
        )  # fmt: skip
        dweight_VN = made.dweight_VN if onto is None else None
        ctx.gradients, ctx.unit_upstream = (made.dhidden_RN, dweight_VN, made.dbias_V), unit_upstream
        ctx.weight = weight_VN if into_grad else None
        _count(tally, made.rows, labels_R)
        return made.rows.losses_R.sum() * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor):
        if ctx.gradients is None:
            raise RuntimeError("the gradients of linear_cross_entropy were handed on already; it has one backward pass")
        # Let go of them here, so that autograd may add to them in place (tied embeddings).
        gradients, ctx.gradients = list(ctx.gradients), None
        if not ctx.unit_upstream:
            gradients = [None if g is None else g.mul_(upstream) for g in gradients]
        if ctx.weight is not None and ctx.weight.grad is None:
            ctx.weight.grad, gradients[1] = gradients[1], None
        return *gradients, None, None, None, None, None, None, None, None


def _count(tally: TokenScores | None, rows: RowScores, labels_R: Tensor) -> None:
    if tally is not None and rows.entropy_R is not None and rows.right_R is not None:
        tally.add(rows.entropy_R, rows.right_R, labels_R)


def _takes_products(weight_VN: Tensor) -> bool:
    """Whether there is a gradient that products can be added to in place."""
    gradient = weight_VN.grad
    return gradient is not None and gradient.dtype == weight_VN.dtype and gradient.is_contiguous()


def _checked(hidden_RN: Tensor, weight_VN: Tensor, scale: Tensor | float) -> Tensor:
    """`scale` as a tensor on the rows' device."""
    if hidden_RN.dim() != 2 or hidden_RN.shape[1] != weight_VN.shape[1] or hidden_RN.dtype != weight_VN.dtype:
        raise ValueError(
            f"hidden states {tuple(hidden_RN.shape)} in {hidden_RN.dtype} do not fit a weight {tuple(weight_VN.shape)} "
            f"in {weight_VN.dtype}; they must be (rows, width) and (words, width) in one dtype"
        )
    if isinstance(scale, Tensor):
        return scale.detach()
    wide = torch.promote_types(hidden_RN.dtype, torch.float32)
    return torch.full((), scale, dtype=wide, device=hidden_RN.device)


def linear_cross_entropy(
    hidden_RN: Tensor,
    weight_VN: Tensor,
    labels_R: Tensor,
    *,
    scale: Tensor | float = 1.0,
    bias: Tensor | None = None,
    form: CrossEntropy = PLAIN,
    chunk_rows: int | None = None,
    unit_upstream: bool = False,
    into_grad: bool = False,
    tally: TokenScores | None = None,
    words: Words | None = None,
) -> Tensor:
    """Cross-entropy of the rows that carry a label, summed and multiplied by `scale`; 0-dim, fp32. `scale`: a 0-dim
    tensor on the device, or a number where nothing is captured. `unit_upstream`: the caller calls `backward()` on the
    result itself, so that nothing need be multiplied by the upstream gradient. `into_grad`, together with it: the
    weight's gradient goes into `.grad`, in part already now. `tally`: counts entropy and right labels. `words`: which
    words weight and bias are of, where other ranks have the rest; the loss is then the same on all of them."""
    assert unit_upstream or not into_grad, "what was added to .grad cannot be multiplied afterwards"
    scale, words = _checked(hidden_RN, weight_VN, scale), words or ALL_WORDS
    hidden_RN, labels_R = hidden_RN.contiguous(), labels_R.contiguous()
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden_RN, weight_VN, bias))
    if not learns:
        counts = tally is not None
        made = _chunk_by_chunk(
            hidden_RN, weight_VN, bias, labels_R, scale, form, chunk_rows, scores=counts, entropy=counts,
            words=words,
        )  # fmt: skip
        rows = made.rows
        _count(tally, rows, labels_R)
        return rows.losses_R.sum() * scale
    one_kernel = unit_upstream and form == PLAIN and tally is None and words is ALL_WORDS
    if one_kernel and are_few(hidden_RN, weight_VN):
        return few_classes_cross_entropy(hidden_RN, weight_VN, bias, labels_R, scale)
    return _LinearCrossEntropy.apply(
        hidden_RN, weight_VN, bias, labels_R, scale, form, chunk_rows, unit_upstream, into_grad, tally, words
    )


@torch.no_grad()
def linear_cross_entropy_scores(
    hidden_RN: Tensor,
    weight_VN: Tensor,
    labels_R: Tensor,
    *,
    bias: Tensor | None = None,
    form: CrossEntropy = PLAIN,
    chunk_rows: int | None = None,
    tally: TokenScores | None = None,
    words: Words | None = None,
) -> Scores:
    """Summed loss and the number of labels that have the highest logit, for evaluation. `tally`: counts entropy and
    right labels besides. `words`: as for `linear_cross_entropy`."""
    scale, labels_R = _checked(hidden_RN, weight_VN, 1.0), labels_R.contiguous()
    rows = _chunk_by_chunk(
        hidden_RN.contiguous(), weight_VN, bias, labels_R, scale, form, chunk_rows, scores=True, entropy=bool(tally),
        words=words or ALL_WORDS,
    ).rows  # fmt: skip
    assert rows.right_R is not None
    _count(tally, rows, labels_R)
    return Scores(rows.losses_R.sum(), rows.right_R.sum())
