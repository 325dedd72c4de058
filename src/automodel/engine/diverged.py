"""A run whose loss is no longer a number ends with an error that says what helps."""

from __future__ import annotations

from automodel.checkpoint.store import last_saved
from automodel.config.errors import EXIT_FAILED, UserError
from automodel.engine.build import Run
from automodel.engine.state import Window
from automodel.metrics.progress import format_lr, format_value


class DivergedError(UserError):
    """The loss is no longer a number."""

    exit_code = EXIT_FAILED


def diverged(run: Run, what: str, value: float, step: int, window: Window | None = None) -> DivergedError:
    """`what` was `value` at that step; or, where it is the sum of a window that ended with it, at one of that."""
    if window is not None and window.broke_at:
        step += window.broke_at - window.steps
    kept = last_saved(run.checkpoints)
    saved = f"The checkpoint of step {kept} is kept." if kept is not None else "No checkpoint was saved before it."
    cfg, plan = run.prepared.cfg, run.prepared.plan
    ways = [f"a lower optimizer.lr (now {format_lr(cfg.optimizer.lr)})"]
    if not (cfg.lr_scheduler.warmup_steps or cfg.lr_scheduler.warmup_ratio):
        ways.append("a warm-up (lr_scheduler.warmup_ratio: 0.1)")
    if cfg.training_optimizations.gradient_clipping is None:
        ways.append("training_optimizations.gradient_clipping: 1.0")
    if plan.precision not in ("fp32", "tf32"):
        ways.append("training_optimizations.precision: fp32")
    said = ways[0] if len(ways) == 1 else f"{', '.join(ways[:-1])} or {ways[-1]}"
    return DivergedError(
        f"The {what} is {format_value(value)} at step {step}, so every further step would be wasted. "
        f"Try {said}. {saved}"
    )
