"""Adapters on disk, in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

`peft.PeftModel.from_pretrained` loads such a folder, and so does everything that reads PEFT's folders; the library
itself is not needed here. Tensors are called `base_model.model.NAME.lora_A.weight`, and modules that were trained in
full simply `base_model.model.NAME.weight`.

A folder of somebody else is read from its tensors: where they stand is where adapters are, whatever rule put them
there. What this library cannot compute (adapters on embeddings, trained biases) is refused by name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from automodel.adapters.attach import Adapter, trained_tensors
from automodel.adapters.choose import shortest_names
from automodel.adapters.config import PeftConfig
from automodel.adapters.dora import MAGNITUDE
from automodel.adapters.lora import LoraLinear, is_linear, sizes
from automodel.config.errors import NotYetError, UserError
from automodel.config.json_text import parse_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
OWN = (".lora_A", ".lora_B", f".{MAGNITUDE}")
"""How names of an adapter's own tensors end."""
# Keys of PEFT that change what is computed, with the values that leave it alone.
_UNUSUAL = {
    "lora_bias": (False, None),
    "bias": ("none", None),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "velora_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "arrow_config": (None,),
}
# Beginnings of A and B that leave the base as it is on the disk. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA take something
# out of its weights, so that their A and B belong to a base that nobody has.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


def is_adapter_folder(folder: str | Path) -> bool:
    return (Path(folder).expanduser() / CONFIG).is_file()


def read_config(folder: str | Path) -> dict[str, Any]:
    """`adapter_config.json`, checked: it must be LoRA, and nothing in it may be something we do not compute."""
    path = Path(folder).expanduser() / CONFIG
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"'{folder}' holds no {CONFIG}, so it is not an adapter folder. Correct the path.") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    if config.get("peft_type") != "LORA":
        raise NotYetError(f"{path}: peft_type is {config.get('peft_type')}; only LORA is built. Use a LoRA adapter.")
    for key, plain in _UNUSUAL.items():
        if config.get(key) not in plain:
            raise NotYetError(f"{path}: `{key}: {config[key]}` is not built yet. Use an adapter without it.")
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise NotYetError(
            f"{path}: `init_lora_weights: {start}` began by changing the base's weights, so beside the base as it is "
            "the adapter gives other answers. Have PEFT write an ordinary one: save_pretrained(folder, "
            "path_initial_model_for_weight_conversion=...)."
        )
    return config


