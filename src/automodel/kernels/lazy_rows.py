"""AdamW for an embedding table, paid only for the rows a batch reads.

A batch of 2,000 tokens reads perhaps 1,500 of BERT's 30,522 rows, or of XLM-R's 250,002. All other rows have gradient
zero, and AdamW still changes them: moments decay, weights move on with what is left of them and shrink by the weight
decay. Done every step that is 30 bytes a parameter for rows nobody looks at: a third of DistilBERT's whole update.

But nobody looks at them, so they can wait. Each row remembers the last step it took part in. Before a batch is read,
its rows catch up: the idle steps since then,

    m ← m + (1 − β₁)(0 − m)        v ← β₂·v        p ← p·(1 − lrₛ·wd) − lrₛ / (1 − β₁ˢ) · m / (√v / √(1 − β₂ˢ) + ε)

one after the other, in registers, with each step's own learning rate and corrections from `history`. Row by row these
are the operations of the plain update in the plain order: the result is AdamW's, not an approximation of it (unlike
"sparse" or "lazy" Adam, which skip the idle steps). Whoever reads the table otherwise (evaluation, a checkpoint, the
end) calls `catch_up_all` first.

The gradient is never a table either: one row for each distinct token of the batch, at the place of its run in
`runs_2T` (`PackedBatch.token_runs_2T`: places in order of their ids, and the length of the run of equal ids that
starts there, else 0).

Only for a table that is read through `word_embedding` and nowhere else (no tied output layer), once a step (no
accumulation over micro-batches). The step must settle at least every `RING` steps.

Shapes: T tokens, V rows of the table, N width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from automodel.kernels.dispatch import power_of_two_above, runs_triton

RING = 4096
"""Steps of history that are kept. No row may lag behind further than that."""
HISTORY = ("shrink", "step_size", "inv_sqrt_correction2")
NORM_ROWS = 8  # rows of one program of the norm


@dataclass
class RowGradients:
    """Gradients of the rows of one batch."""

    rows_TN: Tensor
    """Row i belongs to the token of the run that starts at i; other rows are not written."""
    ids_T: Tensor
    runs_2T: Tensor
    padding_id: int
    """A row that is never trained; -1 for none."""


class LazyRows:
    """The table's places in the optimizer's buffers, and what the rows have to know."""

    def __init__(
        self,
        weight_VN: Tensor,
        exp_avg_VN: Tensor,
        exp_avg_sq_VN: Tensor,
        copy_VN: Tensor | None,
        settings: Tensor,
        step: Tensor,
    ):
        """settings: (8,) fp32, this group's row of `AdamWState.settings`. step: (1,) int64, steps taken."""
        self.weight_VN, self.exp_avg_VN, self.exp_avg_sq_VN, self.copy_VN = (
            weight_VN,
            exp_avg_VN,
            exp_avg_sq_VN,
            copy_VN,
        )
        self.settings, self.step = settings, step
        device = weight_VN.device
        self.last_V = torch.zeros(weight_VN.shape[0], dtype=torch.int64, device=device)
        """Steps each row has taken part in."""
        self.history = torch.zeros((RING, len(HISTORY)), dtype=torch.float32, device=device)
        """Row s % RING: this group's settings in step s."""
        self.gradients: RowGradients | None = None

    def catch_up(self, ids_T: Tensor, runs_2T: Tensor) -> None:
        """The rows of this batch take the steps they missed."""
        if runs_triton(self.weight_VN):
            self._launch_idle(ids_T, runs_2T, ids_T.shape[0])
        else:
            lengths = runs_2T[1]
            idle_steps_reference(self, ids_T[runs_2T[0][lengths > 0].long()].tolist())

    def catch_up_all(self) -> None:
        """Every row takes the steps it missed: the table is as plain AdamW would have it."""
        rows = self.weight_VN.shape[0]
        if runs_triton(self.weight_VN):
            self._launch_idle(None, None, rows)
        else:
            idle_steps_reference(self, range(rows))

    def square_sums(self) -> Tensor | None:
        """Partial sums of the squared gradients."""
        found = self.gradients
        if found is None:
            return None
        if not runs_triton(self.weight_VN):
            return found.rows_TN[_real_runs(found)].float().square().sum().reshape(1)
        from automodel.kernels.lazy_rows_triton import row_squares_kernel

        T, N = found.rows_TN.shape
        partial = torch.empty(-(-T // NORM_ROWS), dtype=torch.float32, device=found.rows_TN.device)
        row_squares_kernel[(len(partial),)](
            found.rows_TN, found.ids_T, found.runs_2T, partial, T, found.padding_id,
            N=N, BLOCK_N=power_of_two_above(N), ROWS=NORM_ROWS, num_warps=8,
        )  # fmt: skip
        return partial

    def update(self) -> None:
        """AdamW for the rows that have a gradient; they have caught up before the batch was read."""
        found = self.gradients
        if found is None:
            return
        self.gradients = None
        if not runs_triton(self.weight_VN):
            update_rows_reference(self, found)
            return
        from automodel.kernels.lazy_rows_triton import update_rows_kernel

        T, N = found.rows_TN.shape
        update_rows_kernel[(T,)](
            self.weight_VN, self.exp_avg_VN, self.exp_avg_sq_VN, self.copy_VN, self.last_V, self.step, self.settings,
            found.rows_TN, found.ids_T, found.runs_2T, T, found.padding_id,
            N=N, BLOCK_N=power_of_two_above(N), num_warps=4,
        )  # fmt: skip

    def settled_at(self, step: int) -> None:
        """The whole table is as it is after `step` steps (it was loaded)."""
        self.last_V.fill_(step)

    def _launch_idle(self, ids_T: Tensor | None, runs_2T: Tensor | None, programs: int) -> None:
        from automodel.kernels.lazy_rows_triton import idle_steps_kernel

        N = self.weight_VN.shape[1]
        idle_steps_kernel[(programs,)](
            self.weight_VN, self.exp_avg_VN, self.exp_avg_sq_VN, self.copy_VN, self.last_V, self.step, self.settings,
            self.history, ids_T, runs_2T, programs,
            N=N, BLOCK_N=power_of_two_above(N), RING=RING, num_warps=4,
        )  # fmt: skip


def lazy_rows_of(weight: Tensor) -> LazyRows | None:
    """What the optimizer left on a table whose rows it updates when they are needed."""
    return getattr(weight, "lazy_rows", None)


def _real_runs(found: RowGradients) -> Tensor:
    """Places of the runs whose rows are trained."""
    places = (found.runs_2T[1] > 0).nonzero().squeeze(1)
    ids = found.ids_T[found.runs_2T[0][places].long()]
    return places[ids != found.padding_id]


@torch.no_grad()
def idle_steps_reference(lazy: LazyRows, rows) -> None:
    _, _, one_minus_beta1, beta2, _, _, eps, _ = lazy.settings.tolist()
    now = int(lazy.step)
    for row in rows:
        p, m, v = (t[row].float() for t in (lazy.weight_VN, lazy.exp_avg_VN, lazy.exp_avg_sq_VN))
        for s in range(int(lazy.last_V[row]), now):
            shrink, step_size, inv_sqrt_correction2 = lazy.history[s % RING].tolist()
            m = m + one_minus_beta1 * (0.0 - m)
            v = beta2 * v
            p = p * shrink - step_size * m / (v.sqrt() * inv_sqrt_correction2 + eps)
            p, m, v = (t.to(lazy.weight_VN.dtype).float() for t in (p, m, v))
        _store_row(lazy, row, p, m, v)
        lazy.last_V[row] = now


@torch.no_grad()
def update_rows_reference(lazy: LazyRows, found: RowGradients) -> None:
    shrink, step_size, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, clip = lazy.settings.tolist()
    if clip == -1.0:
        return
    for place in _real_runs(found).tolist():
        row = int(found.ids_T[int(found.runs_2T[0, place])])
        p, m, v = (t[row].float() for t in (lazy.weight_VN, lazy.exp_avg_VN, lazy.exp_avg_sq_VN))
        g = found.rows_TN[place].float() * clip
        m = m + one_minus_beta1 * (g - m)
        v = beta2 * v + one_minus_beta2 * g * g
        p = p * shrink - step_size * m / (v.sqrt() * inv_sqrt_correction2 + eps)
        _store_row(lazy, row, p, m, v)
        lazy.last_V[row] = int(lazy.step)


def _store_row(lazy: LazyRows, row: int, p: Tensor, m: Tensor, v: Tensor) -> None:
    lazy.weight_VN[row], lazy.exp_avg_VN[row], lazy.exp_avg_sq_VN[row] = p, m, v
    if lazy.copy_VN is not None:
        lazy.copy_VN[row] = p
