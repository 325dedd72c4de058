"""Several adapters of one base: added up as one, or one in the place of another.

The sum of low-rank updates is one of higher rank, exactly:

    Σ wᵢ sᵢ Bᵢ Aᵢ = s [w₁ s₁/s B₁ … wₙ sₙ/s Bₙ] [A₁; …; Aₙ]

so a stack of adapters is an ordinary PEFT folder, which every tool reads; layers that only some of them have get those.
`swap` puts another adapter's numbers into a model that has one attached, without loading the base again.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from automodel.adapters.attach import Adapter, adapter_of, set_adapter, trained_tensors
from automodel.adapters.choose import in_short
from automodel.adapters.peft_folder import CONFIG, WEIGHTS, by_pattern, peft_name, read_config, read_tensors
from automodel.config.errors import UserError

BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "chat_template.jinja", "vocab.txt", "vocab.json", "merges.txt", "tokenizer.model")  # fmt: skip
"""What lies beside an adapter and belongs to its stack as well."""


def stack_folders(given: Sequence[str], out: str | Path) -> int:
    """Writes the sum of adapters, `FOLDER` or `FOLDER=WEIGHT` each, as one PEFT folder; returns its largest rank."""
    from safetensors.torch import save_file

    target = Path(out).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--out: '{target}' exists and is not empty. Name another folder.")
    named = [_weighted(text) for text in given]
    configs = [read_config(folder) for folder, _ in named]
    _agree([folder for folder, _ in named], configs)
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for (folder, weight), config in zip(named, configs):
        for name, a_RI, b_OR, scale in _layers(folder, config):
            parts.setdefault(name, []).append((a_RI, weight * scale * b_OR))
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for name, pairs in parts.items():
        ranks[name] = sum(a.shape[0] for a, _ in pairs)
        tensors[peft_name(f"{name}.lora_A")] = torch.cat([a for a, _ in pairs]).contiguous()
        # alpha is the rank, so that the scale is 1: it is in B already.
        tensors[peft_name(f"{name}.lora_B")] = torch.cat([b for _, b in pairs], dim=1).contiguous()
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    (target / CONFIG).write_text(json.dumps(_config(configs, ranks), indent=2, sort_keys=True) + "\n")
    for name in BESIDE:
        if (Path(named[0][0]).expanduser() / name).is_file():
            shutil.copy2(Path(named[0][0]).expanduser() / name, target / name)
    return max(ranks.values())


@torch.no_grad()
def swap(model: Any, adapter: Adapter) -> None:
    """Another adapter's numbers in the place of the attached one's; both stand beside the same layers with one rank."""
    own = adapter_of(model)
    if own is None or adapter.start is None:
        raise UserError(
            "an adapter can be swapped only where one is attached, and for one that was read from a folder."
        )
    if (own.ranks, own.saved, own.dora) != (adapter.ranks, adapter.saved, adapter.dora):
        raise UserError(
            f"the adapter of {in_short(adapter.ranks)} does not fit the places of the attached one "
            f"({in_short(own.ranks)}), or its rank is another. Load the base again and attach it."
        )
    from automodel.adapters.lora import LoraLinear

    places = trained_tensors(model)
    for name, tensor in adapter.start.items():
        places[name].copy_(tensor)
    for name in adapter.ranks:
        layer = model.get_submodule(name)
        assert isinstance(layer, LoraLinear)
        layer.scale = adapter.scale(name)
    set_adapter(model, adapter)


def _weighted(text: str) -> tuple[str, float]:
    folder, equals, weight = text.rpartition("=")
    if not equals or Path(text).expanduser().is_dir():  # a folder's name may have one
        return text, 1.0
    try:
        return folder, float(weight)
    except ValueError as error:
        raise UserError(
            f"--stack: '{weight}' in '{text}' is no number. Write FOLDER=WEIGHT, e.g. {folder}=0.5"
        ) from error


def _layers(folder: str, config: dict[str, Any]) -> list[tuple[str, Tensor, Tensor, float]]:
    """(module, A, B, scale), each in fp32."""
    tensors, found = read_tensors(folder), []
    whole = [name for name in tensors if not name.endswith((".lora_A", ".lora_B"))]
    if whole:
        raise UserError(f"'{folder}' trains '{whole[0]}' in full, and two of those cannot be added up. Leave it out.")
    for name in (n.removesuffix(".lora_A") for n in tensors if n.endswith(".lora_A")):
        a_RI, b_OR = tensors[f"{name}.lora_A"].float(), tensors[f"{name}.lora_B"].float()
        alpha = float(by_pattern(config.get("alpha_pattern"), name, config["lora_alpha"]))
        rank = a_RI.shape[0]
        found.append((name, a_RI, b_OR, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)))
    return found


def _agree(folders: Sequence[str], configs: Sequence[dict[str, Any]]) -> None:
    for folder, config in zip(folders, configs):
        if config.get("use_dora"):
            raise UserError(f"'{folder}' is a DoRA adapter, whose lengths do not add up. Merge it instead.")
        for key in ("base_model_name_or_path", "task_type"):
            here, there = config.get(key), configs[0].get(key)
            if here != there:
                raise UserError(
                    f"'{folder}' and '{folders[0]}' differ in {key} ({here} and {there}): only adapters of one base "
                    "can be stacked."
                )


def _config(configs: Sequence[dict[str, Any]], ranks: dict[str, int]) -> dict[str, Any]:
    most = max(set(ranks.values()), key=list(ranks.values()).count)
    unlike = {re.escape(name): rank for name, rank in ranks.items() if rank != most}
    return {
        **configs[0],
        "r": most,
        "lora_alpha": most,
        "rank_pattern": unlike,
        "alpha_pattern": dict(unlike),
        "use_rslora": False,
        "lora_dropout": 0.0,
        "target_modules": sorted(ranks),
        "modules_to_save": None,
    }
