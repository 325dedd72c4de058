"""Tokenised once: what the store's name depends on, and that any number of processes gives the same samples."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from automodel.data import encode
from automodel.data.config import DatasetConfig
from automodel.data.encode import encode_rows
from automodel.data.fingerprint import tokenizer_digest
from automodel.data.prepare import choose_max_length, prepare
from automodel.tasks.registry import TEXT_CLASSIFICATION, task_named

ROWS = [{"text": "good film " * (i % 7 + 1), "label": i % 2} for i in range(50)]


class CountingTokenizer:
    """Passes everything on to a real tokenizer, and counts the calls."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calls = tokenizer, 0

    def __call__(self, *args, **settings):
        self.calls += 1
        return self.tokenizer(*args, **settings)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __len__(self):
        return len(self.tokenizer)


@pytest.fixture
def data_file(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def run(tmp_path, bert_like):
    def prepared(path, tokenizer=bert_like, **settings):
        cfg = DatasetConfig(path=str(path), cache_dir=str(tmp_path / "cache"), **settings)
        return prepare(
            cfg, row_format=TEXT_CLASSIFICATION.rows, tokenizer=tokenizer, max_positions=512, type_vocab_size=2
        )

    return prepared


def test_the_second_start_tokenises_nothing_and_reads_no_rows(run, data_file, bert_like, monkeypatch):
    counting = CountingTokenizer(bert_like)
    first = run(data_file, counting)
    calls = counting.calls
    assert calls >= 1
    assert not first.from_cache
    monkeypatch.setattr("automodel.data.files.read_split", lambda *_: pytest.fail("rows were read"))
    second = run(data_file, counting)
    assert counting.calls == calls
    assert second.from_cache
    assert second.stats == first.stats
    assert second.label_map == first.label_map
    assert np.array_equal(second.store.input_ids, first.store.input_ids)


def test_touching_moving_and_copying_change_nothing(run, data_file, tmp_path):
    key = run(data_file).store.key
    os.utime(data_file, (1, 1))
    assert run(data_file).store.key == key
    moved = tmp_path / "elsewhere" / "other.jsonl"
    moved.parent.mkdir()
    shutil.copy(data_file, moved)
    assert run(moved).from_cache


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 5},
        {"split": "train[:10]"},
        {"num_samples_limit": 9},
        {"labels": ("a", "b")},
        {"on_bad_row": "skip"},
    ],
)
def test_settings_are_part_of_the_name(run, data_file, change):
    key = run(data_file).store.key
    changed = run(data_file, **change)
    assert not changed.from_cache
    assert changed.store.key != key


def test_content_is_part_of_the_name(run, data_file):
    key = run(data_file).store.key
    data_file.write_text(data_file.read_text().replace("good film", "bad film", 1))
    os.utime(data_file, (1, 1))
    assert run(data_file).store.key != key


def test_the_tokenizer_is_part_of_the_name(run, data_file, bert_like, chat_like):
    first = run(data_file)
    other = copy.deepcopy(bert_like)
    other.add_tokens(["film good"])
    assert run(data_file, other).store.key != first.store.key
    same = copy.deepcopy(bert_like)
    same(["left over"], truncation=True, max_length=3, padding="max_length")  # leaves settings behind in the backend
    assert run(data_file, same).from_cache
    talking = copy.deepcopy(chat_like)
    talking.chat_template = "{{ messages }}"
    assert tokenizer_digest(talking) != tokenizer_digest(chat_like)


def test_a_damaged_store_is_tokenised_again(run, data_file, bert_like):
    first = run(data_file)
    before = np.array(first.store.input_ids)
    file = first.store.folder / "input_ids.npy"
    file.write_bytes(file.read_bytes()[:-3])
    again = run(data_file)
    assert not again.from_cache
    assert np.array_equal(again.store.input_ids, before)


def test_any_number_of_processes_gives_the_same_samples(run, data_file, bert_like, monkeypatch):
    monkeypatch.setattr(encode, "ROWS_PER_CHUNK", 7)
    alone = run(data_file, num_proc=1)
    folder = alone.store.folder
    kept = {p.name: p.read_bytes() for p in folder.glob("*.npy")}
    shutil.rmtree(folder)
    together = run(data_file, num_proc=3)
    assert not together.from_cache  # processes are not part of the name: the result is the same
    assert together.store.folder == folder
    assert {p.name: p.read_bytes() for p in folder.glob("*.npy")} == kept


def test_a_pool_is_used_for_many_rows(monkeypatch, bert_like):
    import datasets

    class Pids:
        columns = ("text",)

        def encode(self, rows, first, out):
            for i, _ in enumerate(rows["text"]):
                out.add(first + i, [os.getpid() % 1000])

    monkeypatch.setattr(encode, "ROWS_PER_CHUNK", 5)
    table = datasets.Dataset.from_list([{"text": "x"}] * 40)
    chunks = list(encode_rows(table, Pids(), num_proc=2))
    assert np.concatenate([c.rows for c in chunks]).tolist() == list(range(40))
    assert os.getpid() % 1000 not in set(np.concatenate([c.input_ids for c in chunks]).tolist())


KILLED_WHILE_TOKENISING = """
import os, sys, time
import datasets
from automodel.data import encode

class Slow:
    columns = ("text",)

    def encode(self, rows, first, out):
        os.write(1, f"{os.getpid()}\\n".encode())
        time.sleep(60)

encode.ROWS_PER_CHUNK = 5
list(encode.encode_rows(datasets.Dataset.from_list([{"text": "x"}] * 40), Slow(), num_proc=2))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="parent death signals are Linux's")
def test_no_tokenising_process_outlives_a_killed_run():
    run = subprocess.Popen([sys.executable, "-c", KILLED_WHILE_TOKENISING], stdout=subprocess.PIPE, text=True)
    workers = [int(run.stdout.readline()) for _ in range(2)]
    run.kill()
    run.wait()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in workers)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as status:
            return status.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("task", "positions", "asked", "expected"),
    [
        ("text-classification", 8192, None, 512),
        ("text-classification", 128, None, 128),
        ("text-classification", None, None, 512),
        ("causal-lm", 131072, None, 2048),
        ("causal-lm", 1024, None, 1024),
        ("causal-lm", 131072, 16384, 16384),
    ],
)
def test_default_lengths(task, positions, asked, expected):
    assert choose_max_length(DatasetConfig(path="x", max_length=asked), task_named(task).rows, positions)[0] == expected


def test_ready_rows_keep_their_length(tmp_path, bert_like):
    rows = [{"input_ids": [4] * 700, "label": i % 2} for i in range(4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = DatasetConfig(path=str(tmp_path / "a.jsonl"), cache_dir=str(tmp_path / "cache"))
    data = prepare(cfg, row_format=TEXT_CLASSIFICATION.rows, tokenizer=bert_like, max_positions=1024, type_vocab_size=0)
    assert data.store.lengths.tolist() == [700] * 4
    assert data.max_length == 700


def test_rows_without_files_are_known_by_their_content(tmp_path, bert_like):
    def settings(text):
        cfg = DatasetConfig(target="mine.make", cache_dir=str(tmp_path / "cache"))
        return prepare(
            cfg, row_format=TEXT_CLASSIFICATION.rows, tokenizer=bert_like, max_positions=512, type_vocab_size=0,
            resolved_target=lambda: [{"text": text, "label": i % 2} for i in range(4)],
        )  # fmt: skip

    assert not settings("good").from_cache
    assert settings("good").from_cache
    assert not settings("bad").from_cache
