"""Compiled blocks inside captured steps, on a real GPU: the same losses, one compile for all shapes, a safe way out."""

import io
import json

import numpy as np
import pytest
import torch

from automodel.tasks.registry import task_named

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    from automodel.data.batch import StepBatch
    from automodel.data.collate import PackedCollator
    from automodel.data.samples import SampleWriter
    from automodel.data.store import TokenStore
    from automodel.engine.captured import CapturedStep, Uncaptured
    from automodel.kernels.flat_adamw import FlatAdamW
    from automodel.models.attention_op import attend
    from automodel.models.compiled_blocks import compile_blocks
    from automodel.models.forward import make_forward
    from automodel.models.packed_attention import packed_attention
    from automodel.optim.build import parameter_groups
    from automodel.optim.config import LRSchedulerConfig, OptimizerConfig
    from automodel.optim.schedule import Schedule
    from automodel.tasks.loss_config import LossConfig

TASK = "text-classification"
LR = 1e-4


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def make_model(kind: str, dropout: float = 0.0):
    import transformers as t

    torch.manual_seed(0)
    size = {
        "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512,
        "vocab_size": 512, "max_position_embeddings": 514, "pad_token_id": 0,
    }  # fmt: skip
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if kind == "albert":
        return t.AlbertForSequenceClassification(t.AlbertConfig(embedding_size=64, **size, **drops))
    if kind == "llama":
        return t.LlamaForSequenceClassification(t.LlamaConfig(num_key_value_heads=2, **size))
    return t.BertForSequenceClassification(t.BertConfig(**size, **drops))


def steps_of(kind: str, accumulation: int, count: int):
    """Steps of eight documents, of many different token counts."""
    rng, writer = np.random.default_rng(0), SampleWriter()
    for row in range(64):
        ids = rng.integers(10, 500, rng.integers(5, 200)).tolist()
        ids[1:4] = [100 + row % 2] * 3
        writer.add(row, ids, label=row % 2)
    collate = PackedCollator(
        TokenStore.in_memory(writer.finish()), place=task_named(TASK).rows.labels,
        pool="last" if kind == "llama" else "first",
        bucket_tokens=64, max_seqlen=256, micro_batch_size=8 // accumulation,
    )  # fmt: skip
    for step in range(count):
        rows = np.take(np.arange(64), range(step * 8, step * 8 + 8), mode="wrap")
        yield StepBatch(tuple(collate(part.tolist()) for part in np.split(rows, accumulation)), 0, step)


def make_step(kind: str, compiled: bool, accumulation: int = 1, dtype=torch.bfloat16, dropout: float = 0.0):
    model = make_model(kind, dropout).cuda().train()
    schedule = Schedule(LRSchedulerConfig(), 100)
    optimizer = FlatAdamW(
        parameter_groups(model, OptimizerConfig(lr=LR, weight_decay=0.01)), lr=LR, max_norm=1.0, copy_dtype=dtype,
        flat_gradients=accumulation > 1,
        lr_factors=torch.tensor([schedule.lr_at(s, 1.0) for s in range(100)], dtype=torch.float64),
    )  # fmt: skip
    forward = make_forward(model, task_named(TASK).head, "packed")
    if compiled:
        compile_blocks(model, dynamic=True, fullgraph=True)
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")
    return CapturedStep(
        model, forward, task_named(TASK).loss(LossConfig(), None, 2), optimizer, schedule, peak_lr=LR, seed=seed,
        accumulates=accumulation > 1, device="cuda", compiled=compiled,
    )  # fmt: skip


def losses(step, batches):
    return torch.stack([step(i, b).loss for i, b in enumerate(batches)]).tolist()


def all_captured(step) -> bool:
    return not any(isinstance(graph, Uncaptured) for graph in step.graphs.values())


