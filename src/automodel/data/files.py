"""Local data: which files a path means, which split each belongs to, and how they are read.

Parsing is left to `datasets` (its builders are what hub datasets are read with), with four things decided here:

- values of JSON files are those that are written there (`exact_json.py`);
- its table cache is kept under the hash of the files' *content*; `datasets` itself goes by modification times;
- cells of CSV files are text as they are written, and only an empty one is missing; what of them are numbers is decided
  where labels are looked for (`numbers.py`). A TSV file with stray quotes is read without quoting;
- text files: a folder of classes (`train/pos/1.txt`) gives a labelled document for each file; a folder of other text
  files gives a document for each file; one text file gives a document for each paragraph (blank lines between), or for
  each line where it has no blank lines.
"""

from __future__ import annotations

import csv
import errno
import glob
import json
import logging
import os
import re
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from automodel.config.errors import UserError
from automodel.config.machine_errors import shortage
from automodel.config.run_folders import not_of_runs
from automodel.data.cells import check_encoding, first_row_options, open_text
from automodel.data.columns import did_you_mean
from automodel.data.config import DatasetConfig
from automodel.data.exact_json import as_written, holds_json, with_all_digits
from automodel.data.fingerprint import digest
from automodel.data.header import check_header, named_by_config
from automodel.data.json_faults import check_depth, records, repeated_keys
from automodel.data.nested_json import SPLIT_WORDS, nested_rows
from automodel.data.packed import PackedError, opened, plain_name, unpacked
from automodel.data.store import unwritable
from automodel.data.unreadable import different_columns, unreadable

FORMATS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
READ_INTO_NAMES = ("*", "?", "[", "::")
"""What `datasets` finds patterns and addresses by."""
READABLE = "CSV, TSV, JSON, JSONL, Parquet, Arrow and text (.txt) files, each also as .gz, .bz2, .xz, .zst or .zip"
NOT_DATA = {"dataset_infos.json", "dataset_info.json", "state.json", "config.json", "package.json", "SOURCE.txt"}
NOT_DATA_WORDS = ("readme", "license", "licence", "requirements")


def format_of(path: Path) -> str | None:
    """A file's format, or that of what is compressed in it."""
    return FORMATS.get(Path(plain_name(path)).suffix.lower())


def split_of(path: Path, root: Path) -> str | None:
    """The split a file belongs to, by its own name or by the folders above it up to the root."""
    parts = [path.name.split(".")[0], *reversed(path.relative_to(root).parts[:-1])]
    for part in parts:
        words = "".join(c if c.isalnum() else " " for c in part.lower()).split()
        for word in words:
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return None


def data_files(root: Path) -> list[Path]:
    """The readable files below a folder, in a stable order; what runs have written there is no data."""
    found = []
    for path in not_of_runs(root):
        hidden = any(part.startswith((".", "__")) for part in path.relative_to(root).parts)
        ours = path.name in NOT_DATA or path.name.lower().startswith(NOT_DATA_WORDS)
        if not hidden and not ours and format_of(path):
            found.append(path)
    return found


