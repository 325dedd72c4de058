"""A resumed run goes on in the precision that it began with, whatever is measured by then."""

import io
import json
import shutil

import pytest
from rich.console import Console

import tiny_runs as tiny
from automodel.engine import product_facts
from automodel.engine.run import dry_run, finetune
from automodel.kernels.product_speed import Timed
from automodel.plan.check import load_run_config

SETTINGS = (
    "step_scheduler: {max_steps: 3, log_every_steps: 1, val_every_steps: 100}\n"
    "dataloader: {batch_size: 4}\nlr_scheduler: constant\ntraining_optimizations: {precision: auto}\n"
)
FAST_BF16 = Timed((150.0,) * 3, (100.0,) * 3, (640.0,) * 3, 2.0)
SLOW_BF16 = Timed((150.0,) * 3, (100.0,) * 3, (60.0,) * 3, 2.0)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Sets what is measured from now on."""
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(product_facts, "LEAST_OPERATIONS", 0.0)
    tiny.write_run(tmp_path, text=SETTINGS)

    def measured(timed):
        shutil.rmtree(tmp_path / "cache" / "products", ignore_errors=True)
        monkeypatch.setattr(product_facts, "time_products", lambda sample, *budget: timed)

    return measured


def run(folder, *settings, **how) -> tuple[dict, str]:
    """The plan of a run, and what was printed."""
    out = io.StringIO()
    finetune(load_run_config([folder / "run.yaml"], list(settings)), console=Console(file=out, width=400), **how)
    return json.loads((folder / "out" / "run" / "plan.json").read_text()), out.getvalue()


@pytest.mark.parametrize(("begun", "timed", "later"), [("fp32", SLOW_BF16, FAST_BF16), ("bf16", FAST_BF16, SLOW_BF16)])
@pytest.mark.parametrize("damaged", [False, True], ids=["plan kept", "plan damaged"])
def test_the_precision_stays(tmp_path, measured, begun, timed, later, damaged):
    measured(timed)
    assert run(tmp_path, "step_scheduler.max_steps=6")[0]["precision"] == begun
    whole = tiny.losses(tmp_path / "out")
    assert run(tmp_path, overwrite=True)[0]["precision"] == begun
    measured(later)
    if damaged:
        (tmp_path / "out" / "run" / "plan.json").write_text("{")
    plan, printed = run(tmp_path, "step_scheduler.max_steps=6", resume=True)
    assert plan["precision"] == begun
    assert "as the run began" in printed
    assert "continues in" not in printed
    assert tiny.losses(tmp_path / "out") == whole


def test_a_config_can_ask_for_another(tmp_path, measured):
    measured(SLOW_BF16)
    run(tmp_path)
    asked = "training_optimizations.precision=bf16"
    plan, printed = run(tmp_path, "step_scheduler.max_steps=6", asked, resume=True)
    assert plan["precision"] == "bf16"
    assert "The run was in fp32 so far and continues in bf16." in printed


def test_a_plan_measures_and_says_what_it_found(tmp_path, measured, capsys):
    measured(FAST_BF16)
    dry_run(load_run_config([tmp_path / "run.yaml"]))
    assert "640 GFLOP/s in bf16, 150 in fp32" in " ".join(capsys.readouterr().out.split())
    measured(SLOW_BF16)
    dry_run(load_run_config([tmp_path / "run.yaml"]))
    assert "60 GFLOP/s in bf16, 150 in fp32" in " ".join(capsys.readouterr().out.split())
