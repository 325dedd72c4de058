"""`provider: huggingface` trains once; beside `benchmark:` stock Trainer runs first, and it is said where it cannot."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import automodel.benchmark.verb as verb
import automodel.cli.finetune as command
from automodel.cli.finetune import _stock_trainer_first
from automodel.cli.main import app
from automodel.config.errors import NotYetError
from automodel.plan.check import load_run_config


def test_stock_trainer_runs_first_in_a_folder_of_its_own(tmp_path, monkeypatch, capsys):
    settings = {
        "provider": "huggingface",
        "model": "m",
        "dataset": "d.jsonl",
        "task": "causal-lm",
        "output_dir": "out/",
        "benchmark": {"against": ["hf-trainer-tuned"]},
    }
    (tmp_path / "s.json").write_text(json.dumps(settings))
    cfg = load_run_config([tmp_path / "s.json"])
    asked = []
    monkeypatch.setattr(verb, "benchmark", lambda *given: asked.append(given))
    _stock_trainer_first(cfg, [])
    ((run, wishes),) = asked
    assert (run.provider, wishes.against, str(wishes.output)) == (None, ("hf-trainer-tuned",), "out-comparison")

    def refuses(*given):
        raise NotYetError("adapters are not compared")

    monkeypatch.setattr(verb, "benchmark", refuses)
    _stock_trainer_first(cfg, [])
    assert "no comparison with stock Trainer: adapters are not compared" in capsys.readouterr().err


@pytest.mark.parametrize(("section", "compared"), [({}, 0), ({"benchmark": {}}, 1)])
def test_the_data_are_trained_once_unless_the_file_asks(section, compared, tmp_path, monkeypatch):
    (tmp_path / "d.jsonl").write_text("")
    settings = {"provider": "huggingface", "model": "m", "dataset": "d.jsonl", "task": "causal-lm", **section}
    (tmp_path / "s.json").write_text(json.dumps(settings))
    trainings = []
    monkeypatch.setattr(verb, "benchmark", lambda *given: trainings.append("stock Trainer"))
    monkeypatch.setattr(command, "_finetune", lambda *given: trainings.append("this engine") or 0)
    assert CliRunner().invoke(app, ["finetune", "llm", "-c", str(tmp_path / "s.json")]).exit_code == 0
    assert trainings == ["stock Trainer"] * compared + ["this engine"]
