"""Does the largest batch fit? Asked before step 1, not found out at step 900.

Batches differ in size, and the largest one of a run may come late. So its forward and backward pass are tried once at
the start. Where the GPU runs out of memory, a captured step first does without its second stream, which holds memory of
its own: 1.8 GiB of gradients of Llama 1B that could lie where activations were. Then micro-batches are halved and
accumulated twice as often: the same examples a step, the same losses, less memory at a time. The plan says so.

A captured step has its optimizer's states when it is tried. torch's optimizers make theirs in the first step, and
gradients of the micro-batches before are there when the next one runs, so as much memory is held free while an eager
step is tried. Its batches of many sizes leave holes between them, too, which those of a captured step, all in one pool,
do not: an eighth of what the trial took has to be left over. On the CPU nothing is tried: the system has no error to
catch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from automodel.config.errors import EXIT_FAILED, UserError
from automodel.data.loader import Order, StepLoader
from automodel.engine.captured import CapturedStep
from automodel.engine.prepare import Prepared
from automodel.engine.step import TrainStep
from automodel.optim.kinds import ADAMW
from automodel.plan.memory import Setting, estimate
from automodel.plan.plan import Decision

MOST_STEPS = 200_000  # looked through for the largest batch; a second or two
MOST_DEALT = 10_000  # where documents have to be dealt to ranks first
HOLES = 1 / 8
"""Of an eager step's memory, lost between tensors of different sizes."""


def largest_micro_batch(
    order: Order, steps: int, own: Callable[[list], list] = list, padded: bool = False
) -> np.ndarray:
    """Samples of the micro-batch with the most tokens among the next `steps` steps, or with the largest rectangle where
    they are padded; the order is known beforehand. `own`: this rank's share of a step."""

    def size(chosen: np.ndarray) -> int:
        lengths = order.lengths[chosen]
        return int(lengths.max() * len(chosen) if padded else lengths.sum())

    batches = (b for s in range(steps) for b in own(order.micro_batches(*order.locate(s))))
    one = np.zeros(1, dtype=np.int64)  # a rank without documents: there are fewer of them than ranks
    return max(batches, key=size, default=one)


def fits(prepared: Prepared, step: TrainStep | CapturedStep, loader: StepLoader) -> bool:
    """Whether forward and backward of the largest micro-batch of the run go through."""
    plan = prepared.plan
    steps = min(plan.total_steps, MOST_STEPS if loader.ranks == 1 else MOST_DEALT)
    batch: Any = loader.collate(largest_micro_batch(loader.order, steps, loader.own, plan.path == "padded").tolist())
    try:
        if isinstance(step, CapturedStep):
            step.probe(batch, recorded=on_two_streams(prepared, step))
            step.largest = batch
        else:
            _try_eager(step, batch, bytes_to_come(prepared, step), plan.device)
    except torch.cuda.OutOfMemoryError:
        return False
    return True


def _try_eager(step: TrainStep, batch: Any, to_come: int, device: str) -> None:
    """Once to see what it takes, and again with as much held free as holes will cost."""
    torch.cuda.reset_peak_memory_stats()
    _try(step, batch, to_come, device)
    step.most_bytes = torch.cuda.max_memory_allocated()
    _try(step, batch, to_come + round(HOLES * step.most_bytes), device)
    torch.cuda.reset_peak_memory_stats()  # a report is about the run, not about what was tried


def _try(step: TrainStep, batch: Any, held_free: int, device: str) -> None:
    room = torch.empty(held_free, dtype=torch.uint8, device=device)
    step.probe(batch)
    del room


def bytes_to_come(prepared: Prepared, step: TrainStep) -> int:
    """What is there beside a later micro-batch and not beside the first: the optimizer's states, and the gradients that
    are being summed up."""
    plan, trained = prepared.plan, sum(p.numel() for p in step.parameters)
    setting = Setting(plan.precision, False, False, plan.optimizer, plan.checkpointing, tokens=0, rows=0)
    summed = sum(p.numel() * p.element_size() for p in step.parameters) if plan.grad_acc_steps > 1 else 0
    return round(estimate(None, trained, setting).states) + summed


def on_two_streams(prepared: Prepared, step: TrainStep | CapturedStep) -> bool:
    """Whether gradients of weights are computed beside the backward pass, which only fused blocks do. Those of adapters
    are too small to make room for anything."""
    if prepared.adapter is not None or not prepared.plan.fused_kernels:
        return False
    return isinstance(step, CapturedStep) and step.side is not None


