"""The head of a fused encoder while it learns to classify texts: its loss takes over the last product.

    rows = dropout(f(dropout(pooled) W₁ᵀ + b₁))        logits = rows W₂ᵀ + b₂

All five families have this head, with different functions, and dropout before the first product or not. Bias, function
and dropout are one kernel (`kernels/activate.py`); last product, loss and their gradients another
(`kernels/few_classes.py`). Evaluation and prediction use the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from automodel.kernels.activate import Dropout, activate
from automodel.kernels.few_classes import MOST_CLASSES
from automodel.kernels.linear import joined_linear
from automodel.models.fused_embeddings import FusedEmbeddings
from automodel.models.fused_encoder import swapped_encoder
from automodel.models.head_outputs import Unprojected
from automodel.models.lm_head import is_plain


@dataclass(frozen=True)
class HeadParts:
    """A head, taken apart."""

    dense: nn.Linear
    function: str
    dropout: float
    last: nn.Linear
    first_dropout: float = 0.0


def _bert(model: Any) -> HeadParts:
    return HeadParts(model.bert.pooler.dense, "tanh", model.dropout.p, model.classifier)


def _distilbert(model: Any) -> HeadParts:
    return HeadParts(model.pre_classifier, "relu", model.dropout.p, model.classifier)


def _of_its_own(function: str) -> Callable[[Any], HeadParts]:
    def parts(model: Any) -> HeadParts:
        head = model.classifier
        return HeadParts(head.dense, function, head.dropout.p, head.out_proj, head.dropout.p)

    return parts


HEADS: dict[str, Callable[[Any], HeadParts]] = {
    "bert": _bert,
    "distilbert": _distilbert,
    "roberta": _of_its_own("tanh"),
    "xlm-roberta": _of_its_own("tanh"),
    "camembert": _of_its_own("tanh"),
    "electra": _of_its_own("gelu"),
}


def fused_head(model: Any) -> Callable[[Tensor], Unprojected] | None:
    """From pooled rows (R, N) to what the loss takes; None where the head is not one of these, or has many classes."""
    find = HEADS.get(model.config.model_type)
    if find is None:
        return None
    swap = swapped_encoder(model)[0].__dict__.get("forward")
    parts = find(model)
    layers = (parts.dense, parts.last)
    if not isinstance(swap, FusedEmbeddings) or not all(is_plain(m) and m.bias is not None for m in layers):
        return None
    if parts.last.out_features > MOST_CLASSES or not all(p.requires_grad for m in layers for p in m.parameters()):
        return None
    seed, site, side = swap.seed, swap.site + 1, swap.side

    def head(pooled_RN: Tensor) -> Unprojected:
        if parts.first_dropout:
            pooled_RN = activate(pooled_RN, None, "none", Dropout(parts.first_dropout, seed, site))
        weight = parts.dense.weight
        inner_RN, _ = joined_linear(pooled_RN, weight.detach(), [weight], side=side)
        rows_RN = activate(inner_RN, parts.dense.bias, parts.function, Dropout(parts.dropout, seed, site + 1), side)
        return Unprojected(rows_RN, parts.last.weight, parts.last.bias)

    return head
