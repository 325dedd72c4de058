"""The decision about a language model's loss: over stored logits, or with the last product inside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from automodel.config.errors import UserError
from automodel.kernels.logits_memory import rows_at_a_time, saved_bytes
from automodel.plan.config import RunConfig
from automodel.plan.facts import ModelFacts
from automodel.plan.plan import Decision
from automodel.tasks.task import Task

if TYPE_CHECKING:
    from automodel.plan.hardware import Hardware  # which imports torch


def why_stored(cfg: RunConfig, model_type: str, head_words: int) -> str | None:
    """Why a causal language model stores its logits; None where the loss makes them itself."""
    asked = cfg.loss_fn.fused
    if not head_words:
        return f"the head of {model_type} is not known to be a plain product"
    if asked is False:
        return "loss_fn.fused is false"
    if asked is None and cfg.model.use_liger_kernel is False:
        return "model.use_liger_kernel is false; loss_fn.fused: true turns it on alone"
    return None


def decide_loss(
    cfg: RunConfig, task: Task, model: ModelFacts, hardware: Hardware, precision: str, rows: int, lines: list[Decision]
) -> bool:
    """Whether logits are made inside the loss, a few rows at a time. `rows`: tokens of the largest micro-batch."""
    if not task.head.next_token:
        if cfg.loss_fn.fused:
            raise UserError(
                f"loss_fn.fused belongs to causal language models; the task here is {task}, whose logits are few. "
                "Remove loss_fn.fused."
            )
        return False
    reason = why_stored(cfg, model.model_type, model.head_words)
    if reason is not None:
        if cfg.loss_fn.fused:
            raise UserError(f"loss_fn.fused is true, but {reason}. Remove loss_fn.fused: its logits are stored.")
        lines.append(Decision("loss", "cross-entropy over stored logits", reason))
        return False
    from automodel.plan.memory import in_words  # which imports numpy

    shape = (rows, model.head_words, 4 if precision in ("fp32", "tf32") else 2, hardware.device)
    saved = in_words(saved_bytes(*shape))
    reason = f"{rows_at_a_time(*shape):,} rows at a time, logits are never stored: saves up to {saved}"
    lines.append(Decision("loss", "fused linear + cross-entropy", reason))
    return True