def by_split(files: Iterable[Path], root: Path) -> dict[str, list[Path]]:
    """Files of each split; files that name none are the training data."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(split_of(file, root) or "train", []).append(file)
    return splits


def one_format(files: list[Path], root: Path, section: str) -> str:
    """The format all files share. A mixture is never guessed at."""
    formats = {format_of(file) or "?": file for file in files}
    if len(formats) > 1:
        examples = ", ".join(f"{os.path.relpath(file, root)}" for file in formats.values())
        raise UserError(
            f"{section}.path: '{root}' holds files of several formats ({examples}). "
            f'Say which are meant with {section}.data_files, e.g. data_files: "*.{next(iter(formats))}".'
        )
    return next(iter(formats))


def class_folders(files: list[Path], root: Path) -> bool:
    """Text files sorted into one folder for each class, below an optional folder for each split."""
    parents = {file.parent for file in files}
    names = {parent.name for parent in parents if parent != root and parent.name.lower() not in SPLIT_WORDS}
    return len(names) > 1 and all(p != root and p.name.lower() not in SPLIT_WORDS for p in parents)


def read_split(
    files: list[Path],
    root: Path,
    format: str,
    cache: Path,
    section: str,
    key: str | None = None,
    cfg: DatasetConfig | None = None,
) -> Any:
    """One split as a `datasets.Dataset`. Cells of CSV files are text, whatever they hold (`numbers.py`). `key`: where
    the rows stand in a JSON file that has several splits. `cfg`: tells which columns the config names."""
    cfg = cfg or DatasetConfig()
    if format in ("csv", "tsv", "json", "text"):
        for file in files:
            check_encoding(file, section)
            if format == "json":
                check_depth(file, section)
    if format == "text":
        return _read_texts(files, root)
    import datasets
    import pyarrow

    paths = files
    if format == "json" and (nested := nested_rows(files, section, key)) is not None:
        try:
            return from_records(nested)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError):  # which `datasets` can read
            paths = [_as_lines(nested, cache)]
    tables = format in ("csv", "tsv")
    if len(paths) > 1 and tables and not cfg.column_names and (difference := different_columns(paths, format)):
        raise UserError(f"{section}.path: {difference}")
    options = _csv_options(files, format, section, cfg) if tables else [{}] * len(paths)
    alike = all(option == options[0] for option in options)
    # Files that differ in their quotes are read one by one.
    groups = [(paths, options[0])] if alike else [([path], option) for path, option in zip(paths, options)]

    def read(group: list[Path], **option: Any) -> Any:
        files = {"train": [_as_one_file(plain[path], cache) for path in group]}
        kind = "csv" if format == "tsv" else format
        return datasets.load_dataset(kind, data_files=files, split="train", cache_dir=str(cache), **option)

    try:
        with quiet(datasets):
            plain = _plain(paths, cache, section)
            parts = [read(group, **option) for group, option in groups]
            if format == "json":
                _refuse_repeated_keys(parts[0], paths, section)
                exact = as_written(parts[0], lambda features: read(paths, features=features))
                return with_all_digits(exact, lambda: chain.from_iterable(map(records, paths)))
            return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    except UserError:
        raise
    except Exception as error:
        if "corresponds to no data" in str(error) or all(file.stat().st_size == 0 for file in files):
            raise UserError(f"{section}.path: '{files[0]}' has no rows. Name a file that has some.") from error
        if _no_room(error):
            raise unwritable(cache, "there is not enough space on the disk") from error
        if shortage(error) is not None:
            raise
        raise UserError(unreadable(files, paths, format, error, section, cfg.column_names)) from error


def _plain(paths: list[Path], cache: Path, section: str) -> dict[Path, Path]:
    """What `datasets` reads for each file: the file itself, or what was compressed in it."""
    found = {}
    for number, path in enumerate(paths):
        try:
            found[path] = unpacked(path, cache / "unpacked" / str(number))
        except PackedError as error:
            raise UserError(f"{section}.path: '{path}' cannot be read: {error}.") from error
    return found


def _as_one_file(path: Path, cache: Path) -> str:
    """The name of a file as `datasets` takes it for that file alone: it would match `a[1].csv` as a pattern, which is
    `a1.csv`, and open a name with `::` as an address. Such a file gets another name, in the cache."""
    full = path.absolute()
    if not any(sign in str(full) for sign in READ_INTO_NAMES):
        return str(path)
    ending = "".join(suffix for suffix in path.suffixes[-2:] if re.fullmatch(r"\.\w+", suffix))
    link = cache / "named" / f"{digest(str(full))}{ending}"
    half = link.with_name(f".{uuid.uuid4().hex[:8]}")
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        half.symlink_to(full)
        os.replace(half, link)
    except OSError as error:
        raise unwritable(cache, error.strerror or str(error)) from error
    return glob.escape(str(link))


def _refuse_repeated_keys(rows: Any, paths: list[Path], section: str) -> None:
    """Arrow has refused them, but not where a file is an array, or a column has values of several kinds: those are read
    by parsers that take the last one."""
    arrays = [path for path in paths if Path(plain_name(path)).suffix.lower() not in (".jsonl", ".ndjson")]
    for path in paths if holds_json(rows.features) else arrays:
        if (fault := repeated_keys(path)) is not None:
            raise UserError(f"{section}.path: '{path}': {fault}")


def _csv_options(files: list[Path], format: str, section: str, cfg: DatasetConfig) -> list[dict[str, Any]]:
    """How pandas has to read each file for its cells to be those that were meant."""
    found = []
    for file in files:
        options: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}
        if format == "tsv":
            options["sep"] = "\t"
            if _has_stray_quotes(file):
                options["quoting"] = csv.QUOTE_NONE
        check_header(file, options, section, cfg)
        options |= first_row_options(file, options, section, cfg.column_names)
        options |= named_by_config(cfg)
        found.append(options | {"features": _all_text(file, options)})
    return found


def _all_text(file: Path, options: dict[str, Any]) -> Any:
    """Every column of a CSV file as text, by the names that pandas gives them."""
    import datasets
    import pandas

    with suppress(ValueError, OSError):  # what is wrong with the file is said by who reads all of it
        with opened(file) as content:
            names = pandas.read_csv(content, nrows=0, **options).columns
        return datasets.Features({str(name): datasets.Value("string") for name in names})
    return None


def from_records(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Records as a `datasets.Dataset`, with every column that any of them has."""
    import datasets

    columns = dict.fromkeys(name for row in rows for name in row)
    return datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for name in columns})


