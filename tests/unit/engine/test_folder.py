"""Nothing a user made is lost: what may live in a run folder, and what is refused."""

import json
import os
import shutil
from pathlib import Path

import pytest

from automodel.checkpoint.disk import replace_text
from automodel.config.errors import UserError
from automodel.engine.folder import EXPORTED, LAYOUT, RunFolder, open_folder, refuse_what_it_reads, start_fresh
from automodel.plan.check import load_run_config
from automodel.plan.places import with_folder


def finished_run(root):
    (root / "run" / "steps" / "step-00000010").mkdir(parents=True)
    (root / "run" / "config.yaml").write_text("model: x\n")
    (root / "config.json").write_text("{}")
    (root / "notes.md").write_text("mine")
    (root / "run" / EXPORTED).write_text(json.dumps(["config.json"]))
    return root


def test_a_new_folder_is_fine(tmp_path):
    folder = open_folder(str(tmp_path / "new"), resume=False, overwrite=False)
    start_fresh(folder)
    assert folder.run.is_dir()


def test_another_run_is_not_overwritten(tmp_path):
    root = finished_run(tmp_path)
    with pytest.raises(
        UserError, match=r"already holds a run\. Continue it with --resume, replace it with --overwrite"
    ):
        open_folder(str(root), resume=False, overwrite=False)


def test_overwrite_removes_only_what_the_run_wrote(tmp_path):
    root = finished_run(tmp_path)
    start_fresh(open_folder(str(root), resume=False, overwrite=True))
    assert not (root / "config.json").exists()
    assert (root / "notes.md").read_text() == "mine"
    assert not any((root / "run").iterdir())


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("model={here}", "model.pretrained_model_name_or_path"),
        ("model={link}", "model.pretrained_model_name_or_path"),
        ("model.tokenizer={here}", "model.tokenizer"),
        ("peft={{pretrained_adapter: {here}}}", "peft.pretrained_adapter"),
        ("dataset={here}/run/steps", "dataset.path"),
    ],
)
def test_what_a_run_starts_from_does_not_make_room_for_it(tmp_path, setting, key):
    """With --overwrite the base of an adapter was removed, and the adapter saved without it."""
    root = finished_run(tmp_path / "out")
    (tmp_path / "link").symlink_to(root)
    (tmp_path / "rows.csv").write_text("text,label\n")
    plain = [f"model={tmp_path / 'base'}", f"dataset={tmp_path / 'rows.csv'}", f"checkpoint.checkpoint_dir={root}"]
    refuse_what_it_reads(load_run_config([], plain), resume=False)
    asked = load_run_config([], [*plain, setting.format(here=root, link=tmp_path / "link")])
    with pytest.raises(UserError, match=rf"^{key}: .* lies in the folder of the new run"):
        refuse_what_it_reads(asked, resume=False)
    refuse_what_it_reads(asked, resume=True)


