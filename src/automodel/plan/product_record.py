"""How fast this machine makes a run's matrix products on its CPU: timed once and remembered.

What was timed (`kernels/product_speed.py`) is kept in `$AUTOMODEL_CACHE/products` or `~/.cache/automodel/products`, a
small file for each processor, version of torch, number of threads, setting of the libraries and sample of products. So
a run plans as the one before it did. A file that says anything else than what was written counts as none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from automodel.config.cache import cache_folder
from automodel.config.json_text import parse_json
from automodel.kernels.product_speed import Sample, Timed
from automodel.plan.hardware import processor

VERSION = 1
"""Of how products are timed."""
SETTINGS = ("ONEDNN_", "DNNL_", "MKL_", "ATEN_CPU_CAPABILITY")
"""What begins the names of variables that say which instructions the libraries may use."""


def record_key(sample: Sample, threads: int) -> dict[str, Any]:
    """What the speeds depend on."""
    return {
        "version": VERSION,
        "processor": processor(),
        "torch": torch.__version__,
        "threads": threads,
        "settings": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(SETTINGS)},
        "tokens": sample.tokens,
        "products": [list(product) for product in sample.products],
    }


def remembered(key: dict[str, Any]) -> Timed | None:
    """What an earlier process has timed; None where there is nothing that can be used."""
    try:
        found = parse_json(_path(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return timed_of(found.get("speeds")) if isinstance(found, dict) and found.get("of") == key else None


def timed_of(found: Any) -> Timed | None:
    """What JSON carried; None where it is anything else."""
    names = [field.name for field in dataclasses.fields(Timed)]
    if not isinstance(found, dict) or sorted(found) != sorted(names):
        return None
    casts, lists = found["casts"], [found[name] for name in names[:-1]]
    if not all(isinstance(speeds, list) and len(speeds) in (0, 3) for speeds in lists) or not lists[0]:
        return None
    if not all(_is_speed(number) for speeds in lists for number in speeds) or not (casts == 0.0 or _is_speed(casts)):
        return None
    return Timed(*map(tuple, lists), casts=float(casts))


def _is_speed(number: Any) -> bool:
    return isinstance(number, float) and 0 < number < math.inf


def remember(key: dict[str, Any], timed: Timed) -> None:
    """Where the folder cannot be written, the next process times them again."""
    path = _path(key)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"of": key, "speeds": timed.to_json()}, indent=1), encoding="utf-8")
        os.replace(temporary, path)


def _path(key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "products" / f"{digest}.json"
