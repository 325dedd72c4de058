"""Lion: the sign of a momentum, with decoupled weight decay. One state, where AdamW has two.

    c = β₁ m + (1 − β₁) g
    p = (1 − lr · wd) p − lr · sign(c)
    m = β₂ m + (1 − β₂) g

torch has no Lion. bitsandbytes has one with 8-bit or paged state (`quantized.py`); this is the plain one, for every
device, over lists of tensors. Numbers of the update are computed in the parameter's own dtype.
"""

from __future__ import annotations

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ):
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"lr {lr} and weight_decay {weight_decay} must be 0 or more, betas {betas} in [0, 1)")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # ty: ignore[incompatible-method-override]
        if closure is not None:
            raise ValueError("Lion.step takes no closure: call loss.backward() first")
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for p in parameters:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            gradients = [p.grad.to(p.dtype) for p in parameters]
            momenta = [self.state[p]["exp_avg"] for p in parameters]
            first, second = group["betas"]
            updates = torch._foreach_mul(momenta, first)
            torch._foreach_add_(updates, gradients, alpha=1 - first)
            torch._foreach_sign_(updates)
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, updates, alpha=-group["lr"])
            torch._foreach_mul_(momenta, second)
            torch._foreach_add_(momenta, gradients, alpha=1 - second)
