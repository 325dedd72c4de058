"""What each family makes of its head's product, told from its config alone. No torch here: those who compile ahead of
the plan ask.

In these families logits are `lm_head` of the last hidden states and nothing else, apart from a factor (Granite, Cohere)
or a soft-cap (Gemma 2). `tests/parity/test_lm_head.py` holds each of them to the logits of the stock forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

PLAIN = frozenset(
    {
        "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
        "gpt2", "gpt_neox", "granite", "helium", "llama", "ministral", "mistral", "olmo", "olmo2", "olmo3", "phi",
        "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2",
    }
)  # fmt: skip


class HeadForm(NamedTuple):
    """What a family does to the product."""

    logit_scale: float = 1.0
    softcap: float | None = None


def head_form(config: Any) -> HeadForm | None:
    """The family's, from a config of transformers; None where it is not known."""
    if config.model_type not in PLAIN or getattr(config, "auto_map", None):
        return None
    scale = 1.0
    if config.model_type == "granite":
        scale = 1.0 / config.logits_scaling
    elif config.model_type in ("cohere", "cohere2"):
        scale = config.logit_scale
    return HeadForm(scale, getattr(config, "final_logit_softcapping", None))
