"""A checkpoint that a captured step on a GPU wrote goes on here, and the person is told what that changes.

There is no GPU here, so the checkpoint of a plain run is rewritten into what a captured one would have saved: the same
moments by name, all parameters, its own counters. `tests/gpu/test_resume_across_devices.py` does it for real.
"""

import hashlib
import json

import pytest
from rich.console import Console

import tiny_runs as tiny
from automodel.config.errors import UserError
from automodel.engine.run import finetune
from automodel.plan.check import load_run_config

SETTINGS = (
    "step_scheduler: {max_steps: 6, log_every_steps: 1, val_every_steps: 100}\n"
    "dataloader: {batch_size: 4}\nlr_scheduler: constant\n"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A finished run of six steps, and one of twelve to compare with."""
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    path = tiny.write_run(tmp_path, text=SETTINGS)
    finetune(load_run_config([path]))
    finetune(
        load_run_config([path], ["step_scheduler.max_steps=12", f"checkpoint.checkpoint_dir={tmp_path / 'whole'}"])
    )
    return tmp_path


def rewrite(folder, change) -> None:
    """Changes the last checkpoint's state.json and sets its manifest right."""
    step = folder / "out" / "run" / "steps" / "step-00000006"
    state = json.loads((step / "state.json").read_text())
    change(state)
    (step / "state.json").write_text(json.dumps(state))
    manifest = json.loads((step / "manifest.json").read_text())
    data = (step / "state.json").read_bytes()
    manifest["files"]["state.json"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    del manifest["sha256"]  # its own; the first version had none
    (step / "manifest.json").write_text(json.dumps(manifest))


def resumed(folder) -> str:
    """Six more steps; what was printed."""
    out = folder / "console.txt"
    with out.open("w") as file:
        finetune(
            load_run_config([folder / "run.yaml"], ["step_scheduler.max_steps=12"]),
            resume=True,
            console=Console(file=file, width=400),
        )
    return out.read_text()


def test_a_captured_checkpoint_goes_on_in_plain_steps(folder):
    def captured(state):
        assert state["step"]["form"] == "adamw"
        state |= {"step_kind": "CapturedStep", "device": "cuda", "precision": "bf16"}
        state["step"]["dropout_seed"] = 48

    rewrite(folder, captured)
    printed = resumed(folder)
    assert "comes from captured steps on cuda, and eager steps on cpu go on with it" in printed
    assert "dropout is drawn in another way" in printed
    assert "The run was in bf16 so far and continues in fp32." in printed
    assert tiny.losses(folder / "out") == tiny.losses(folder / "whole")


def test_the_same_kind_says_nothing(folder):
    printed = resumed(folder)
    assert "dropout" not in printed
    assert "The run was in" not in printed
    assert tiny.losses(folder / "out") == tiny.losses(folder / "whole")


def test_a_checkpoint_of_the_first_version_goes_on(folder):
    def old(state):
        """The captured step's form before versions were counted: moments alike, other names for the numbers."""
        new = state.pop("step")
        state["step"] = {"step": new["steps"], "skipped": 0, "dropout_seed": 48}
        state["step_kind"] = "CapturedStep"
        del state["device"], state["precision"]

    rewrite(folder, old)
    assert "comes from captured steps" in resumed(folder)
    assert tiny.losses(folder / "out") == tiny.losses(folder / "whole")


def test_a_checkpoint_of_a_later_release_is_refused_by_its_version(folder):
    rewrite(folder, lambda state: state["step"].update(version=9))
    with pytest.raises(UserError, match="optimizer state is of version 9; this automodel reads versions 1 to 2"):
        resumed(folder)
    # Refused before anything was touched: the finished model is still there.
    assert (folder / "out" / "model.safetensors").exists()
