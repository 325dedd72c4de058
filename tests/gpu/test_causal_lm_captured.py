"""Causal language models in captured steps, whose loss makes the logits itself, against plain steps over logits.

pytest -m gpu tests/gpu/test_causal_lm_captured.py
"""

from __future__ import annotations

import gc

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
    from automodel.engine.captured import CapturedStep
    from automodel.engine.evaluate import Evaluator
    from automodel.engine.step import TrainStep
    from automodel.kernels import flat_parameters, logits_memory, weight_gradient
    from automodel.kernels.flat_adamw import FlatAdamW
    from automodel.kernels.late_update import LateUpdates, late_parameters
    from automodel.kernels.side_stream import SideStream
    from automodel.models.auto import class_for
    from automodel.models.forward import make_forward, make_loss_forward
    from automodel.models.fuse import fuse, layers_of, will_fuse
    from automodel.models.head_outputs import Unprojected
    from automodel.optim.build import build_optimizer, parameter_groups
    from automodel.optim.config import LRSchedulerConfig, OptimizerConfig
    from automodel.optim.schedule import Schedule
    from automodel.tasks.loss_config import LossConfig

WRITE = "causal-lm"
LR = 1e-4
SIZE = {
    "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "vocab_size": 512, "max_position_embeddings": 512, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-odd-vocabulary": ("llama", {"vocab_size": 1003}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "gemma3-capped": (
        "gemma3_text",
        {
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2-capped": (  # scores saturate in a kernel of our own
        "gemma2",
        {
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 32,
            "attn_logit_softcapping": 0.5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 3.0,
        },
    ),
    "granite-scaled": ("granite", {"logits_scaling": 2.0}),  # no fused blocks
}


def make_model(kind: str, **overrides):
    from transformers import AutoConfig

    family, settings = KINDS[kind]
    torch.manual_seed(0)
    return class_for(task_named(WRITE).head).from_config(
        AutoConfig.for_model(family, **{**SIZE, **settings, **overrides})
    )


def make_store(count: int = 64) -> TokenStore:
    """Documents of 5 to 200 tokens, of which the second half is learned; every third word repeats, to be learnable."""
    rng, writer = np.random.default_rng(0), SampleWriter()
    for row in range(count):
        ids = rng.integers(10, 500, rng.integers(5, 200))
        ids[2::3] = 7 + row % 2
        ids = ids.tolist()
        writer.add(row, ids, token_labels=[-100] * (len(ids) // 2) + ids[len(ids) // 2 :])
    return TokenStore.in_memory(writer.finish())


def collator(store, documents: int = 8) -> PackedCollator:
    return PackedCollator(
        store,
        place=task_named(WRITE).rows.labels,
        pool="last",
        bucket_tokens=256,
        max_seqlen=256,
        micro_batch_size=documents,
        sort_tokens=True,
    )


def steps_of(store, accumulation: int, count: int):
    collate, order = collator(store), np.arange(len(store))
    for step in range(count):
        rows = np.take(order, range(step * 8 * accumulation, (step + 1) * 8 * accumulation), mode="wrap")
        yield StepBatch(tuple(collate(part) for part in np.split(rows, accumulation)), 0, step)


def captured(model, accumulation: int = 1, precision=torch.bfloat16, fused_loss=True, total=100, late=False, **loss):
    model.cuda().train()
    schedule = Schedule(LRSchedulerConfig(), total)
    layers = layers_of(model) if late else []
    optimizer = FlatAdamW(
        parameter_groups(model, OptimizerConfig(lr=LR, weight_decay=0.01)), lr=LR, max_norm=1.0, copy_dtype=precision,
        flat_gradients=accumulation > 1,
        lr_factors=torch.tensor([schedule.lr_at(s, 1.0) for s in range(total)], dtype=torch.float64),
        initial_loss_scale=2.0**16 if precision == torch.float16 else None,
        late=late_parameters(layers),
    )  # fmt: skip
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")
    side = SideStream() if accumulation == 1 else None
    swapped = precision is not None and will_fuse(model) and bool(fuse(model, seed, side, 256))
    assert swapped == (precision is not None and model.config.model_type != "granite")
    return CapturedStep(
        model, make_loss_forward(model, task_named(WRITE).head, "packed", swapped=swapped, fused=fused_loss),
        task_named(WRITE).loss(LossConfig(**loss), None, None), optimizer, schedule, peak_lr=LR,
        seed=seed, accumulates=accumulation > 1, device="cuda", side=side,
        late=LateUpdates(optimizer, layers, side.stream) if late else None,
    )  # fmt: skip


def plain(model, total=100, precision="fp32", fused_loss=False, **loss):
    model.cuda().train()
    return TrainStep(
        model, make_loss_forward(model, task_named(WRITE).head, "packed", fused=fused_loss),
        task_named(WRITE).loss(LossConfig(**loss), None, None),
        build_optimizer(model, OptimizerConfig(lr=LR, weight_decay=0.01)), Schedule(LRSchedulerConfig(), total),
        peak_lr=LR, max_norm=1.0, precision=precision, device="cuda",
    )  # fmt: skip


def run(step, batches):
    results = [step(i, b) for i, b in enumerate(batches)]
    return torch.stack([r.loss for r in results]).tolist()


def all_captured(step) -> bool:
    return len(step.graphs) > 1 and not any(type(g).__name__ == "Uncaptured" for g in step.graphs.values())


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_equal_the_plain_step_over_logits(kind, accumulation, monkeypatch):
    """bf16, captured, several chunks of 128 rows, against fp32, eager and stock, over 30 steps."""
    monkeypatch.setitem(logits_memory.BUFFER_BYTES, "cuda", 1)
    store = make_store()
    reference = run(plain(make_model(kind)), steps_of(store, accumulation, 30))
    step = captured(make_model(kind), accumulation)
    ours = run(step, steps_of(store, accumulation, 30))
    assert all_captured(step)
    assert ours == pytest.approx(reference, rel=0.03, abs=0.02)
    assert ours[-1] < ours[0]


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gemma2-capped"])
def test_updates_under_the_next_step_change_nothing(kind, precision, monkeypatch):
    """Layers are updated when the next step is about to read them, the table of words as one long piece."""
    monkeypatch.setattr(flat_parameters, "LONG_BLOCKS", 16)
    store, found = make_store(), []
    for late in (False, True):
        step = captured(make_model(kind), precision=precision, late=late)
        losses = run(step, steps_of(store, 1, 20))
        step.settle()  # somebody looks at the weights
        losses += run(step, steps_of(store, 1, 20))
        assert all_captured(step)
        found.append((losses, {name: t.clone() for name, t in step.weights().items()}))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-3)
    for name, tensor in found[0][1].items():
        most = 1e-2 if "norm" in name else 1e-3  # Gemma's norms begin at zero: what is left of them is all change
        assert (found[1][1][name] - tensor).norm() <= most * tensor.norm(), name


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="the product is for Hopper"
)
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_captured_steps_have_the_norms_of_gradients_that_are_read_again(monkeypatch, precision):
    """Some weights of this model suit the product, some do not; batches above the limit take turns with those below."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8}
    batches = list(steps_of(make_store(), 1, 8))
    tokens = sorted({b.micro_batches[0].input_ids_T.numel() for b in batches})
    assert len(tokens) > 1
    results, made = {}, []
    product = weight_gradient.squared_product
    monkeypatch.setattr(
        weight_gradient, "squared_product", lambda dy, *rest: made.append(dy.shape[0]) or product(dy, *rest)
    )
    for most in (0, tokens[-2]):
        monkeypatch.setattr(weight_gradient, "MOST_TOKENS", most)
        step = captured(make_model("llama-tied", **sizes), precision=precision, late=True)
        results[most] = [[float(r.loss), float(r.grad_norm)] for r in (step(i, b) for i, b in enumerate(batches))]
        assert bool(made) == bool(most)
        step.finish()
    assert max(made) <= tokens[-2] < tokens[-1]
    assert results[0][0] == pytest.approx(results[tokens[-2]][0], rel=1e-4), "of one model"
    torch.testing.assert_close(*(torch.tensor(r) for r in results.values()), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("settings", [{"label_smoothing": 0.1}, {"z_loss": 1e-3}], ids=["smoothed", "z-loss"])
def test_adjusted_losses_equal_too(settings):
    store = make_store()
    reference = run(plain(make_model("llama-tied"), **settings), steps_of(store, 1, 20))
    ours = run(captured(make_model("llama-tied"), **settings), steps_of(store, 1, 20))
    assert ours == pytest.approx(reference, rel=0.03, abs=0.02)


def test_fp32_is_exact():
    """No half precision anywhere: captured without logits against eager with them."""
    store = make_store()
    reference = run(plain(make_model("llama-tied")), steps_of(store, 1, 20))
    step = captured(make_model("llama-tied"), precision=None)
    ours = run(step, steps_of(store, 1, 20))
    assert all_captured(step)
    assert ours == pytest.approx(reference, rel=1e-3, abs=1e-4)


def test_fp16_scales_the_gradients_before_they_are_rounded():
    store = make_store()
    reference = run(plain(make_model("llama")), steps_of(store, 1, 20))
    step = captured(make_model("llama"), precision=torch.float16)
    ours = run(step, steps_of(store, 1, 20))
    assert all_captured(step)
    assert step.skipped_steps() <= 3
    assert ours == pytest.approx(reference, rel=0.05, abs=0.05)
    assert float(step.optimizer.grad_norm) > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_eager_step_without_logits(precision):
    store = make_store()
    with_logits = run(plain(make_model("qwen3-tied"), precision=precision), steps_of(store, 2, 15))
    without = run(plain(make_model("qwen3-tied"), precision=precision, fused_loss=True), steps_of(store, 2, 15))
    exact = precision == "fp32"
    assert without == pytest.approx(with_logits, rel=1e-4 if exact else 0.02, abs=1e-4 if exact else 0.01)


def gradients(step, batch):
    outputs = step.forward(batch)
    scale = torch.tensor(1 / batch.num_labels, device="cuda")
    step.loss.scaled_sum(outputs, batch, scale).backward()
    step.side.join()
    return outputs, {n: p.grad.float() for n, p in step.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_logits(kind):
    """The same bf16 model with and without logits, parameter by parameter."""
    batch = collator(make_store())(range(8)).to("cuda")
    outputs, ours = gradients(captured(make_model(kind)), batch)
    logits, expected = gradients(captured(make_model(kind), fused_loss=False), batch)
    assert isinstance(outputs, Unprojected)
    assert isinstance(logits, torch.Tensor)
    assert ours.keys() == expected.keys()
    whole = torch.stack([g.norm() for g in expected.values()]).norm()
    for name, gradient in expected.items():
        assert (ours[name] - gradient).norm() < 0.02 * gradient.norm() + 2e-3 * whole, name


def test_evaluation_reads_loss_and_accuracy_without_logits():
    store = make_store(24)
    step = captured(make_model("llama-tied"))
    run(step, steps_of(make_store(), 1, 10))
    loader = [collator(store)(range(first, first + 8)) for first in (0, 8, 16)]
    found = []
    for forward in (step.forward, make_forward(step.model, task_named(WRITE).head, "packed", swapped=True)):
        evaluator = Evaluator(step.model, forward, step.loss, loader, "tokens", None, step.compute, "cuda")
        found.append(evaluator().values)
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=2e-3)
    assert found[0]["accuracy"] == pytest.approx(found[1]["accuracy"], abs=0.02)
    assert found[0]["perplexity"] == pytest.approx(found[1]["perplexity"], rel=0.02)


def test_shapes_find_their_places_in_the_largest():
    """Recorded as they come, each a little larger than the one before, none fits into what the others left."""
    collate = collator(make_store(160), documents=160)
    growing = [collate(range(count)) for count in range(20, 161, 20)]
    assert len({b.input_ids_T.numel() for b in growing}) == len(growing)
    wide = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2048, "vocab_size": 20_000}

    def held_and_losses(batches, largest) -> tuple[int, list[float]]:
        gc.collect()
        torch.cuda.empty_cache()
        step = captured(make_model("llama", **wide))
        step.largest = largest
        before = torch.cuda.memory_reserved()
        losses = run(step, [StepBatch((b,), 0, i) for i, b in enumerate(batches)])
        assert len(step.graphs) == len(batches)
        return torch.cuda.memory_reserved() - before, losses

    alone, _ = held_and_losses(growing[-1:], None)
    as_they_come, losses = held_and_losses(growing, None)
    largest_first, same = held_and_losses(growing, growing[-1])
    print([f"{held / 2**20:.0f} MiB" for held in (alone, as_they_come, largest_first)])
    assert largest_first < 1.3 * alone
    assert largest_first < as_they_come
    assert same == pytest.approx(losses, rel=1e-3)


def test_a_step_needs_less_memory_without_logits():
    """Rehearsals of one batch with 60,000 words: about 90 MiB of logits in bf16, six times that around them."""
    batch = collator(make_store(), documents=16)(range(16))
    peaks = {}
    for fused_loss in (True, False):
        step = captured(make_model("llama", vocab_size=60_000), fused_loss=fused_loss)
        step.probe(batch)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step.probe(batch)
        peaks[fused_loss] = torch.cuda.max_memory_allocated() - before
        del step
        torch.cuda.empty_cache()
    logits = 2 * len(batch.labels_R) * 60_000
    print({k: f"{v / 2**20:.0f} MiB" for k, v in peaks.items()}, f"logits {logits / 2**20:.0f} MiB")
    assert peaks[False] - peaks[True] > 3 * logits
