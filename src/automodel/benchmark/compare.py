"""What the measurements say: improvements, agreement of the losses, and the results file.

`speedup_factor` is the ratio of the training times: from where model and optimizer are there until the trained model is
saved, with everything in between (trying the largest batch, captures, compilation, evaluations, checkpoints, of which
Trainer writes the last one before its model and this library beside it). Its steady-state sister is `step_speedup`, the
ratio of the median step times, and `wall_speedup` compares the whole processes.

A speed-up with another loss curve is a bug report, so agreement is part of the result: step by step for a side that
reads the rows in the same order; for one that groups them by length, by the end of the curve and the validation
metrics.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

COMPARED_STEPS = 50
DISTURBING_PERCENT = 15.0
TAIL_SHARE = 0.1  # the last tenth of the steps stands for the final loss
RESULTS = "performance_comparison_results.json"


def improvements(baseline: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """How `ours` compares with `baseline`; the first three keys are the reference's."""
    speedup = baseline["training_time"] / ours["training_time"]
    return {
        "speedup_factor": speedup,
        "memory_reduction_percent": _saved_percent(baseline, ours, "peak_memory_gib"),
        "cost_reduction_percent": (1 - 1 / speedup) * 100,
        "reserved_memory_reduction_percent": _saved_percent(baseline, ours, "peak_reserved_gib"),
        "step_speedup": baseline["ms_per_step"] / ours["ms_per_step"],
        "throughput_speedup": ours["tokens_per_s"] / baseline["tokens_per_s"],
        "wall_speedup": baseline["wall_s"] / ours["wall_s"],
        "first_step_speedup": baseline["first_step_s"] / ours["first_step_s"],
    }


def _saved_percent(baseline: dict[str, Any], ours: dict[str, Any], key: str) -> float:
    return (1 - ours[key] / baseline[key]) * 100 if baseline[key] else 0.0


def agreement(job: dict[str, Any], theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Whether two sides learned the same."""
    same_order = theirs["same_order"]
    steps = min(COMPARED_STEPS, len(theirs["losses"]), len(ours["losses"]))
    result: dict[str, Any] = {
        "against": theirs["provider"],
        "same_data_order": same_order,
        "drawn": job["drawn"],
        "same_precision": theirs["precision"] == ours["precision"],
        "precision": {side["provider"]: side["precision"] for side in (theirs, ours)},
        "final_loss": {side["provider"]: final_loss(side["losses"]) for side in (theirs, ours)},
        "validation": {side["provider"]: side["validation"] for side in (theirs, ours)},
    }
    if same_order:
        differences = [
            abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours["losses"][:steps], theirs["losses"][:steps])
        ]
        result |= {"compared_steps": steps, "max_relative_difference": max(differences)}
    return result


def final_loss(losses: list[float]) -> float:
    """Mean over the last tenth of the steps: a single step's loss is mostly noise."""
    count = max(1, round(len(losses) * TAIL_SHARE))
    return math.fsum(losses[-count:]) / count


def agreement_lines(found: dict[str, Any], label: str) -> list[str]:
    """The agreement as a person reads it."""
    ours = next(name for name in found["final_loss"] if name != found["against"])
    theirs = found["against"]
    lines = []
    precisions = f"{found['precision'][ours]} here, {found['precision'][theirs]} there"
    if found["same_data_order"]:
        why = []
        if found["drawn"]:
            why.append(f"each side draws random numbers of its own for {', '.join(found['drawn'])}; 0 turns that off")
        if not found["same_precision"]:
            why.append(f"the precisions differ: {precisions}")
        remark = f" ({'; '.join(why)})" if why else ""
        lines.append(
            f"Losses against {label}: at most {found['max_relative_difference']:.1e} apart (relative) over the first "
            f"{found['compared_steps']} steps, same data in the same order{remark}."
        )
    else:
        lines.append(
            f"{label} reads rows of similar lengths together, which is a part of its speed. Its steps hold other rows, "
            "so the losses and metrics of a short run differ by chance; --against hf-trainer-ungrouped reads them in "
            "the same order."
        )
        if not found["same_precision"]:
            lines.append(f"The precisions differ, too: {precisions}.")
    tail = found["final_loss"]
    lines.append(f"Final training loss: {tail[ours]:.4f}, {label} {tail[theirs]:.4f} (mean of the last tenth).")
    mine, other = found["validation"][ours], found["validation"][theirs]
    if mine and other:
        told = ("loss", "accuracy", "f1", "f1_micro", "entity_f1", "perplexity", "pearson")
        shared = [name for name in told if name in mine and name in other]
        said = ", ".join(f"{name} {mine[name]:.4f} / {other[name]:.4f}" for name in shared)
        lines.append(f"Validation, ours / {label}: {said}.")
    return lines


def load_note(job: dict[str, Any], sides: list[dict[str, Any]]) -> str | None:
    """A warning where other programs had a good part of the processors that a CPU run is measured on."""
    if job["device"] != "cpu" or max(side["other_load_percent"] for side in sides) < DISTURBING_PERCENT:
        return None
    said = ", ".join(f"{side['other_load_percent']:.0f}% during {side['method']}" for side in sides)
    return f"other programs used the processors ({said}), so these ratios are not reliable; measure on a quiet machine"


def results_document(
    job: dict[str, Any],
    system: dict[str, Any],
    baseline: dict[str, Any],
    ours: dict[str, Any],
    others: list[dict[str, Any]],
    notes: list[str],
    command: str,
) -> dict[str, Any]:
    """The results file: the reference script's keys first, then everything else that was measured."""
    opponents = [baseline, *others]
    return {
        "timestamp": time.time(),
        "system_info": system,
        "results": {
            "baseline": _reference_form(baseline),
            "nemo_automodel": _reference_form(ours),
            "improvements": improvements(baseline, ours),
        },
        "improvements_by_side": {o["provider"]: improvements(o, ours) for o in opponents},
        "agreement": [agreement(job, o, ours) for o in opponents],
        "sides": {side["provider"]: _reference_form(side) for side in (*opponents, ours)},
        "job": job,
        "notes": notes,
        "command": command,
    }


def _reference_form(side: dict[str, Any]) -> dict[str, Any]:
    """A side with the reference's `max_gpu_memory_gb`: the peak, and 0 where there is no GPU."""
    return {**side, "max_gpu_memory_gb": side["peak_allocated_gib"]}


def write_results(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / RESULTS
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=2), encoding="utf-8")
    os.replace(temporary, path)
    return path