@pytest.mark.parametrize("kind", ["albert", "llama"])
def test_losses_equal_the_uncompiled_step_over_many_shapes(kind):
    """Dropout off, bf16: with one and with two micro-batches a step, and nothing is compiled a second time."""
    for accumulation in (1, 2):
        plain = make_step(kind, False, accumulation)
        expected = losses(plain, steps_of(kind, accumulation, 24))
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        step = make_step(kind, True, accumulation)
        ours = losses(step, steps_of(kind, accumulation, 24))
        assert len(step.graphs) > 3
        assert all_captured(step)
        assert ours == pytest.approx(expected, rel=0.03, abs=0.02)
        assert np.mean(ours[-4:]) < np.mean(ours[:4])  # ALBERT's one layer learns slowly
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_fp32_agrees_closely():
    """Memory-efficient attention inside the operation; torch's own backward of it cannot be traced."""
    expected = losses(make_step("bert", False, dtype=None), steps_of("bert", 1, 16))
    step = make_step("bert", True, dtype=None)
    first = next(steps_of("bert", 1, 1)).micro_batches[0]
    step.probe(first)
    step.try_recording(first)  # as a run does before its first step; its graph is gone, and the next ones are recorded
    assert losses(step, steps_of("bert", 1, 16)) == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert all_captured(step)


def test_dropout_draws_anew_on_every_replay_and_keeps_the_mean():
    """Same batch, learning rate 0: compiled masks come from torch's generator, which the graph advances."""
    batch = next(steps_of("bert", 1, 1))
    results = []
    for compiled in (False, True):
        step = make_step("bert", compiled, dropout=0.1)
        step.optimizer.device_state.lr_factors.zero_()
        results.append(losses(step, [batch] * 200))
    theirs, ours = results
    assert len(set(ours)) > 150
    spread = (np.var(ours) / 200 + np.var(theirs) / 200) ** 0.5
    assert abs(np.mean(ours) - np.mean(theirs)) < 5 * spread + 2e-3
    assert 0.5 < np.std(ours) / np.std(theirs) < 2.0


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("dtype", "kv_heads", "window"),
    [(torch.bfloat16, 4, None), (torch.bfloat16, 2, 16), (torch.float32, 4, None), (torch.float32, 2, None)],
)
def test_the_operation_equals_the_kernels_it_wraps(dtype, kv_heads, window, causal):
    generator = torch.Generator("cuda").manual_seed(0)
    boundaries = torch.tensor([0, 30, 31, 90, 128, 128], dtype=torch.int32, device="cuda")
    shapes = ((1, n, 128, 64) for n in (4, kv_heads, kv_heads))
    tensors = [torch.randn(s, generator=generator, dtype=dtype, device="cuda").requires_grad_() for s in shapes]
    theirs, _ = packed_attention(
        torch.nn.Module(), *tensors, None, scaling=0.1, is_causal=causal, sliding_window=window,
        cu_seq_lens_q=boundaries, max_length_q=64,
    )  # fmt: skip
    rows = [t[0].transpose(0, 1) for t in tensors]
    ours = attend(*rows, boundaries, 64, causal, window, 0.1, 0.0)[0].unsqueeze(0)
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn(ours.shape, generator=generator, dtype=dtype, device="cuda")
    mine, expected = (torch.autograd.grad(x, tensors, upstream) for x in (ours, theirs))
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(mine, expected, **tolerance)


def test_a_run_whose_compiler_fails_goes_on_without(tmp_path, monkeypatch):
    from functools import partial

    from rich.console import Console

    import tiny_runs as tiny
    from automodel.engine import compiled as room
    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    def broken(graph, inputs):
        raise FileNotFoundError("no C compiler here")

    monkeypatch.setattr(room, "compile_blocks", partial(compile_blocks, backend=broken))
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    path = tiny.write_run(tmp_path, text="compile: true\nstep_scheduler: {max_steps: 4}\n")
    finetune(load_run_config([path]), console=Console(file=io.StringIO()))
    plan = json.loads((tmp_path / "out" / "run" / "plan.json").read_text())
    line = next(d for d in plan["decisions"] if d["name"] == "compile")
    assert (plan["compile"], plan["capture"]) == (False, True)
    assert "tried and failed: FileNotFoundError: no C compiler here" in line["reason"]
