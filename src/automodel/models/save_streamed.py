"""Writing a model tensor by tensor, file by file.

The ranks of a sharded run put one tensor together at a time (`distributed/shards.py`), and the first of them writes it.
A file is begun when the one before is full, so the writer never holds more than a file, and no GPU more than one
tensor. Which tensor goes into which file is known beforehand, from their sizes.

A model on one GPU is written the same way, straight from there: transformers would first copy every tensor into the
host's memory, which without page-locked memory is a tenth as fast as the bus (1 GB a second on one machine).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from automodel.checkpoint.parts import neighbours, numbered
from automodel.checkpoint.tensor_file import DTYPES, write_unhashed

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
    model.save_pretrained(folder, state_dict={})  # config, generation config, code that comes with the model
    for empty in folder.glob("model*.safetensors*"):
        empty.unlink()
    ignored, named = set(model._keys_to_ignore_on_save or ()), names_of_shared(model)
    sizes = {named.get(name, name): size for name, size in sizes.items()}
    groups = neighbours({name: size for name, size in sizes.items() if name not in ignored}, largest)
    names = [NAME] if len(groups) == 1 else [numbered("model", i, len(groups)) for i in range(len(groups))]
    waiting: dict[str, Tensor] = {}
    queue = [(name, group) for name, group in zip(names, groups, strict=True)]
    for first, tensor in tensors:
        name = named.get(first, first)
        if name not in ignored:
            waiting[name] = tensor
        if queue and len(waiting) == len(queue[0][1]):
            write_unhashed(folder / queue.pop(0)[0], waiting, {"format": "pt"})
            waiting = {}
    if waiting or queue:
        raise RuntimeError("more or fewer tensors came than were announced")
    if len(groups) > 1:
        index = {
            "metadata": {"total_size": sum(sizes[name] for group in groups for name in group)},
            "weight_map": {name: file for file, group in zip(names, groups, strict=True) for name in group},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def names_of_shared(model: Any) -> dict[str, str]:
    """The name under which transformers saves a parameter that has several, by the name that torch finds first: that of
    the word table, not of the head that borrows it."""
    return {first: own[0] if own else first for first, own in _own_names(model).items()}


def _own_names(model: Any) -> dict[str, list[str]]:
    """Of each parameter, by its first name, those that it does not have because the model says that it is shared."""
    borrowed = getattr(model, "all_tied_weights_keys", None) or {}
    every: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        every.setdefault(id(parameter), []).append(name)
    return {names[0]: [name for name in names if name not in borrowed] for names in every.values()}


def held_by(device: str, model: Any) -> tuple[dict[str, int], list[tuple[str, Tensor]]] | None:
    """Sizes and tensors of a plain model that lies on such a device as a whole, shared ones once. None for others:
    quantised ones, those with a form of saving of their own, and those that share what they do not declare, of which
    transformers says that they could not be loaded again."""
    from transformers import PreTrainedModel

    if getattr(model, "hf_quantizer", None) is not None:
        return None
    if any(getattr(type(model), way) is not getattr(PreTrainedModel, way) for way in ("save_pretrained", "state_dict")):
        return None
    kept = model.state_dict(keep_vars=True)
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in kept}
    known = set(map(id, tensors.values()))
    as_they_are = tensors.keys() <= kept.keys() and all(id(tensor) in known for tensor in kept.values())
    plain = all(type(t.data) is Tensor and t.device.type == device and t.dtype in DTYPES for t in tensors.values())
    if not plain or not as_they_are or any(len(own) > 1 for own in _own_names(model).values()):
        return None
    return {name: tensor.nbytes for name, tensor in tensors.items()}, list(tensors.items())
