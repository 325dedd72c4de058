"""Rows of a word table whose last update is still to come, as they will be.

The table of a language model is a fifth of a small one's parameters, and the first thing a step reads. So its update
could not wait for the next step like those of the layers (`late_update.py`), although all but a few hundred rows are
read only at the end of the forward pass, by the head that shares the table. Those few hundred are computed as they will
be, without writing anything, and the update itself runs beside the layers, before the head.

    rows_t = AdamW(p, m, v, g)[id_t]           from the settings that the last step left; p itself where it left none

Whoever reads rows must do so before the update is queued; `LateUpdates` sees to that.

Shapes: T tokens, V rows of the table, N width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from automodel.kernels.adamw import NO_STEP, update_reference
from automodel.kernels.dispatch import power_of_two_above, runs_triton

BLOCK = 1024  # columns of one program


class LateRows:
    """The table's part of the optimizer's buffers."""

    def __init__(
        self, weight_VN: Tensor, exp_avg_VN: Tensor, exp_avg_sq_VN: Tensor, gradient_VN: Tensor, settings: Tensor,
        dtype: torch.dtype,
    ):  # fmt: skip
        """settings: (8,) fp32, this group's row of `AdamWState.settings`. dtype: what the model computes in."""
        self.weight_VN, self.exp_avg_VN, self.exp_avg_sq_VN = weight_VN, exp_avg_VN, exp_avg_sq_VN
        self.gradient_VN, self.settings, self.dtype = gradient_VN, settings, dtype

    @torch.no_grad()
    def read(self, ids_T: Tensor) -> Tensor:
        """(T, N) in the compute dtype."""
        if not runs_triton(self.weight_VN):
            return self._read_reference(ids_T)
        from automodel.kernels.late_rows_triton import late_rows_kernel

        T, N = ids_T.shape[0], self.weight_VN.shape[1]
        block = min(BLOCK, power_of_two_above(N))
        rows_TN = torch.empty((T, N), dtype=self.dtype, device=ids_T.device)
        late_rows_kernel[(T, -(-N // block))](
            self.weight_VN, self.exp_avg_VN, self.exp_avg_sq_VN, self.gradient_VN, self.settings, ids_T, rows_TN,
            N=N, BLOCK_N=block, num_warps=4,
        )  # fmt: skip
        return rows_TN

    def _read_reference(self, ids_T: Tensor) -> Tensor:
        weight_TN = self.weight_VN[ids_T]
        settings = self.settings.tolist()
        if settings[-1] != NO_STEP:
            moments = self.exp_avg_VN[ids_T], self.exp_avg_sq_VN[ids_T]
            update_reference(weight_TN, self.gradient_VN[ids_T], *moments, settings)
        return weight_TN.to(self.dtype)


def late_rows_of(weight: Tensor) -> LateRows | None:
    """What the optimizer left on a table whose update it puts off."""
    return getattr(weight, "late_rows", None)
