"""A run does not write into what it reads: nothing of it is replaced, and no file of the run becomes data."""

from __future__ import annotations

import pytest

import tiny_runs as tiny
from automodel.config.errors import UserError
from automodel.plan.check import load_run_config
from automodel.plan.run_place import check_run_place

REFUSED = [
    ("is the file of the data", "dataset=a.jsonl", "checkpoint.checkpoint_dir=a.jsonl", "a.jsonl is a file"),
    ("is the folder of the data", "dataset=data", "checkpoint.checkpoint_dir=data", "'data' is also dataset.path"),
    ("is it by another spelling", "dataset=data", "checkpoint.checkpoint_dir=model/../data/", "is also dataset.path"),
    ("is it by a link", "dataset=data", "checkpoint.checkpoint_dir=link", "'link' is also dataset.path"),
    ("lies in it", "dataset=data", "checkpoint.checkpoint_dir=data/out", "every file of which is data (dataset.path)"),
    ("lies in the folder of held-out data", "validation_dataset=data", "checkpoint.checkpoint_dir=data/out",
     "choose files with validation_dataset.data_files"),
    ("is one of a mixture", "dataset={mixture: [a.jsonl, data]}", "checkpoint.checkpoint_dir=data",
     "is also dataset.mixture.1.path"),
    ("is the model", "dataset=a.jsonl", "checkpoint.checkpoint_dir=model", "is also model.pretrained_model_name"),
    ("is the tokenizer", "model.tokenizer=data", "checkpoint.checkpoint_dir=data", "is also model.tokenizer"),
    ("is the adapter", "peft.pretrained_adapter=data", "checkpoint.checkpoint_dir=data",
     "is also peft.pretrained_adapter"),
    ("a cache in the data", "dataset=data", "dataset.cache_dir=data/cache", "dataset.cache_dir: 'data/cache' lies in"),
    ("event files in the data", "dataset=data", "tensorboard={log_dir: data/logs}", "tensorboard.log_dir: "),
    ("offline files in the data", "dataset=data", "wandb={dir: data}", "wandb.dir: "),
]  # fmt: skip
ALLOWED = [
    ("dataset={path: data, data_files: a.jsonl}", "checkpoint.checkpoint_dir=data/out"),
    ("dataset=a.jsonl", "checkpoint.checkpoint_dir=."),
    ("dataset=a.jsonl", "checkpoint.checkpoint_dir=model/out"),
    ("dataset=saved", "checkpoint.checkpoint_dir=saved/out"),
    ("dataset=data", "checkpoint.checkpoint_dir=database"),
    ("dataset=imdb", "checkpoint.checkpoint_dir=imdb-run"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "data", "saved"):
        (tmp_path / name).mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    for name in ("a.jsonl", "data/a.jsonl"):
        tiny.write_jsonl(tmp_path / name, tiny.reviews(4))
    (tmp_path / "run.yaml").write_text("model: model\ndataset: a.jsonl\n")
    return tmp_path


@pytest.mark.parametrize(("reads", "writes", "message"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED])
def test_refused(folder, reads, writes, message):
    with pytest.raises(UserError) as caught:
        check_run_place(load_run_config([folder / "run.yaml"], [reads, writes]))
    said = str(caught.value)
    assert said.startswith(writes.partition("=")[0].partition("{")[0])
    assert message in said


@pytest.mark.parametrize("settings", ALLOWED)
def test_allowed(folder, settings):
    check_run_place(load_run_config([folder / "run.yaml"], settings))


@pytest.mark.parametrize("verb", [("config", "validate"), ("plan",), ("finetune", "llm")])
def test_every_command_that_begins_or_judges_a_run_says_it(folder, verb):
    tiny.make_model_folder(folder / "model")
    before = sorted(folder.rglob("*"))
    done = tiny.automodel(*verb, "-c", "run.yaml", "dataset=data", "checkpoint.checkpoint_dir=data/out", cwd=folder,
                          check=False, AUTOMODEL_CACHE=str(folder.parent / "cache"))  # fmt: skip
    assert done.returncode == 2
    assert "every file of which is data (dataset.path)" in done.stderr
    assert sorted(folder.rglob("*")) == before
