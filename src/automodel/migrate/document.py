"""What a migration found, and the YAML that comes of it: each key with a comment that says where it comes from.

Three lists stand beside the settings. `left_out` names what has no place here and changes little or nothing (a progress
bar, a tracker that is not ours); `differs` what is done in another way; `blocked` what would make another training of
it (a loss of the user's own, arguments that nobody can read). With anything in `blocked` there is no YAML: a wrong one
would be worse than none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel.config.errors import UserError
from automodel.config.holes import FILL_IN
from automodel.data.row_format import LabelPlace
from automodel.tasks.registry import task_named

NEEDED = {"model": ("pretrained_model_name_or_path",), "dataset": ("path", "mixture", "_target_")}
"""Sections without which nothing can be trained, and the keys one of which says what it is."""
ORDER = (
    "model", "task", "dataset", "validation_dataset", "peft", "quantization", "step_scheduler", "dataloader",
    "validation_dataloader", "optimizer", "lr_scheduler", "loss_fn", "training_optimizations", "compile",
    "packed_sequence", "checkpoint", "early_stopping", "wandb", "mlflow", "tensorboard", "seed", "provider",
)  # fmt: skip


@dataclass(frozen=True)
class Note:
    """Something a person must know, with the line of the source it is about (0: the whole of it)."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}" if self.line else self.text


def lines_of(path: Path) -> dict[str, int]:
    """Where each key of a YAML file stands, those of its sections as `section.key`."""
    import yaml

    node, found = yaml.compose(path.read_text(encoding="utf-8")), {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else []:
        found[key.value] = key.start_mark.line + 1
        for inner, _ in value.value if isinstance(value, yaml.MappingNode) else []:
            found[f"{key.value}.{inner.value}"] = inner.start_mark.line + 1
    return found


@dataclass
class Document:
    """Settings on their way into a config file."""

    source: str
    values: dict[str, dict[str, tuple[Any, str]] | tuple[Any, str]] = field(default_factory=dict)
    left_out: list[Note] = field(default_factory=list)
    differs: list[Note] = field(default_factory=list)
    blocked: list[Note] = field(default_factory=list)

    def set(self, path: str, value: Any, origin: str = "") -> None:
        """`section.key`, or a key of the file itself; a later value wins."""
        section, dot, key = path.partition(".")
        if not dot:
            self.values[section] = (value, origin)
            return
        inner = self.values.setdefault(section, {})
        assert isinstance(inner, dict)
        inner[key] = (value, origin)

    def unset(self, path: str) -> None:
        section, _, key = path.partition(".")
        inner = self.values.get(section)
        assert isinstance(inner, dict)
        inner.pop(key, None)
        if not inner:  # an empty section would turn something on
            del self.values[section]

    def open(self, section: str) -> None:
        """An empty section, which turns something on."""
        self.values.setdefault(section, {})

    def get(self, path: str) -> Any:
        section, dot, key = path.partition(".")
        found = self.values.get(section)
        if dot:
            found = found.get(key) if isinstance(found, dict) else None
        return found[0] if isinstance(found, tuple) else None

    @property
    def labels(self) -> LabelPlace | None:
        """Where the labels of the task stand; none where no task is set yet."""
        name = self.get("task")
        return None if name is None else task_named(name).rows.labels

    def drop(self, line: int, text: str) -> None:
        self.left_out.append(Note(line, text))

    def note(self, line: int, text: str) -> None:
        if Note(line, text) not in self.differs:
            self.differs.append(Note(line, text))

    def fill_rows(self, line: int, key: str, size: int) -> None:
        """Rows that other tools fill with documents, which is what their batch sizes count then."""
        self.set("packed_sequence.packed_sequence_size", size, key)
        self.note(
            line, f"{key}: rows of {size} tokens are filled anew in every epoch, and documents never see each other"
        )

    def block(self, line: int, text: str) -> None:
        self.blocked.append(Note(line, text))

    def require(self) -> None:
        """Raises `UserError` with every line that stands in the way."""
        if self.blocked:
            lines = "\n".join(f"  {note}" for note in sorted(self.blocked, key=lambda n: n.line))
            raise UserError(f"{self.source} cannot be turned into a config; nothing was written.\n{lines}")

    def holes(self) -> list[str]:
        """The sections that the source does not name: a fragment has no model, perhaps no data."""
        return [
            section for section in NEEDED if not isinstance(self.values.get(section), tuple) and not self._says(section)
        ]

    def _says(self, section: str) -> bool:
        return any(self.get(f"{section}.{key}") is not None for key in NEEDED[section])

    def with_holes(self) -> dict[str, dict[str, tuple[Any, str]] | tuple[Any, str]]:
        """The settings, with `FILL-IN` where a person has to write something."""
        values = dict(self.values)
        for section in self.holes():
            inner = values.get(section)
            key = NEEDED[section][0]
            values[section] = {key: (FILL_IN, ""), **inner} if isinstance(inner, dict) else (FILL_IN, "")
        return values

    def to_yaml(self) -> str:
        """The file's text."""
        self.require()
        lines = [_comment(f"Made by `automodel migrate` from {self.source}.")]
        for title, notes in (("Done differently here", self.differs), ("Not carried over", self.left_out)):
            if notes:
                lines.append(f"# {title}:")
                lines += [_comment(f"  {note}") for note in sorted(notes, key=lambda n: n.line)]
        for section in self.holes():
            said = f"`{section}` is not part of {self.source}: write it in place of {FILL_IN}, or give another -c."
            lines.append(_comment(said))
        lines.append("")
        values = self.with_holes()
        for section in sorted(values, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
            found = values[section]
            if isinstance(found, tuple):
                lines.append(_line(section, found, ""))
                continue
            lines.append(f"{section}:" if found else f"{section}: {{}}")
            lines += [_line(key, value, "  ") for key, value in found.items()]
        return "\n".join(lines) + "\n"


def _line(key: str, value: tuple[Any, str], indent: str) -> str:
    text = f"{indent}{key}: {_scalar(value[0])}"
    return f"{text}  {_comment(value[1])}" if value[1] else text


def _comment(text: str) -> str:
    """A comment of one line, whatever the source has written: a line break would begin a key of the config."""
    return "# " + "".join(c if c.isprintable() else " " for c in text)


def _scalar(value: Any) -> str:
    """A value as YAML of one line; JSON is YAML."""
    if isinstance(value, float) and value == value:  # 2e-05 would be text to YAML 1.1
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, dict) and value and all(isinstance(key, int) for key in value):  # to JSON they would be text
        return "{" + ", ".join(f"{key}: {_scalar(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str) and _plain(value):
        return value
    return json.dumps(value, ensure_ascii=False).replace("${", "$${")  # no other tool's text names our variables


def _plain(text: str) -> bool:
    """Whether a text needs no quotes."""
    special = text.lower() in ("", "true", "false", "null", "yes", "no", "on", "off", "none", "~")
    start = text[:1].isalpha() or text[:1] in "./_"
    number = text[:1] == "." and text[1:2].isdigit()
    return not special and not number and start and all(c.isalnum() or c in "._/-+" for c in text)