def test_an_adapter_without_a_config_beside_it_does_not_make_room_either(tmp_path):
    """That is how an adapter of a language model is saved."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    here = [f"model={tmp_path / 'base'}", "dataset=rows", f"peft={{pretrained_adapter: {tmp_path}}}"]
    with pytest.raises(UserError, match=r"^peft.pretrained_adapter: .* lies in the folder of the new run"):
        refuse_what_it_reads(load_run_config([], [*here, f"checkpoint.checkpoint_dir={tmp_path}"]), resume=False)


@pytest.mark.parametrize("overwrite", [False, True])
def test_somebody_elses_model_is_never_touched(tmp_path, overwrite):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(UserError, match="holds a model that no run of automodel wrote"):
        open_folder(str(tmp_path), resume=False, overwrite=overwrite)


def test_a_run_without_model_is_put_aside(tmp_path):
    for number in (1, 2):
        folder = open_folder(str(tmp_path), resume=False, overwrite=False)
        start_fresh(folder)
        (folder.run / "metrics.jsonl").write_text(str(number))
    assert (tmp_path / "run.1" / "metrics.jsonl").read_text() == "1"
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "2"


def test_resume_needs_a_run(tmp_path):
    with pytest.raises(UserError, match="there is no run in"):
        open_folder(str(tmp_path / "nothing"), resume=True, overwrite=False)


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        open_folder(str(tmp_path / "file"), resume=False, overwrite=False)


def test_exported_files_are_remembered(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_json(EXPORTED, ["config.json"])
    assert folder.exported() == ["config.json"]


def test_a_folder_named_run_of_somebody_else_is_not_touched(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "start.sh").write_text("echo mine")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="holds files that no run of automodel wrote"):
            open_folder(str(tmp_path), resume=False, overwrite=overwrite)


def test_notes_and_data_beside_a_run_are_no_model(tmp_path):
    root = finished_run(tmp_path)
    (root / "requirements.txt").write_text("torch")
    (root / "results.json").write_text("{}")
    start_fresh(open_folder(str(root), resume=False, overwrite=True))
    assert (root / "requirements.txt").exists()
    assert (root / "results.json").exists()


def test_a_run_is_complete_when_its_last_step_was_exported(tmp_path):
    folder = RunFolder(finished_run(tmp_path))
    assert not folder.is_complete(10), "killed before its summary"
    folder.write_json("summary.json", {"status": "finished", "steps": 10})
    assert folder.is_complete(10)
    assert not folder.is_complete(20), "it was continued since, and killed before the second export"
    folder.write_json("summary.json", {"status": "interrupted", "steps": 20})
    assert not folder.is_complete(20)


def test_a_run_that_was_killed_before_it_wrote_anything_is_in_nobodys_way(tmp_path):
    (tmp_path / "run").mkdir()
    folder = open_folder(str(tmp_path), resume=False, overwrite=False)
    start_fresh(folder)
    assert folder.run.is_dir()


def test_a_run_that_was_killed_amid_its_first_file_is_in_nobodys_way(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    folder = RunFolder(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            replace_text(folder.config, "model: somewhere")
    assert list(folder.run.iterdir()), "what a kill leaves"
    with pytest.raises(UserError, match="there is no run in"):
        open_folder(str(tmp_path), resume=True, overwrite=False)
    for overwrite in (False, True):
        start_fresh(open_folder(str(tmp_path), resume=False, overwrite=overwrite))
    assert not list(folder.run.iterdir())


def test_hidden_files_with_numbers_are_somebody_elses(tmp_path):
    (tmp_path / "run" / ".snapshots.1").mkdir(parents=True)
    with pytest.raises(UserError, match="holds files that no run of automodel wrote"):
        open_folder(str(tmp_path), resume=False, overwrite=True)


def test_a_link_to_another_disk_stays_and_is_emptied(tmp_path, monkeypatch):
    root, disk = finished_run(tmp_path / "here"), tmp_path / "disk"
    os.replace(root / "run", disk)
    (root / "run").symlink_to(disk)
    (disk / "config.yaml").write_text(with_folder("checkpoint: {checkpoint_dir: here}\n"))
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match=r"is a link to .*disk, whose config.yaml does not name"):
        open_folder(str(root), resume=False, overwrite=True)
    monkeypatch.chdir(tmp_path)
    (disk / "config.yaml").write_text(with_folder("checkpoint: {checkpoint_dir: here}\n"))
    assert start_fresh(open_folder(str(root), resume=False, overwrite=True)) == []
    assert (root / "run").is_symlink()
    assert not list(disk.iterdir())


def test_what_cannot_be_removed_is_told(tmp_path, monkeypatch):
    root = finished_run(tmp_path)
    mine = root / ".removed-run-notes"
    mine.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        (told,) = start_fresh(open_folder(str(root), resume=False, overwrite=True))
    (left,) = (p for p in root.glob(".removed-run-*") if p != mine)
    assert str(left) in told
    assert start_fresh(open_folder(str(root), resume=False, overwrite=True)) == []
    assert not left.exists()
    assert mine.exists()


def test_a_kill_amid_removing_the_earlier_run_leaves_nothing_in_the_way(tmp_path, monkeypatch):
    root = finished_run(tmp_path)

    def killed(path, **_):
        for found in Path(path).glob("*.yaml"):
            found.unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        folder = open_folder(str(root), resume=False, overwrite=True)
        with pytest.raises(KeyboardInterrupt):
            start_fresh(folder)
    start_fresh(open_folder(str(root), resume=False, overwrite=False))
    assert sorted(path.name for path in root.iterdir()) == ["notes.md", "run"]
    assert not list((root / "run").iterdir())


@pytest.mark.parametrize("damage", [b"", b'{"ranks', b"[1]", b"5", b"null", b"\xff"])
def test_a_damaged_record_counts_as_none_and_what_the_model_needs_is_named(tmp_path, damage):
    folder = RunFolder(finished_run(tmp_path))
    for name in ("plan.json", "summary.json"):
        (folder.run / name).write_bytes(damage)
        assert folder.read_json(name) is None
    assert not folder.is_complete(10)
    (folder.run / EXPORTED).write_bytes(damage.replace(b"[1]", b"{}"))
    assert folder.exported() == []
    (folder.run / LAYOUT).write_bytes(damage)
    with pytest.raises(UserError, match=r"layout.json is damaged.*Put back a copy of it"):
        folder.read_json(LAYOUT)
    assert folder.read_json("nothing.json") is None
