"""An observer hears of every step, in order, and of every pause; the run is the same with and without it."""

import pytest

import tiny_runs as tiny
from automodel.engine.observe import Observer
from automodel.engine.run import finetune
from automodel.plan.check import load_run_config


class Diary(Observer):
    def __init__(self):
        self.lines, self.losses, self.validation = [], [], None

    def model_loaded(self):
        self.lines.append(("model",))

    def loop_begins(self, plan):
        self.lines.append(("loop", plan.total_steps))

    def step_begins(self):
        self.lines.append(("step",))

    def step_ends(self, result, pauses):
        self.lines.append(("done", pauses))
        self.losses.append(float(result.loss))

    def loop_ends(self, validation):
        self.lines.append(("end",))
        self.validation = validation


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    path = tiny.write_run(
        tmp_path,
        text="step_scheduler: {max_steps: 7, val_every_steps: 3, ckpt_every_steps: 5, log_every_steps: 1}\n",
    )
    return lambda name: load_run_config([path], [f"checkpoint.checkpoint_dir={tmp_path / name}"])


def test_every_step_and_every_pause_is_told(run, tmp_path):
    diary = Diary()
    finished = finetune(run("watched"), observer=diary)
    pauses = [step in (3, 5, 6, 7) for step in range(1, 8)]
    expected = [("model",), ("loop", 7)]
    for pause in pauses:
        expected += [("step",), ("done", pause)]
    assert diary.lines == [*expected, ("end",)]
    assert diary.validation.values["accuracy"] == finished.summary["validation"]["accuracy"]
    logged = tiny.losses(tmp_path / "watched")
    assert diary.losses == pytest.approx([logged[step] for step in range(1, 8)])


def test_being_watched_changes_nothing(run, tmp_path):
    finetune(run("watched"), observer=Diary())
    finetune(run("alone"))
    assert tiny.losses(tmp_path / "watched") == tiny.losses(tmp_path / "alone")
