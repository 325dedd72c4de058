"""Predictions for files: which columns of a file are the question, and the file that comes back.

The run's own column names are looked for first, then the names that public datasets use, as in training;
`--text-column` wins over both. The answer file keeps every column of the input and adds the prediction's. A text file
has one text on each line, as stdin has; in training a blank line would end a paragraph there.
"""

from __future__ import annotations

import csv
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from automodel.config.errors import UserError
from automodel.data import columns as known
from automodel.data.cells import check_encoding, open_text
from automodel.data.columns import did_you_mean, is_list, is_string, kind_of
from automodel.data.config import DatasetConfig
from automodel.data.files import format_of
from automodel.data.messages import holds_chats
from automodel.data.prepare import cache_root
from automodel.data.sources import find_source
from automodel.engine.predict import Predictor
from automodel.engine.prompts import prompt_writer
from automodel.engine.stdin import lines_of_stdin
from automodel.tasks.answers import Answer
from automodel.tasks.task import Task


@dataclass(frozen=True)
class Questions:
    """What a model is asked, row by row."""

    items: list[Any]
    pairs: list[str] | None = None
    """Second texts, for a model of pairs."""


def read_table(path: str, split: str | None = None, note: Callable[[str], None] | None = None) -> Any:
    """The rows of any file, folder or hub dataset that training could read; `-`: a row for each line of stdin. `note`
    is told of splits that are left out although nobody chose."""
    file = Path(path).expanduser()
    lines = path == "-" or (file.is_file() and format_of(file) == "text")
    if lines and split is not None:
        raise UserError("--split chooses rows of a table, a folder or a dataset of the hub; lines of text have none.")
    if path == "-":
        return _rows_of(lines_of_stdin())
    try:
        rows = _lines(file) if lines else _as_in_training(path, split, note)
    except UserError as error:
        text = str(error).replace("--input.path", "--input")
        raise UserError(
            text.replace("e.g. --input.split: ", "e.g. --split ").replace("--input.split", "--split")
        ) from error
    if len(rows) == 0:
        raise UserError(f"--input: '{path}' has no rows.")
    return rows


def _as_in_training(path: str, split: str | None, note: Callable[[str], None] | None) -> Any:
    cfg = DatasetConfig(path=path, split=split)
    source = find_source(cfg, role="train", section="--input", resolved_target=None, memory=cache_root(cfg))
    rows = source.load()
    choice = source.choice(rows)
    if choice and choice.others and split is None and note is not None:
        others = ", ".join(choice.others)
        note(f"--input: the rows are those of the split {choice.taken}; there is also {others}. Choose with --split")
    return rows


def _lines(path: Path) -> Any:
    """A row for each line. Blank ones are rows too: without them nobody could tell which answer is whose."""
    check_encoding(path, "--input")
    with open_text(path) as file:
        return _rows_of([line.rstrip("\n") for line in file])


def _rows_of(lines: list[str]) -> Any:
    import datasets

    features = datasets.Features({"text": datasets.Value("string")})
    return datasets.Dataset.from_dict({"text": lines}, features=features)


def questions_of(
    rows: Any, predictor: Predictor, text_column: str | None, pair_column: str | None, raw: bool = False
) -> Questions:
    """The columns that the model reads. `raw`: of a language model, one text as it is, however it was trained."""
    table = _Table(rows.features, predictor.saved.dataset, text_column, predictor.saved.reads_pairs is not False)
    table.check_added(predictor.task)
    if pair_column is not None and predictor.task.verb != "classify":
        raise UserError(f"--pair-column belongs to text classification; this is a {predictor.task} model.")
    if predictor.task.verb == "classify":
        text, pair = table.text_and_pair(pair_column)
        return Questions(rows[text][:], rows[pair][:] if pair else None)
    if predictor.task.verb == "tag":
        return Questions(rows[table.tokens()][:])
    if predictor.task.head.encoder_decoder:
        record, column = table.source()
        values = rows[record or column][:]
        return Questions([(value or {}).get(column) for value in values] if record else values)
    return Questions(_texts(rows, table) if raw else _prompts(rows, table, predictor))


def _prompts(rows: Any, table: _Table, predictor: Predictor) -> list[Any]:
    if table.asked is not None:
        return _texts(rows, table)
    roles = prompt_writer(predictor.saved).columns
    named = {role: role if role in rows.features else column for role, column in roles.items()}
    missing = [column for column in named.values() if column not in rows.features]
    if named and not missing:  # as it was trained, whatever else there is
        return [{role: row[column] for role, column in named.items()} for row in rows]
    messages = table.messages(rows)
    if messages:
        tools = next((name for name in known.TOOLS if name in rows.features), None)
        extra = {"system": "system" if "system" in rows.features else None, "tools": tools}
        beside = {key: name for key, name in extra.items() if name is not None}
        return [{"messages": row[messages], **{key: row[name] for key, name in beside.items()}} for row in rows]
    if missing and len(named) > 1:
        raise table.absent(missing[0], "a part of the prompts that the run was trained on")
    return _texts(rows, table)


def _texts(rows: Any, table: _Table) -> list[str]:
    return rows[table.text(known_names=("prompt", "instruction", "question", *known.TEXT))][:]