def read_tensors(folder: str | Path) -> dict[str, Tensor]:
    """The adapter's tensors by the names they have in our models (`….q_proj.lora_A`, `classifier.weight`)."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder).expanduser() / WEIGHTS
    if not path.is_file():
        raise UserError(f"'{folder}' has a {CONFIG} but no {WEIGHTS}; only safetensors are read. Save it again.")
    try:
        return {_own_name(name): tensor for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}). Save or copy it again.") from error


def resolve_folder(folder: str | Path, model: Any, task_type: str, base: str, revision: str | None = None) -> Adapter:
    """The adapter in a folder, compared with the model's modules; its tensors come with it."""
    config, tensors = read_config(folder), read_tensors(folder)
    targets = [name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")]
    modules = dict(model.named_modules())
    order = [name for name in modules if name in set(targets)]
    _check(str(folder), model, modules, tensors, targets)
    ranks = {name: tensors[f"{name}.lora_A"].shape[0] for name in order}
    alphas = {name: float(by_pattern(config.get("alpha_pattern"), name, config["lora_alpha"])) for name in order}
    saved = _saved_modules(config, modules, [n for n in tensors if not n.endswith(OWN)])
    lost = [f"{s}.{n}" for s in saved for n, _ in modules[s].named_parameters() if f"{s}.{n}" not in tensors]
    if config.get("use_dora"):
        lost += [f"{name}.{MAGNITUDE}" for name in order if f"{name}.{MAGNITUDE}" not in tensors]
    if lost:
        raise UserError(f"'{folder}' trains '{lost[0]}' in full, but does not hold it. Save the adapter again.")
    return Adapter(
        ranks, alphas, saved, task_type, base, revision, config.get("lora_dropout") or 0.0,
        bool(config.get("use_rslora")), bool(config.get("use_dora")),
        start=_tied_once(str(folder), model, tensors),
    )  # fmt: skip


def resolve_start(section: PeftConfig, model: Any, task_type: str, base: str, revision: str | None = None) -> Adapter:
    """The adapter that training starts from. What the section says beside it must agree."""
    folder = section.pretrained_adapter
    assert folder is not None
    if not is_adapter_folder(folder):
        raise UserError(
            f"peft.pretrained_adapter: '{folder}' holds no {CONFIG}, so it is not an adapter folder. Correct the path."
        )
    adapter = resolve_folder(folder, model, task_type, base, revision)
    said = {"target_modules": section.target_modules, "exclude_modules": section.exclude_modules}
    said["modules_to_save"] = section.modules_to_save
    for key in (key for key, value in said.items() if value):
        raise UserError(f"peft.{key}: the modules are those of pretrained_adapter ({folder}). Remove the key.")
    rank, alpha = set(adapter.ranks.values()), set(adapter.alphas.values())
    for key, asked, there in (("dim", section.dim, rank), ("alpha", section.alpha, alpha)):
        if asked is not None and there != {asked}:
            shown = ", ".join(f"{value:g}" for value in sorted(there))
            raise UserError(f"peft.{key}: is {asked}, but the adapter in {folder} has {shown}. Remove the key.")
    if section.use_dora and not adapter.dora:
        raise UserError(f"peft.use_dora: the adapter in {folder} is a plain one. Remove the key.")
    if section.use_rslora and not adapter.rslora:
        raise UserError(f"peft.use_rslora: the adapter in {folder} is scaled by alpha / dim. Remove the key.")
    before = read_config(folder).get("base_model_name_or_path") or base
    before = "" if os.path.realpath(before) == os.path.realpath(base) else before  # names of the hub are compared, too
    dropout = adapter.dropout if section.dropout is None else section.dropout
    return replace(adapter, dropout=dropout, before=before)


def write_folder(model: Any, adapter: Adapter, folder: str | Path, trained: Mapping[str, Tensor] | None = None) -> None:
    """Writes both files. The model has the adapter attached. `trained`: its tensors, where the model holds only parts
    of them."""
    from safetensors.torch import save_file

    target = Path(folder)
    own = trained or trained_tensors(model)
    tensors = {peft_name(name): tensor.detach().contiguous().cpu() for name, tensor in own.items()}
    for name, twins in _twins(model).items():  # a table and the head that is tied to it: PEFT wants both
        tensors |= {peft_name(twin): tensors[peft_name(name)].clone() for twin in twins if name in own}
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    (target / CONFIG).write_text(json.dumps(_config_of(model, adapter), indent=2, sort_keys=True) + "\n")


def _config_of(model: Any, adapter: Adapter) -> dict[str, Any]:
    ranks, alphas = list(adapter.ranks.values()), list(adapter.alphas.values())
    rank, alpha = max(set(ranks), key=ranks.count), max(set(alphas), key=alphas.count)
    every = [name for name, _ in model.named_modules() if name]
    transposed = any(isinstance(m, LoraLinear) and m.transposed for m in model.modules())
    return {
        "peft_type": "LORA",
        "task_type": adapter.task_type,
        "base_model_name_or_path": adapter.base,
        "revision": adapter.revision,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "target_modules": shortest_names(adapter.ranks, every),
        "modules_to_save": list(adapter.saved) or None,
        "rank_pattern": {re.escape(n): r for n, r in adapter.ranks.items() if r != rank},
        "alpha_pattern": {re.escape(n): a for n, a in adapter.alphas.items() if a != alpha},
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _own_name(name: str) -> str:
    name = name.removeprefix(_PREFIX).replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".")
    return re.sub(r"\.(lora_[AB]|lora_magnitude_vector)(\.default)?(\.weight)?$", r".\1", name)


def peft_name(name: str) -> str:
    return _PREFIX + (f"{name}.weight" if name.endswith((".lora_A", ".lora_B")) else name)


def by_pattern(patterns: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """PEFT's rule: a key is the end of a name, as a regular expression."""
    for key, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({key})$", name):
            return value
    return default


def _twins(model: nn.Module) -> dict[str, list[str]]:
    """Further names of tied parameters, by the name that they are trained under."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name != first[id(parameter)]:
            found.setdefault(first[id(parameter)], []).append(name)
    return found


def _tied_once(folder: str, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the second names of tied tensors. PEFT unties what it trains, and a model whose head is its word table
    has one place for both: they must be the same."""
    once = dict(tensors)
    for name, twins in _twins(model).items():
        for twin in twins:
            here, there = tensors.get(name), once.pop(twin, None)
            if here is there is None:
                continue
            if here is None or there is None or not here.equal(there):
                raise NotYetError(
                    f"the adapter in '{folder}' has another '{name}' than '{twin}', which are one here (tied). "
                    "Tables that an adapter unties are not built yet. Use an adapter without them in modules_to_save."
                )
    return once


def _check(folder: str, model: nn.Module, modules: dict[str, nn.Module], tensors: dict, targets: list[str]) -> None:
    """Every tensor must have its place, and the place its size."""
    if not targets:
        raise UserError(f"'{folder}' holds no adapter: there is no lora_A in {WEIGHTS}. Save it again.")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in tensors.items():
        place, _, last = name.rpartition(".")
        if last in ("lora_A", "lora_B"):
            layer = modules.get(place)
            if layer is None or not is_linear(layer):
                raise UserError(f"the adapter in '{folder}' stands beside '{place}', which is no linear layer here.")
            width = sizes(layer)[0 if last == "lora_A" else 1]
            if tensor.shape[1 if last == "lora_A" else 0] != width:
                raise UserError(f"the adapter in '{folder}' does not fit '{place}': {tuple(tensor.shape)} of {width}.")
        elif last == MAGNITUDE:
            if place not in targets or tensor.shape != (sizes(modules[place])[1],):
                raise UserError(f"the adapter in '{folder}' does not fit '{place}': its lengths are for another layer.")
        elif "lora_" in name:
            raise NotYetError(f"the adapter in '{folder}' has '{name}'; only adapters of linear layers are built.")
        elif ".base_layer." in name:
            raise NotYetError(
                f"the adapter in '{folder}' holds '{name}', a table of the base that PEFT adds where an adapter stands "
                "beside it. Save it without: save_pretrained(folder, save_embedding_layers=False)."
            )
        elif name not in parameters:
            raise UserError(f"the adapter in '{folder}' has '{name}', which this model does not have.")
        elif parameters[name].shape != tensor.shape:
            raise UserError(
                f"the adapter in '{folder}' has '{name}' of shape {tuple(tensor.shape)}, but the model's is "
                f"{tuple(parameters[name].shape)}. A head of other classes cannot be continued."
            )


def _saved_modules(config: dict[str, Any], modules: dict[str, nn.Module], names: list[str]) -> tuple[str, ...]:
    """The modules that the full tensors belong to: as the config names them, else where they lie."""
    asked = config.get("modules_to_save") or []
    found: list[str] = []
    for name in names:
        ends = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]  # from the inside out
        listed = [end for end in ends if any(end.endswith(key) for key in asked)]
        found.append(listed[-1] if listed else ends[0])
    return tuple(name for name in modules if name in set(found))
