"""Where rows come from: `find_source` decides from the config, a `Source` loads.

A path that exists is local (a file, a folder, a `save_to_disk` folder); anything else that could be a hub name goes to
`datasets.load_dataset`, with its caches; what cannot be reached or found is an error that says what was tried. A
`_target_` of the user's is called with the arguments it asks for. A source of local files also knows its content
without loading it, so a second start reads no rows at all.
"""

from __future__ import annotations

import glob
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from automodel.config.errors import UserError
from automodel.config.json_text import parse_json
from automodel.config.machine_errors import shortage
from automodel.config.own_files import file_inside
from automodel.config.run_folders import could_be_on_hub
from automodel.data import files as local
from automodel.data.config import BUILDERS, BUILT_IN_TARGETS, PATTERN, DatasetConfig
from automodel.data.fingerprint import digest, files_digest
from automodel.data.hub_names import names_the_hub
from automodel.data.media import undecoded
from automodel.data.nested_json import splits_inside
from automodel.data.packed import why_not_read
from automodel.data.permitted import check, is_address
from automodel.data.problems import Problems
from automodel.data.splits import SplitChoice, choice_among, chosen_split, split_names, take

DEFAULT_MEMORY = "~/.cache/automodel/tokens"
SQUAD = "rajpurkar/squad"  # what `make_squad_dataset` means where no path is given
WHERE_FROM = ("path", "name", "data_files", "revision", "mixture")


class Source(Protocol):
    """Something that rows come from."""

    @property
    def only_text(self) -> bool:
        """Whether everything in the rows is text, because the files cannot say what is a number."""
        ...

    def content_key(self) -> str | None:
        """A hash of the content that can be had without loading it; None where it cannot."""
        ...

    def check(self) -> None:
        """Raises `UserError` where the rows are not there, or not in reach. Reads none of them."""
        ...

    def load(self) -> Any:
        """A map-style `datasets.Dataset`, with split and limit applied."""
        ...

    def choice(self, rows: Any) -> SplitChoice | None:
        """Which of several splits is taken; `rows` are those that were loaded, where the content could not be known
        otherwise."""
        ...


def load_rows(
    cfg: DatasetConfig,
    *,
    role: str = "train",
    resolved_target: Callable[..., Any] | None = None,
    tokenizer: Any = None,
    remote: bool = False,
) -> Any:
    """The rows of a section as a map-style `datasets.Dataset`. `remote`: as in `find_source`."""
    section = "dataset" if role == "train" else "validation_dataset"
    memory = Path(cfg.cache_dir or DEFAULT_MEMORY).expanduser()
    place: Any = {"resolved_target": resolved_target, "memory": memory, "tokenizer": tokenizer, "remote": remote}
    return find_source(cfg, role=role, section=section, **place).load()


def find_source(
    cfg: DatasetConfig,
    *,
    role: str,
    section: str,
    resolved_target: Callable[..., Any] | None,
    memory: Path,
    tokenizer: Any = None,
    remote: bool = False,
) -> Source:
    """The source a section means. Raises `UserError` where it means nothing that exists, or what may not be read.
    `remote`: whether the command line allows addresses in `data_files`."""
    check(cfg, section, remote=remote)
    name = getattr(resolved_target, "__name__", "") or (cfg.target or "").split(".")[-1]
    if name not in BUILT_IN_TARGETS and cfg.target is not None:
        if resolved_target is None:
            raise TypeError(f"{cfg.target} must be resolved by the config's gate and passed as resolved_target")
        return CallableSource(cfg, role, section, resolved_target, tokenizer)
    if not cfg.path and name == "make_squad_dataset":
        cfg = replace(cfg, path=SQUAD)
    if not cfg.path:
        raise UserError(
            f"{section}.path is missing. Give a hub name (path: imdb), a file (path: reviews.csv) or a folder of files."
        )
    if cfg.path in BUILDERS and cfg.data_files:
        root, found = _named_files(cfg, section, memory)
        return _file_source(cfg, role, section, memory, root, found, cfg.path)
    path = Path(cfg.path).expanduser()
    if path.is_dir() and not names_the_hub(cfg.path):
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            _refuse_choice(cfg, section, "was written by save_to_disk")
            _refuse_names(cfg, section)
            return SavedSource(cfg, role, section, memory, path)
        if (path / "config.json").is_file() and (path / "tokenizer_config.json").is_file():
            raise UserError(
                f"{section}.path: the folder '{cfg.path}' holds a model, not data. Name a file or a folder of data."
            )
        if cfg.name:
            raise UserError(
                f"{section}.name: '{cfg.name}' would be a configuration on the hub, but '{cfg.path}' is a folder here, "
                "of which every file is read. Choose files with data_files, or remove it."
            )
        found = _matching(path, cfg, section) if cfg.data_files else local.data_files(path)
        if not found:
            raise UserError(
                f"{section}.path: the folder '{cfg.path}' holds no data files. Readable are {local.READABLE}, and "
                f"folders written by save_to_disk.{_or_the_hub(cfg.path)}"
            )
        return _file_source(cfg, role, section, memory, path, found)
    if path.is_file():
        _refuse_choice(cfg, section, "is a file")
        return _file_source(cfg, role, section, memory, path.parent, [path])
    if any(c in cfg.path for c in PATTERN):
        _refuse_choice(cfg, section, "is a pattern of files")
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if os.path.isfile(p))
        if not found:
            raise UserError(f"{section}.path: no file matches '{cfg.path}'. Correct the pattern.")
        return _file_source(cfg, role, section, memory, Path(os.path.commonpath([p.parent for p in found])), found)
    if _looks_local(cfg.path):
        raise local.missing_path(cfg.path, section)
    if cfg.path in BUILDERS:
        raise UserError(
            f"{section}.path: '{cfg.path}' is the name of a format. Say which files with {section}.data_files."
        )
    _require_possible_name(cfg.path, section)
    _refuse_names(cfg, section)
    from automodel.data.hub import HubSource

    return HubSource(cfg, role, section)


