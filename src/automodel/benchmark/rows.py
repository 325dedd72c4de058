"""Measured rows as they are committed to `benchmarks/results/*.json`.

A results file is a JSON list of flat objects. Rows of workloads are known by workload and provider: measuring again
replaces them and leaves every other row alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from automodel.benchmark.compare import final_loss

Row = dict[str, Any]
TUNED = "hf-trainer-tuned"
# Column of the row, and the opponent it compares with.
SPEEDUPS = {
    "speedup_vs_hf": TUNED,
    "speedup_vs_hf_stock": "hf-trainer",
    "speedup_vs_hf_compile": "hf-trainer-compile",
    "speedup_vs_hf_ungrouped": "hf-trainer-ungrouped",
}


def rows_of(
    workload: str,
    measured: dict[str, dict[str, Any]],
    system: dict[str, Any],
    *,
    date: str,
    commit: str | None,
    command: str,
) -> list[Row]:
    """One row for every side that completed. Speed-ups are of median step times. Where batches differ in size, as those
    of the tuned Trainer do, the median moves with the few steps that were measured: the speed-up of the mean step and
    that of the training time, with everything that happens in it, say more."""
    sides = {name: side for name, side in measured.items() if side["status"] == "completed"}
    rows = []
    for side in sides.values():
        row = {
            "workload": workload,
            "provider": side["provider"],
            "ms_per_step": round(side["ms_per_step"], 3),
            "ms_p20": round(side["ms_p20"], 3),
            "ms_p80": round(side["ms_p80"], 3),
            "ms_mean": round(side["ms_mean"], 3),
            "tokens_per_s": round(side["tokens_per_s"]),
            "peak_gib": round(side["peak_memory_gib"], 3),
            "peak_reserved_gib": round(side["peak_reserved_gib"], 3),
            "first_step_s": round(side["first_step_s"], 2),
            "wall_s": round(side["wall_s"], 2),
            "flush_s": round(side["flush_s"], 2),
            "training_s": round(side["training_time"], 2),
        }
        for column, opponent in SPEEDUPS.items():
            known = opponent in sides
            row[column] = round(sides[opponent]["ms_per_step"] / side["ms_per_step"], 2) if known else None
        tuned = sides.get(TUNED)
        row["speedup_vs_hf_mean_step"] = round(tuned["ms_mean"] / side["ms_mean"], 2) if tuned else None
        row["speedup_vs_hf_training_time"] = round(tuned["training_time"] / side["training_time"], 2) if tuned else None
        row |= {
            "precision": side["precision"],
            "attention": side["attention"],
            "setup": side["setup"],
            "steps": side["steps"],
            "final_loss": round(final_loss(side["losses"]), 4),
            "gpu_utilization_percent": side["gpu_utilization_percent"],
            "cpu_s": round(side["cpu_s"], 2),
            "other_load_percent": round(side["other_load_percent"]),
            "date": date,
            "commit": commit,
            "torch": system["torch"],
            "transformers": system["transformers"],
            "gpu": system["gpu_name"],
            "processor": system["processor"],
            "cores": system["cores"],
            "threads": side["threads"],
            "command": command,
        }
        rows.append(row)
    return rows


def merge_rows(existing: list[Row], new: list[Row]) -> list[Row]:
    """`existing` with rows of the same workload and provider replaced, in place, and unknown ones appended."""
    merged = list(existing)
    places = {_key(row): i for i, row in enumerate(merged) if _key(row) is not None}
    for row in new:
        place = places.get(_key(row))
        if place is None:
            places[_key(row)] = len(merged)
            merged.append(row)
        else:
            merged[place] = row
    return merged


def _key(row: Row) -> tuple[str, str] | None:
    """None for rows of another kind (kernels)."""
    return (row["workload"], row["provider"]) if "workload" in row and "provider" in row else None


def merge_into(path: Path, new: list[Row]) -> None:
    """Merges rows into a results file, which is made where it is absent."""
    existing = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(merge_rows(existing, new), indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
