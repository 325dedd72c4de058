"""Full disks, damaged checkpoints and other numbers of ranks: what a run says, and what it keeps."""

from __future__ import annotations

import io
import shutil
import signal
from pathlib import Path

import pytest

import tiny_runs as tiny
from automodel.config.errors import UserError
from automodel.engine.observe import Observer

EVERY_TWO = (
    "step_scheduler: {max_steps: 8, log_every_steps: 1, val_every_steps: 8, ckpt_every_steps: 2}\n"
    "dataloader: {batch_size: 4}\n"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    tiny.write_run(folder, text=EVERY_TWO)
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("AUTOMODEL_CACHE", str(made / "cache"))
    shutil.copy(made / "run.yaml", tmp_path)
    return tmp_path


def finetune(folder: Path, *overrides: str, **how) -> tuple[dict, str]:
    from rich.console import Console

    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    said = io.StringIO()
    cfg = load_run_config([folder / "run.yaml"], [f"checkpoint.checkpoint_dir={folder / 'out'}", *overrides])
    done = finetune(cfg, console=Console(file=said, width=500), **how)
    return done.summary, said.getvalue()


def kept(folder: Path) -> list[int]:
    return sorted(int(p.name.split("-")[1]) for p in (folder / "out" / "run" / "steps").glob("step-*"))


class Disk:
    """Writes to a real disk, which refuses the checkpoints of some steps."""

    def __init__(self, monkeypatch, refused: set[int]):
        from automodel.checkpoint import tensor_file

        write = tensor_file.write_tensors

        def write_or_refuse(path, *rest):
            if any(f"step-{step:08d}" in str(path) for step in refused):
                raise OSError(28, "No space left on device", str(path))
            return write(path, *rest)

        monkeypatch.setattr(tensor_file, "write_tensors", write_or_refuse)


def test_a_full_disk_ends_the_run_at_the_next_save_and_keeps_the_last_checkpoint(folder, monkeypatch):
    Disk(monkeypatch, {4})
    with pytest.raises(UserError, match="checkpoint of step 4 could not be written to .*No space left") as stopped:
        finetune(folder)
    assert stopped.value.exit_code == 1
    assert "The checkpoint of step 2 is kept" in str(stopped.value)
    assert kept(folder) == [2]
    monkeypatch.undo()
    summary, said = finetune(folder, resume=True)
    assert "Resuming after step 2" in said
    assert summary["steps"] == 8


@pytest.mark.parametrize("left", ["nothing", "half a line"])
def test_a_history_that_was_lost_is_said_when_the_run_goes_on(folder, monkeypatch, left):
    Disk(monkeypatch, {8})
    with pytest.raises(UserError, match="step 8 could not be written"):
        finetune(folder)
    monkeypatch.undo()
    metrics = folder / "out" / "run" / "metrics.jsonl"
    if left == "nothing":
        metrics.unlink()
    else:
        first, second = metrics.read_text().splitlines()[:2]
        metrics.write_text(f"{first}\n{second[:9]}")
    _, said = finetune(folder, resume=True)
    what = "is missing or empty: what was logged up to" if left == "nothing" else "ends at step 1: what was logged from"
    assert what in said
    assert "step 6 is lost to the report" in said


def test_a_disk_that_was_full_from_the_beginning_leaves_nothing_to_resume(folder, monkeypatch):
    Disk(monkeypatch, {2})
    with pytest.raises(UserError, match="There is no earlier checkpoint. Make room and start again;"):
        finetune(folder)


def test_on_error_continue_trains_on(folder, monkeypatch):
    Disk(monkeypatch, {4})
    summary, said = finetune(folder, "checkpoint.on_error=continue", "checkpoint.keep_last=9")
    assert summary["status"] == "finished"
    assert said.count("training goes on (checkpoint.on_error: continue)") == 1
    assert kept(folder) == [2, 6, 8]
    assert (folder / "out" / "model.safetensors").exists()


def test_a_disk_that_is_full_at_the_end_costs_no_step(folder, monkeypatch):
    """Of safetensors' own errors, those that speak of the disk."""
    from safetensors import SafetensorError

    from automodel.engine import run as engine

    errors = [
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        OSError(28, "No space left on device"),
    ]
    for error in errors:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "save_hf_folder", lambda *_, error=error: (_ for _ in ()).throw(error))
            with pytest.raises(
                UserError, match="the model could not be written to .*: No space left on dev"
            ) as stopped:
                finetune(folder, resume=error is not errors[0])
        assert stopped.value.exit_code == 1
        assert "The checkpoint of step 8 is kept: make room, and --resume continues after it" in str(stopped.value)
    _, said = finetune(folder, resume=True)
    assert "only the export is missing" in said
    assert (folder / "out" / "model.safetensors").exists()


def test_a_disk_that_is_too_full_is_found_before_step_1(folder, monkeypatch):
    from automodel.engine import room

    full = type("Usage", (), {"free": 50_000})
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: full)
    with pytest.raises(UserError, match=r"checkpoint.checkpoint_dir: .* has 0.1 MB free; a checkpoint takes 0.3 MB"):
        finetune(folder)
    assert not (folder / "out" / "run").exists()
    full.free = 500_000
    _, said = finetune(folder, "step_scheduler.max_steps=2", "checkpoint.keep_last=7")
    assert "checkpoint.keep_last: 7 takes up to" in said


