"""Weights read part by part: a model is made without memory, sharded, and filled from safetensors by slices.

transformers' own loading reads whole tensors into one process. For a model that is cut into parts this would put the
whole of it into the memory of every rank. Here a rank reads of each tensor the rows it holds, and nothing else, from
the files as they lie (memory-mapped, so ranks of one machine share what is read). A model on one GPU is filled the same
way, past the memory of the host, by a few threads at once (`place`).

This is for checkpoints whose tensors have the names of the model's parameters, with or without the backbone's prefix:
all families of today. Where transformers converts weights while it loads (experts that are joined, quantised files),
and where something is not as expected, `open_weights` gives None, and the ordinary way is taken: it has the words for
what is wrong. What a checkpoint lacks (a new head) is drawn as the ordinary way draws it, from the same seed to the
same numbers.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from automodel.models.config import ModelConfig
from automodel.models.file_checks import check_no_adapter, check_weights
from automodel.models.load import is_new_head, refuse_other_shapes, without_memory
from automodel.models.onto_gpu import Way
from automodel.models.quiet import quiet_transformers
from automodel.models.source import Source, find_model
from automodel.models.task_head import TaskHead

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OLD_NAMES = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
UNTOUCHED = {torch.float32: float("nan"), torch.float64: float("nan"), torch.bfloat16: float("nan")}
UNTOUCHED |= {torch.int64: -(2**40), torch.int32: -(2**30)}

READERS = 4
"""Threads: one alone copies 5 GB a second out of files, and the bus carries ten times that (`onto_gpu.py`)."""
GENERATION_KEYS = ("cache_dir", "local_files_only", "token", "revision", "subfolder", "force_download")

Fill = Callable[[Tensor, Callable[[tuple[slice, ...]], Tensor]], None]
"""Puts into a tensor its part of a whole, which a function gives by slices."""


@dataclass(frozen=True)
class OpenWeights:
    """Where each tensor of a model lies."""

    model: Any
    """Without memory, but for its buffers."""
    files: dict[str, tuple[Path, str]]
    """The file and the name there, by the model's own name."""
    drawn: dict[str, Tensor]
    """What no file has."""
    buffers: dict[str, Tensor]
    ties: tuple[tuple[str, ...], ...] = ()
    """Names of one and the same parameter."""

    def fill(self, model: Any, fill: Fill, device: str) -> None:
        """Gives a model that was made from `self.model` its numbers. It has memory by now."""
        for name, value in self.buffers.items():
            _put(model, name, value.to(device))
        for first, *others in self.ties:  # torch gave each of them memory of its own
            for name in others:
                _put(model, name, model.get_parameter(first))
        parameters = dict(model.named_parameters())
        for path in sorted({path for path, _ in self.files.values()}):
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                for name, (where, stored) in self.files.items():
                    if where == path and name in parameters:
                        part = file.get_slice(stored)
                        fill(parameters[name], lambda slices, part=part: part[slices])
        for name, value in self.drawn.items():
            fill(parameters[name], lambda slices, value=value: value[slices])

    def read(self, name: str) -> Tensor:
        """One parameter, whole."""
        return self.drawn[name] if name in self.drawn else _read(*self.files[name])

    def without(self, names: Sequence[str]) -> OpenWeights:
        """The rest, after somebody else has taken these."""
        taken = set(names)
        return replace(
            self,
            files={name: place for name, place in self.files.items() if name not in taken},
            drawn={name: value for name, value in self.drawn.items() if name not in taken},
        )

    @torch.no_grad()
    def place(self, device: str) -> None:
        """Gives the parameters of `self.model` that have no memory yet memory on the device, and their numbers."""
        for module in self.model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    module._parameters[key] = nn.Parameter(torch.empty_like(parameter, device=device))

        ways: dict[int, Way] = {}

        def whole(target: Tensor, part: Callable[[tuple[slice, ...]], Tensor]) -> None:
            source = part((slice(None),) * target.ndim)
            if target.is_cuda and target.is_contiguous():
                thread = threading.get_ident()
                if thread not in ways:
                    ways[thread] = Way(target.device)
                ways[thread].carry(target, source)
            else:
                with torch.no_grad():  # of this thread
                    target.copy_(source)

        try:
            with ThreadPoolExecutor(READERS) as readers:
                copies: list[Future] = []
                self.fill(self.model, lambda *given: copies.append(readers.submit(whole, *given)), device)
                for copy_made in copies:
                    copy_made.result()
        finally:  # after an error, too: others may get the memory that is still being written to
            for way in ways.values():
                torch.cuda.current_stream(device).wait_stream(way.stream)


