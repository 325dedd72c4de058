"""Parts that several ranks wrote are read in any other cut, and by torch.distributed.checkpoint as they are."""

import itertools
import json
import time

import pytest
import torch

from automodel.checkpoint import parts as parts_module
from automodel.checkpoint.catalog import Checkpoint, DamagedCheckpointError
from automodel.checkpoint.parts import Part, SavedGroup, cut, file_of, header_of_parts, neighbours, read_whole
from automodel.checkpoint.tensor_file import write_tensors

WHOLE = {
    "table": torch.arange(70.0).reshape(10, 7),
    "bias": torch.arange(5, dtype=torch.int64),
    "cube": torch.randn(4, 6, 3).to(torch.bfloat16),
    "scalar": torch.tensor(3.5),
}


def write_parts(folder, ranks=4):
    """The table in four blocks of 2 × 2, the bias by rows (rank 3 has none), the rest by the first rank."""
    for rank in range(ranks):
        rows, columns = [(0, 6), (6, 10)][rank // 2], [(0, 4), (4, 7)][rank % 2]
        table = WHOLE["table"][rows[0] : rows[1], columns[0] : columns[1]]
        parts = {"table": Part(table, (rows[0], columns[0]), (10, 7))}
        if rank < 3:
            parts["bias"] = Part(WHOLE["bias"][2 * rank : 2 * rank + 2], (2 * rank,), (5,))
        if rank == 0:
            parts |= {name: Part.whole(WHOLE[name]) for name in ("cube", "scalar")}
        tensors = {name: part.data for name, part in parts.items()}
        write_tensors(folder / file_of("model", rank, ranks), tensors, header_of_parts(parts))


def test_any_rectangle_is_read(tmp_path):
    write_parts(tmp_path)
    saved = SavedGroup(tmp_path, "model")
    assert set(saved) == set(WHOLE)
    for a, b in itertools.combinations(range(11), 2):
        for c, d in ((0, 7), (1, 5), (4, 6), (3, 3)):
            assert torch.equal(saved["table"][a:b, c:d], WHOLE["table"][a:b, c:d])
    assert torch.equal(saved["bias"][1:4], WHOLE["bias"][1:4])
    assert torch.equal(saved["cube"][:, 2:5], WHOLE["cube"][:, 2:5])
    assert saved["table"].shape == (10, 7)
    assert saved["cube"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="not every 2 elements"):
        saved["table"][::2]


def test_whole_tensors_of_parts_and_of_one_file_are_the_same(tmp_path):
    write_parts(tmp_path)
    (tmp_path / "one").mkdir()
    write_tensors(tmp_path / "one" / file_of("model", None, 1), WHOLE)
    for folder in (tmp_path, tmp_path / "one"):
        found = read_whole(folder, "model")
        assert found.keys() == WHOLE.keys()
        assert all(torch.equal(found[name], WHOLE[name]) for name in WHOLE)
        lazy = Checkpoint(1, folder).parts("model")
        assert all(torch.equal(lazy[name].read(), WHOLE[name]) for name in WHOLE)


def test_a_missing_part_is_named(tmp_path):
    write_parts(tmp_path)
    (tmp_path / file_of("model", 2, 4)).unlink()
    with pytest.raises(DamagedCheckpointError, match="the parts of '(table|bias)' .* have (58|4) elements"):
        SavedGroup(tmp_path, "model")
    with pytest.raises(DamagedCheckpointError, match=r"optimizer.safetensors is missing"):
        SavedGroup(tmp_path, "optimizer")


def test_replicas_may_be_written_twice(tmp_path):
    """Ranks that hold the same part and do not know of each other."""
    parts = {"w": Part(torch.ones(3), (0,), (3,))}
    for rank in range(2):
        write_tensors(tmp_path / file_of("model", rank, 2), {"w": torch.ones(3)}, header_of_parts(parts))
    assert torch.equal(read_whole(tmp_path, "model")["w"], torch.ones(3))


def test_torch_reads_the_files_as_they_are(tmp_path):
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    write_parts(tmp_path)
    into = {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items() if name != "scalar"}
    dcp.load(into, storage_reader=HuggingFaceStorageReader(str(tmp_path)))
    assert all(torch.equal(into[name], WHOLE[name]) for name in into)


def test_a_changed_manifest_is_named(tmp_path):
    from automodel.checkpoint.store import CheckpointStore

    store = CheckpointStore(tmp_path)
    store.save(1, {"model": {"w": torch.ones(2)}}, {})
    folder = store.save(2, {"model": {"w": torch.ones(2)}}, {}).folder
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["model.safetensors"]["size"] += 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    checkpoint, notes = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert "manifest.json was changed" in notes[0]


def test_the_files_of_a_thousand_ranks_are_put_together_at_once(tmp_path, monkeypatch):
    """On every rank that resumes; comparing each part with all others, a large model would take a minute."""
    ranks, names = 1000, [f"layers.{number}.weight" for number in range(20)]
    paths = [tmp_path / file_of("model", rank, ranks) for rank in range(ranks)]

    def header_of(path):
        rank = paths.index(path)
        parts = {name: Part(torch.empty(1, 4, device="meta"), (rank, 0), (ranks, 4)) for name in names}
        entry = {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]}
        return {**dict.fromkeys(names, entry), "__metadata__": header_of_parts(parts)}

    headers = {path: header_of(path) for path in paths}
    monkeypatch.setattr(parts_module, "files_of", lambda folder, group: [*paths, *paths[:3]])  # and some replicas
    monkeypatch.setattr(parts_module, "_header_of", lambda path: dict(headers[path]))
    begun = time.process_time()
    group = SavedGroup(tmp_path, "model")
    assert time.process_time() - begun < 0.8
    assert all(len(group[name].stored) == ranks for name in names)


def test_a_large_group_is_cut_into_files_of_neighbours(monkeypatch):
    monkeypatch.setattr(parts_module, "FILE_BYTES", 100)
    monkeypatch.setattr(parts_module, "FILES", 3)
    assert cut("model", {"a": 60, "b": 60, "c": 60}) == {"model.safetensors": ["a", "b", "c"]}
    sizes = {f"t{i}": 90 for i in range(6)}
    found = cut("optimizer", sizes)
    assert list(found) == [f"optimizer-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert list(found.values()) == [["t0", "t1"], ["t2", "t3"], ["t4", "t5"]]
    table = cut("model", {"small": 10, "table": 900, "last": 10})
    assert list(table.values()) == [["small"], ["table"], ["last"]]
    assert cut("rng", {}) == {"rng.safetensors": []}


def test_neighbours_share_what_has_room_for_them():
    sizes = {"a": 3, "b": 3, "c": 9, "d": 1}
    assert neighbours(sizes, 6) == [["a", "b"], ["c"], ["d"]]
    assert neighbours(sizes, 100) == [["a", "b", "c", "d"]]
    assert neighbours({}, 100) == []
    assert neighbours({"empty": 0, "more": 0}, 0) == [["empty", "more"]]
