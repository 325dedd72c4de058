"""How long compiling a model took on this machine, remembered beside what it made.

torch keeps compiled kernels on disk. Where nobody has chosen a folder for them (`TORCHINDUCTOR_CACHE_DIR`), they go to
`$AUTOMODEL_CACHE/compiled` or `~/.cache/automodel/compiled` rather than into the temporary folder, which the next
reboot empties. In the same folder a small file for each model, precision, mode, GPU and version of torch says how many
seconds its first compile took and how many the last one with a cache, so that the next plan counts with those. Whoever
removes the folder removes both, and the plan counts with a cold cache again.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from automodel.config.cache import cache_folder
from automodel.config.json_text import parse_json
from automodel.kernels.obstacles import triton_obstacle
from automodel.plan.asked import asked_precision
from automodel.plan.compile_pays import CompileFacts
from automodel.plan.config import RunConfig

# These say where a config came from and what its classes are called; no block depends on them.
NAMES_ONLY = {"_name_or_path", "architectures", "id2label", "label2id", "transformers_version", "torch_dtype", "dtype"}


def compiled_folder() -> Path:
    """Where torch keeps what it compiled."""
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return cache_folder() / "compiled"


def use_compiled_folder() -> None:
    """Points torch at it. Where it cannot be written, torch keeps its own choice."""
    folder = compiled_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def record_key(cfg: RunConfig, hf_config: Any, gpu: str) -> str:
    """What the compiled code depends on."""
    import torch
    import transformers

    shape = {name: value for name, value in hf_config.to_dict().items() if name not in NAMES_ONLY}
    parts = [shape, asked_precision(cfg)[0], cfg.compile.mode, gpu, torch.__version__, transformers.__version__]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def read_compile_facts(cfg: RunConfig, hf_config: Any, device: str, gpu: str, begun: bool | None) -> CompileFacts:
    if device != "cuda":
        return CompileFacts(begun=begun)
    record = _read(record_key(cfg, hf_config, gpu))
    return CompileFacts(
        blocks=_size(hf_config, "num_hidden_layers"),
        width=_size(hf_config, "hidden_size"),
        obstacle=triton_obstacle(),
        cold_s=record.get("cold_s"),
        warm_s=record.get("warm_s"),
        begun=begun,
    )


def _size(hf_config: Any, name: str) -> int:
    """0: not known, as for families whose layers differ in it."""
    size = getattr(hf_config, name, None)
    return size if isinstance(size, int) else 0


def remember_compile(key: str, seconds: float) -> None:
    """Adds a measured compile: the first one was cold, later ones found its cache."""
    record = _read(key)
    record["warm_s" if "cold_s" in record else "cold_s"] = round(seconds, 2)
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(record))
        temporary.replace(path)
    except OSError:
        pass  # a read-only cache: the next plan counts with the constants


def _path(key: str) -> Path:
    return compiled_folder() / "automodel" / f"{key}.json"


def _read(key: str) -> dict[str, float]:
    try:
        found = parse_json(_path(key).read_text())
    except (OSError, ValueError):
        return {}
    numbers = found.items() if isinstance(found, dict) else ()
    return {name: float(value) for name, value in numbers if isinstance(value, int | float)}