def open_weights(
    cfg: ModelConfig, hf_config: Any, head: TaskHead, dtype: torch.dtype = torch.float32, seed: int = 42
) -> OpenWeights | None:
    """The model and where its weights are; None where only transformers' own loading will do."""
    from safetensors import SafetensorError

    if (cfg.target or "").endswith(".from_config") or getattr(hf_config, "quantization_config", None):
        return None
    try:
        return _open(cfg, hf_config, head, dtype, seed)
    except (SafetensorError, OSError, json.JSONDecodeError):  # damaged, as the ordinary way will say
        return None


def _open(cfg: ModelConfig, hf_config: Any, head: TaskHead, dtype: torch.dtype, seed: int) -> OpenWeights | None:
    source = find_model(cfg)
    stored = stored_in(source)
    check_weights(source)
    check_no_adapter(source)
    if stored is None or converts(hf_config.model_type):
        return None
    asked = {
        "attn_implementation": cfg.attn_implementation,
        "use_sdpa_patching": cfg.use_sdpa_patching,
        "use_liger_kernel": cfg.use_liger_kernel,
    }
    model = without_memory(
        copy.deepcopy(hf_config), head, dtype=dtype, trust_remote_code=cfg.trust_remote_code, **asked
    )
    names = dict(model.named_parameters())
    for parameter in names.values():  # all learn, whatever the model's code says: so does what transformers loads
        parameter.requires_grad_(parameter.is_floating_point())
    files = {name: found for name in names if (found := _find(name, stored, model.base_model_prefix)) is not None}
    files = {name: found for name, found in files.items() if _fits(found, names[name].shape)}
    missing = [name for name in names if name not in files]
    ties = _ties(model)
    if any(not is_new_head(model, name, head) for name in missing) or _differ(ties, stored, model.base_model_prefix):
        return None
    made = _initialise(model, set(missing), stored, seed)
    if made is None:
        return None
    drawn = {name: made.pop(name) for name in missing}
    model.newly_initialised = frozenset(missing)  # ty: ignore[invalid-assignment]
    _read_generation_config(model, source)
    return OpenWeights(model, files, drawn, made, ties)


def _read_generation_config(model: Any, source: Source) -> None:
    """How the model writes (its ends, its temperature): a file of its own, or old entries of config.json."""
    if not model.can_generate():
        return
    from transformers import GenerationConfig

    keywords: dict[str, Any] = {key: source.keywords[key] for key in GENERATION_KEYS if key in source.keywords}
    try:
        model.generation_config = GenerationConfig.from_pretrained(source.name, **keywords)
    except OSError:
        old: dict[str, Any] = {"config_file_name": "config.json", "_from_model_config": True}
        model.generation_config = GenerationConfig.from_pretrained(source.name, **old, **keywords)


def _ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    homes: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        homes.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in homes.values() if len(names) > 1)


def _differ(ties: tuple[tuple[str, ...], ...], stored: dict[str, Path], prefix: str) -> bool:
    """Whether names that the config ties have tensors of their own, with different numbers: transformers then leaves
    them apart."""
    for names in ties:
        places = {found for name in names if (found := _find(name, stored, prefix)) is not None}
        tensors = [_read(*place) for place in places] if len(places) > 1 else []
        if any(not torch.equal(tensors[0], other) for other in tensors[1:]):
            return True
    return False


def _read(path: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return file.get_tensor(name)


def stored_in(source: Source) -> dict[str, Path] | None:
    """Names of the tensors, each with its file; None where there are no safetensors on this machine."""
    from safetensors import safe_open

    single, index = _file(source, SINGLE), _file(source, INDEX)
    if single is not None:
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single)
    if index is None:
        return None
    found = {name: _file(source, file) for name, file in json.loads(index.read_text())["weight_map"].items()}
    return None if None in found.values() else {name: path for name, path in found.items() if path is not None}


