"""The last product of a causal language model, taken out of it: the loss makes it (`losses/unprojected.py`).

A causal LM of transformers is a backbone and `lm_head`, a linear layer, mostly with the input embeddings as its weight.
For the families listed here that is all, apart from a factor (Granite, Cohere) or a soft-cap (Gemma 2) on the logits,
which the loss knows too; `tests/parity/test_lm_head.py` holds each of them to the logits of the stock forward. Every
other family keeps its logits, and so does a head that is more than a plain linear layer (an adapter, quantised weights,
a hook).

Legend: R rows, N width, V words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from automodel.losses.unprojected import Unprojected

PLAIN = frozenset(
    {
        "cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "granite", "llama",
        "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2",
    }
)  # fmt: skip


class HeadForm(NamedTuple):
    """What a family does to the product."""

    logit_scale: float = 1.0
    softcap: float | None = None


def head_form(config: Any) -> HeadForm | None:
    """What the config's family makes of its head's product; None where that is not known."""
    if config.model_type not in PLAIN or getattr(config, "auto_map", None):
        return None
    scale = 1.0
    if config.model_type == "granite":
        scale = 1.0 / config.logits_scaling
    elif config.model_type in ("cohere", "cohere2"):
        scale = config.logit_scale
    return HeadForm(scale, getattr(config, "final_logit_softcapping", None))


def is_plain(head: Any) -> bool:
    """A linear layer, with nothing around it."""
    hooks = (getattr(head, name, None) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))
    return type(head) is nn.Linear and "forward" not in head.__dict__ and not any(hooks)


def unprojected_head(model: Any) -> Callable[[Tensor], Unprojected] | None:
    """From hidden states (…, N) to what the loss takes; None where only the model itself can make its logits."""
    form, head = head_form(model.config), model.get_output_embeddings()
    if form is None or not is_plain(head):
        return None

    def project_later(hidden: Tensor) -> Unprojected:
        # The loss is summed outside of autocast, so the dtype of the product is settled here, as autocast would.
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
        bias = None if head.bias is None else head.bias.to(dtype)
        return Unprojected(hidden.reshape(-1, hidden.shape[-1]).to(dtype), head.weight.to(dtype), bias, *form)

    return project_later
