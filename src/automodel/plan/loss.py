"""The decision about a language model's loss: over stored logits, or with the last product inside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from automodel.config.errors import UserError
from automodel.kernels.logits_memory import rows_at_a_time, saved_bytes
from automodel.plan.config import RunConfig
from automodel.plan.facts import ModelFacts
from automodel.plan.plan import Decision

if TYPE_CHECKING:
    from automodel.plan.hardware import Hardware  # which imports torch

GIB = 2**30


def decide_loss(
    cfg: RunConfig, task: str, model: ModelFacts, hardware: Hardware, precision: str, rows: int, lines: list[Decision]
) -> bool:
    """Whether logits are made inside the loss, a few rows at a time. `rows`: tokens of the largest micro-batch."""
    asked, words = cfg.loss_fn.fused, model.head_words
    if task != "causal-lm":
        if asked:
            raise UserError(
                f"loss_fn.fused belongs to causal language models; the task here is {task}, whose logits are few. "
                "Remove loss_fn.fused."
            )
        return False
    if not words:
        reason = f"the head of {model.model_type} is not known to be a plain product"
        if asked:
            raise UserError(f"loss_fn.fused is true, but {reason}. Remove loss_fn.fused: its logits are stored.")
    elif asked is False:
        reason = "loss_fn.fused is false"
    elif asked is None and cfg.model.use_liger_kernel is False:
        reason = "model.use_liger_kernel is false; loss_fn.fused: true turns it on alone"
    else:
        size = 4 if precision in ("fp32", "tf32") else 2
        chunk = rows_at_a_time(rows, words, size, hardware.device)
        saved = saved_bytes(rows, words, size, hardware.device) / GIB
        amount = f"{saved:.1f}" if saved >= 1 else f"{saved:.2g}"
        reason = f"{chunk:,} rows at a time, logits are never stored: saves up to {amount} GiB"
        lines.append(Decision("loss", "fused linear + cross-entropy", reason))
        return True
    lines.append(Decision("loss", "cross-entropy over stored logits", reason))
    return False