def smaller(prepared: Prepared, two_streams: bool) -> Prepared:
    """The same run with less memory at a time. `two_streams`: whether it had as many."""
    return _on_one_stream(prepared) if two_streams else halved(prepared)


def _on_one_stream(prepared: Prepared) -> Prepared:
    plan = prepared.plan
    batch = f"a bin of {plan.packed_sequence_size:,} tokens" if plan.packed_sequence_size else "the largest batch"
    line = Decision(
        "streams",
        "one",
        f"{batch} ran out of GPU memory with gradients of weights computed beside the backward pass; the same numbers",
    )
    # Updates that are put off are the second stream's, too. Where memory is short after all, nothing is kept for speed.
    kept = (d for d in plan.decisions if d.name not in ("update", "gates"))
    changed = dataclasses.replace(
        plan, second_stream=False, late_update=False, gates_kept=False, decisions=(*kept, line)
    )
    return dataclasses.replace(prepared, plan=changed)


def halved(prepared: Prepared) -> Prepared:
    """The same run with half the micro-batch and twice the accumulation."""
    plan, ranks = prepared.plan, prepared.layout.data_ranks
    if plan.packed_sequence_size:
        raise UserError(
            f"A bin of {plan.packed_sequence_size:,} tokens does not fit into the memory of {prepared.hardware.name}. "
            "Lower packed_sequence.packed_sequence_size (and raise step_scheduler.grad_acc_steps to keep the tokens of "
            f"a step), {_more_room(prepared)}or a smaller model."
        )
    if plan.micro_batch_size == 1:
        raise UserError(
            f"Even one example of {plan.max_length} tokens does not fit into the memory of {prepared.hardware.name}. "
            f"Lower dataset.max_length, {_more_room(prepared)}or a smaller model."
        )
    micro = plan.micro_batch_size // 2
    while plan.global_batch_size % (micro * ranks):
        micro -= 1
    accumulation = plan.global_batch_size // (micro * ranks)
    shared = f" × {ranks} ranks" if ranks > 1 else ""
    line = Decision(
        "batch",
        f"{micro} × {accumulation}{shared} = {plan.global_batch_size}",
        f"the largest batch of {plan.micro_batch_size} ran out of GPU memory; same examples a step, less at a time",
    )
    # Updates are put off only where a step is one batch.
    kept = (d for d in plan.decisions if d.name not in ("embeddings", "gates", "memory", "norms", "update"))
    smaller = dataclasses.replace(
        plan,
        micro_batch_size=micro,
        grad_acc_steps=accumulation,
        late_update=False,
        lazy_embeddings=False,
        gates_kept=False,
        decisions=tuple(line if d.name == "batch" else d for d in kept),
    )
    return dataclasses.replace(prepared, plan=smaller)


class OutOfMemoryError(UserError):
    """The GPU has no memory left in the middle of a run, although the largest batch was tried before it."""

    exit_code = EXIT_FAILED


def out_of_memory(prepared: Prepared, step: int, kept: int | None) -> OutOfMemoryError:
    """`step`: the last that was taken. `kept`: the newest of which there is a checkpoint."""
    resume = f"The checkpoint of step {kept} is kept; --resume continues after it."
    saved = "Nothing was saved." if kept is None else resume
    return OutOfMemoryError(
        f"{prepared.hardware.name} ran out of memory after step {step}. {saved} Another program may have taken memory "
        f"meanwhile (nvidia-smi lists them). To need less, {_more_room(prepared)}or halve dataloader.batch_size and "
        "double step_scheduler.grad_acc_steps (in a new run)."
    )


def _more_room(prepared: Prepared) -> str:
    """Settings that are not used yet and need less memory, each with a comma behind it."""
    options = {
        "training_optimizations.gradient_checkpointing: full": prepared.plan.checkpointing != "full",
        "training_optimizations.activation_offload: true": prepared.plan.checkpointing == "full"
        and prepared.plan.capture
        and not prepared.plan.offload,
        "training_optimizations.precision: bf16-pure": prepared.plan.precision != "bf16-pure",
        "optimizer.name: adamw_8bit": prepared.plan.optimizer == ADAMW,
    }
    return "".join(f"use {key}, " for key, helps in options.items() if helps)
