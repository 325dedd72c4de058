"""What the files of a model may say, looked at as data before transformers opens them.

A model folder, or a repository of the hub, may come from anywhere. Without `--trust remote_code` nothing in it may
choose code or other files: transformers downloads and runs kernels that `attn_implementation: publisher/kernel` names,
loads pickled weights where an index or `transformers_weights` names them, and takes whatever class of its own stands
under `tokenizer_class`. Weights in any other form than safetensors are refused with trust, too. `auto_map` (Python
files beside the weights) is not looked at here: transformers itself asks for trust.

Chat templates are programs as well, which Jinja runs in a sandbox; they are left to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from automodel.config.errors import UserError
from automodel.config.json_text import parse_json
from automodel.config.own_files import file_inside
from automodel.config.values import on_one_line
from automodel.models.source import Source

CONFIG, GENERATION, ADAPTER = "config.json", "generation_config.json", "adapter_config.json"
TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
INDEX = "model.safetensors.index.json"
LARGEST = 64 * 2**20
"""Bytes of a JSON file: the index of a model of 10^12 parameters has a tenth."""

ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
EXPERTS = ("eager", "batched_mm", "grouped_mm")

FORMS = {
    "model_type": (str, "a text"), "architectures": (list, "a list"), "auto_map": (dict, "a dictionary"),
    "id2label": (dict, "a dictionary"), "label2id": (dict, "a dictionary"),
    "quantization_config": (dict, "a dictionary"), "text_config": (dict, "a dictionary"),
    "dtype": (str, "a text"), "torch_dtype": (str, "a text"),
}  # fmt: skip
"""What code of ours and of transformers reads before anything looks at types."""

OF_THE_LOADER = (
    "_commit_hash", "_configuration_file", "_from_auto", "_from_pipeline", "code_revision", "config_file_name",
    "force_download", "gguf_file", "name_or_path", "proxies", "resume_download", "return_unused_kwargs", "subfolder",
    "token", "use_auth_token", "use_kernels", "kernel_config", "adapter_kwargs", "device_map", "state_dict",
    "weights_only", "use_safetensors", "variant", "key_mapping", "custom_generate",
)  # fmt: skip
"""What `from_pretrained` takes for itself, which is no attribute of a model."""


def check_config(source: Source) -> None:
    """config.json and generation_config.json. Raises `UserError`."""
    config = read_json(source, CONFIG)
    read_json(source, GENERATION)  # an object; nothing in it names code or files
    if config is None:
        return
    for key, (form, words) in FORMS.items():
        if config.get(key) is not None and not isinstance(config[key], form):
            where = f"model: {CONFIG} of {source.name!r} says {key}: {on_one_line(config[key])}"
            raise UserError(f"{where}, which should be {words}. Correct the file, or download or save it again.")
    for number in config.get("id2label") or ():
        if not number.strip().isdecimal():
            where = f"model: {CONFIG} of {source.name!r} says id2label: {on_one_line(config['id2label'])}"
            fix = 'Correct the file, e.g. {"0": "negative", "1": "positive"}.'
            raise UserError(f"{where}, but {number!r} is no number of a class. {fix}")
    if named := config.get("transformers_weights"):
        raise UserError(
            f"model: {CONFIG} of {source.name!r} says transformers_weights: {on_one_line(named)}, "
            "which names another file of weights. Remove the key; weights are read from model.safetensors."
        )
    if not source.trusted:
        check_keys(config, lambda key: f"model: {CONFIG} of {source.name!r} says {key}")


def check_attributes(attributes: dict[str, Any], trusted: bool) -> None:
    """The same for attributes of the run's own config, which may come from elsewhere as well."""
    for key in attributes:
        if key in OF_THE_LOADER:
            raise UserError(f"model.{key}: is a keyword of transformers' loading, no attribute of a model. Remove it.")
    if not trusted:
        check_keys(attributes, lambda key: f"model.{key}")


def check_keys(config: dict[str, Any], place: Callable[[str], str]) -> None:
    """Refuses keys that choose code or files, at any depth. `place`: where a key stands, in words."""
    for path, key, value in _items(config):
        if value is None or value in ({}, []):
            continue
        if key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
            _one_of(value, ATTENTIONS, place(path), "a kernel is code, and would be downloaded and run")
        elif key in ("experts_implementation", "_experts_implementation", "_experts_implementation_internal"):
            _one_of(value, EXPERTS, place(path), "a kernel is code, and would be downloaded and run")
        elif key in ("transformers_weights", "configuration_files"):
            raise UserError(f"{place(path)}: {on_one_line(value)}, which names other files. {_REMOVE}")
        elif key in ("dtype", "torch_dtype") and not path.startswith("quantization_config.") and not _is_dtype(value):
            raise UserError(
                f"{place(path)}: {on_one_line(value)}, which is no dtype. Write float32, bfloat16 or float16."
            )
        elif key == "use_pretrained_backbone" and value:
            raise UserError(f"{place(path)}: {on_one_line(value)}, which downloads other weights. {_REMOVE}")
        elif key in ("backbone", "architecture") and isinstance(value, str) and re.search(r"[:/\\]", value):
            raise UserError(f"{place(path)}: {on_one_line(value)}, which names a place of files. {_REMOVE}")
        elif key in ("model_args", "backbone_kwargs") and isinstance(value, dict):
            for name in ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
                if value.get(name):
                    raise UserError(
                        f"{place(f'{path}.{name}')}: {on_one_line(value[name])}, which names files. {_REMOVE}"
                    )
        elif key == "tokenizer_class":
            _is_tokenizer(value, place(path))