@dataclass(frozen=True)
class _Table:
    """The columns of a file, asked for with the run's settings."""

    features: Any
    cfg: DatasetConfig
    asked: str | None
    """`--text-column`."""
    pairs: bool = True
    """Whether two columns may be a pair of texts; false for a model that was trained on single ones."""

    def absent(self, column: str, what: str) -> UserError:
        listed = ", ".join(f"{name} ({kind_of(feature)})" for name, feature in self.features.items())
        return UserError(
            f"--input has no column '{column}', {what}. It has: {listed}. Name the right one with --text-column, or "
            f"rename it.{did_you_mean(column, self.features)}"
        )

    def check_added(self, task: Task) -> None:
        """No column may be lost to one of the prediction's."""
        added = {field.name for field in fields(task.answer)}
        if task.verb == "tag" and self.tokens() == "words" and is_list(self.features["words"]):
            added.remove("words")  # comes back as it was
        taken = [name for name in self.features if name in added]
        if taken:
            raise UserError(f"--input has a column '{taken[0]}', which the prediction would replace. Rename it.")

    def _mapped(self, role: str, configured: str | None) -> str | None:
        return configured or (self.cfg.column_mapping or {}).get(role)

    def text(self, configured: str | None = None, known_names: Sequence[str] = known.TEXT) -> str:
        """A column of strings: the one asked for, the run's, one of a known name, or the only one there is."""
        if self.asked is not None:
            if self.asked not in self.features:
                raise self.absent(self.asked, "as --text-column says")
            return self._strings(self.asked)
        configured = configured or self.cfg.text_column
        if configured is not None and list(self.features) == ["text"]:
            configured = "text"  # as a .txt file has it, whatever the run's column was called
        if configured is not None:
            if configured not in self.features:
                raise self.absent(configured, "which the run was trained on")
            return self._strings(configured)
        strings = [name for name, feature in self.features.items() if is_string(feature)]
        found = next((name for name in known_names if name in strings), None)
        labels = {self.cfg.label_column, *known.LABEL}
        others = [name for name in strings if name not in labels] or strings
        if found is None and len(others) == 1:
            found = others[0]
        if found is None:
            listed = ", ".join(f"{name} ({kind_of(feature)})" for name, feature in self.features.items())
            raise UserError(f"--input: no column is known to hold the text. It has: {listed}. Name it: --text-column.")
        return found

    def _strings(self, name: str) -> str:
        if not is_string(self.features[name]):
            raise UserError(f"--input: column '{name}' holds {kind_of(self.features[name])}, not text.")
        return name

    def text_and_pair(self, asked_pair: str | None) -> tuple[str, str | None]:
        text, pair = self._mapped("text", self.cfg.text_column), self._mapped("text_pair", self.cfg.text_pair_column)
        pair = asked_pair or pair
        if text is None and self.asked is None and (pair or self.pairs):
            for first, second in known.TEXT_PAIRS:
                strings = all(name in self.features and is_string(self.features[name]) for name in (first, second))
                if strings and pair in (None, second):
                    return first, second
        if pair is not None and pair not in self.features:
            raise self.absent(pair, "which holds the second text of each pair")
        return self.text(text), pair

    def tokens(self) -> str:
        configured = self._mapped("tokens", self.cfg.tokens_column)
        if self.asked is None:
            for name in (configured, *known.TOKENS):
                if name is not None and name in self.features and is_list(self.features[name]):
                    return name
        return self.text()

    def source(self) -> tuple[str | None, str]:
        """A record's column and the key in it, or None and a column."""
        configured = self._mapped("source", self.cfg.source_column)
        record = self.features.get("translation")
        if self.asked is None and isinstance(record, dict) and (configured is None or configured not in self.features):
            language = configured or next(name for name in record if name != self.cfg.target_column)
            if language not in record:
                raise self.absent(language, "a language of 'translation' that the run was trained on")
            return "translation", language
        sources = tuple(dict.fromkeys(source for source, _ in known.SOURCE_TARGET))
        return None, self.text(configured, (*sources, *known.TEXT))

    def messages(self, rows: Any) -> str | None:
        """As training data are read: lists, or lists written as JSON text."""
        own = [self.cfg.messages_column] if self.cfg.messages_column else []
        names = [*own, *known.MESSAGES, known.PROMPT_MESSAGES[0]]
        return next((n for n in names if n in self.features and holds_chats(rows, n, self.features[n])), None)


def check_output(path: Path, source: str | None) -> None:
    """Whatever would stop the answers from being written, before they are made."""
    if path.suffix not in (".jsonl", ".csv"):
        raise UserError(f"--output: '{path}' must end in .jsonl or .csv.")
    if not path.parent.is_dir():
        raise UserError(f"--output: the folder '{path.parent}' does not exist.")
    if path.is_dir():
        raise UserError(f"--output: '{path}' is a folder. Name a file in it.")
    if source is not None and path.exists() and os.path.exists(source) and os.path.samefile(path, source):
        raise UserError("--output is the same file as --input, which would be lost. Name another one.")
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # now, and not after an hour of answers
            pass
    except OSError as error:
        raise UserError(f"--output: nothing can be written to '{path.parent}' ({error.strerror}).") from error


def answered(rows: Sequence[dict[str, Any]], answers: Sequence[Answer | None]) -> list[dict[str, Any]]:
    """Each row with its prediction's columns; null where a row could not be used."""
    added = [answer.to_json() if answer is not None else {"prediction": None} for answer in answers]
    return [{**row, **new} for row, new in zip(rows, added, strict=True)]


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """`.jsonl` or `.csv`, in one rename; lists and records become JSON in the cells of a CSV file."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            if path.suffix == ".jsonl":
                file.writelines(json_line(row) + "\n" for row in rows)
            else:
                columns = list(dict.fromkeys(name for row in rows for name in row))
                writer = csv.DictWriter(file, columns)
                writer.writeheader()
                writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def json_line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, default=str)


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, dict | list) else value
