"""Inputs of checkpointed layers in host memory, on a real GPU: captured, the same losses, less memory.

pytest -m gpu tests/gpu/test_offload_gpu.py
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from automodel.models.task_head import NEXT_TOKEN
from automodel.tasks.registry import CAUSAL_LM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    from rich.console import Console

    import tiny_runs as tiny
    from automodel.data.batch import StepBatch
    from automodel.data.collate import PackedCollator
    from automodel.data.samples import SampleWriter
    from automodel.data.store import TokenStore
    from automodel.engine.captured import CapturedStep
    from automodel.engine.run import finetune
    from automodel.kernels.flat_adamw import FlatAdamW
    from automodel.kernels.side_stream import SideStream
    from automodel.models.auto import class_for
    from automodel.models.checkpointing import use_gradient_checkpointing
    from automodel.models.forward import make_loss_forward
    from automodel.models.fuse import fuse
    from automodel.models.recompute import use_own_checkpoints
    from automodel.optim.build import parameter_groups
    from automodel.optim.config import LRSchedulerConfig, OptimizerConfig
    from automodel.optim.schedule import Schedule
    from automodel.plan.check import load_run_config
    from automodel.tasks.loss_config import LossConfig

SIZE = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1024, "vocab_size": 512, "max_position_embeddings": 2048, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LR, TOKENS = 1e-4, 16_384


def make_step(*, offload: bool | None, accumulates: bool = False, mode: str = "full"):
    from transformers import AutoConfig

    torch.manual_seed(0)
    model = class_for(NEXT_TOKEN).from_config(AutoConfig.for_model("llama", **SIZE))
    model = model.to("cuda", torch.bfloat16).train()
    use_gradient_checkpointing(model, mode)
    memory = None if offload is None else use_own_checkpoints(model, offload)
    optimizer = FlatAdamW(
        parameter_groups(model, OptimizerConfig(lr=LR)), lr=LR, max_norm=1.0, flat_gradients=accumulates,
        lr_factors=torch.ones(100, dtype=torch.float64),
    )  # fmt: skip
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")
    side = None if accumulates else SideStream()
    assert fuse(model, seed, side, 2048)
    step = CapturedStep(
        model, make_loss_forward(model, NEXT_TOKEN, "packed", swapped=True, fused=True),
        CAUSAL_LM.loss(LossConfig(), None, None), optimizer, Schedule(LRSchedulerConfig(name="constant"), 100),
        peak_lr=LR, seed=seed, accumulates=accumulates, device="cuda", side=side,
    )  # fmt: skip
    step.warn = pytest.fail
    return step, memory


def batches(parts: int = 1, lengths=(2048,) * 8, count: int = 6):
    rng, writer = np.random.default_rng(0), SampleWriter()
    for row, length in enumerate(lengths):
        ids = rng.integers(10, 500, length)
        ids[2::3] = 7
        writer.add(row, ids.tolist(), token_labels=ids.tolist())
    store = TokenStore.in_memory(writer.finish())
    collate = PackedCollator(
        store,
        place="next_token",
        pool="last",
        bucket_tokens=1024,
        max_seqlen=2048,
        micro_batch_size=8,
        sort_tokens=True,
    )
    rows = np.split(np.arange(len(lengths)), parts)
    return [StepBatch(tuple(collate(part) for part in rows), 0, step) for step in range(count)]


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_same_losses(mode, parts):
    losses = {}
    for offload in (None, False, True):  # torch's checkpoints, ours, and ours with inputs on the host
        step, memory = make_step(offload=offload, accumulates=parts > 1, mode=mode)
        losses[offload] = torch.stack([step(i, b).loss for i, b in enumerate(batches(parts))]).tolist()
        if offload:
            assert all(buffer.is_pinned() for buffer in memory.buffers.values())
    assert losses[True] == pytest.approx(losses[False], rel=2e-3)
    assert losses[None] == pytest.approx(losses[False], rel=2e-3)
    assert losses[True][-1] < losses[True][0]


def test_a_smaller_shape_after_a_larger_one():
    step, _ = make_step(offload=True)
    plain, _ = make_step(offload=False)
    large, small = batches(count=2), batches(lengths=(1000, 500), count=2)
    for index, batch in enumerate([large[0], small[0], large[1], small[1]]):
        assert step(index, batch).loss.item() == pytest.approx(plain(index, batch).loss.item(), rel=2e-3)


@pytest.mark.parametrize("error", [RuntimeError, torch.cuda.OutOfMemoryError])
@pytest.mark.parametrize("offload", [True, False])
def test_a_recording_that_breaks_off_leaves_nothing_to_the_next(monkeypatch, offload, error):
    """In the middle of the backward pass of the second shape, when inputs of the next layer are on their way: it runs
    eagerly, or is recorded again without the first one."""
    plain, _ = make_step(offload=False)
    step, memory = make_step(offload=offload)
    said: list[str] = []
    step.warn = said.append
    fetch = memory.fetch

    def breaks(layer, device):
        fetch(layer, device)
        if layer == 3 and len(step.graphs) == 1 and not said and torch.cuda.is_current_stream_capturing():
            raise error("no more")

    monkeypatch.setattr(memory, "fetch", breaks)
    large, small = batches(count=2), batches(lengths=(1000, 500), count=2)
    for index, batch in enumerate([large[0], small[0], large[1], small[1]]):
        assert step(index, batch).loss.item() == pytest.approx(plain(index, batch).loss.item(), rel=2e-3)
    assert len(said) == 1
    assert ("GPU memory is short" in said[0]) == (error is not RuntimeError)
    assert not memory.here


def test_saves_what_the_inputs_take():
    """8 layers, two tensors each: 5 of them leave."""
    peaks = {}
    for offload in (False, True):
        step, _ = make_step(offload=offload)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for index, batch in enumerate(batches(count=2)):
            step(index, batch)
        torch.cuda.synchronize()
        peaks[offload] = torch.cuda.max_memory_allocated() - before
        del step
    inputs = 2 * TOKENS * SIZE["hidden_size"] * 2
    assert peaks[False] - peaks[True] > 3.5 * inputs


def test_through_the_whole_command(tmp_path):
    import transformers as t

    tokenizer = tiny.make_tokenizer(decoder=True)
    torch.manual_seed(0)
    config = t.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=512, max_position_embeddings=128, pad_token_id=0, eos_token_id=3, bos_token_id=2,
    )  # fmt: skip
    t.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    tiny.write_jsonl(tmp_path / "train.jsonl", tiny.reviews(64))
    text = tmp_path / "run.yaml"
    text.write_text(
        f"model: {tmp_path / 'llama'}\ntask: causal-lm\ndataset: {{path: {tmp_path / 'train.jsonl'}}}\n"
        "dataloader: {batch_size: 16, num_workers: 0}\noptimizer: {name: adamw_8bit, lr: 3e-4}\n"
        "training_optimizations: {gradient_checkpointing: full, precision: bf16-pure}\n"
        "lr_scheduler: constant\nstep_scheduler: {log_every_steps: 1, max_steps: 12}\n"
    )
    losses = {}
    for offload in ("false", "true"):
        out, printed = tmp_path / offload, tmp_path / "printed.txt"
        with pytest.MonkeyPatch.context() as patch, printed.open("w") as file:
            patch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
            settings = (f"checkpoint.checkpoint_dir={out}", f"training_optimizations.activation_offload={offload}")
            finetune(load_run_config([text], settings), console=Console(file=file, width=400))
        assert "could not be captured" not in printed.read_text()
        assert json.loads((out / "run" / "plan.json").read_text())["offload"] == (offload == "true")
        losses[offload] = tiny.losses(out)
    assert losses["true"] == pytest.approx(losses["false"], rel=5e-3)
