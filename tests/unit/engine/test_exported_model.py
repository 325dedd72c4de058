"""When a run says that its model is saved, its weights are on the disk: in its last checkpoint or in its own files."""

import tempfile
from pathlib import Path

import pytest

import tiny_runs as tiny
from automodel.checkpoint import catalog, store
from automodel.checkpoint.disk import flush_to_disk
from automodel.cli.checkpoint import prune
from automodel.config.errors import UserError
from automodel.engine import exported_model
from automodel.engine.folder import RunFolder
from automodel.engine.run import finetune
from automodel.models import save
from automodel.plan.check import load_run_config

WEIGHTS = "model.safetensors"


@pytest.fixture
def flushed(monkeypatch):
    """Names of what was brought to the disk for the model's sake; every file of it counts as a large one."""
    names: list[str] = []

    def note(path):
        names.append(path.name)
        flush_to_disk(path)

    monkeypatch.setattr(save, "_LARGE", 10_000)
    for room in (save, exported_model):
        monkeypatch.setattr(room, "flush_to_disk", note)
    return names


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    return tiny.write_run(tmp_path, rows=16, text="step_scheduler: {num_epochs: 1}\n")


def test_the_disk_is_not_waited_for_twice(path, flushed, tmp_path):
    finetune(load_run_config([path]))
    assert (tmp_path / "out" / WEIGHTS).stat().st_size > save._LARGE
    assert "config.json" in flushed
    assert WEIGHTS not in flushed
    assert [p.name for p in (tmp_path / "out" / "run" / "steps").glob("step-*")] == ["step-00000002"]


@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_without_its_checkpoint_the_model_itself_is(path, flushed, tmp_path, monkeypatch, on_error):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_side_by_side", full)
    cfg = load_run_config([path], [f"checkpoint.on_error={on_error}"])
    if on_error == "stop":
        with pytest.raises(UserError, match="checkpoint of step 2 could not be written"):
            finetune(cfg)
    else:
        finetune(cfg)
    assert WEIGHTS in flushed
    assert not RunFolder(tmp_path / "out").left_short()


def test_an_older_checkpoint_of_the_same_step_is_not_the_models(path, flushed, tmp_path, monkeypatch):
    """It may be the damaged one for which the run went back and came here again."""
    finetune(load_run_config([path]))
    (tmp_path / "out" / WEIGHTS).unlink()
    summary = tmp_path / "out" / "run" / "summary.json"
    summary.write_text(summary.read_text().replace('"finished"', '"interrupted"'))
    del flushed[:]
    finetune(load_run_config([path]), resume=True)
    assert WEIGHTS in flushed


def test_a_checkpoint_on_another_disk_is_not_relied_on(flushed, tmp_path):
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here")
    with tempfile.TemporaryDirectory(dir=elsewhere) as other:
        folder = RunFolder(tmp_path)
        folder.run.mkdir()
        folder.write_json("exported.json", [WEIGHTS])
        (tmp_path / WEIGHTS).write_bytes(b"weights")
        for steps, expected in ((tmp_path / "steps", []), (Path(other), [WEIGHTS])):
            steps.mkdir(exist_ok=True)
            folder.steps.unlink(missing_ok=True)
            folder.steps.symlink_to(steps)
            kept = store.CheckpointStore(folder.steps)
            kept.sealed.add(2)
            exported_model.wait_for_disk(kept, folder, 2)
            assert flushed == expected


def test_weights_that_a_power_cut_left_short_are_exported_again(path, tmp_path):
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


def test_pruning_leaves_weights_with_a_place_on_the_disk(path, flushed, tmp_path, monkeypatch):
    finetune(load_run_config([path], ["step_scheduler.num_epochs=2"]))
    assert WEIGHTS not in flushed
    monkeypatch.setattr(catalog, "retire", lambda folder: flushed.append(folder.name))
    prune(tmp_path / "out", keep=1, drop_best=True, dry_run=True)
    assert WEIGHTS not in flushed
    prune(tmp_path / "out", keep=1, drop_best=True, dry_run=False)
    assert flushed.index(WEIGHTS) < flushed.index("step-00000002")
