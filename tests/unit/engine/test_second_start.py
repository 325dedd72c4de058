"""The second start of a config reaches its first step in a fraction of the time: what was read and tokenised is mapped.
(On a GPU compiled kernels are found again, too: tests/gpu/test_second_start_gpu.py.)"""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

import tiny_runs as tiny
from automodel.data import build, encode

ROWS = 6000
FRACTION = 1 / 2  # measured: a tenth; neighbours on the cores may slow down one side


@pytest.fixture
def started(tmp_path, monkeypatch):
    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    tiny.write_run(tmp_path, kind="llama", text="dataloader: {batch_size: 4}\nstep_scheduler: {max_steps: 1}\n")
    config = tmp_path / "run.yaml"
    text = config.read_text().replace("text-classification", "causal-lm")
    config.write_text(text.replace(f"validation_dataset: {{path: {tmp_path / 'test.jsonl'}}}\n", ""))

    def one_step(data: str) -> float:
        settings = [f"dataset.path={tmp_path / data}", "checkpoint.enabled=false"]
        before = time.perf_counter()
        finetune(load_run_config([config], settings), overwrite=True, console=Console(file=io.StringIO()))
        return time.perf_counter() - before

    one_step("train.jsonl")  # imports are not what this is about
    tiny.write_jsonl(tmp_path / "many.jsonl", tiny.reviews(ROWS, longest=250))
    return one_step


def test_nothing_is_tokenised_twice(started, monkeypatch):
    first = started("many.jsonl")

    def refuse(*_, **__):
        raise AssertionError("rows were tokenised again")

    monkeypatch.setattr(encode, "encode_rows", refuse)
    monkeypatch.setattr(build, "encode_rows", refuse)
    second = started("many.jsonl")
    assert second < FRACTION * first
