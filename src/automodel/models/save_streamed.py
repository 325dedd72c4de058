"""Writing a model that no process holds as a whole: tensor by tensor, file by file.

The ranks of a sharded run put one tensor together at a time (`distributed/shards.py`), and the first of them writes it.
A file is begun when the one before is full, so the writer never holds more than a file, and no GPU more than one
tensor. Which tensor goes into which file is known beforehand, from their sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

LARGEST_FILE = 5 * 10**9
NAME, INDEX = "model.safetensors", "model.safetensors.index.json"


def write_streamed(
    model: Any,
    sizes: Mapping[str, int],
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    largest: int = LARGEST_FILE,
) -> None:
    """The model's config files, and its weights in files of at most `largest` bytes. `sizes`: bytes of each tensor;
    `tensors`: the tensors, in the same order."""
    from safetensors.torch import save_file

    model.save_pretrained(folder, state_dict={})  # config, generation config, code that comes with the model
    for empty in folder.glob("model*.safetensors*"):
        empty.unlink()
    ignored = set(model._keys_to_ignore_on_save or ())
    groups = split_by_size({name: size for name, size in sizes.items() if name not in ignored}, largest)
    names = [NAME] if len(groups) == 1 else [_numbered(i, len(groups)) for i in range(len(groups))]
    waiting: dict[str, Tensor] = {}
    queue = [(name, group) for name, group in zip(names, groups, strict=True)]
    for name, tensor in tensors:
        if name not in ignored:
            waiting[name] = tensor.contiguous()
        if queue and len(waiting) == len(queue[0][1]):
            save_file(waiting, folder / queue.pop(0)[0], metadata={"format": "pt"})
            waiting = {}
    if waiting or queue:
        raise RuntimeError("more or fewer tensors came than were announced")
    if len(groups) > 1:
        index = {
            "metadata": {"total_size": sum(sizes[name] for group in groups for name in group)},
            "weight_map": {name: file for file, group in zip(names, groups, strict=True) for name in group},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def split_by_size(sizes: Mapping[str, int], largest: int) -> list[list[str]]:
    """Neighbours, as many as a file takes; at least one."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = largest
        groups[-1].append(name)
        room -= size
    return groups


def _numbered(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
