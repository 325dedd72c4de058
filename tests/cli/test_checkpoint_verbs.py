"""`automodel checkpoint ls|verify|prune|convert`, on a run that was really trained."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import tiny_runs as tiny
from tiers import quick

SETTINGS = (
    "step_scheduler: {max_steps: 8, log_every_steps: 4, val_every_steps: 2, ckpt_every_steps: 2}\n"
    "dataloader: {batch_size: 4}\n"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    tiny.write_run(folder, text=SETTINGS)
    settings = ("checkpoint.keep_last=3", "checkpoint.keep_best=false")
    cache = {"AUTOMODEL_CACHE": str(folder / "cache")}
    tiny.automodel("finetune", "llm", "-c", folder / "run.yaml", *settings, **cache)
    return folder


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy whose checkpoints may be spoiled."""
    return shutil.copytree(trained / "out", tmp_path / "out")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_ls_lists_them(run):
    rows = json.loads(tiny.automodel("checkpoint", "ls", run, "--json").stdout)
    assert [row["step"] for row in rows] == [4, 6, 8]
    assert [row["marks"][:1] for row in rows][-1] == ["latest"]
    assert all(row["ranks"] == 1 and row["files"] == 4 and row["bytes"] > 10_000 for row in rows)
    table = tiny.automodel("checkpoint", "ls", run).stdout
    assert table.splitlines()[1].split() == ["step", "epoch", "written", "size", "ranks", "files"]
    assert "latest" in table.splitlines()[-1]


def test_verify_names_the_damaged_file(run):
    whole = tiny.automodel("checkpoint", "verify", run)
    assert whole.stdout.count("whole, 4 files") == 3
    flip(run / "run" / "steps" / "step-00000006" / "optimizer.safetensors")
    done = tiny.automodel("checkpoint", "verify", run, check=False)
    assert done.returncode == 1
    assert "step 6: DAMAGED" in done.stdout
    assert "step-00000006/optimizer.safetensors was changed after it was written" in done.stdout
    assert "--resume takes the newest that is whole" in done.stdout
    assert tiny.automodel("checkpoint", "verify", run, "--step", "8").returncode == 0


@pytest.mark.parametrize("how", quick(["no manifest", "no folder"], "no folder"))
def test_what_is_missing_is_damage(trained, run, how):
    newest = run / "run" / "steps" / "step-00000008"
    (newest / "manifest.json").unlink() if how == "no manifest" else shutil.rmtree(newest)
    what = f"{newest / 'manifest.json' if how == 'no manifest' else newest} is missing"
    done = tiny.automodel("checkpoint", "verify", run, check=False)
    assert done.returncode == 1
    assert f"step 8: DAMAGED. {what}." in done.stdout
    assert done.stdout.count("whole, 4 files") == 2
    rows = json.loads(tiny.automodel("checkpoint", "ls", run, "--json").stdout)
    assert [row["step"] for row in rows if "latest" in row["marks"]] == [6]
    assert what in rows[-1]["problem"]
    assert "is missing." in " ".join(tiny.automodel("checkpoint", "ls", run).stdout.split())
    settings = ("checkpoint.keep_last=3", "checkpoint.keep_best=false", f"checkpoint.checkpoint_dir={run}")
    cache = {"AUTOMODEL_CACHE": str(trained / "cache")}
    done = tiny.automodel("finetune", "llm", "-c", trained / "run.yaml", *settings, "--resume", **cache)
    printed = " ".join((done.stdout + done.stderr).split())
    assert what in printed
    assert "Falling back to the checkpoint before it." in printed
    assert "Resuming after step 6" in printed
    assert tiny.automodel("checkpoint", "verify", run).stdout.count("whole, 4 files") == 3


def test_prune_forgets_what_is_missing(run):
    shutil.rmtree(run / "run" / "steps" / "step-00000008")
    done = tiny.automodel("checkpoint", "prune", run, "--drop-best").stdout
    assert "Removed steps: 4 (" in done
    assert tiny.automodel("checkpoint", "verify", run).stdout.count("whole") == 1


