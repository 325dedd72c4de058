"""Which precision and attention are fastest for Trainer: `python -m automodel.benchmark.trial REQUEST RESULT`.

A careful user finds out before a long run whether bf16 is faster than fp32 on this processor, and which attention is
fastest: the backward pass of flash attention in bf16, for one, takes many times as long on a processor as plain
products do. So the tuned side gets what was fastest here: forward and backward passes of the run's own model over
batches that Trainer's own sampler and collator make, the contestants in turns.

Attentions are those that load: transformers' choice, sdpa, eager, and flash attention where its package is installed.
Precisions are fp32 and bf16 on a processor where the config asks for none; everywhere else the side computes in the
run's precision. A side that is compiled later is tried uncompiled.

The trial has a process of its own, before that of the side. In the side's process it would make the first step faster
and the peak of memory higher than they are.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.utils import is_flash_attn_2_available

from automodel.benchmark.recorder import Recorder
from automodel.benchmark.side import Request
from automodel.benchmark.sides import TrainerSettings, Tried
from automodel.benchmark.trainer_side import build_trainer, load_model, weights_dtype
from automodel.data.store import TokenStore

BATCHES = 3  # a smaller, a middle and a larger one
ROUNDS = 3
CERTAIN_ROUNDS = 2  # of every contestant: another program may disturb one round
TOO_SLOW = 1.3  # times the fastest one's time: not tried again
BUDGET_S = 60.0  # after which no other round begins
COMPUTED_IN = {"bf16": torch.bfloat16, "fp16": torch.float16}
Name = TypeVar("Name", bound=Hashable)


def race(contestants: Mapping[Name, Callable[[], object]]) -> dict[Name, float]:
    """Seconds of each contestant's fastest round, the fastest first. One that fails (its attention does not do what the
    model needs, or needs more memory than there is) is left out."""
    began = time.monotonic()
    best: dict[Name, float] = {}
    for name, run in contestants.items():
        try:
            run()  # untimed: kernels are made and memory is fetched
        except Exception as error:
            print(f"{name}: left out, {type(error).__name__}: {error}", flush=True)
        else:
            best[name] = float("inf")
    running = list(best)
    for done in range(1, ROUNDS + 1):
        for name in running:
            start = time.perf_counter()
            contestants[name]()
            best[name] = min(best[name], time.perf_counter() - start)
        if done >= CERTAIN_ROUNDS:
            running = [name for name in running if best[name] <= TOO_SLOW * min(best.values())]
        if len(running) < 2 or time.monotonic() - began > BUDGET_S:
            break
    return dict(sorted(best.items(), key=lambda one: one[1]))


def try_out(job: dict[str, Any], settings: TrainerSettings, output: Path) -> list[Tried]:
    """Every precision with every attention, the fastest first."""
    tokenizer: Any = AutoTokenizer.from_pretrained(job["model"])
    if not settings.cudnn_attention:
        torch.backends.cuda.enable_cudnn_sdp(False)
    models: dict[torch.dtype, Any] = {}
    for precision in precisions_to_try(job):
        dtype = weights_dtype(job, precision)
        models[dtype] = models.get(dtype) or load_model(job, precision, tokenizer)
    recorder = Recorder(job["device"], 0, time.monotonic())
    trainer = build_trainer(job, settings, output, next(iter(models.values())), tokenizer, recorder)
    batches = typical_batches(trainer, job)
    for model in models.values():
        model.to(trainer.args.device).train()
        if job["gradient_checkpointing"]:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    contestants = {
        (precision, attention): passes(trainer, models[weights_dtype(job, precision)], precision, attention, batches)
        for precision in precisions_to_try(job)
        for attention in attentions_to_try(models[weights_dtype(job, precision)], precision)
    }
    found = race(contestants)
    return [Tried(*name, ms=round(seconds * 1e3 / len(batches), 3)) for name, seconds in found.items()]


def precisions_to_try(job: dict[str, Any]) -> list[str]:
    """Where a config asks for a precision, the peers compute in it, too: the comparison is between programs."""
    open_choice = job["device"] == "cpu" and job["asked_precision"] is None
    return ["fp32", "bf16"] if open_choice else [job["precision"]]


def attentions_to_try(model: Any, precision: str) -> list[str]:
    """transformers' own choice first. A model that cannot change its attention keeps it."""
    usual = model.config._attn_implementation
    names = [usual, "sdpa", "eager"]
    if precision not in ("fp32", "tf32") and torch.cuda.is_available() and is_flash_attn_2_available():
        names.append("flash_attention_2")
    kept = []
    for name in dict.fromkeys(names):
        try:
            model.set_attn_implementation(name)
        except (ValueError, ImportError):
            continue
        if model.config._attn_implementation == name:
            kept.append(name)
    model.set_attn_implementation(usual)
    return kept


def passes(
    trainer: Any, model: Any, precision: str, attention: str, batches: list[dict[str, Any]]
) -> Callable[[], None]:
    """Forward and backward over the batches, as Trainer's steps make them. The update is the same for all."""
    dtype = COMPUTED_IN.get(precision)

    def run() -> None:
        model.set_attn_implementation(attention)
        for batch in batches:
            with torch.autocast(trainer.args.device.type, dtype=dtype, enabled=dtype is not None):
                loss = trainer.compute_loss(model, dict(batch))
            loss.backward()
            model.zero_grad(set_to_none=True)
        if trainer.args.device.type == "cuda":
            torch.cuda.synchronize()

    return run


def typical_batches(trainer: Any, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Micro-batches of the first epoch, in Trainer's own order: one of each third of the work that they are."""
    rows, size = list(trainer._get_train_sampler(trainer.train_dataset)), job["micro_batch_size"]
    lengths = TokenStore.open(Path(job["train_store"])).lengths
    micro = [rows[i : i + size] for i in range(0, len(rows), size)]
    whole = [batch for batch in micro if len(batch) == size] or micro
    whole.sort(key=lambda batch: int(lengths[batch].max()))
    places = [(2 * i + 1) * len(whole) // (2 * BATCHES) for i in range(BATCHES)]
    dataset, collate = trainer.train_dataset, trainer.data_collator
    return [trainer._prepare_inputs(collate([dataset[row] for row in whole[place]])) for place in dict.fromkeys(places)]


def keep_within_memory() -> None:
    """On a processor, what needs more memory than there is fails here; otherwise the system would end some process."""
    if sys.platform == "linux" and not torch.cuda.is_available():
        import resource

        import psutil

        most = psutil.virtual_memory().available
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def main() -> None:
    asked, result = Request.read(Path(sys.argv[1])), Path(sys.argv[2])
    job = json.loads((asked.job / "job.json").read_text(encoding="utf-8"))
    assert asked.side.trainer is not None
    keep_within_memory()
    random.seed(job["seed"])
    np.random.seed(job["seed"])
    torch.manual_seed(job["seed"])
    found = try_out(job, asked.side.trainer, asked.output)
    temporary = result.with_suffix(".tmp")
    temporary.write_text(json.dumps([dataclasses.asdict(tried) for tried in found]), encoding="utf-8")
    os.replace(temporary, result)


if __name__ == "__main__":
    main()
