"""A pretrained encoder small enough to travel with a working tree: 8-bit rows, and only the words that are needed.

A matrix is kept as int8 with one fp16 scale a row (the row's largest value / 127), vectors as they are. Of the word
embeddings only the rows of tokens that occur in the given texts are kept; `expand` puts zeros in the others' place,
which no document ever reads. MiniLM shrinks from 91 MB to about a sixth. What comes out is a plain fp32 Hugging Face
folder with weights rounded to 1/127 of their row's largest: a start that every trainer shares, not the published
weights to the bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "compact.safetensors"
ABOUT = "compact.json"
COPIED = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
STEPS = 127  # int8 levels on each side of zero


def shrink(model: Path, out: Path, token_ids: Iterable[int]) -> int:
    """Writes the compact form of a model folder; `token_ids` are the words to keep. Returns its bytes."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = load_file(model / "model.safetensors")
    rows = torch.tensor(sorted(set(token_ids)), dtype=torch.int32)
    words = next(name for name in tensors if name.endswith("word_embeddings.weight"))
    shape = list(tensors[words].shape)
    tensors[words] = tensors[words][rows.long()]
    packed: dict[str, Tensor] = {"rows": rows}
    for name, tensor in tensors.items():
        if tensor.ndim < 2 or not tensor.is_floating_point():
            packed[f"plain/{name}"] = tensor.contiguous()
            continue
        # Rounded to fp16 before it divides, so that the value multiplied with later is the one divided by.
        scale = (tensor.abs().amax(dim=1, keepdim=True) / STEPS).clamp(min=1e-7).half()
        packed[f"scale/{name}"] = scale
        packed[f"int8/{name}"] = (tensor / scale.float()).round().clamp(-STEPS, STEPS).to(torch.int8)
    save_file(packed, out / WEIGHTS)
    (out / ABOUT).write_text(json.dumps({"word_embeddings": words, "shape": shape}))
    for name in COPIED:
        shutil.copyfile(model / name, out / name)
    return sum(path.stat().st_size for path in out.iterdir())


def expand(compact: Path, out: Path) -> Path:
    """Writes the compact folder as a plain fp32 Hugging Face folder."""
    out.mkdir(parents=True, exist_ok=True)
    packed, about = load_file(compact / WEIGHTS), json.loads((compact / ABOUT).read_text())
    tensors: dict[str, Tensor] = {}
    for key, tensor in packed.items():
        kind, _, name = key.partition("/")
        if kind == "plain":
            tensors[name] = tensor
        elif kind == "int8":
            tensors[name] = tensor.float() * packed[f"scale/{name}"].float()
    words = torch.zeros(about["shape"])
    words[packed["rows"].long()] = tensors[about["word_embeddings"]]
    tensors[about["word_embeddings"]] = words
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for name in COPIED:
        shutil.copyfile(compact / name, out / name)
    return out