def _or_the_hub(path: str) -> str:
    return " Where the dataset of that name on the hub is meant, rename the folder." if could_be_on_hub(path) else ""


def _refuse_choice(cfg: DatasetConfig, section: str, what: str) -> None:
    """`data_files` beside a path that leaves nothing to choose: one of the two was not meant."""
    if cfg.data_files:
        raise UserError(
            f"{section}.data_files chooses files of a folder, but '{cfg.path}' {what}. Remove it, or name the folder "
            f"in {section}.path."
        )


def is_local(path: str, data_files: Any = None) -> bool:
    """Whether rows are read from files here, so that what is said of the hub has no meaning."""
    here = (Path(path).expanduser().exists() and not names_the_hub(path)) or any(c in path for c in PATTERN)
    return bool(path) and (here or (path in BUILDERS and bool(data_files)))


def _looks_local(path: str) -> bool:
    """Whether a path that does not exist was meant as a file: hub names have at most one slash and no extension."""
    return (
        path.startswith((".", "/", "~"))
        or path.count("/") > 1
        or "\\" in path
        or local.format_of(Path(path)) is not None
    )


def _require_possible_name(name: str, section: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(
            f"{section}.path: there is no file or folder '{name}' in {os.getcwd()}, and the hub has no names "
            "like that: they are `owner/name`, of letters, digits, '-', '_' and '.'."
        ) from error


def _named_files(cfg: DatasetConfig, section: str, memory: Path) -> tuple[Path, list[Path]]:
    """The files of `data_files` beside the name of a format, and the folder that they are in. What is at an address is
    fetched first; `check` has seen to it that it may be."""
    named = (cfg.data_files,) if isinstance(cfg.data_files, str) else tuple(cfg.data_files or ())
    remote = [name for name in named if is_address(name)]
    if not remote:
        return Path.cwd(), _matching(Path.cwd(), cfg, section)
    if len(remote) < len(named):
        raise UserError(f"{section}.data_files: addresses beside files here. Give one kind.")
    from automodel.data.fetch import fetch

    return memory / "fetched", [fetch(address, memory / "fetched", section) for address in remote]


def _matching(root: Path, cfg: DatasetConfig, section: str) -> list[Path]:
    patterns = (cfg.data_files,) if isinstance(cfg.data_files, str) else tuple(cfg.data_files or ())
    found: list[Path] = []
    for pattern in patterns:
        matches = sorted(glob.glob(os.path.join(glob.escape(str(root)), Path(pattern).expanduser()), recursive=True))
        if not matches:
            raise UserError(f"{section}.data_files: nothing in '{root}' matches '{pattern}'. Correct the pattern.")
        found += [Path(match) for match in matches if os.path.isfile(match)]
    return found


def _file_source(cfg, role, section, memory, root: Path, found: list[Path], format: str | None = None) -> FileSource:
    unknown = [path for path in found if local.format_of(path) is None]
    if unknown and format is None:
        why = why_not_read(unknown[0])
        raise UserError(
            f"{section}.path: '{unknown[0]}' cannot be read: {why}."
            if why
            else f"{section}.path: '{unknown[0]}' is of a format that cannot be read. Readable are {local.READABLE}."
        )
    if not all(path.is_relative_to(root) for path in found):
        found = [path.absolute() for path in found]
        root = Path(os.path.commonpath([path.parent for path in found]))  # data_files may name files anywhere
    format = format or local.one_format(found, root, section)
    if format not in ("csv", "tsv"):
        _refuse_names(cfg, section)
    if len(found) == 1:
        keys = splits_inside(found[0]) if format == "json" else {}
        if keys:
            inside = dict.fromkeys(keys, found)
            return FileSource(cfg, role, section, memory, root, inside, format, keys=keys)
        own = local.split_of(found[0], root)
        splits = {"train": found} if own is None else {own: found, "train": found}
        return FileSource(cfg, role, section, memory, root, splits, format, whole=True)
    return FileSource(cfg, role, section, memory, root, local.by_split(found, root), format)


def _refuse_names(cfg: DatasetConfig, section: str) -> None:
    if cfg.column_names:
        raise UserError(
            f"{section}.column_names is for CSV and TSV files without a header, and the columns of '{cfg.path}' have "
            "names. Remove it."
        )


def limited(rows: Any, cfg: DatasetConfig) -> Any:
    rows, limit = undecoded(rows), cfg.num_samples_limit
    return rows if limit is None or limit >= len(rows) else rows.select(range(limit))


@dataclass(frozen=True)
class FileSource:
    """Files of one format, by split."""

    cfg: DatasetConfig
    role: str
    section: str
    memory: Path
    root: Path
    splits: Mapping[str, list[Path]]
    format: str
    whole: bool = False
    """A single file: it is the data, whatever its split is called."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Of a JSON file that has several splits: the key of each."""

    @property
    def only_text(self) -> bool:
        return self.format in ("csv", "tsv")

    def _spec(self) -> str:
        if self.whole and self.cfg.split is None:
            return next(iter(self.splits))
        return chosen_split(self.cfg.split, list(self.splits), self.role, self.section)

    def choice(self, rows: Any) -> SplitChoice | None:
        return None if self.whole else choice_among(self._spec(), list(self.splits))

    def check(self) -> None:
        self._spec()

    def content_key(self) -> str:
        return digest(self._spec(), [self._content(name) for name in split_names(self._spec())])

    def _content(self, split: str) -> str:
        return digest(
            *([self.keys[split]] if self.keys else []),
            self.format,
            files_digest(self.splits[split], self.root, self.memory, named=self.format == "text"),
        )

    def load(self) -> Any:
        def whole(split: str) -> Any:
            tables = self.memory / "tables" / self._content(split)
            place: Any = (self.root, self.format, tables, self.section)
            return local.read_split(self.splits[split], *place, self.keys.get(split), self.cfg)

        return limited(take(self._spec(), whole, self.section), self.cfg)


@dataclass(frozen=True)
class SavedSource:
    """A folder written by `save_to_disk`, of one split or of several."""

    cfg: DatasetConfig
    role: str
    section: str
    memory: Path
    path: Path
    only_text: ClassVar[bool] = False

    def _splits(self) -> dict[str, Path]:
        if (self.path / "state.json").is_file():
            return {"train": self.path}
        described = self.path / "dataset_dict.json"
        names = self._read(described).get("splits")
        if not isinstance(names, list):
            raise UserError(f"{self.section}.path: '{described}' lists no splits. Write the dataset again.")
        return {name: file_inside(self.path, name, described) for name in names}

    def _read(self, path: Path) -> dict[str, Any]:
        """A JSON object that `save_to_disk` wrote."""
        try:
            found = parse_json(path.read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError("it is no JSON object")
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise UserError(
                f"{self.section}.path: '{path}' cannot be read: {reason}. Write the dataset again with save_to_disk."
            ) from error
        return found

    def _state(self, folder: Path) -> dict[str, Any]:
        """What `state.json` says about the rows, without the name that `datasets` gave them at that time. The files in
        `_data_files` are those that are read; other ones may lie beside them."""
        path = folder / "state.json"
        state = {key: value for key, value in self._read(path).items() if key != "_fingerprint"}
        listed = state.get("_data_files")
        if not isinstance(listed, list) or not all(isinstance(item, dict) and "filename" in item for item in listed):
            raise UserError(f"{self.section}.path: '{path}' lists no files of rows. Write the dataset again.")
        for item in listed:
            file_inside(folder, item["filename"], path)
        return state

    def _spec(self) -> str:
        splits = list(self._splits())
        if self.cfg.split is None and len(splits) == 1:
            return splits[0]
        return chosen_split(self.cfg.split, splits, self.role, self.section)

    def choice(self, rows: Any) -> SplitChoice | None:
        return choice_among(self._spec(), list(self._splits()))

    def check(self) -> None:
        self._spec()

    def content_key(self) -> str:
        folders, spec = self._splits(), self._spec()
        parts = []
        for name in split_names(spec):
            folder = folders[name]
            state = self._state(folder)
            content = [*(folder / item["filename"] for item in state["_data_files"]), folder / "dataset_info.json"]
            found = [path for path in content if path.is_file()]
            parts.append(digest(state, files_digest(found, folder, self.memory, named=True)))
        return digest("save_to_disk", spec, parts)

    def load(self) -> Any:
        import datasets

        def whole(split: str) -> Any:
            self._state(self._splits()[split])
            try:
                return datasets.load_from_disk(str(self._splits()[split]))
            except Exception as error:
                if shortage(error) is not None:
                    raise
                raise UserError(
                    f"{self.section}.path: '{self._splits()[split]}' was written by save_to_disk but cannot be read: "
                    f"{str(error).splitlines()[0]}. Write it again."
                ) from error

        return limited(take(self._spec(), whole, self.section), self.cfg)


@dataclass(frozen=True)
class CallableSource:
    """A class or function of the user's."""

    cfg: DatasetConfig
    role: str
    section: str
    target: Callable[..., Any]
    tokenizer: Any = None
    only_text: ClassVar[bool] = False

    def content_key(self) -> None:
        return None

    def choice(self, rows: Any) -> None:
        return None  # its own affair

    def check(self) -> None:
        return None  # calling it is the only way to know

    def load(self) -> Any:
        try:
            made = self.target(**self._arguments())
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{self.section}._target_: {self._name} failed with {type(error).__name__}: {error}."
            ) from error
        return limited(as_rows(made, self.cfg.split, self.role, self.section, self._name), self.cfg)

    @property
    def _name(self) -> str:
        return self.cfg.target or getattr(self.target, "__qualname__", repr(self.target))

    def _arguments(self) -> dict[str, Any]:
        """Its own arguments, and those keys of the section that it has parameters for. Keys that say where rows come
        from mean nothing beside it otherwise, and are refused."""
        parameters = inspect.signature(self.target).parameters
        known = {f.name: getattr(self.cfg, f.name) for f in fields(self.cfg) if f.name not in ("target", "extra")}
        known.update({alias: known[field] for alias, field in DatasetConfig.ALIASES.items()})
        offered = {name: value for name, value in known.items() if name in parameters and value is not None}
        taken = {DatasetConfig.ALIASES.get(name, name) for name in offered}
        left = {key: known[key] for key in WHERE_FROM if known[key] is not None and key not in taken}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            offered.update(left)
        elif left:
            problems = Problems()
            for key in left:
                why = f"{self._name} makes the rows itself, and has no parameter for it"
                problems.found.append(
                    UserError(f"{self.section}.{key}: {why}. Remove it, or give it one named `{key}`.")
                )
            problems.raise_if_any()
        if "tokenizer" in parameters and self.tokenizer is not None:
            offered["tokenizer"] = self.tokenizer
        return {**offered, **self.cfg.extra}


def as_rows(made: Any, split: str | None, role: str, section: str, name: str) -> Any:
    """A `datasets.Dataset` out of what a user's function returned."""
    import datasets

    if isinstance(made, datasets.DatasetDict):
        spec = chosen_split(split, [str(s) for s in made], role, section)
        return take(spec, made.__getitem__, section)
    if isinstance(made, datasets.Dataset):
        return made
    if hasattr(made, "to_dict") and hasattr(made, "columns"):
        return datasets.Dataset.from_pandas(made, preserve_index=False)
    counted = hasattr(made, "__getitem__") and not isinstance(made, datasets.IterableDataset)
    try:
        rows = [made[i] for i in range(len(made))] if counted else list(made)
        if not all(isinstance(row, Mapping) for row in rows):
            raise TypeError("its items are not records of columns")
        return local.from_records(rows)
    except Exception as error:
        raise UserError(
            f"{section}._target_: {name} returned {type(made).__name__}, which cannot be used as rows: {error}. "
            "Return a datasets.Dataset, a list of records, or a map-style dataset whose items are records."
        ) from error