def _file(source: Source, name: str) -> Path | None:
    if source.folder is not None:
        path = source.folder / name
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    keywords = {key: source.keywords[key] for key in ("cache_dir", "revision") if key in source.keywords}
    found = try_to_load_from_cache(source.name, name, **keywords)
    return Path(found) if isinstance(found, str) else None


def converts(kind: str) -> bool:
    """Whether transformers makes the weights of this family (or class of models) out of others while it loads."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    return bool(get_checkpoint_conversion_mapping(kind))


def _find(name: str, stored: dict[str, Path], prefix: str) -> tuple[Path, str] | None:
    bare = name.removeprefix(f"{prefix}.")
    candidates = [name, bare, f"{prefix}.{name}"]
    candidates += [c.replace(new, old) for c in candidates for new, old in OLD_NAMES if new in c]
    return next(((stored[c], c) for c in candidates if c in stored), None)


def _fits(found: tuple[Path, str], shape: torch.Size) -> bool:
    from safetensors import safe_open

    path, name = found
    with safe_open(path, "pt") as file:
        return tuple(file.get_slice(name).get_shape()) == tuple(shape)


def require_shapes(cfg: ModelConfig, model: Any, head: TaskHead) -> None:
    """Refuses a config whose sizes are not those of the weights, before any of them is read. `model`: without memory.
    Where the files are not as the model is, loading them looks again."""
    from safetensors import SafetensorError, safe_open

    config, source = model.config, find_model(cfg)
    if (cfg.target or "").endswith(".from_config") or getattr(config, "quantization_config", None):
        return
    try:
        stored = stored_in(source)
        if stored is None or converts(config.model_type):
            return
        wanted: dict[Path, list[tuple[str, str]]] = {}
        for name, _ in model.named_parameters():
            found = _find(name, stored, model.base_model_prefix)
            if found is not None and not is_new_head(model, name, head):
                wanted.setdefault(found[0], []).append((name, found[1]))
        shapes = {}
        for path, names in wanted.items():
            with safe_open(path, "pt") as file:
                shapes |= {name: tuple(file.get_slice(there).get_shape()) for name, there in names}
    except (SafetensorError, OSError, json.JSONDecodeError):  # damaged, as the ordinary way will say
        return
    ours = {name: tuple(model.get_parameter(name).shape) for name in shapes}
    refuse_other_shapes(source.name, config, {name: (shape, ours[name]) for name, shape in shapes.items()})


def _initialise(model: Any, missing: set[str], stored: dict[str, Path], seed: int) -> dict[str, Tensor] | None:
    """What the model's own initialisation makes of parameters that are missing and of tables that it computes for
    itself (positions, rotations); saved tables as they were saved. Everything else counts as initialised, as in
    transformers' own loading. None where something stayed as it was."""
    from safetensors import safe_open

    real: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor._is_hf_initialized = True
        if name in missing or not isinstance(tensor, nn.Parameter):
            real[name] = torch.empty_like(tensor, device="cpu")
            if tensor.dtype not in UNTOUCHED:
                return None
            real[name].fill_(UNTOUCHED[tensor.dtype])
            _put(model, name, nn.Parameter(real[name]) if name in missing else real[name])
    with torch.random.fork_rng([]), quiet_transformers(), torch.no_grad():
        torch.manual_seed(seed)
        model.initialize_weights()
    saved = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    for name, value in real.items():
        found = _find(name, stored, model.base_model_prefix) if name in saved else None
        if found is not None:
            with safe_open(found[0], "pt") as file:
                real[name] = file.get_tensor(found[1]).to(value.dtype)
        elif bool((value.isnan() if value.is_floating_point() else value == UNTOUCHED[value.dtype]).any()):
            return None
        if name in missing:
            _put(model, name, nn.Parameter(torch.empty_like(value, device="meta")))
    return real


def _put(model: Any, name: str, tensor: Tensor) -> None:
    parent, _, key = name.rpartition(".")
    module = model.get_submodule(parent)
    (module._parameters if isinstance(tensor, nn.Parameter) else module._buffers)[key] = tensor
