"""What a config may have read: no reader that runs code, and no address that only a file names.

They hold for versions of `datasets` whose own `pandas` builder unpickles, too (tried with 4.0.0 and 4.8.5);
pyproject.toml allows none of these.
"""

from __future__ import annotations

import functools
import http.server
import os
import pickle
import threading
from typing import ClassVar

import datasets
import pyarrow.parquet
import pytest
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

from automodel.config.errors import ConfigError, UserError
from automodel.config.gate import REMOTE_DATA
from automodel.data.config import BUILDERS, DatasetConfig, MixtureEntry
from automodel.data.permitted import OTHER_BUILDERS, SCHEMES, shown
from automodel.data.sources import load_rows
from automodel.plan.check import load_run_config

REFUSED = sorted(set(_PACKAGED_DATASETS_MODULES) - BUILDERS)
BAD = ["http://127.0.0.1:9/b.csv", "s3://bucket/b.csv", "hf://datasets/a/b/c.csv", "ftp://a/b.csv"]
NEVER = ["file:///etc/passwd", "zip://b.csv::http://127.0.0.1:9/b.zip", "simplecache::http://127.0.0.1:9/b.csv"]
NEVER += ["reference://::http://127.0.0.1:9/b.json", "memory://b.csv", "github://a:b@main/c.csv"]


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "b.pkl").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    (tmp_path / "b.csv").write_text("text,label\ngood,1\nbad,0\n")
    return tmp_path


def message(remote: bool = False, **settings) -> str:
    with pytest.raises(UserError) as caught:
        load_rows(DatasetConfig(**settings), remote=remote)
    return str(caught.value)


def complaint(tmp_path, text: str, *settings: str, trust=()) -> str:
    (tmp_path / "run.yaml").write_text(f"model: bert\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        load_run_config([tmp_path / "run.yaml"], settings, trust)
    return str(caught.value)


# --- readers


def test_a_pickle_is_never_loaded(here):
    assert message(path="pandas", data_files="b.pkl").startswith(
        "dataset.path: 'pandas' is a reader of `datasets` that"
    )
    assert message(path="pandas", data_files="b.pkl", target="datasets.load_dataset").startswith(
        "dataset.path: 'pandas'"
    )
    assert not (here / "ran").exists()
    pickle.loads((here / "b.pkl").read_bytes())
    assert (here / "ran").exists()  # it would have been seen


@pytest.mark.parametrize("name", REFUSED)
def test_no_other_reader_is_seen_by_datasets(here, monkeypatch, name):
    def seen(*_, **__):
        pytest.fail("`datasets` was asked")

    monkeypatch.setattr(datasets, "load_dataset", seen)
    monkeypatch.setattr(datasets, "load_dataset_builder", seen)
    for settings in ({}, {"data_files": "b.pkl"}, {"data_files": ("b.pkl", "b.csv"), "split": "train"}):
        assert f"'{name}' is a reader of `datasets` that is not used here" in message(path=name, **settings)


def test_readers_of_this_version_are_known_before_it_is_imported():
    assert set(REFUSED) <= OTHER_BUILDERS
    assert not OTHER_BUILDERS & BUILDERS


def test_a_folder_of_the_name_of_a_reader_is_a_folder(here):
    (here / "xml").mkdir()
    (here / "b.csv").rename(here / "xml" / "b.csv")
    assert load_rows(DatasetConfig(path="xml"))["text"][:] == ["good", "bad"]


def test_the_name_of_a_format_needs_files(here):
    assert message(path="csv") == (
        "dataset.path: 'csv' is the name of a format. Say which files with dataset.data_files."
    )


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("dataset: {path: pandas, data_files: b.pkl}", "run.yaml:2: dataset.path: 'pandas'"),
        ("dataset: {_target_: datasets.load_dataset, path: pandas, data_files: b.pkl}", "dataset.path: 'pandas'"),
        ("dataset: b.csv\nvalidation_dataset: {path: pandas, data_files: b.pkl}", "validation_dataset.path: 'pandas'"),
        ("dataset: {mixture: [b.csv, {path: pandas, data_files: b.pkl}]}", "dataset.mixture.1.path: 'pandas'"),
        ("dataset: b.csv\nvalidation_dataset: {mixture: [{path: pandas}]}", "validation_dataset.mixture.0.path"),
        ("dataset: {path: csv, data_files: 'http://a/b.csv'}", "run.yaml:2: dataset.data_files: 'http://a/b.csv'"),
        ("dataset: {path: csv, data_files: [b.csv, 's3://a/b.csv']}", "dataset.data_files: 's3://a/b.csv'"),
        ("dataset: {mixture: [{path: csv, data_files: 'http://a/b'}]}", "dataset.mixture.0.data_files: 'http://a/b'"),
        ("dataset: 'https://a/b.csv'", "dataset.path: 'https://a/b.csv' is an address"),
        (
            "dataset: {path: csv, data_files: b.csv}\nvalidation_dataset: {data_files: 'http://a/b'}",
            "validation_dataset.data_files: 'http://a/b' is an address",
        ),
        ("dataset: {_target_: datasets.load_dataset, path: a/b, data_dir: 'http://a/b'}", "dataset.data_dir: "),
        ("dataset: {_target_: datasets.load_dataset, path: a/b, storage_options: {a: b}}", "dataset.storage_options: "),
        ("dataset: b.csv\nallow_remote_data: true", "allow_remote_data: a file cannot have anything fetched"),
        ("dataset: {path: b.csv, allow-remote-data: true}", "dataset.allow-remote-data: a file cannot have anything"),
    ],
)
def test_a_config_says_it_with_file_and_line(here, text, where):
    assert where in complaint(here, text)


