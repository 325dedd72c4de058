"""Nothing that a file of a run folder, checkpoint, cache or dataset names leads out of the folder of that file."""

import json
import os
import subprocess
import sys

import datasets
import numpy as np
import pytest
import torch

from automodel.checkpoint import catalog
from automodel.checkpoint.catalog import MANIFEST, Checkpoint, DamagedCheckpointError
from automodel.checkpoint.disk import digest_of
from automodel.checkpoint.store import CheckpointStore
from automodel.cli import checkpoint as verbs
from automodel.config.errors import UserError
from automodel.config.own_files import OutsideError, file_inside
from automodel.data.config import DatasetConfig
from automodel.data.sources import SavedSource
from automodel.data.store import DamagedStore, TokenStore
from automodel.engine.folder import EXPORTED, open_folder, start_fresh
from automodel.models.save import finish_interrupted_save

OUTSIDE = ["../mine.json", "{abs}/mine.json", "link/mine.json", "a/../../mine.json", "..", "", "/", 5, None, "a\0b"]


def a_run(tmp_path):
    root = tmp_path / "run_folder"
    (root / "run" / "steps" / "step-00000010").mkdir(parents=True)
    (root / "run" / "config.yaml").write_text("model: x\n")
    (root / "link").symlink_to(tmp_path)
    (tmp_path / "mine.json").write_text("mine")
    return root


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_leads_into_its_folder_or_nowhere(tmp_path, name):
    root = a_run(tmp_path)
    name = name.format(abs=tmp_path) if isinstance(name, str) else name
    with pytest.raises(OutsideError, match=r"^list\.json "):
        file_inside(root, name, "list.json")
    assert file_inside(root, "run/config.yaml", "list.json") == root / "run" / "config.yaml"


def test_a_link_of_that_name_can_be_replaced_but_not_followed(tmp_path):
    root = a_run(tmp_path)
    (root / "config.json").symlink_to(tmp_path / "mine.json")
    assert file_inside(root, "config.json", "list.json", replaced=True) == root / "config.json"
    with pytest.raises(OutsideError, match="does not lie in"):
        file_inside(root, "config.json", "list.json")


@pytest.mark.parametrize("name", OUTSIDE)
def test_overwrite_removes_nothing_outside_the_run_folder(tmp_path, name):
    root = a_run(tmp_path)
    name = name.format(abs=tmp_path) if isinstance(name, str) else name
    (root / "run" / EXPORTED).write_text(json.dumps(["config.json", name]))
    (root / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"run/exported\.json"):
        start_fresh(open_folder(str(root), resume=False, overwrite=True))
    assert (tmp_path / "mine.json").read_text() == "mine"
    assert (root / "config.json").exists()
    assert (root / "run" / "config.yaml").exists()


def test_overwrite_removes_no_notes_that_the_list_names(tmp_path):
    root = a_run(tmp_path)
    (root / "run" / EXPORTED).write_text(json.dumps(["config.json", "thesis.txt"]))
    for name in ("config.json", "thesis.txt"):
        (root / name).write_text("{}")
    start_fresh(open_folder(str(root), resume=False, overwrite=True))
    assert not (root / "config.json").exists()
    assert (root / "thesis.txt").exists()


def test_an_interrupted_save_moves_nothing_out_of_its_folder(tmp_path):
    """`predict` finishes it. `..` moved a file of the folder to where the list said."""
    root = a_run(tmp_path)
    staged = root / "deep" / ".model-to-move-in"
    staged.mkdir(parents=True)
    (root / "bashrc").write_text("evil")
    (staged / ".files.json").write_text(json.dumps(["../../bashrc"]))
    with pytest.raises(UserError, match="does not lie in"):
        finish_interrupted_save(root / "deep")
    assert (root / "bashrc").exists()
    (staged / ".files.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"\.files\.json is damaged"):
        finish_interrupted_save(root / "deep")


def test_an_index_of_weights_removes_weights_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    staged = tmp_path / ".model-to-move-in"
    staged.mkdir()
    (staged / ".files.json").write_text("[]")
    old = tmp_path / "model-00001-of-00002.safetensors"
    old.write_text("")
    named = {"a": "mine.txt", "b": old.name, "c": "../x.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    finish_interrupted_save(tmp_path)
    assert (tmp_path / "mine.txt").exists()
    assert not old.exists()


def test_a_manifest_names_files_of_its_checkpoint_alone(tmp_path):
    store = CheckpointStore(tmp_path / "steps", background=False)
    saved = store.save(1, {"model": {"w": torch.zeros(2)}}, {})
    mine = tmp_path / "mine.bin"
    mine.write_bytes(b"mine")
    path = saved.folder / MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    manifest["files"]["../../mine.bin"] = {"size": 4, "sha256": digest_of(mine)}
    path.write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpointError, match=r"names '\.\./\.\./mine\.bin', which does not lie in"):
        saved.verify()


def test_a_header_asks_for_no_more_than_its_file_has(tmp_path):
    """A length of 2^62 was allocated."""
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(DamagedCheckpointError, match="its header is longer than the file"):
        Checkpoint(1, folder).parts("model")


def test_prune_removes_no_checkpoints_behind_a_link(tmp_path):
    other = tmp_path / "other" / "run" / "steps"
    store = CheckpointStore(other, keep_last=5, background=False)
    for step in (1, 2):
        store.save(step, {"model": {"w": torch.zeros(2)}}, {})
    root = tmp_path / "mine"
    (root / "run").mkdir(parents=True)
    (root / "run" / "steps").symlink_to(other)
    with pytest.raises(UserError, match=r"is a link that leads out of .*checkpoint prune .*other/run/steps"):
        verbs.prune(root)
    assert len(catalog.complete(other)) == 2
    verbs.prune(other)
    assert [c.step for c in catalog.complete(other)] == [2]


def test_a_checkpoint_that_is_a_link_goes_without_what_it_leads_to(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    steps = tmp_path / "steps"
    steps.mkdir()
    (steps / "step-00000001").symlink_to(mine)
    catalog.retire(steps / "step-00000001")
    assert not list(steps.iterdir())
    assert (mine / "thesis.txt").exists()


def test_a_token_store_has_arrays_of_its_own_alone(tmp_path):
    np.save(tmp_path / "outside.npy", np.arange(3))
    store = tmp_path / "store"
    store.mkdir()
    about = {"shape": [3], "dtype": "<i8", "bytes": (tmp_path / "outside.npy").stat().st_size, "crc32": 0}
    (store / "meta.json").write_text(json.dumps({"format": 1, "files": {"../outside": about}}))
    with pytest.raises(DamagedStore, match="names arrays that no store has"):
        TokenStore.open(store, verify=False)


def source_of(folder):
    return SavedSource(DatasetConfig(path=str(folder)), "train", "dataset", folder.parent / "memory", folder)


def saved_rows(folder):
    rows = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(8)], "label": [0, 1] * 4})
    rows.save_to_disk(str(folder), num_shards=2)
    return source_of(folder)