def _as_lines(rows: list[dict], cache: Path) -> Path:
    """Rows as JSON lines in the cache, for `datasets` to read."""
    path, half = cache / "rows.jsonl", cache / f"rows.{uuid.uuid4().hex[:8]}"
    if path.exists():  # the folder is named by the content
        return path
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with open(half, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        os.replace(half, path)
    except OSError as error:
        raise unwritable(cache, error.strerror or str(error)) from error
    return path


def _no_room(error: BaseException | None) -> bool:
    """Whether `datasets` failed at its own cache, and not at the files."""
    while error is not None:
        if isinstance(error, OSError) and (error.errno == errno.ENOSPC or "Not enough disk space" in str(error)):
            return True
        error = error.__cause__
    return False


class quiet:
    """No progress bars and log lines of `datasets` and the hub's library while reading: our own output says what
    happens."""

    def __init__(self, datasets: Any):
        self.datasets = datasets

    def __enter__(self) -> None:
        self.were_on = self.datasets.utils.are_progress_bars_disabled() is False
        self.datasets.utils.disable_progress_bars()
        self.verbosity = self.datasets.utils.logging.get_verbosity()
        self.datasets.utils.logging.set_verbosity(logging.CRITICAL)
        self.hub_verbosity = logging.getLogger("huggingface_hub").level
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)

    def __exit__(self, *_: Any) -> None:
        self.datasets.utils.logging.set_verbosity(self.verbosity)
        logging.getLogger("huggingface_hub").setLevel(self.hub_verbosity)
        if self.were_on:
            self.datasets.utils.enable_progress_bars()


def _read_texts(files: list[Path], root: Path) -> Any:
    import datasets

    if class_folders(files, root):
        names = sorted({file.parent.name for file in files})
        texts = {"text": [_whole(file) for file in files], "label": [names.index(f.parent.name) for f in files]}
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
        return datasets.Dataset.from_dict(texts, features=features)
    if len(files) > 1 and not all(split_of(Path(file.name), Path()) for file in files):
        return datasets.Dataset.from_dict({"text": [_whole(file) for file in files]})
    documents = [document for file in files for document in _documents(_whole(file))]
    features = datasets.Features({"text": datasets.Value("string")})
    return datasets.Dataset.from_dict({"text": documents}, features=features)


def _whole(path: Path) -> str:
    with open_text(path) as file:
        return file.read()


def _documents(text: str) -> list[str]:
    # Not splitlines: prose may hold U+2028 and the like inside a line.
    lines = text.replace("\r\n", "\n").split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    if all(line.strip() for line in lines):
        return lines
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    return ["\n".join(paragraph) for paragraph in paragraphs if paragraph]


def _has_stray_quotes(path: Path) -> bool:
    """Tab-separated text usually has no quoting at all; a lone quote would swallow the lines after it. Where quotes
    enclose tabs or line ends, they are whole cells, and rows are as long as the header only if they are read so."""
    with open_text(path) as file:
        header = file.readline().count("\t")
        odd, ragged = False, 0
        for line in file:
            odd = odd or line.count('"') % 2 == 1
            ragged += bool(line.strip()) and line.count("\t") != header
    if not odd or not ragged:
        return odd
    usual = csv.field_size_limit(sys.maxsize)
    try:
        with open_text(path) as file:
            rows = csv.reader(file, delimiter="\t", strict=True)
            return ragged <= sum(1 for row in rows if row and len(row) != header + 1)
    except csv.Error:  # a quote inside a cell, or one that is never closed
        return True
    finally:
        csv.field_size_limit(usual)


def missing_path(path: str, section: str) -> UserError:
    """A path that does not exist, with the nearest name beside it, or that is neither a file nor a folder."""
    expanded = Path(path).expanduser()
    if expanded.exists() and not expanded.is_file() and not expanded.is_dir():
        return UserError(
            f"{section}.path: '{path}' is no regular file but a pipe or a device, and data is read more than once. "
            "Write it to a file, and give that."
        )
    parent = expanded.parent
    near = ""
    if parent.is_dir():
        near = did_you_mean(expanded.name, [p.name for p in parent.iterdir()])
    where = "" if parent.is_dir() else f" The folder '{parent}' does not exist either."
    here = "" if expanded.is_absolute() else f" in {Path.cwd()}"  # a run's own config may be read from somewhere else
    fix = near or " Correct the path."
    return UserError(f"{section}.path: there is no file or folder '{path}'{here}.{where}{fix}")
