"""`provider: huggingface` has stock Trainer run first, and says why where it cannot."""

from __future__ import annotations

import json

import automodel.benchmark.verb as verb
from automodel.cli.finetune import _stock_trainer_first
from automodel.config.errors import NotYetError
from automodel.plan.check import load_run_config


def test_stock_trainer_runs_first_in_a_folder_of_its_own(tmp_path, monkeypatch, capsys):
    settings = {
        "provider": "huggingface",
        "model": "m",
        "dataset": "d.jsonl",
        "task": "causal-lm",
        "output_dir": "out/",
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
