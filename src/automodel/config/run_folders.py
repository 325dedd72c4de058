"""Run folders, for everything that looks for data or a model under a name.

A run may write into a folder of the same name as a dataset on the hub: `dataset: imdb` and `checkpoint_dir: ./imdb`.
What runs have written is no data, and the folder that holds nothing else does not stand in the way of the hub's name.
A folder that holds a model may be meant or not; `trained_from_same_name` tells those that need a question.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from automodel.config.yaml_text import parse_yaml

MODEL_FILE = re.compile(
    r"adapter_(config\.json|model\.safetensors)"
    r"|(model|pytorch_model).*\.(safetensors|bin)(\.index\.json)?"
    r"|(config|generation_config|tokenizer.*|special_tokens_map|added_tokens|vocab)\.json"
    r"|vocab\.txt|merges\.txt|chat_template\.jinja|.*\.model"
)
"""What transformers writes for a model and its tokenizer. A user's own notes or data beside them are no model."""
_RECORDS = re.compile(r"run(\.\d+)?")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def could_be_on_hub(name: str) -> bool:
    """Whether the hub could have a model or dataset of this name; `./imdb` can only be a folder."""
    return _HUB_NAME.fullmatch(name) is not None


def records_in(folder: Path) -> list[Path]:
    """The folders of records (`run`, `run.1`, …) that runs have written into a folder."""
    found = [path for path in folder.glob("run*") if _RECORDS.fullmatch(path.name)]
    return [path for path in found if (path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file()]


def not_of_runs(root: Path) -> Iterator[Path]:
    """The files below a folder that no run has written, in a stable order."""
    known: dict[Path, list[Path]] = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and not _of_a_run(path, root, known):
            yield path


def _of_a_run(path: Path, root: Path, known: dict[Path, list[Path]]) -> bool:
    for folder in path.parents:
        records = known.setdefault(folder, records_in(folder))
        if any(record in path.parents for record in records):
            return True
        if records and folder == path.parent and MODEL_FILE.fullmatch(path.name):
            return True
        if folder == root:
            break
    return False


def holds_runs(root: Path) -> bool:
    """Whether a run has its folder here or somewhere below."""
    return any(_RECORDS.fullmatch(path.name) and path in records_in(path.parent) for path in root.rglob("run*"))


def trained_from_same_name(name: str, folder: Path | None = None) -> bool:
    """Whether the folder of this name was written by a run that itself was trained from this name on the hub: which of
    the two is meant, nothing tells."""
    folder = folder or Path(name)
    if not could_be_on_hub(name) or not folder.is_dir():
        return False
    return any(name in _models_read(record / "config.yaml") for record in records_in(folder))


def folder_or_hub(name: str) -> str:
    """What to say of such a name."""
    return (
        f"'{name}' is the folder of a run here that began with the model of that name on the hub. Write ./{name} if "
        "the folder is meant; for the model of the hub, rename the folder."
    )


def _models_read(config: Path) -> list[object]:
    try:
        model = parse_yaml(config.read_text(encoding="utf-8"))["model"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, RecursionError):
        return []
    if not isinstance(model, dict):
        return [model]
    return [model.get("pretrained_model_name_or_path"), model.get("tokenizer")]
