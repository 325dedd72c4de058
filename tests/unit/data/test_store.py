"""The token store on disk: what was written is read, never half of it, and damage is noticed."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import signal
import time

import numpy as np
import pytest

from automodel.config.errors import UserError
from automodel.data.samples import SampleWriter
from automodel.data.store import DamagedStore, TokenStore, open_or_build


def chunk(first: int, count: int):
    writer = SampleWriter()
    for row in range(first, first + count):
        writer.add(row, [row % 7 + 1] * (row % 5 + 1), token_labels=[row % 3] * (row % 5 + 1), label=row % 2)
    return writer.finish()


def build_with(*chunks, meta=None):
    return lambda: (iter(chunks), lambda: meta or {"key": "k"})


def test_round_trip(tmp_path):
    store, cached = open_or_build(tmp_path / "s", build_with(chunk(0, 4), chunk(4, 6)), vocabulary=1000)
    assert not cached
    assert len(store) == 10
    assert store.input_ids.dtype == np.uint16
    assert store.lengths.tolist() == [row % 5 + 1 for row in range(10)]
    assert store.rows.tolist() == list(range(10))
    assert store.input_ids[store.offsets[6] : store.offsets[7]].tolist() == [7, 7]
    assert store.token_labels[store.offsets[8] : store.offsets[9]].tolist() == [2] * 4
    assert store.labels.tolist() == [0, 1] * 5
    again, cached = open_or_build(tmp_path / "s", build_with(), vocabulary=1000)
    assert cached
    assert np.array_equal(again.input_ids, store.input_ids)


def test_large_vocabularies_take_32_bits(tmp_path):
    writer = SampleWriter()
    writer.add(0, [70_000, 3])
    store, _ = open_or_build(tmp_path / "s", build_with(writer.finish()), vocabulary=128_256)
    assert store.input_ids.tolist() == [70_000, 3]


def test_float_labels_keep_their_columns(tmp_path):
    writer = SampleWriter()
    writer.add(0, [1], label=[0.0, 1.0, 0.5])
    writer.add(1, [1], label=[1.0, 0.0, 0.25])
    store, _ = open_or_build(tmp_path / "s", build_with(writer.finish()), vocabulary=10)
    assert store.labels.tolist() == [[0.0, 1.0, 0.5], [1.0, 0.0, 0.25]]


def test_a_failed_build_leaves_nothing(tmp_path):
    def meta():
        raise RuntimeError("bad rows")

    with pytest.raises(RuntimeError, match="bad rows"):
        open_or_build(tmp_path / "s", lambda: (iter([chunk(0, 4)]), meta), vocabulary=10)
    assert list(tmp_path.iterdir()) == []


def _truncate(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("input_ids.npy", _truncate),
        ("input_ids.npy", _flip),
        ("offsets.npy", lambda path: path.unlink()),
        ("meta.json", lambda path: path.unlink()),
        ("meta.json", lambda path: path.write_text('{"files": ')),
        ("meta.json", lambda path: path.write_text('{"format": 0, "files": {}}')),
        ("labels.npy", lambda path: path.write_bytes(b"")),
    ],
)
def test_damage_is_detected_and_repaired(tmp_path, name, damage):
    folder = tmp_path / "s"
    open_or_build(folder, build_with(chunk(0, 10)), vocabulary=1000)
    damage(folder / name)
    with pytest.raises(DamagedStore):
        TokenStore.open(folder)
    store, cached = open_or_build(folder, build_with(chunk(0, 10)), vocabulary=1000)
    assert not cached
    assert len(store) == 10
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_pickles_as_its_folder(tmp_path):
    store, _ = open_or_build(tmp_path / "s", build_with(chunk(0, 10)), vocabulary=1000)
    data = pickle.dumps(store)
    assert len(data) < 500
    assert pickle.loads(data).input_ids.tolist() == store.input_ids.tolist()


def _slow_build(folder, started, results, pause):
    def chunks():
        for first in range(0, 10, 2):
            started.set()
            time.sleep(pause)
            yield chunk(first, 2)

    _, cached = open_or_build(folder, lambda: (chunks(), lambda: {"key": "k"}), vocabulary=1000)
    results.put(cached)


def test_killed_while_building(tmp_path):
    context = multiprocessing.get_context("fork")
    started, results = context.Event(), context.Queue()
    victim = context.Process(target=_slow_build, args=(tmp_path / "s", started, results, 5))
    victim.start()
    assert started.wait(10)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    assert not (tmp_path / "s").exists()
    store, cached = open_or_build(tmp_path / "s", build_with(chunk(0, 10)), vocabulary=1000)
    assert not cached
    assert len(store) == 10


def test_leftovers_of_killed_builds_are_swept_after_a_day(tmp_path):
    old, young = tmp_path / "s.tmp-1-aa", tmp_path / "s.tmp-2-bb"
    for folder in (old, young):
        folder.mkdir()
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    open_or_build(tmp_path / "s", build_with(chunk(0, 4)), vocabulary=10)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s", "s.tmp-2-bb"]


def test_two_processes_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    started, results = context.Event(), context.Queue()
    args = (tmp_path / "s", started, results, 0.02)
    processes = [context.Process(target=_slow_build, args=args) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(TokenStore.open(tmp_path / "s")) == 10
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        open_or_build(tmp_path / "file" / "key", lambda: pytest.fail("nothing is read"), vocabulary=10)
    assert str(caught.value).startswith(f"the cache folder {tmp_path}/file cannot be written: ")
    assert str(caught.value).endswith("dataset.cache_dir or the environment variable AUTOMODEL_CACHE.")

    def fill():
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="cannot be written: No space left on device. Make room"):
        open_or_build(tmp_path / "cache" / "key", fill, vocabulary=10)
    assert list((tmp_path / "cache").iterdir()) == []


def test_settings_of_a_tokenizer_that_change_its_tokens_change_the_key(gpt_like):
    from automodel.data.fingerprint import tokenizer_digest

    other = copy.deepcopy(gpt_like)
    other.split_special_tokens = True
    assert tokenizer_digest(other) != tokenizer_digest(gpt_like) == tokenizer_digest(copy.deepcopy(gpt_like))


def test_merges_of_a_tokenizer_written_in_python_are_part_of_the_key(tmp_path):
    from transformers import CTRLTokenizer

    from automodel.data.fingerprint import tokenizer_digest

    def made(name: str, merges: str, **settings):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "vocab.json").write_text(json.dumps({"<unk>": 0, "ab</w>": 1, "a@@": 2, "b</w>": 3}))
        (folder / "merges.txt").write_text(merges)
        return CTRLTokenizer.from_pretrained(folder, **settings)

    plain, same, other = made("a", "#v\na b</w>\n"), made("b", "#v\na b</w>\n"), made("c", "#v\na c</w>\n")
    assert plain.tokenize("ab") != other.tokenize("ab")
    assert tokenizer_digest(plain) == tokenizer_digest(same) != tokenizer_digest(other)


def test_samples_are_known_by_their_content_whatever_their_store_is_called(prepare_rows, gpt_like, monkeypatch):
    """A checkpoint of an earlier version noted the name of its store, which changes with the encoders' version."""
    from automodel.data import fingerprint, prepare

    rows = [{"text": "good film"}, {"text": "bad film"}]
    monkeypatch.setattr(prepare, "ENCODERS", fingerprint.ENCODERS - 1)
    before = prepare_rows(rows, gpt_like, "causal-lm").store
    monkeypatch.undo()
    store = prepare_rows(rows, gpt_like, "causal-lm").store
    other = prepare_rows([*rows[:1], {"text": "bad films"}], gpt_like, "causal-lm", name="b.jsonl").store
    assert store.key != before.key
    assert store.content == before.content != other.content
    assert store.is_that_of(before.key)  # which lies beside it
    assert store.is_that_of(before.content)
    assert not store.is_that_of(other.key)
    assert not store.is_that_of(other.content)
    assert not store.is_that_of("0" * 32)  # gone
