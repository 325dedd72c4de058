"""`linear_cross_entropy` for a handful of classes: a head's last product, its loss and all gradients in one kernel.

    z_c = h·W_c + b_c        loss = Σ_rows (lse z − z_y) · scale        dz = (softmax z − 1_y) · scale
    dh  = dz W               dW   = Σ_rows dzᵀ h                        db = Σ_rows dz

Eight rows of 768 numbers and two classes are nothing to compute; in torch they are fifteen launches, each on the path
that everything waits for. A program keeps 16 rows in registers, reads the weight of each class twice, and leaves its
part of dW and db, which a second kernel adds up. Logits are never rounded.

Shapes: R rows, N width, C classes, P programs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from automodel.kernels.column_sum import column_sum
from automodel.kernels.dispatch import power_of_two_above, runs_triton

ROWS = 16
MOST_CLASSES, MOST_ROWS, WIDEST = 16, 512, 2048


def are_few(hidden_RN: Tensor, weight_CN: Tensor) -> bool:
    """Whether this kernel is for them."""
    (rows, width), classes = hidden_RN.shape, weight_CN.shape[0]
    return runs_triton(hidden_RN) and classes <= MOST_CLASSES and rows <= MOST_ROWS and width <= WIDEST


class _FewClasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RN: Tensor, weight_CN: Tensor, bias_C: Tensor | None, labels_R, scale) -> Tensor:
        from automodel.kernels.few_classes_triton import few_classes_kernel

        (R, N), C, device = hidden_RN.shape, weight_CN.shape[0], hidden_RN.device
        programs = -(-R // ROWS)
        dhidden_RN = torch.empty_like(hidden_RN)
        losses_P = torch.empty(programs, dtype=torch.float32, device=device)
        partial = torch.empty((programs, C * N + C), dtype=torch.float32, device=device)
        block = power_of_two_above(N)
        few_classes_kernel[(programs,)](
            hidden_RN, weight_CN, bias_C, labels_R, scale, dhidden_RN, partial, losses_P, R,
            N=N, BLOCK_N=block, C=C, BLOCK_C=power_of_two_above(C), ROWS=ROWS, num_warps=max(1, block // 256),
        )  # fmt: skip
        ctx.made, ctx.shape = (dhidden_RN, partial), (C, N)
        ctx.dtypes = weight_CN.dtype, None if bias_C is None else bias_C.dtype
        return losses_P.squeeze(0) if programs == 1 else losses_P.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor):
        """For an upstream gradient of 1, as `linear_cross_entropy(unit_upstream=True)` promises."""
        (dhidden_RN, partial), (C, N), (weight_dtype, bias_dtype) = ctx.made, ctx.shape, ctx.dtypes
        ctx.made = None
        sums = column_sum(partial, weight_dtype)
        dbias_C = None if bias_dtype is None else sums[C * N :].to(bias_dtype)
        return dhidden_RN, sums[: C * N].view(C, N), dbias_C, None, None


def few_classes_cross_entropy(
    hidden_RN: Tensor, weight_CN: Tensor, bias_C: Tensor | None, labels_R: Tensor, scale: Tensor
) -> Tensor:
    """The summed loss times `scale` (0-dim, on the device); call `backward()` on the result itself."""
    return _FewClasses.apply(hidden_RN, weight_CN, bias_C, labels_R, scale)
