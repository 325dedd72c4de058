"""`automodel migrate … --check`: script and config from the same weights over the same rows, loss by loss."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny_runs as tiny
from automodel.config.errors import UserError

SCRIPT = Path(__file__).parent / "hf_scripts" / "text_classification.py"


def test_the_losses_of_script_and_config_agree_and_a_wrong_config_is_found_out(tmp_path, monkeypatch):
    from automodel.migrate.verb import read_source, write_config
    from automodel.trainer.check_migration import DifferentLossesError, check_migration

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    tiny.make_model_folder(tmp_path / "bert", "bert", dropout=0.1)
    tiny.write_jsonl(tmp_path / "train.jsonl", tiny.reviews(40))
    tiny.write_jsonl(tmp_path / "test.jsonl", tiny.reviews(8, seed=1))
    early = 'eval_dataset=data["test"], callbacks=[transformers.EarlyStoppingCallback()]'
    script = SCRIPT.read_text().replace("sys.argv[1]", '"."').replace('eval_dataset=data["test"]', early)
    best = 'report_to="none", load_best_model_at_end=True, save_strategy="steps", save_steps=3'
    script = script.replace('save_strategy="no",\n', "").replace('report_to="none"', best)
    (tmp_path / "train.py").write_text(f"import transformers\n{script}")
    write_config(read_source(tmp_path / "train.py"), tmp_path / "run.yaml")
    assert check_migration(tmp_path / "train.py", tmp_path / "run.yaml", 6).startswith("Checked: 6 steps of both")
    wrong = (tmp_path / "run.yaml").read_text().replace("lr: 0.001", "lr: 0.1")
    (tmp_path / "wrong.yaml").write_text(wrong)
    with pytest.raises(DifferentLossesError, match="the losses differ: at step"):
        check_migration(tmp_path / "train.py", tmp_path / "wrong.yaml", 6)
    with pytest.raises(UserError, match="runs a script"):
        check_migration(tmp_path / "training_args.json", tmp_path / "run.yaml", 6)
