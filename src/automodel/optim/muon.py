"""Muon for the matrices of hidden layers, AdamW for everything else, as one optimizer.

Muon (torch's own) replaces the momentum of a matrix by the nearest orthogonal one, which means something for maps from
hidden states to hidden states only. Embeddings, heads, norms, biases and stacks of expert matrices are left to AdamW,
as its authors do.

Both share one learning rate: Muon's steps are scaled to the root mean square of AdamW's (`match_rms_adamw`), so a rate
and a weight decay that suit AdamW suit it too. `optimizer.muon_lr` gives the matrices a peak of their own; the schedule
then has the same shape for both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from automodel.config.errors import UserError

LR_FACTOR = "lr_factor"
"""Key of a group whose rate is this many times the schedule's."""


def hidden_matrices(model: nn.Module) -> set[Tensor]:
    """Trainable matrices inside the repeated layers of a model (their names count: `model.layers.3.mlp.up_proj`), but
    no embedding that a layer may hold (T5's position bias)."""
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.ndim == 2]
    return {p for name, p in named if any(part.isdigit() for part in name.split(".")) and p not in tables}


def _times(factor: float, group: dict[str, Any], lr: float) -> dict[str, Any]:
    """The group with so many times its rate, which may be a multiple of `lr` already (LoRA+)."""
    own = group.get(LR_FACTOR, 1.0) * factor
    return {**group, "lr": lr * own, LR_FACTOR: own}


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers that step as one. They share this one's `state`, and its groups are theirs."""

    def __init__(
        self,
        muon_groups: list[dict[str, Any]],
        adamw_groups: list[dict[str, Any]],
        *,
        lr: float,
        muon_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **muon_options: Any,
    ):
        muon_options.setdefault("adjust_lr_fn", "match_rms_adamw")
        super().__init__([{**group} for group in (*muon_groups, *adamw_groups)], {"lr": lr})
        own_lr = lr if muon_lr is None else muon_lr
        groups = [_times(own_lr / lr, group, lr) for group in muon_groups]
        self.parts: list[torch.optim.Optimizer] = [torch.optim.Muon(groups, lr=own_lr, **muon_options)]
        if adamw_groups:
            self.parts.append(torch.optim.AdamW(adamw_groups, lr=lr, betas=betas, eps=eps, fused=True))
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        for part in self.parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # ty: ignore[incompatible-method-override]
        if closure is not None:
            raise ValueError("MuonWithAdamW.step takes no closure: call loss.backward() first")
        for part in self.parts:
            part.step()


def muon_with_adamw(model: nn.Module, groups: list[dict[str, Any]], **options: Any) -> MuonWithAdamW:
    """The groups of a model (with and without weight decay) divided between the two."""
    matrices = hidden_matrices(model)
    divided = [
        [{**group, "params": [p for p in group["params"] if (p in matrices) == by_muon]} for group in groups]
        for by_muon in (True, False)
    ]
    muon_groups, adamw_groups = ([group for group in part if group["params"]] for part in divided)
    if not muon_groups:
        raise UserError(
            "optimizer.name: muon updates the matrices of hidden layers, but no such matrix of this model is trained. "
            "Use adamw."
        )
    return MuonWithAdamW(muon_groups, adamw_groups, **options)
