"""`--ladder`: from Trainer as it comes to this library as it comes, one optimization at a time.

The lower rungs are Trainer with its own settings turned on one after the other, the last of them with the precision
and the attention that were fastest when they were tried; the upper ones are this library with its own switches, all
off at first. Which rungs exist depends on the machine and the model: the CPU has no cuDNN and no captured step, and a
model that cannot be packed has no packed rung.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from automodel.benchmark.job import Job
from automodel.benchmark.sides import AUTOMODEL, STOCK, TRAINERS, TUNED, Side, TrainerSettings
from automodel.plan.config import RunConfig


@dataclass(frozen=True)
class Switch:
    """One of this library's optimizations and the setting that turns it off."""

    label: str
    off: str
    gpu_only: bool = True


SWITCHES = (
    Switch("packed: no padding at all", "packed_sequence.enabled=false", gpu_only=False),
    Switch("the step captured as one CUDA graph", "training_optimizations.capture=false"),
    Switch("fused kernels", "model.use_liger_kernel=false"),
    Switch("torch.compile where it pays", "compile.enabled=false"),
)


def ladder_sides(job: Job) -> tuple[list[Side], list[str]]:
    """The rungs from bottom to top, and what is not on this ladder and why. A rung's label is its line in the table."""
    gpu = job.device == "cuda"
    rungs = [dataclasses.replace(TRAINERS["hf-trainer"], label="HF Trainer, as it comes"), *_trainer_rungs(job, gpu)]
    switches, missing = [], []
    for switch in SWITCHES:
        if switch.gpu_only and not gpu:
            continue
        if not exists(switch.off):
            missing.append(f"no rung for {switch.label}: this version has no `{switch.off.partition('=')[0]}`")
        elif switch.off.startswith("packed") and job.prepared.plan.path != "packed":
            missing.append(f"no rung for packing: {job.prepared.packing.reason}")
        else:
            switches.append(switch)
    for on in range(len(switches)):
        label = "+ automodel's own loop" if on == 0 else f"+ {switches[on - 1].label}"
        off = tuple(switch.off for switch in switches[on:])
        rungs.append(Side(f"automodel-{on}", label, overrides=off))
    top = f"+ {switches[-1].label}" if switches else "+ automodel's own loop"
    rungs.append(dataclasses.replace(AUTOMODEL, label=top))
    return rungs, missing


def _trainer_rungs(job: Job, gpu: bool) -> list[Side]:
    """Trainer, from the reference's settings to the tuned ones."""
    steps: list[tuple[str, dict[str, object]]] = [("dynamic padding", {"padding": "longest"})]
    known = gpu or job.settings["asked_precision"] is not None  # else the precision is found by trying
    if known and job.prepared.plan.precision != "fp32":
        steps.append((job.prepared.plan.precision, {"same_precision": True}))
    if gpu:
        steps.append(("cuDNN attention off", {"cudnn_attention": False}))
    last = {"batches of similar lengths": job.settings["shuffle"], "workers": gpu}
    if any(last.values()):
        untried = dataclasses.replace(TUNED, trial=False, same_precision=known)
        steps.append((", ".join(name for name, there in last.items() if there), vars(untried)))
    settings: TrainerSettings = STOCK
    rungs = []
    for number, (label, change) in enumerate(steps, start=1):
        settings = dataclasses.replace(settings, **change)
        rungs.append(Side(f"hf-trainer-{number}", f"+ {label}", settings))
    found = "the fastest attention" if known else "the fastest precision and attention"
    return [*rungs, dataclasses.replace(TRAINERS["hf-trainer-tuned"], label=f"+ {found}, by trying")]


def exists(setting: str) -> bool:
    """Whether `section.key=value` names a key of the config."""
    from typing import get_type_hints

    section_name, _, key = setting.partition("=")[0].partition(".")
    section = get_type_hints(RunConfig).get(section_name)
    return dataclasses.is_dataclass(section) and key in {f.name for f in dataclasses.fields(section)}


def new_sides(rungs: Sequence[Side], measured: set[str]) -> list[Side]:
    """Rungs that were not already run as a side of the comparison."""
    return [side for side in rungs if side.name not in measured]
