"""When a run says that its model is saved, the model is on the disk; so is the state of a run that has no model."""

import os
import signal
from pathlib import Path

import pytest

import tiny_runs as tiny
from automodel.checkpoint import catalog
from automodel.cli.checkpoint import prune
from automodel.config.errors import UserError
from automodel.engine import loop
from automodel.engine import run as engine
from automodel.engine.folder import RunFolder
from automodel.engine.run import finetune
from automodel.plan.check import load_run_config
from watched_disk import note_flushes

WEIGHTS = "model.safetensors"


@pytest.fixture
def flushed(monkeypatch):
    """Folder and name of what was brought to the disk, in order."""
    names: list[str] = []
    note_flushes(monkeypatch, lambda path: names.append("/".join(path.parts[-2:])))
    return names


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    return tiny.write_run(tmp_path, rows=16, text="step_scheduler: {num_epochs: 1}\n")


def of_model(flushed: list[str]) -> list[str]:
    return [name for name in flushed if name.startswith(".model-being-written/")]


def of_checkpoints(flushed: list[str]) -> list[str]:
    return [name for name in flushed if "step-" in name and name.endswith(".safetensors")]


def test_the_model_is_on_the_disk_and_the_checkpoint_with_the_system(path, flushed, tmp_path):
    finetune(load_run_config([path]))
    assert {Path(name).name for name in of_model(flushed)} >= {WEIGHTS, "config.json", "tokenizer.json"}
    assert not of_checkpoints(flushed)
    (found,) = catalog.complete(tmp_path / "out" / "run" / "steps")
    found.verify()


def test_a_run_that_is_stopped_waits_for_its_checkpoint(path, flushed, monkeypatch):
    """It has nothing else."""
    monkeypatch.setattr(loop.StopRequest, "agreed", lambda *_: "SIGTERM")
    assert finetune(load_run_config([path])).exit_code == 130
    assert not of_model(flushed)
    assert any(name.endswith(WEIGHTS) for name in of_checkpoints(flushed))


@pytest.mark.parametrize("when", ["in the last step", "while the model is written"])
def test_so_does_one_that_is_asked_to_stop_at_its_end(path, flushed, monkeypatch, when):
    """The machine may be about to go; the run is finished all the same."""
    if when == "in the last step":
        answers = iter([None, "SIGTERM"])
        monkeypatch.setattr(loop.StopRequest, "agreed", lambda *_: next(answers))
    else:
        save = engine.save_hf_folder
        monkeypatch.setattr(
            engine, "save_hf_folder", lambda *given: (os.kill(os.getpid(), signal.SIGTERM), save(*given))[1]
        )
    done = finetune(load_run_config([path]))
    assert (done.exit_code, done.summary["status"], done.summary["steps"]) == (0, "finished", 2)
    assert any(name.endswith(WEIGHTS) for name in of_model(flushed))
    assert any(name.endswith(WEIGHTS) for name in of_checkpoints(flushed))


def test_so_does_one_whose_model_is_that_of_an_earlier_end(path, flushed, monkeypatch):
    """The last weights are in the checkpoint alone."""
    monkeypatch.setattr(engine, "_export", lambda *_: {"exported_step": 1, "stays": True})
    finetune(load_run_config([path]))
    assert any(name.endswith(WEIGHTS) for name in of_checkpoints(flushed))


def test_so_does_one_whose_model_cannot_be_written(path, flushed, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine, "save_hf_folder", full)
    with pytest.raises(UserError, match="the model could not be written"):
        finetune(load_run_config([path]))
    assert any(name.endswith(WEIGHTS) for name in of_checkpoints(flushed))


def test_pruning_keeps_something_on_the_disk(path, flushed, tmp_path, monkeypatch):
    finetune(load_run_config([path], ["step_scheduler.num_epochs=2"]))
    assert not [name for name in of_checkpoints(flushed) if "step-00000004" in name]
    del flushed[:]
    monkeypatch.setattr(catalog, "retire", lambda folder: flushed.append(f"away with {folder.name}"))
    prune(tmp_path / "out", keep=1, drop_best=True, dry_run=True)
    assert not flushed
    prune(tmp_path / "out", keep=1, drop_best=True, dry_run=False)
    assert flushed.index(f"step-00000004/{WEIGHTS}") < flushed.index("away with step-00000002")


def test_without_a_whole_checkpoint_the_model_is_where_to_begin(path, tmp_path):
    """A power cut soon after the end, with no older checkpoint."""
    finetune(load_run_config([path]))
    os.truncate(tmp_path / "out" / "run" / "steps" / "step-00000002" / WEIGHTS, 100)
    with pytest.raises(UserError) as refused:
        finetune(load_run_config([path]), resume=True)
    message = str(refused.value)
    assert "has no complete checkpoint, so there is nothing to continue" in message
    assert f"model.pretrained_model_name_or_path={tmp_path / 'out'}" in message
    assert "has 100 bytes instead of" in message
    assert "before it" not in message, "there is none"
    again = [f"model.pretrained_model_name_or_path={tmp_path / 'out'}", f"checkpoint.checkpoint_dir={tmp_path / 'on'}"]
    finetune(load_run_config([path], again))
    assert RunFolder(tmp_path / "on").is_exported()


@pytest.mark.parametrize("adapter", [True, False])
def test_the_advice_is_only_given_where_it_helps(path, tmp_path, adapter):
    settings = ["peft.r=2"] if adapter else []
    finetune(load_run_config([path], settings))
    for file in (tmp_path / "out" / "run" / "steps" / "step-00000002").glob("model*.safetensors"):
        os.truncate(file, 100)
    if adapter:
        with pytest.raises(UserError, match=rf"whole in .* \(peft.pretrained_adapter={tmp_path / 'out'} "):
            finetune(load_run_config([path], settings), resume=True)
        again = [f"peft.pretrained_adapter={tmp_path / 'out'}", f"checkpoint.checkpoint_dir={tmp_path / 'on'}"]
        finetune(load_run_config([path], [*settings, *again]))
        assert RunFolder(tmp_path / "on").is_exported()
    else:
        (tmp_path / "out" / WEIGHTS).rename(tmp_path / "elsewhere")
        with pytest.raises(UserError, match=r"nothing to continue. Start again with --overwrite"):
            finetune(load_run_config([path]), resume=True)


def test_weights_that_were_cut_short_are_exported_again(path, tmp_path):
    finetune(load_run_config([path]))
    weights, folder = tmp_path / "out" / WEIGHTS, RunFolder(tmp_path / "out")
    whole = weights.read_bytes()
    assert not folder.left_short()
    with pytest.raises(UserError, match="already finished"):
        finetune(load_run_config([path]), resume=True)
    for left in (whole[:-1], whole[:100], whole[:3], b""):
        weights.write_bytes(left)
        assert folder.left_short() == [WEIGHTS]
        assert not folder.is_complete(2)
    finetune(load_run_config([path]), resume=True)
    assert weights.read_bytes() == whole
    weights.unlink()
    assert folder.is_complete(2), "whoever moved it away has it"