@pytest.mark.parametrize(("name", "how"), [("model.safetensors", "flip"), ("state.json", "truncate")])
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_continues_exactly(folder, name, how):
    finetune(folder)
    losses = tiny.losses(folder / "out")
    path = folder / "out" / "run" / "steps" / "step-00000008" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data if how == "flip" else data[:-7])
    _, said = finetune(folder, resume=True)
    assert f"step-00000008/{name}" in said
    assert "Falling back to the checkpoint before it" in said
    assert "Resuming after step 6" in said
    assert tiny.losses(folder / "out") == losses


def test_a_damaged_best_checkpoint_does_not_cost_the_model(folder):
    """It is found at the end, when all steps are done. With a rate of almost nothing no evaluation beats the first."""
    how = ("optimizer.lr=1e-12", "step_scheduler.val_every_steps=2")
    summary, _ = finetune(folder, *how)
    assert summary["exported_step"] == 2
    (folder / "out" / "run" / "exported.json").unlink()
    path = folder / "out" / "run" / "steps" / "step-00000002" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    summary, said = finetune(folder, *how, resume=True)
    assert "The checkpoint of step 2, the best by loss, cannot be used" in said
    assert f"{path} was changed after it was written (SHA-256 differs); the last weights are exported." in said
    assert summary["exported_step"] == 8
    assert (folder / "out" / "model.safetensors").exists()


def test_the_exported_best_model_outlives_its_checkpoint(folder):
    """The run goes further, stops on the way and goes further again; no evaluation beats the first."""
    how = ("optimizer.lr=1e-12", "lr_scheduler=constant", "step_scheduler.val_every_steps=2", "checkpoint.keep_last=1")
    first, _ = finetune(folder, *how)
    assert first["exported_step"] == 2
    model, steps = folder / "out" / "model.safetensors", folder / "out" / "run" / "steps"
    exported = model.read_bytes()
    shutil.rmtree(steps / "step-00000002")

    class Stopping(Observer):
        def step_ends(self, result, pauses):
            signal.raise_signal(signal.SIGTERM)

    summary, said = finetune(folder, *how, "step_scheduler.max_steps=12", resume=True, observer=Stopping())
    assert summary["status"] == "interrupted"
    what = "The checkpoint of step 2, the best by loss"
    stays = f"{what} so far, is missing or damaged: unless a later evaluation is better, its model stays in"
    assert stays in said
    summary, said = finetune(folder, *how, "step_scheduler.max_steps=12", resume=True)
    assert stays in said
    assert f"{what}, is missing; its model, which was exported before, stays in {folder / 'out'}." in said
    assert f"Left the model in {folder / 'out'}" in said
    assert "Saved the model" not in said
    assert model.read_bytes() == exported
    assert (summary["steps"], summary["exported_step"], summary["validation"]) == (12, 2, first["validation"])
    with pytest.raises(UserError, match="already finished its 12 steps"):
        finetune(folder, *how, "step_scheduler.max_steps=12", resume=True)
    better = ("optimizer.lr=1e-2", *how[1:], "step_scheduler.max_steps=14")
    config = folder / "out" / "run" / "config.yaml"
    config.write_text(config.read_text().replace("1e-12", "0.01").replace("1.0e-12", "0.01"))
    summary, said = finetune(folder, *better, resume=True)
    assert summary["exported_step"] > 12
    assert model.read_bytes() != exported


def test_another_number_of_ranks_is_told_how_to_keep_the_steps(folder, monkeypatch):
    """As after two ranks of batch 4, of which one was lost."""
    import json

    from automodel.checkpoint.catalog import Checkpoint

    finetune(folder, "dataloader.batch_size=4", "step_scheduler.grad_acc_steps=2", "step_scheduler.max_steps=4")
    checkpoint = folder / "out" / "run" / "steps" / "step-00000004"
    state = Checkpoint(4, checkpoint).state()
    state["ranks"] = 2
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "state", lambda self: json.loads(json.dumps(state)))
        with pytest.raises(UserError) as refused:
            finetune(folder, "step_scheduler.grad_acc_steps=1", resume=True)
        message = str(refused.value)
        assert "comes from 2 ranks with 8 examples a step in micro-batches of 4; 1 rank" in message
        command = message.splitlines()[-1].strip()
        assert command.startswith(f"automodel finetune llm -c {folder / 'out' / 'run' / 'config.yaml'} --resume")
        settings = command.split("--resume ")[1].split()
        own = [setting for setting in settings if not setting.startswith("step_scheduler.max_steps=")]
        assert own == ["step_scheduler.global_batch_size=8", "dataloader.batch_size=4"]
        _, said = finetune(folder, *settings, "step_scheduler.max_steps=6", resume=True)
    assert "The checkpoint comes from 2 ranks, and 1 goes on with it" in said
