"""A run folder is used from another folder than the run was started in: its relative paths mean what they meant."""

from __future__ import annotations

import json
import shutil

import pytest

import tiny_runs as tiny

CONFIG = """
model: model
task: text-classification
dataset: {path: train.jsonl}
validation_dataset: {path: test.jsonl}
checkpoint: {checkpoint_dir: r/out}
peft: {dim: 2}
step_scheduler: {max_steps: 4, val_every_steps: 2}
training_optimizations: {precision: fp32}
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """`home` with a run in r/out that knows only relative paths; `other` has a test.jsonl of its own."""
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    tiny.write_run(home)
    (home / "run.yaml").write_text(CONFIG)
    tiny.write_jsonl(other / "test.jsonl", tiny.reviews(5, seed=3))
    tiny.automodel("finetune", "llm", "-c", "run.yaml", cwd=home)
    return tmp_path


def measured(folder, run, **more) -> tuple[int, str]:
    done = tiny.automodel("evaluate", run, "--json", cwd=folder, **more)
    return json.loads(done.stdout)["rows"], done.stderr


@pytest.mark.slow
def test_verbs_read_what_the_run_read(work):
    home, other = work / "home", work / "other"
    assert measured(other, "../home/r/out") == (16, "")
    assert measured(home, "r/out") == (16, "")
    done = tiny.automodel("evaluate", "../home/r/out", "--json", "--dataset", "test.jsonl", cwd=other)
    assert json.loads(done.stdout)["rows"] == 5, "what is typed now is read from here"
    tiny.automodel("export", "../home/r/out", "--merge", "-o", "merged", cwd=other)
    assert (other / "merged" / "config.json").is_file()
    tiny.automodel("checkpoint", "convert", "../home/r/out", "--out", "converted", cwd=other)
    config, more = "../home/r/out/run/config.yaml", "step_scheduler.max_steps=6"
    done = tiny.automodel("finetune", "llm", "-c", config, "--resume-or-start", cwd=other)
    assert "finished (4 steps); nothing to do" in done.stdout
    done = tiny.automodel("finetune", "llm", "-c", config, "--resume", more, cwd=other)
    assert "Resuming after step 4" in done.stdout + done.stderr
    assert not (other / "r").exists()
    done = tiny.automodel("finetune", "llm", "-c", "run.yaml", "--resume-or-start", more, cwd=home)
    assert "finished (6 steps); nothing to do" in done.stdout, "the same places, typed as at first"


def test_a_run_folder_elsewhere(work):
    """Below an absolute checkpoint_dir nothing tells the folder of the data but the run's own note."""
    home, other = work / "home", work / "other"
    settings = [f"checkpoint.checkpoint_dir={work / 'away'}", "step_scheduler.max_steps=2"]
    tiny.automodel("finetune", "llm", "-c", "run.yaml", *settings, cwd=home)
    assert measured(other, work / "away") == (16, "")
    shutil.move(work / "away", other / "renamed")
    assert measured(other, "renamed") == (16, "")


def test_moved_with_its_data(work):
    """The project lies elsewhere, whole; then only the run folder does, and its data are in the current folder."""
    shutil.move(work / "home", work / "moved")
    config = (work / "moved" / "r" / "out" / "adapter_config.json").read_text()  # PEFT knows the base by this alone
    (work / "moved" / "r" / "out" / "adapter_config.json").write_text(
        config.replace(str(work / "home"), str(work / "moved"))
    )
    rows, said = measured(work / "other", work / "moved" / "r" / "out")
    assert rows == 16
    assert f"the run was started in {work / 'home'}; now these are read from {work / 'moved'}: " in said
    done = tiny.automodel("finetune", "llm", "-c", "r/out/run/config.yaml", "--resume-or-start", cwd=work / "moved")
    assert "finished (4 steps)" in done.stdout
    shutil.move(work / "moved" / "r" / "out", work / "alone")
    rows, said = measured(work / "moved", work / "alone")
    assert rows == 16
    assert f"now these are read from {work / 'moved'}: " in said
