"""Hub names, offline, out of a cache that the real loading code reads."""

from __future__ import annotations

import shutil
import subprocess
import sys

import datasets
import pytest

from automodel.config.errors import UserError
from automodel.data.config import DatasetConfig
from automodel.data.sources import find_source, load_rows

ROWS = [{"text": f"review number {i}", "label": i % 2} for i in range(20)]
SPLITS = {"train": ROWS, "test": ROWS[:5]}

OFFLINE_PROCESS = """
from datasets import load_dataset
from transformers import AutoTokenizer

assert load_dataset("imdb", split="train[:3]")["text"][:] == ["review number 0", "review number 1", "review number 2"]
assert load_dataset("imdb", split="test").features["label"].names == ["neg", "pos"]
tokenizer = AutoTokenizer.from_pretrained("distilbert-base-uncased")
assert tokenizer("hello")["input_ids"] == [101, 7592, 102]

from automodel.data.config import DatasetConfig
from automodel.data.sources import load_rows

assert len(load_rows(DatasetConfig(path="imdb", split="train", num_samples_limit=7))) == 7
assert len(load_rows(DatasetConfig(path="imdb"), role="validation")) == 5
print("done")
"""


@pytest.fixture
def labelled():
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    return {name: datasets.Dataset.from_list(rows, features=features) for name, rows in SPLITS.items()}


def test_a_fresh_process_loads_model_and_data_by_name(hf_cache, labelled, shared_data, tmp_path):
    from transformers import DistilBertConfig

    model = tmp_path / "model"
    shutil.copytree(shared_data / "tokenizers" / "bert-base-uncased", model)
    model.chmod(0o755)
    DistilBertConfig(dim=32, n_layers=1, n_heads=2, hidden_dim=64).save_pretrained(model)
    hf_cache.add_model("distilbert-base-uncased", model)
    hf_cache.add_dataset("imdb", labelled, config="plain_text")
    done = subprocess.run([sys.executable, "-c", OFFLINE_PROCESS], env=hf_cache.env(), capture_output=True, text=True)
    assert done.stdout.strip().endswith("done"), done.stderr


@pytest.fixture
def offline(hf_cache, monkeypatch):
    hf_cache.activate(monkeypatch)
    return hf_cache


def test_prepared_tables(offline, labelled):
    offline.add_dataset("imdb", labelled)
    assert load_rows(DatasetConfig(path="imdb", split="train[:2]"))["text"][:] == ["review number 0", "review number 1"]


def test_a_downloaded_snapshot_is_enough(offline):
    offline.add_dataset("org/raw", SPLITS, prepared=False)
    assert len(load_rows(DatasetConfig(path="org/raw"))) == 20
    assert len(load_rows(DatasetConfig(path="org/raw", split="test[:40%]"))) == 2


def test_the_split_that_is_taken_is_known(offline, tmp_path):
    offline.add_dataset("org/raw", SPLITS, prepared=False)
    for role, taken, other in (("train", "train", "test"), ("validation", "test", "train")):
        cfg = DatasetConfig(path="org/raw")
        source = find_source(cfg, role=role, section="dataset", resolved_target=None, memory=tmp_path)
        assert source.choice(source.load()) == (taken, (other,))


def test_an_old_short_name_finds_its_full_name(offline):
    offline.add_dataset("stanfordnlp/sst2", SPLITS, prepared=False)
    assert len(load_rows(DatasetConfig(path="sst2"))) == 20


def message(**settings) -> str:
    with pytest.raises(UserError) as caught:
        load_rows(DatasetConfig(**settings))
    return str(caught.value)


def test_errors_of_cached_datasets(offline):
    offline.add_dataset("imdb", SPLITS)
    offline.add_dataset("org/raw", SPLITS, prepared=False)
    assert message(path="imdb", split="trian") == (
        "dataset.split: the data has no split 'trian'. It has: train, test. Did you mean 'train'?"
    )
    assert message(path="imdb", split="train[a]") == (
        "dataset.split: 'train[a]' is not understood. Write train, train[:1000], train[10%:20%] or train+validation."
    )
    assert message(path="imdb", split="train[900:]") == (
        "dataset.split: 'train[900:]' of the dataset 'imdb' holds no rows: it begins behind the last one."
    )
    assert message(path="imdb", name="mrpc") == (
        "dataset.name: for the hub dataset 'imdb' there is no configuration 'mrpc'. It has: default."
    )
    assert message(path="org/raw", name="mrpc") == (
        "dataset.name: for the hub dataset 'org/raw' there is no configuration 'mrpc'. It has: default."
    )


def test_a_dataset_that_is_nowhere(offline, monkeypatch):
    begins = "dataset.path: the dataset 'glue' cannot be loaded"
    cache = f"and it is not in the local cache ({offline.hub})"
    fix = "set HF_HOME to a cache that has it, or give the path of a local file or folder instead."
    assert message(path="glue", name="mrpc") == (
        f"{begins}: HF_HUB_OFFLINE=1 is set, {cache}. Unset HF_HUB_OFFLINE, {fix}"
    )
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert message(path="glue", name="mrpc") == (
        f"{begins}: the Hugging Face hub cannot be reached, {cache}. Check the connection, {fix}"
    )
