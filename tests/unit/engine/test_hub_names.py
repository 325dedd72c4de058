"""A run that writes into a folder of the name of something on the hub does not hide that from itself or from others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import tiny_runs as tiny
from automodel.config.errors import UserError
from automodel.config.run_folders import could_be_on_hub, trained_from_same_name
from automodel.data.config import DatasetConfig
from automodel.data.hub_names import names_the_hub
from automodel.data.sources import is_local, load_rows
from automodel.engine.run import finetune
from automodel.engine.saved import open_saved
from automodel.models.config import ModelConfig
from automodel.models.source import find_model
from automodel.plan.check import load_run_config
from automodel.plan.run_place import check_run_place

SETTINGS = ["step_scheduler.max_steps=2", "dataloader.batch_size=4", "step_scheduler.val_every_steps=2"]


@pytest.fixture
def here(tmp_path, monkeypatch, hf_cache):
    """A folder to start runs in, and a cache that has the dataset `imdb` and the model `tiny-bert`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    hf_cache.activate(monkeypatch)
    hf_cache.add_dataset("imdb", {"train": tiny.reviews(16), "test": tiny.reviews(8, seed=1)})
    hf_cache.add_model("tiny-bert", tiny.make_model_folder(tmp_path / "model"))
    (tmp_path / "run.yaml").write_text(
        "model: tiny-bert\ntask: text-classification\ndataset: {path: imdb}\nvalidation_dataset: {split: test}\n"
        "checkpoint: {checkpoint_dir: ./imdb}\n"
    )
    return tmp_path


def run(here: Path, *settings: str, **options) -> dict:
    done = finetune(load_run_config([here / "run.yaml"], [*SETTINGS, *settings]), **options)
    return done.summary


@pytest.mark.parametrize("folder", ["./imdb", "imdb", "imdb/first"])
def test_the_folder_of_a_run_may_have_the_name_of_its_dataset(here, folder):
    at = f"checkpoint.checkpoint_dir={folder}"
    first = run(here, at)
    assert Path(folder, "model.safetensors").is_file()
    assert names_the_hub("imdb")
    assert not is_local("imdb")
    again = run(here, at, overwrite=True)
    assert again["best"] == first["best"]
    assert run(here, at, "step_scheduler.max_steps=3", resume=True)["steps"] == 3
    other = run(here, "checkpoint.checkpoint_dir=other")  # a run that merely is started beside it
    assert other["best"] == first["best"]


def test_it_is_resumed_by_its_own_config_from_elsewhere(here, monkeypatch):
    run(here)
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    cfg = load_run_config([here / "imdb" / "run" / "config.yaml"], ["step_scheduler.max_steps=3"])
    assert cfg.dataset.path == "imdb"
    assert finetune(cfg, resume=True).summary["steps"] == 3


def test_no_folder_is_made_before_the_data_are_read(here, monkeypatch):
    from automodel.engine import run as module

    seen = []

    def build(*args, **kwargs):
        seen.append(Path("imdb").exists())
        raise UserError("enough")

    monkeypatch.setattr(module, "build", build)
    with pytest.raises(UserError, match="enough"):
        run(here)
    assert seen == [False]
    assert not Path("imdb").exists()


def test_a_run_that_was_put_aside_or_killed_hides_nothing(here):
    run(here, "checkpoint.enabled=false")
    run(here, "checkpoint.enabled=false")
    assert Path("imdb/run.1/config.yaml").is_file()
    assert len(load_rows(DatasetConfig(path="imdb"))) == 16


def test_data_beside_a_run_are_data(here):
    run(here, "checkpoint.checkpoint_dir=imdb/first")
    tiny.write_jsonl(here / "imdb" / "own.jsonl", tiny.reviews(4))
    assert not names_the_hub("imdb")
    assert len(load_rows(DatasetConfig(path="imdb"))) == 4  # nothing of what the run has written


def test_an_empty_folder_is_no_dataset_and_says_what_to_do(here):
    (here / "imdb").mkdir()
    with pytest.raises(UserError, match=r"'imdb' holds no data files.* on the hub is meant, rename the folder\."):
        load_rows(DatasetConfig(path="imdb"))
    with pytest.raises(UserError, match=r"holds no data files[^.]*\. Readable.*by save_to_disk\.$"):
        load_rows(DatasetConfig(path="./imdb"))


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("checkpoint.checkpoint_dir=./tiny-bert", "checkpoint.checkpoint_dir"),
        ("checkpoint.checkpoint_dir=tiny-bert/first", "checkpoint.checkpoint_dir"),
        ("dataset.cache_dir=imdb", "dataset.cache_dir"),
        ("tensorboard={log_dir: ./tiny-bert}", "tensorboard.log_dir"),
        ("wandb={dir: imdb/offline}", "wandb.dir"),
    ],
)
def test_folders_that_would_hide_a_name_are_refused(here, setting, key):
    cfg = load_run_config([here / "run.yaml"], ["checkpoint.checkpoint_dir=out", setting])
    with pytest.raises(UserError, match=rf"^{key}: '.*' makes a folder '.*' of the hub .* Choose another folder"):
        check_run_place(cfg)


def test_a_run_folder_of_the_name_of_its_model_is_never_taken_for_one_of_the_two(here):
    """As earlier versions left them."""
    run(here, "checkpoint.checkpoint_dir=out")
    (here / "out").rename(here / "tiny-bert")
    assert trained_from_same_name("tiny-bert")
    with pytest.raises(UserError, match=r"Write \./tiny-bert if the folder is meant; .* rename the folder\."):
        find_model(ModelConfig(pretrained_model_name_or_path="tiny-bert"))
    assert find_model(ModelConfig(pretrained_model_name_or_path="./tiny-bert")).folder == Path("tiny-bert")
    for named in ("tiny-bert", "./tiny-bert", str(here / "tiny-bert")):  # a run folder, whatever it is called
        saved = open_saved(named)
        assert find_model(saved.source).folder == here / "tiny-bert" or named.startswith("/")
        assert saved.hf_config.architectures == ["BertForSequenceClassification"]


def test_another_runs_model_is_still_found_by_its_bare_name(here):
    run(here, "checkpoint.checkpoint_dir=out")
    assert not trained_from_same_name("out")
    assert find_model(ModelConfig(pretrained_model_name_or_path="out")).folder == Path("out")


def test_names():
    assert all(map(could_be_on_hub, ["imdb", "org/name", "a.b-c_d"]))
    assert not any(map(could_be_on_hub, ["./imdb", "/imdb", "~/imdb", "a/b/c", ".hidden", "a b", "*.csv", ""]))


def test_a_damaged_config_of_a_run_hides_nothing(here):
    for text in ("", "[", "model: [1]", json.dumps({"model": {"tokenizer": ["x"]}}), "\x00"):
        folder = here / "some" / "run"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(text)
        assert not trained_from_same_name("some")
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": "some"}))
    assert trained_from_same_name("some")