def test_validation_data_of_the_same_place_are_blamed_once(here):
    said = complaint(here, "dataset: {path: pandas, data_files: b.pkl}\nvalidation_dataset: {split: test}")
    assert said.count("'pandas'") == 1


def test_what_may_be_read_passes(here):
    (here / "run.yaml").write_text(
        "model: bert\ndataset: {mixture: [b.csv, imdb, {path: a/b, data_files: 'data/*.csv'}, "
        "{path: csv, data_files: b.csv}]}\n"
    )
    assert len(load_run_config([here / "run.yaml"]).dataset.mixture or ()) == 4


# --- addresses


class Answers(http.server.SimpleHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self):
        self.asked.append(self.path)
        super().do_GET()

    def do_HEAD(self):
        self.asked.append(self.path)
        super().do_HEAD()

    def log_message(self, *_):
        pass


@pytest.fixture
def server(here, monkeypatch):
    Answers.asked.clear()
    handler = functools.partial(Answers, directory=str(here))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.mark.parametrize("address", BAD)
def test_an_address_needs_the_command_line(here, address):
    said = message(path="csv", data_files=address)
    assert said.startswith(f"dataset.data_files: '{address}' is an address, and a config alone cannot have anything")
    assert said.endswith("or add --allow-remote-data to the command line.")
    assert "is an address" in message(path="imdb", data_files=("data/*.csv", address))
    assert "is an address" in message(path=".", data_files=address)


@pytest.mark.parametrize("address", NEVER)
@pytest.mark.parametrize("remote", [False, True])
def test_some_are_never_read(here, address, remote):
    for path in ("csv", "imdb", "."):
        assert "is of a kind that is not read" in message(path=path, data_files=address, remote=remote)


@pytest.mark.parametrize("file", ["/etc/passwd", "~/x.csv", "../x.csv", "data:,a", "http:x"])
def test_files_of_a_dataset_on_the_hub_lie_in_it(here, file):
    assert "chooses files of 'org/name' on the hub" in message(path="org/name", data_files=file)


def test_nothing_is_fetched_without_leave_and_everything_with_it(here, server):
    file = f"{server}/b.csv"
    assert "--allow-remote-data" in message(path="csv", data_files=file)
    assert "--allow-remote-data" in message(path=file)
    assert Answers.asked == []
    rows = load_rows(DatasetConfig(path="csv", data_files=file), remote=True)
    assert rows["text"][:] == ["good", "bad"]
    assert set(Answers.asked) == {"/b.csv"}
    once = len(Answers.asked)
    assert len(load_rows(DatasetConfig(path="csv", data_files=file), remote=True)) == 2
    assert len(Answers.asked) == once  # the same command


def test_several_addresses_are_splits_as_files_are(here, server):
    for name, text in (("train.csv", "good"), ("test.csv", "bad")):
        (here / name).write_text(f"text,label\n{text},1\n")
    files = (f"{server}/train.csv", f"{server}/test.csv")
    assert load_rows(DatasetConfig(path="csv", data_files=files), remote=True)["text"][:] == ["good"]
    assert load_rows(DatasetConfig(path="csv", data_files=files), role="validation", remote=True)["text"][:] == ["bad"]


def test_an_address_that_has_nothing(here, server):
    said = message(path="csv", data_files=f"{server}/none.csv?token=secret", remote=True)
    assert said.startswith(f"dataset.data_files: '{server}/none.csv' cannot be fetched: ")
    assert "secret" not in said
    assert not [path for path in (here / "cache").rglob("*") if path.is_file()]
    assert "one of arrow, csv" in message(path="org/name", data_files=f"{server}/b.csv", remote=True)
    assert "is a pattern" in message(path="csv", data_files=f"{server}/*.csv", remote=True)


def test_the_command_line_reaches_the_config(here):
    (here / "run.yaml").write_text("model: bert\ndataset: {path: csv, data_files: 'http://a/b.csv'}\n")
    assert load_run_config([here / "run.yaml"], trust=[REMOTE_DATA]).dataset.data_files == "http://a/b.csv"
    assert load_run_config([here / "run.yaml"], reads_data=False).dataset.data_files == "http://a/b.csv"
    assert "is an option of its own" in complaint(here, "dataset: b.csv", "allow_remote_data=true")


def test_secrets_of_an_address_are_not_shown():
    assert shown("https://me:pass@host/a.csv?sig=1#x") == "https://host/a.csv"
    assert len(SCHEMES) == 9


# --- cells


def test_a_cell_that_names_an_address_is_not_opened(here, server):
    """Rows are read whole in places; an image among their columns would be fetched."""
    image = {"bytes": None, "path": f"{server}/x.png"}
    features = datasets.Features(
        {"text": datasets.Value("string"), "image": datasets.Image(), "images": datasets.List(datasets.Image())}
    )
    row = {"text": "good", "image": image, "images": [image]}
    table = pyarrow.Table.from_pylist([row]).cast(features.arrow_schema)
    pyarrow.parquet.write_table(table, "images.parquet")
    assert datasets.load_dataset("parquet", data_files="images.parquet", split="train").features == features
    read = load_rows(DatasetConfig(path="images.parquet"))
    assert read[0] == row
    assert Answers.asked == []


def test_an_entry_of_a_mixture_is_judged_like_a_section(here):
    entry = MixtureEntry(path="pandas", data_files="b.pkl")
    cfg = DatasetConfig(mixture=(entry,))
    from automodel.data.inheritance import members_of

    [(where, member)] = members_of(cfg)
    with pytest.raises(UserError, match="'pandas' is a reader"):
        load_rows(member)
    assert where == "dataset.mixture.0"