def test_a_saved_dataset_has_files_of_its_own_alone(tmp_path):
    source = saved_rows(tmp_path / "rows")
    state = tmp_path / "rows" / "state.json"
    said = json.loads(state.read_text())
    os.replace(tmp_path / "rows" / said["_data_files"][0]["filename"], tmp_path / "elsewhere.arrow")
    said["_data_files"][0]["filename"] = "../elsewhere.arrow"
    state.write_text(json.dumps(said))
    for ask in (source.content_key, source.load):
        with pytest.raises(UserError, match=r"state\.json names '\.\./elsewhere\.arrow'"):
            ask()


def test_splits_of_a_saved_dataset_lie_in_it(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "dataset_dict.json").write_text('{"splits": ["../x"]}')
    with pytest.raises(UserError, match=r"dataset_dict\.json names '\.\./x'"):
        source_of(tmp_path / "rows").content_key()


def test_the_cache_sees_which_rows_state_json_names(tmp_path):
    """One shard less gave the tokens of both."""
    source = saved_rows(tmp_path / "rows")
    before = source.content_key()
    state = tmp_path / "rows" / "state.json"
    said = json.loads(state.read_text())
    state.write_text(json.dumps(said | {"_fingerprint": "another"}))
    assert source.content_key() == before, "only a name that datasets gives"
    said["_data_files"] = said["_data_files"][:1]
    state.write_text(json.dumps(said))
    assert source.content_key() != before
    assert len(source.load()) == 4
    state.write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"state\.json' cannot be read"):
        source.content_key()


HOLDS = """
import sys, time
from pathlib import Path
from automodel.checkpoint import catalog
folder = catalog.unfinished(Path(sys.argv[1]), 7)
held = catalog.make_held(folder)
print(folder, flush=True)
time.sleep(60)
"""


def test_a_checkpoint_that_begins_is_never_without_its_lock(tmp_path, monkeypatch):
    seen, hold = [], catalog.hold

    def looked_at(folder):
        seen.extend(catalog.left_behind(folder.parent))
        return hold(folder)

    monkeypatch.setattr(catalog, "hold", looked_at)
    folder = catalog.unfinished(tmp_path / "steps", 7)
    held = catalog.make_held(folder)
    monkeypatch.undo()
    assert folder.is_dir()
    assert [*seen, *catalog.left_behind(folder.parent)] == []
    catalog.let_go(held)
    assert catalog.left_behind(folder.parent) == [folder]


def test_what_a_killed_save_left_goes_with_the_next_start_and_a_living_one_stays(tmp_path, capsys):
    """15 GB for a model of 1B stayed in `run.1` for ever."""
    steps = tmp_path / "run" / "steps"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("model: x\n")
    aside = tmp_path / "run.1" / "steps"
    writers = [
        subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True)
        for folder in (steps, aside)
    ]
    try:
        names = [writer.stdout.readline().strip() for writer in writers]
        assert all(map(os.path.isdir, names))
        start_fresh(open_folder(str(tmp_path), resume=False, overwrite=False))
        assert len(list(tmp_path.glob("run.*/steps/.unfinished-*"))) == 2, "their processes live"
        with pytest.raises(UserError, match="there is no checkpoint"):
            verbs.prune(tmp_path / "run.1" / "steps")
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    moved = next(path for path in tmp_path.glob("run.*/steps") if list(path.iterdir()))
    verbs.prune(moved, dry_run=True)
    assert "Would remove 1 unfinished checkpoint of killed saves" in capsys.readouterr().out
    assert list(moved.iterdir())
    verbs.prune(moved)
    assert "Removed 1 unfinished checkpoint of killed saves" in capsys.readouterr().out
    assert not list(moved.iterdir())
    start_fresh(open_folder(str(tmp_path), resume=False, overwrite=False))
    assert not list(tmp_path.glob("run*/steps/.unfinished-*"))