def check_tokenizer(source: Source) -> None:
    """The files of a tokenizer, and what config.json says of it."""
    config = read_json(source, CONFIG)
    if config is not None and not source.trusted:
        check_keys(config, lambda key: f"model.tokenizer: {CONFIG} of {source.name!r} says {key}")
    for name in TOKENIZER:
        found = read_json(source, name)
        if found is not None and not source.trusted:
            _check_tokenizer_keys(found, f"model.tokenizer: {name} of {source.name!r} says ")


def _check_tokenizer_keys(found: dict[str, Any], place: str) -> None:
    _is_tokenizer(found.get("tokenizer_class"), f"{place}tokenizer_class")
    for name in found.get("fast_tokenizer_files") or ():
        if not isinstance(name, str) or re.search(r"[/\\]", name):
            raise UserError(f"{place}fast_tokenizer_files: {on_one_line(name)}, which is not in its folder. {_REMOVE}")
    for key, value in found.items():  # options of libraries: dictionaries, resource files, whole models
        if key.endswith("_kwargs") and isinstance(value, dict):
            for path, _, option in _items(value):
                special = isinstance(option, str) and re.fullmatch(r"<[^<>]+>", option)  # such as </s>
                if isinstance(option, str) and not special and re.search(r"[/\\]", option):
                    raise UserError(f"{place}{key}.{path}: {on_one_line(option)}, which names files. {_REMOVE}")


def check_weights(source: Source) -> None:
    """Which files the weights lie in: safetensors of the same folder. Called before anything is loaded."""
    index = read_json(source, INDEX)
    if index is None:
        return
    where = f"model: {INDEX} of {source.name!r}"
    files = index.get("weight_map")
    if not isinstance(files, dict):
        raise UserError(f"{where} has no weight_map, which says where each tensor lies. Download or save it again.")
    for name in {str(value): value for value in files.values()}.values():
        if source.folder is not None:
            file_inside(source.folder, name, source.folder / INDEX)
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
            raise UserError(
                f"{where} names {on_one_line(name)}: only safetensors of the same folder are read, since other weights "
                "can run code when they are opened. Convert them once where you trust them: load them with "
                "transformers and `save_pretrained`."
            )


def check_no_adapter(source: Source) -> None:
    """A folder of weights that are whole: transformers would add the adapter that stands beside them, or read the base
    that it names."""
    if read_json(source, ADAPTER) is not None:
        raise UserError(
            f"model: {source.name!r} holds an adapter ({ADAPTER}). Name its base there, and the adapter under "
            "peft.pretrained_adapter; or make one model of both with `automodel export --merge`."
        )


def read_json(source: Source, name: str) -> dict[str, Any] | None:
    """A file of the model, which must be a JSON object of no unreasonable size; None where there is none."""
    if source.folder is None:
        return _of_the_hub(source.name, tuple(sorted(source.keywords.items())), name)
    path = source.folder / name
    return _parsed(path, f"{name} of {source.name!r}") if path.is_file() else None


@lru_cache(maxsize=64)
def _of_the_hub(repository: str, keywords: tuple[tuple[str, Any], ...], name: str) -> dict[str, Any] | None:
    """Asked once in a process: every question may be one over the network."""
    from transformers.utils.hub import cached_file

    known = {key: value for key, value in keywords if key in ("cache_dir", "revision", "local_files_only")}
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_gated_repo": False}
    try:
        path = cached_file(repository, name, **known, **quiet)
    except (OSError, ValueError) as error:
        raise UserError(f"model: {name} of {repository!r} could not be read: {on_one_line(str(error))}") from error
    return None if path is None else _parsed(Path(path), f"{name} of {repository!r}")


def _parsed(path: Path, where: str) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"model: {where} has more than {LARGEST // 2**20} MiB. Download or save it again.")
        found = parse_json(path.read_bytes())
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"model: {where} could not be read: it is not a valid JSON file ({error}).") from error
    if not isinstance(found, dict):
        raise UserError(
            f"model: {where} should be a JSON object, and is {on_one_line(found)}. Download or save it again."
        )
    return found


def _items(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, str, Any]]:
    """(path, key, value) of every key at any depth."""
    for key, value in tree.items():
        path = f"{above}{key}"
        yield path, str(key), value
        for number, inner in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(inner, dict):
                yield from _items(inner, f"{path}.{number}." if isinstance(value, list) else f"{path}.")


def _one_of(value: Any, allowed: tuple[str, ...], place: str, why: str) -> None:
    for each in value.values() if isinstance(value, dict) else [value]:
        if each is not None and each not in allowed:
            raise UserError(f"{place}: {on_one_line(each)}; {why}. Allowed without --trust are {', '.join(allowed)}.")


def _is_dtype(value: Any) -> bool:
    import torch

    named = [str(name).removeprefix("torch.") for name in (value.values() if isinstance(value, dict) else [value])]
    return all(name == "auto" or isinstance(getattr(torch, name, None), torch.dtype) for name in named)


def _is_tokenizer(value: Any, place: str) -> None:
    """A name that transformers looks up among all its classes must be a tokenizer's."""
    if value is None:
        return
    if not isinstance(value, str):
        raise UserError(f"{place}: {on_one_line(value)}, which is no name of a class. {_REMOVE}")
    import transformers
    from transformers import PreTrainedTokenizerBase

    for name in (value, value.removesuffix("Fast"), f"{value}Fast"):
        found = getattr(transformers, name, None)
        lacks_a_package = type(found).__name__ == "DummyObject"
        if found is None or lacks_a_package or (isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)):
            continue
        raise UserError(f"{place}: {on_one_line(value)}, which is no tokenizer of transformers. {_REMOVE}")


_REMOVE = "Remove the key, or pass --trust remote_code if you trust these files with your machine."
