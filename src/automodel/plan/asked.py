"""What the config alone decides: the precision it asks for and the size of a batch.

Apart from the other decisions, because it is needed before them, when nothing heavy is imported yet
(`kernels_ahead.py`).
"""

from __future__ import annotations

from typing import Literal

from automodel.config.errors import UserError
from automodel.plan.config import RunConfig
from automodel.plan.plan import Decision

DEFAULT_BATCH_SIZE = 8

DTYPE_PRECISION = {
    "float32": "fp32",
    "fp32": "fp32",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
}


def asked_precision(cfg: RunConfig) -> tuple[str, str]:
    """The precision the config asks for and the key it came from; `auto` where it leaves the choice open."""
    options = cfg.training_optimizations
    if options.precision != "auto":
        return options.precision, "training_optimizations.precision"
    if options.bf16:
        return "bf16", "training_optimizations.bf16"
    if options.fp16:
        return "fp16", "training_optimizations.fp16"
    if cfg.model.torch_dtype and cfg.model.torch_dtype != "auto":
        name = cfg.model.torch_dtype.removeprefix("torch.")
        return DTYPE_PRECISION[name], "model.torch_dtype"
    return "auto", ""


def asked_checkpointing(cfg: RunConfig) -> Literal["none", "selective", "full", "auto"]:
    """How the config wants activations to be kept; true is `full`, and whoever says nothing leaves it to the plan."""
    asked = cfg.training_optimizations.gradient_checkpointing
    if asked is None:
        return "auto"
    if isinstance(asked, bool):
        return "full" if asked else "none"
    return asked


def decide_batch(cfg: RunConfig, lines: list[Decision], ranks: int = 1) -> tuple[int, int]:
    """Examples of a micro-batch, and micro-batches that each rank has of a step. Packed by size, a micro-batch is one
    bin and the keys count bins; how many examples that makes is said when they are packed (`bins.py`)."""
    schedule, by_size = cfg.step_scheduler, cfg.packed_sequence.packed_sequence_size > 0
    micro = schedule.local_batch_size or cfg.dataloader.batch_size or (1 if by_size else _default_micro(cfg, ranks))
    if schedule.global_batch_size:
        if schedule.global_batch_size % micro:
            raise UserError(
                f"step_scheduler.global_batch_size: {schedule.global_batch_size} is not a multiple of the micro-batch "
                f"of {micro} examples. Use a multiple, or change dataloader.batch_size."
            )
        if schedule.global_batch_size % (micro * ranks):
            raise _unequal_shares(schedule.global_batch_size, micro, ranks)
        accumulation = schedule.global_batch_size // (micro * ranks)
        reason = f"global_batch_size {schedule.global_batch_size}"
        if schedule.grad_acc_steps not in (None, accumulation):
            reason += f", which wins over grad_acc_steps {schedule.grad_acc_steps}"
            if by_size:
                lines.append(Decision("not used", "step_scheduler.grad_acc_steps", reason))
    else:
        accumulation = schedule.grad_acc_steps or 1
        reason = "examples per device × gradient accumulation steps" + (" × ranks" if ranks > 1 else "")
    if by_size:
        return 1, micro * accumulation
    product = f"{micro} × {accumulation}" + (f" × {ranks} ranks" if ranks > 1 else "")
    lines.append(Decision("batch", f"{product} = {micro * accumulation * ranks}", reason))
    return micro, accumulation


def _default_micro(cfg: RunConfig, ranks: int) -> int:
    """Where nobody says: 8, or the most below that the ranks can share a fixed global batch by."""
    share, unequal = divmod(cfg.step_scheduler.global_batch_size or DEFAULT_BATCH_SIZE * ranks, ranks)
    if unequal:
        return 1  # as good as any: no micro-batch can make the shares equal
    return max(m for m in range(1, DEFAULT_BATCH_SIZE + 1) if share % m == 0)


def _unequal_shares(total: int, micro: int, ranks: int) -> UserError:
    """A global batch that so many ranks cannot share, with the nearest that they can."""
    below, above = total // (micro * ranks) * micro * ranks, -(-total // (micro * ranks)) * micro * ranks
    nearest = f"{below} or {above}" if below else str(above)
    smaller = max((m for m in range(1, micro + 1) if total % (m * ranks) == 0), default=None)
    other = f", or dataloader.batch_size: {smaller}" if smaller else ""
    fewer = max(r for r in range(1, ranks + 1) if total % (micro * r) == 0)
    return UserError(
        f"step_scheduler.global_batch_size: {total} cannot be shared by {ranks} ranks with micro-batches of {micro} "
        f"examples. The nearest that can: global_batch_size: {nearest}{other}, or {fewer} "
        f"rank{'s' if fewer > 1 else ''}."
    )
