"""Batches that do not fit are made smaller before step 1, captured or eager, packed or padded.

    pytest -m gpu tests/gpu/test_fit_gpu.py

The process may use 1.2 GiB more than it has. A batch of 64 documents of up to 512 tokens needs several times that.
"""

from __future__ import annotations

import gc
import io

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    from rich.console import Console

    import tiny_runs as tiny
    from automodel.config.errors import UserError
    from automodel.engine.prepare import prepare_run
    from automodel.engine.run import finetune
    from automodel.engine.steps import make_fitting_step
    from automodel.plan.check import load_run_config

ROOM, LESS = 1.2 * 2**30, 0.25 * 2**30
SIZES = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 2048, "max_position_embeddings": 512}
PADDED = "packed_sequence.enabled=false"


@pytest.fixture
def small_gpu():
    gc.collect()
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + ROOM) / whole)
    yield torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    # The plan sees the limit and would recompute; what is tested is what happens where it thought that all would fit.
    batch = "dataloader: {batch_size: 64}\nstep_scheduler: {max_steps: 3}\n"
    batch += "training_optimizations: {gradient_checkpointing: none}\n"
    config = tiny.write_run(tmp_path, rows=128, text=batch, **SIZES)
    tiny.write_jsonl(tmp_path / "train.jsonl", tiny.reviews(128, longest=500))
    limit = f"dataset: {{path: {tmp_path / 'train.jsonl'}, max_length: 512}}"
    config.write_text(config.read_text().replace(f"dataset: {{path: {tmp_path / 'train.jsonl'}}}", limit, 1))
    return config


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["optimizer.name=lion"],  # not captured
        [PADDED, "training_optimizations.precision=fp32"],
    ],
    ids=["captured", "eager", "padded"],
)
def test_a_batch_that_does_not_fit_is_cut_before_step_1(config, small_gpu, settings):
    prepared = prepare_run(load_run_config([config], settings), ())
    assert prepared.plan.capture == (not settings)
    found = make_fitting_step(prepared)[0].plan
    assert found.micro_batch_size < 64
    assert found.micro_batch_size * found.grad_acc_steps == 64
    assert any("ran out of GPU memory" in d.reason for d in found.decisions)
    gc.collect()
    torch.cuda.empty_cache()
    # What this process keeps beside the run: workspaces of cuBLAS for three streams, not for those of every attempt.
    assert torch.cuda.memory_allocated() < small_gpu + 160 * 2**20
    done = finetune(load_run_config([config], settings), console=Console(file=io.StringIO()))
    assert done.summary["status"] == "finished"


def test_one_document_too_large_is_an_error_that_says_what_helps(config, small_gpu):
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + LESS) / whole)
    cfg = load_run_config([config], [PADDED, "training_optimizations.precision=fp32"])
    with pytest.raises(UserError, match="does not fit into the memory") as error:
        make_fitting_step(prepare_run(cfg, ()))
    assert "gradient_checkpointing" in str(error.value)
