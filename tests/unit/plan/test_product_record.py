"""Speeds of products are remembered for what they depend on, and what cannot be used counts as none."""

import json
import os

import pytest
import torch

from automodel.kernels.product_speed import Sample, Timed
from automodel.plan import product_record
from automodel.plan.product_record import record_key, remember, remembered, timed_of

SAMPLE = Sample(512, ((384, 384, 0.5), (384, 682, 0.5)))
TIMED = Timed((226.0, 225.0, 224.5), (480.0, 470.0, 370.0), (980.0, 960.0, 950.0), 21.0)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(cache):
    return sorted(cache.rglob("*.json"))


def test_what_was_timed_is_found_again(cache):
    key = record_key(SAMPLE, threads=2)
    assert remembered(key) is None
    remember(key, TIMED)
    assert remembered(record_key(SAMPLE, threads=2)) == TIMED
    assert [path.parent for path in files(cache)] == [cache / "products"]
    remember(key, Timed((1.0, 1.0, 1.0), (), (), 0.0))
    assert remembered(key) == Timed((1.0, 1.0, 1.0), (), (), 0.0)


def test_it_is_of_one_processor_torch_setting_thread_count_and_sample(monkeypatch):
    remember(record_key(SAMPLE, 2), TIMED)
    assert remembered(record_key(SAMPLE, 1)) is None
    assert remembered(record_key(Sample(256, SAMPLE.products), 2)) is None
    assert remembered(record_key(Sample(512, SAMPLE.products[:1]), 2)) is None
    with monkeypatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        assert remembered(record_key(SAMPLE, 2)) is None
    with monkeypatch.context() as patch:
        patch.setattr(product_record, "processor", lambda: "another")
        assert remembered(record_key(SAMPLE, 2)) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9")
        assert remembered(record_key(SAMPLE, 2)) is None
    assert remembered(record_key(SAMPLE, 2)) == TIMED


WHOLE = {"fp32": [1.0, 1.0, 1.0], "onednn": [], "bf16": [2.0, 2.0, 2.0], "casts": 1.0}
WRONG = {
    "no object": [],
    "none": None,
    "a figure is missing": {key: value for key, value in WHOLE.items() if key != "casts"},
    "one too many": WHOLE | {"more": 1.0},
    "no number": WHOLE | {"bf16": ["2", 2.0, 2.0]},
    "true": WHOLE | {"bf16": [True, 2.0, 2.0]},
    "too few": WHOLE | {"bf16": [2.0]},
    "no fp32": WHOLE | {"fp32": []},
    "zero": WHOLE | {"bf16": [0.0, 2.0, 2.0]},
    "below zero": WHOLE | {"casts": -1.0},
    "infinite": WHOLE | {"casts": float("inf")},
    "not a number": WHOLE | {"fp32": [float("nan"), 1.0, 1.0]},
    "too large for a float": WHOLE | {"casts": 10**400},
    "a list for a number": WHOLE | {"casts": [1.0]},
}


@pytest.mark.parametrize("speeds", WRONG.values(), ids=WRONG)
def test_foreign_content_counts_as_none(cache, speeds):
    key = record_key(SAMPLE, 2)
    remember(key, TIMED)
    (path,) = files(cache)
    path.write_text(json.dumps({"of": key, "speeds": WHOLE}))
    assert remembered(key) is not None
    path.write_text(json.dumps({"of": key, "speeds": speeds}))
    assert remembered(key) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "1", "[" * 5000, "null", '{"of": 1}', "\x00"])
def test_a_damaged_file_counts_as_none(cache, content):
    key = record_key(SAMPLE, 2)
    remember(key, TIMED)
    files(cache)[0].write_text(content)
    assert remembered(key) is None
    files(cache)[0].write_bytes(b"\xff\xfe")
    assert remembered(key) is None


def test_speeds_of_another_key_count_as_none(cache):
    """A file that lies under a name of another."""
    remember(record_key(SAMPLE, 1), TIMED)
    files(cache)[0].rename(product_record._path(record_key(SAMPLE, 2)))
    assert remembered(record_key(SAMPLE, 2)) is None


def test_a_folder_that_cannot_be_written_is_no_error(cache, monkeypatch):
    key = record_key(SAMPLE, 2)
    cache.write_text("a file where the folder should be")
    remember(key, TIMED)
    assert remembered(key) is None
    cache.unlink()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    remember(key, TIMED)
    assert remembered(key) is None


def test_json_carries_all_digits():
    timed = Timed((0.1 + 0.2, 1 / 3, 2.0), (), (), 0.0)
    assert timed_of(json.loads(json.dumps({"fp32": timed.fp32, "onednn": (), "bf16": (), "casts": 0.0}))) == timed
