"""Datasets by their hub name, through the steps of `datasets.load_dataset` and every cache it and the hub client keep.

Between its steps stands a check: which reader `datasets` has chosen for the files, before it reads one of them.

When the hub cannot be reached, three places are tried in turn: the table cache of `datasets` (it does that itself), a
snapshot of the repository in the hub cache, and, for an old short name such as `imdb`, a snapshot or table under its
full name (`stanfordnlp/imdb`).
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from automodel.config.errors import UserError
from automodel.config.hub import hub_left_alone, turned_off_by
from automodel.config.machine_errors import shortage
from automodel.data.config import BUILDERS, DatasetConfig
from automodel.data.files import quiet
from automodel.data.media import undecoded
from automodel.data.permitted import builder_refused, is_refused_builder
from automodel.data.splits import PREFERRED, SplitChoice, bad_slice, choice_among, split_names, unknown_split

T = TypeVar("T")
FROM_TABLES = "cache"  # the builder that takes what an earlier load has prepared
UNREACHABLE = ("ConnectionError", "OfflineModeIsEnabled", "ConnectTimeout", "ConnectError", "LocalEntryNotFoundError")


class _NoSuchSplit(Exception):
    def __init__(self, name: str, available: list[str]):
        super().__init__(name)
        self.name, self.available = name, available


@dataclass(frozen=True)
class HubSource:
    """A dataset of the hub."""

    cfg: DatasetConfig
    role: str
    section: str
    only_text: ClassVar[bool] = False

    def content_key(self) -> None:
        return None

    def choice(self, rows: Any) -> SplitChoice | None:
        taken = self.cfg.split or str(rows.split or "")
        return choice_among(taken, list(rows.info.splits or ())) if taken else None

    def load(self) -> Any:
        rows = undecoded(self._first_that_exists(self._candidates()))
        limit = self.cfg.num_samples_limit
        return rows if limit is None or limit >= len(rows) else rows.select(range(limit))

    def _candidates(self) -> tuple[str, ...]:
        return (self.cfg.split,) if self.cfg.split is not None else PREFERRED[self.role]

    def _first_that_exists(self, specs: tuple[str, ...]) -> Any:
        missing: _NoSuchSplit | None = None
        for spec in specs:
            try:
                return self._load(spec)
            except _NoSuchSplit as error:
                missing = error
        assert missing is not None
        if self.cfg.split is None and self.role == "train" and len(missing.available) == 1:
            return self._load(missing.available[0])
        if self.cfg.split is None:
            raise UserError(
                f"{self.section}.split: '{self.cfg.path}' has no {self.role} split. "
                f"It has: {', '.join(missing.available)}. Say which one to use."
            )
        raise unknown_split(missing.name, missing.available, self.section)

    def check(self) -> None:
        self._somewhere(self._builder)

    def _load(self, spec: str) -> Any:
        return self._somewhere(lambda place: self._load_from(place, spec))

    def _somewhere(self, read: Callable[[str], T]) -> T:
        """What `read` makes of the first place that has the dataset."""
        path = self.cfg.path
        assert path is not None
        import datasets

        with quiet(datasets), hub_left_alone():
            return self._first_place(path, read)

    def _first_place(self, path: str, read: Callable[[str], T]) -> T:
        try:
            return read(path)
        except (UserError, _NoSuchSplit):
            raise
        except Exception as error:
            if shortage(error) is not None:
                raise
            failure = error
            for place in cached_places(path, self.cfg.revision):
                try:
                    return read(place)
                except (UserError, _NoSuchSplit):
                    raise
                except Exception as other:
                    # A copy that is there but cannot be read says more than a hub that cannot be reached.
                    failure = other if os.path.isabs(place) else failure
            raise self._explained(failure) from failure

    def _load_from(self, place: str, spec: str) -> Any:
        builder = self._builder(place)
        try:
            builder.download_and_prepare()
            return builder.as_dataset(split=spec)
        except ValueError as error:
            unknown = re.search(r'Unknown split "(.+?)"\. Should be one of \[(.*)\]', str(error))
            if unknown:
                available = [name.strip(" '\"") for name in unknown[2].split(",")]
                raise _NoSuchSplit(unknown[1], available) from error
            if "Unrecognized instruction format" in str(error) or not all(split_names(spec)):
                raise bad_slice(spec, self.section) from error
            if "corresponds to no data" in str(error):
                raise UserError(
                    f"{self.section}.split: '{spec}' of the dataset '{self.cfg.path}' holds no rows: it begins "
                    "behind the last one."
                ) from error
            raise

    def _builder(self, place: str) -> Any:
        """What reads the dataset at a place. It has looked at names of files, and at no file."""
        import datasets

        if is_refused_builder(place):
            raise UserError(f"{self.section}.path: {builder_refused(place)}")
        options = {k: v for k, v in self.cfg.extra.items() if k in ("data_dir", "token", "storage_options")}
        files = self.cfg.data_files
        with _no_folder_of_that_name(place):
            builder = datasets.load_dataset_builder(
                place,
                self.cfg.name,
                data_files=list(files) if isinstance(files, tuple) else files,
                revision=None if os.path.isabs(place) else self.cfg.revision,
                **options,
            )
        reader = type(builder).__module__.removeprefix("datasets.packaged_modules.").split(".")[0]
        if reader not in (*BUILDERS, FROM_TABLES):
            raise UserError(
                f"{self.section}.path: `datasets` would read the files of '{self.cfg.path}' as {reader}, which is not "
                f"used here: only {', '.join(sorted(BUILDERS))} are. Choose files of these kinds with data_files, or "
                "convert it to Parquet."
            )
        return builder

    def _explained(self, error: Exception) -> UserError:
        name, text = self.cfg.path, str(error)
        chain, cause = [], error
        while cause is not None and len(chain) < 8:
            chain.append(type(cause).__name__)
            cause = cause.__cause__ or cause.__context__
        if re.search("Config name is missing|BuilderConfig|Couldn't find cache|configurations in the cache", text):
            configs = re.search(r"\[(.*?)\]", text, re.DOTALL) or re.search(r"in the cache: ([\w, -]+)", text)
            listed = f" It has: {configs[1].replace(chr(39), '')}." if configs else ""
            asked = (
                f"there is no configuration '{self.cfg.name}'" if self.cfg.name else "a configuration must be chosen"
            )
            return UserError(f"{self.section}.name: for the hub dataset '{name}' {asked}.{listed}")
        if any(kind in UNREACHABLE for kind in chain):
            import huggingface_hub

            variable = turned_off_by()
            why = f"{variable} is set" if variable else "the Hugging Face hub cannot be reached"
            fix = f"Unset {variable.partition('=')[0]}" if variable else "Check the connection"
            return UserError(
                f"{self.section}.path: the dataset '{name}' cannot be loaded: {why}, "
                f"and it is not in the local cache ({huggingface_hub.constants.HF_HUB_CACHE}). {fix}, "
                "set HF_HOME to a cache that has it, or give the path of a local file or folder instead."
            )
        if "DatasetNotFoundError" in chain:
            return UserError(
                f"{self.section}.path: '{name}' is neither a local file or folder nor a dataset on the hub that you "
                f"may read. {text.splitlines()[0]}"
            )
        return UserError(f"{self.section}.path: the dataset '{name}' cannot be loaded: {text.splitlines()[0]}")


@contextmanager
def _no_folder_of_that_name(name: str) -> Generator[None]:
    """`datasets` takes a folder of the name of a dataset for the dataset. That of a run is out of its sight here."""
    if os.path.isabs(name) or not os.path.exists(name):
        yield
        return
    with tempfile.TemporaryDirectory() as empty, chdir(empty):
        yield


def cached_places(name: str, revision: str | None) -> Iterator[str]:
    """Other names and places under which a dataset may lie in the local caches."""
    import datasets.config
    import huggingface_hub

    hub = Path(huggingface_hub.constants.HF_HUB_CACHE)
    names = [name]
    if "/" not in name:
        short = name.lower()
        found = {p.name.removeprefix("datasets--") for p in hub.glob("datasets--*") if p.is_dir()}
        tables = {p.name for p in Path(datasets.config.HF_DATASETS_CACHE).glob("*___*") if p.is_dir()}
        full = {f.replace("--", "/", 1) for f in found} | {t.replace("___", "/", 1) for t in tables}
        matches = sorted(f for f in full if f.lower().endswith(f"/{short}"))
        if len(matches) == 1:  # several of the same short name: never guess
            yield matches[0]
            names += matches
    for candidate in names:
        try:
            yield huggingface_hub.snapshot_download(
                candidate, repo_type="dataset", revision=revision, local_files_only=True
            )
        except Exception:  # not there
            continue
