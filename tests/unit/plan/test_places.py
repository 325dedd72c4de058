"""Relative paths in a run's own config."""

from __future__ import annotations

import pytest

from automodel.config.load import dump_config
from automodel.plan.check import load_run_config
from automodel.plan.places import homes_of, with_folder

CONFIG = """
model: {pretrained_model_name_or_path: m, tokenizer: bert-base-uncased, cache_dir: m}
dataset: {mixture: [{path: a.jsonl}, {path: csv, data_files: 'd/*.csv'}, {path: d, data_files: x.csv}]}
validation_dataset: {path: d}
task: text-classification
peft: {pretrained_adapter: m}
checkpoint: {checkpoint_dir: ./out}
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    home = tmp_path / "ho[m]e"  # no pattern
    for folder in ("m", "d", "out/run", "elsewhere"):
        (home / folder).mkdir(parents=True)
    for name in ("a.jsonl", "d/x.csv", "x.csv", "elsewhere/a.jsonl"):
        (home / name).write_text("x")
    (home / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(home)
    (home / "out" / "run" / "config.yaml").write_text(with_folder(dump_config(load_run_config(["run.yaml"]))))
    return home


def test_every_key_that_names_a_file(home, monkeypatch, capsys):
    assert load_run_config(["out/run/config.yaml"]) == load_run_config(["run.yaml"]), "as typed, where it was typed"
    monkeypatch.chdir(home / "elsewhere")
    cfg = load_run_config(["../out/run/config.yaml"], ["validation_dataset.path=a.jsonl"])
    assert cfg.model.pretrained_model_name_or_path == cfg.model.cache_dir == str(home / "m")
    assert cfg.model.tokenizer == "bert-base-uncased"
    first, second, third = cfg.dataset.mixture or ()
    assert first.path == str(home / "a.jsonl")
    assert (second.path, second.data_files) == ("csv", str(home / "d/*.csv").replace("[", "[[]"))
    assert (third.path, third.data_files) == (str(home / "d"), "x.csv")
    assert cfg.peft is not None
    assert cfg.peft.pretrained_adapter == str(home / "m")
    assert cfg.checkpoint.checkpoint_dir == str(home / "out")
    assert cfg.validation_dataset is not None
    assert cfg.validation_dataset.path == "a.jsonl", "typed here"
    assert capsys.readouterr().err == ""


def test_other_files_are_read_from_here(home, monkeypatch):
    monkeypatch.chdir(home / "elsewhere")
    assert load_run_config(["../run.yaml"]).dataset == load_run_config([home / "run.yaml"]).dataset
    assert homes_of("../run.yaml") == ()
    assert homes_of("../out/run/config.yaml") == (str(home),)
    (home / "out" / "run" / "config.yaml").write_text(CONFIG)  # an earlier version's, without the note
    assert homes_of("../out/run/config.yaml") == (str(home),)
    (home / "out" / "run" / "config.yaml").write_text("no config")
    assert homes_of("../out/run/config.yaml") == ()


def test_what_was_typed_stays_when_its_path_is_read_from_elsewhere(home, monkeypatch):
    for name, value in {"DATA": "a.jsonl", "FOLDER": "d", "OUT": "out"}.items():
        monkeypatch.setenv(name, value)
    text = "model: m\ndataset: {path: '${DATA}', data_files: null}\nvalidation_dataset: {path: csv, data_files: "
    (home / "run.yaml").write_text(text + "['${FOLDER}/x.csv', x.csv]}\ncheckpoint: {checkpoint_dir: './${OUT}'}\n")
    (home / "out" / "run" / "config.yaml").write_text(with_folder(dump_config(load_run_config(["run.yaml"]))))
    assert homes_of("out/run/config.yaml") == (str(home),)
    monkeypatch.chdir(home / "elsewhere")
    cfg = load_run_config(["../out/run/config.yaml"])
    assert cfg.dataset.path == str(home / "a.jsonl")
    written = dump_config(cfg)
    for typed in ("${DATA}", "${OUT}"):
        assert f"{home}/{typed}\n" in written
    assert f"- {home}/${{FOLDER}}/x.csv\n" in written
    (home / "elsewhere" / "again.yaml").write_text(written)
    assert load_run_config(["again.yaml"]) == cfg
