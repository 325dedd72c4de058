"""Cross-entropy over a vocabulary of which every rank has a part: exact, and without the logits of the others.

    lse  = log Σ_ranks Σ_v exp z_v          one maximum and one sum of each row, over the ranks
    loss = Σ_rows [ (1 − ε)·(lse − z_y) + ε·(lse − mean_v z_v) + ζ·lse² ] · scale
    dz_v = [ (1 + 2ζ·lse)·exp(z_v − lse) − (1 − ε)·(v = y) − ε/V ] · scale

as in `kernels/linear_cross_entropy.py`, which this is the several-ranks form of: rows in chunks, gradients made at once
in the forward pass. A rank has the columns `start … start + V/ranks` of the logits. Of the other ranks' columns it
needs three numbers of each row: the highest, the sum of exponentials, and the label's own. The gradient of a hidden
state is a sum over all words, so it is summed over the ranks too; that of the head's weight stays where the words are.

Shapes: R rows, N width, V words of this rank, C rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from automodel.kernels.linear_cross_entropy import IGNORE, CrossEntropy, Scores
from automodel.kernels.logits_memory import rows_at_a_time

HIGH = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class VocabularyPart:
    """Which words this rank has."""

    group: Any
    """The process group whose parts make up the vocabulary."""
    start: int
    words: int
    """Of all ranks."""


def _cap(logits_CV: Tensor, form: CrossEntropy) -> tuple[Tensor, Tensor | None]:
    """Logits in fp32 as the loss sees them, and the slope of the soft-cap."""
    z_CV = logits_CV.float() * form.logit_scale
    if form.softcap is None:
        return z_CV, None
    squashed = torch.tanh(z_CV / form.softcap)
    return squashed * form.softcap, 1.0 - squashed.square()


def _rows(
    z_CV: Tensor, labels_C: Tensor, form: CrossEntropy, part: VocabularyPart
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(losses, log-sum-exp, place of the label here, whether it is here) of each row."""
    own_C = labels_C - part.start
    here_C = (own_C >= 0) & (own_C < z_CV.shape[1]) & (labels_C != IGNORE)
    own_C = torch.where(here_C, own_C, 0)
    highest_C = z_CV.amax(1)
    dist.all_reduce(highest_C, op=dist.ReduceOp.MAX, group=part.group)
    wanted_C = torch.where(here_C, z_CV.gather(1, own_C.unsqueeze(1)).squeeze(1), 0.0)
    sums_3C = torch.stack([(z_CV - highest_C.unsqueeze(1)).exp().sum(1), wanted_C, z_CV.sum(1)])
    dist.all_reduce(sums_3C, group=part.group)
    lse_C = highest_C + sums_3C[0].log()
    losses_C = lse_C - sums_3C[1]
    if form.label_smoothing:
        mean_C = sums_3C[2] / part.words
        losses_C = (1.0 - form.label_smoothing) * losses_C + form.label_smoothing * (lse_C - mean_C)
    losses_C = losses_C + form.z_loss * lse_C.square()
    return torch.where(labels_C == IGNORE, 0.0, losses_C), lse_C, own_C, here_C


def _gradient(
    z_CV: Tensor,
    slope_CV: Tensor | None,
    lse_C: Tensor,
    labels_C: Tensor,
    places: tuple[Tensor, Tensor],
    scale: Tensor,
    form: CrossEntropy,
    part: VocabularyPart,
) -> Tensor:
    """What the logits before scale and cap get."""
    own_C, here_C = places
    unit_C = (labels_C != IGNORE) * scale * form.logit_scale
    dz_CV = (z_CV - lse_C.unsqueeze(1)).exp() * (unit_C * (1.0 + 2.0 * form.z_loss * lse_C)).unsqueeze(1)
    dz_CV.scatter_add_(1, own_C.unsqueeze(1), (here_C * unit_C * (form.label_smoothing - 1.0)).unsqueeze(1))
    if form.label_smoothing:
        dz_CV -= (unit_C * form.label_smoothing / part.words).unsqueeze(1)
    return dz_CV if slope_CV is None else dz_CV * slope_CV


