"""Which models add a balance loss of their routers, how much it weighs, and where its router logits are.

Transformers makes it where `output_router_logits` is true in the config, for causal language models and for NLLB-MoE.
Switch Transformers reads that from an argument alone, which Trainer does not give; it has no balance loss. Doge, whose
experts are pairs of keys, is left out: its routers read later tokens, so no run trains them (`engine/own_loss.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from automodel.models.router_balance import ExpertLoad, expert_load

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NLLB_TOP_K = 2
"""Fixed in its forward."""


@dataclass(frozen=True)
class Router:
    """The balance loss of one model."""

    kind: str
    weight: float
    experts: int
    top_k: int

    @property
    def encoder_decoder(self) -> bool:
        return self.kind == "nllb-moe"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Experts of each load."""
        return (self.experts,) * (2 if self.encoder_decoder else 1)

    def loads(self, outputs: Any, mask_BS: Tensor) -> tuple[ExpertLoad, ...]:
        """Of one batch, from what the model put out for it; empty where none of its layers has a router."""
        if self.encoder_decoder:  # its decoder's padding counts, since no mask of the target is given
            found = ((outputs.encoder_router_logits, mask_BS), (outputs.decoder_router_logits, None))
        else:
            found = ((outputs.router_logits, mask_BS),)
        return tuple(expert_load(layers, self.top_k, mask) for layers, mask in found if layers)


def router_of(model: PreTrainedModel | Any) -> Router | None:
    """None for a model without a balance loss."""
    config = model.config
    if config.model_type == "doge":
        return None
    if not getattr(config.get_text_config(), "output_router_logits", False):
        return None
    weight = getattr(model, "router_aux_loss_coef", None) or getattr(model, "aux_loss_coef", None)
    experts = getattr(model, "num_experts", None)
    if not weight or not experts:
        return None
    return Router(config.model_type, weight, experts, getattr(model, "num_experts_per_tok", NLLB_TOP_K))