@pytest.mark.parametrize("how", quick(["truncated", "changed"], "truncated"))
def test_prune_keeps_the_newest_that_is_whole(run, how):
    newest = run / "run" / "steps" / "step-00000008" / "model.safetensors"
    data = newest.read_bytes()
    newest.write_bytes(data[:-3] if how == "truncated" else data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    would = tiny.automodel("checkpoint", "prune", run, "--drop-best", "--dry-run").stdout
    assert "Would remove steps: 4, 8" in would
    assert len(list((run / "run" / "steps").glob("step-*"))) == 3
    under_way, left_behind = (
        run / "run" / "steps" / f".unfinished-step-{name}" for name in ("00000010-1", "00000009-1")
    )
    for folder in (under_way, left_behind):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        os.utime(folder, (0, 0))
    os.utime(left_behind / "model.safetensors", (0, 0))
    done = tiny.automodel("checkpoint", "prune", run, "--drop-best").stdout
    assert "Removed steps: 4, 8" in done
    assert under_way.exists(), "the run may be training, and this its next checkpoint"
    assert not left_behind.exists()
    assert [path.name for path in (run / "run" / "steps").glob("step-*")] == ["step-00000006"]
    assert (run / "run" / "steps" / "LATEST").read_text() == "step-00000006\n"


def test_convert_writes_what_the_run_exported(trained, run, tmp_path):
    """The run exported its last step; so does the conversion, file by file, without the data."""
    cache = {"AUTOMODEL_CACHE": str(tmp_path / "empty")}
    for data in trained.glob("*.jsonl"):
        data.unlink()
    done = tiny.automodel("checkpoint", "convert", run, "--out", tmp_path / "hf", **cache)
    assert "Wrote the model of step 8" in done.stdout
    written = {path.name for path in (tmp_path / "hf").iterdir() if path.is_file()}
    assert written == {path.name for path in run.iterdir() if path.is_file()}
    for name in written:
        assert (tmp_path / "hf" / name).read_bytes() == (run / name).read_bytes(), name
    assert json.loads((run / "tokenizer.json").read_text())["truncation"] is None, "a limit of the tokenising was saved"
    again = tiny.automodel("checkpoint", "convert", run, "--out", tmp_path / "hf", check=False, **cache)
    assert again.returncode == 2
    assert "is not empty" in again.stderr


def test_an_adapter_is_converted_to_peft_s_folder(tmp_path, monkeypatch):
    from rich.console import Console

    from automodel.engine.convert import convert_checkpoint
    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    tiny.write_run(tmp_path, text=SETTINGS + "peft: {dim: 4, alpha: 8}\n")
    finetune(load_run_config([tmp_path / "run.yaml"], ["checkpoint.keep_best=false"]), console=Console(quiet=True))
    (tmp_path / "train.jsonl").unlink()
    done = convert_checkpoint(tmp_path / "out", tmp_path / "hf")
    assert done.step == 8
    for name in (
        "adapter_model.safetensors", "adapter_config.json", "config.json", "run/layout.json", "run/base.json"
    ):  # fmt: skip
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name


def test_wrong_arguments_are_explained(trained, tmp_path):
    cases = {
        ("ls", tmp_path / "nowhere"): "there is no folder",
        ("ls", tmp_path): "there is no checkpoint in",
        ("lst", tmp_path): "It does: ls, verify, prune, convert",
        ("verify", trained / "out", "--step", "5"): "There are: 4, 6, 8.",
    }
    for arguments, message in cases.items():
        done = tiny.automodel("checkpoint", *arguments, check=False)
        assert done.returncode == 2
        assert message in done.stderr


def test_convert_takes_the_newest_that_is_whole_where_there_is_one(run, tmp_path):
    steps = run / "run" / "steps"
    flip(steps / "step-00000008" / "model.safetensors")
    done = tiny.automodel("checkpoint", "convert", run, "--out", tmp_path / "six")
    assert "Taking the checkpoint before it." in " ".join((done.stdout + done.stderr).split())
    for step in (4, 6):
        flip(steps / f"step-0000000{step}" / "model.safetensors")
    done = tiny.automodel("checkpoint", "convert", run, "--out", tmp_path / "none", check=False)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2
    assert "has no checkpoint that is whole" in said
    assert "before it" not in said
    assert not (tmp_path / "none").exists()
