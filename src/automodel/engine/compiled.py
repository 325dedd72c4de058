"""Compiled blocks in a run: made, tried before the first step, and taken back where they do not work.

torch.compile can fail in more ways than can be listed: no C compiler, an operation it cannot trace, a kernel that does
not build, code that waits for the host and so cannot be recorded in a CUDA graph. It compiles at the first call, so the
first call is made on purpose, on the run's largest batch, while everything can still be thrown away. Whatever goes
wrong, the run goes on without, and the plan says why.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from automodel.data.loader import StepLoader
from automodel.engine.captured import CapturedStep
from automodel.engine.fit import MOST_STEPS, largest_micro_batch
from automodel.engine.prepare import Prepared
from automodel.engine.step import TrainStep
from automodel.models.compiled_blocks import compile_blocks, restore_blocks
from automodel.plan.compile_record import record_key, remember_compile, use_compiled_folder
from automodel.plan.plan import Decision

STATIC_SHAPES = 64  # versions of a block that may be compiled where token counts are not symbols


def compile_model(prepared: Prepared, model: Any) -> None:
    """Lets the model's blocks be compiled at their first training step, as the plan says."""
    cfg, mode = prepared.cfg.compile, prepared.plan.compile_mode
    use_compiled_folder()
    if cfg.dynamic is False:
        import torch._dynamo

        torch._dynamo.config.recompile_limit = STATIC_SHAPES  # ty: ignore[invalid-assignment]
    compile_blocks(
        model,
        mode=None if mode == "default" else mode,
        dynamic=cfg.dynamic is not False,
        fullgraph=cfg.fullgraph,
    )


def try_compiled(prepared: Prepared, model: Any, step: TrainStep | CapturedStep, loader: StepLoader) -> Prepared:
    """Compiles, by a forward and backward pass of the largest batch that leave no trace. The plan that comes back says
    how long it took, or that it failed; then model and step are to be built again."""
    largest = largest_micro_batch(loader.order, min(prepared.plan.total_steps, MOST_STEPS))
    batch: Any = loader.collate(largest.tolist())
    try:
        with torch.compiler.set_stance("force_eager"):
            step.probe(batch)  # so that the time of the next one is the compiler's own
        first, second = (_seconds_of(step.probe, batch) for _ in range(2))
        if isinstance(step, CapturedStep):
            step.try_recording(batch)
    except torch.cuda.OutOfMemoryError:
        return prepared  # not the compiler's fault; `fits` deals with it
    except Exception as error:  # whatever it is, the run can do without
        restore_blocks(model)
        return _uncompiled(prepared, error)
    seconds = max(0.0, first - second)
    remember_compile(record_key(prepared.cfg, prepared.hf_config, prepared.hardware.name), seconds)
    told = next(d for d in prepared.plan.decisions if d.name == "compile")
    reason = told.reason.partition("; took ")[0]  # a batch that did not fit is halved, and all of this done again
    return _with_line(prepared, dataclasses.replace(told, reason=f"{reason}; took {seconds:.1f} s"))


def _seconds_of(work: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    work(*args)
    return time.perf_counter() - start


def _uncompiled(prepared: Prepared, error: Exception) -> Prepared:
    """The plan of a run that was not to be compiled, with the reason; what the user asked for stays in the config."""
    cfg = prepared.cfg
    without = dataclasses.replace(
        cfg,
        compile=dataclasses.replace(cfg.compile, enabled=False),
        training_optimizations=dataclasses.replace(cfg.training_optimizations, use_compile=None),
    )
    plain = dataclasses.replace(prepared, plan=prepared.planned(without))
    return _with_line(plain, Decision("compile", "off", f"it was tried and failed: {_in_one_line(error)}"))


def _in_one_line(error: Exception) -> str:
    """Type and beginning of an error; the compiler's go on for pages."""
    inner = getattr(error, "inner_exception", None) or error
    words = " ".join(str(inner).split())
    return f"{type(inner).__name__}: {words[:240]}{' …' if len(words) > 240 else ''}"


def _with_line(prepared: Prepared, line: Decision) -> Prepared:
    decisions = tuple(line if d.name == line.name else d for d in prepared.plan.decisions)
    return dataclasses.replace(prepared, plan=dataclasses.replace(prepared.plan, decisions=decisions))