class _VocabularyParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RN: Tensor,
        weight_VN: Tensor,
        bias_V: Tensor | None,
        labels_R: Tensor,
        scale: Tensor,
        form: CrossEntropy,
        part: VocabularyPart,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden_RN.device)
        dhidden_RN = torch.zeros_like(hidden_RN)
        dweight_VN = torch.zeros_like(weight_VN)
        dbias_V = None if bias_V is None else torch.zeros_like(bias_V)
        for rows in chunks(hidden_RN, weight_VN):
            logits_CV = torch.nn.functional.linear(hidden_RN[rows], weight_VN, bias_V)
            z_CV, slope_CV = _cap(logits_CV, form)
            losses_C, lse_C, own_C, here_C = _rows(z_CV, labels_R[rows], form, part)
            total += losses_C.sum() * scale
            dz_CV = _gradient(z_CV, slope_CV, lse_C, labels_R[rows], (own_C, here_C), scale, form, part)
            dz_CV = dz_CV.to(hidden_RN.dtype)
            dhidden_RN[rows] = dz_CV @ weight_VN
            dweight_VN.addmm_(dz_CV.t(), hidden_RN[rows])
            if dbias_V is not None:
                dbias_V += dz_CV.sum(0)
        dist.all_reduce(dhidden_RN, group=part.group)
        ctx.gradients = (dhidden_RN, dweight_VN, dbias_V)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor):
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if g is None else g.mul_(upstream) for g in gradients), None, None, None, None


def chunks(hidden_RN: Tensor, weight_VN: Tensor) -> list[slice]:
    """Rows whose logits are made at a time; the same on every rank of a group."""
    rows, words = hidden_RN.shape[0], weight_VN.shape[0]
    size = max(1, rows_at_a_time(rows, max(1, words), 4, hidden_RN.device.type))
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


def vocabulary_parallel_cross_entropy(
    hidden_RN: Tensor,
    weight_VN: Tensor,
    labels_R: Tensor,
    part: VocabularyPart,
    *,
    scale: Tensor | float = 1.0,
    bias: Tensor | None = None,
    form: CrossEntropy,
) -> Tensor:
    """The summed loss times `scale`, the same on every rank of the group. `weight_VN` and `bias`: this rank's words."""
    scale = torch.as_tensor(scale, dtype=torch.float32, device=hidden_RN.device).detach()
    return _VocabularyParallel.apply(hidden_RN, weight_VN, bias, labels_R, scale, form, part)


@torch.no_grad()
def vocabulary_parallel_scores(
    hidden_RN: Tensor,
    weight_VN: Tensor,
    labels_R: Tensor,
    part: VocabularyPart,
    *,
    bias: Tensor | None = None,
    form: CrossEntropy,
) -> Scores:
    """Summed loss, and labels that have the highest logit (the first of equal ones)."""
    loss = torch.zeros((), dtype=torch.float32, device=hidden_RN.device)
    right = torch.zeros((), dtype=torch.int64, device=hidden_RN.device)
    for rows in chunks(hidden_RN, weight_VN):
        z_CV, _ = _cap(torch.nn.functional.linear(hidden_RN[rows], weight_VN, bias), form)
        loss += _rows(z_CV, labels_R[rows], form, part)[0].sum()
        best_C, at_C = z_CV.max(1)
        highest_C = best_C.clone()
        dist.all_reduce(highest_C, op=dist.ReduceOp.MAX, group=part.group)
        at_C = torch.where(best_C == highest_C, at_C + part.start, HIGH)
        dist.all_reduce(at_C, op=dist.ReduceOp.MIN, group=part.group)
        right += (at_C == labels_R[rows]).sum()
    return Scores(loss, right)
