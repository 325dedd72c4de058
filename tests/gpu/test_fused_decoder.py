"""Fused decoder blocks on a real GPU: bf16 and captured against stock transformers in fp32.

    pytest -m gpu tests/gpu/test_fused_decoder.py [-k "llama or qwen3 or gemma3 or olmo2"]

The four kinds named above go every way through the code; the others differ from them in parts. The measure of a
gradient is the error that the stock model itself makes when it computes in bf16.
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
    from automodel.engine.step import TrainStep
    from automodel.kernels.flat_adamw import FlatAdamW
    from automodel.kernels.side_stream import SideStream
    from automodel.models import fused_decoder_attention
    from automodel.models.auto import class_for
    from automodel.models.forward import make_forward
    from automodel.models.fuse import fuse
    from automodel.optim.build import build_optimizer, parameter_groups
    from automodel.optim.config import LRSchedulerConfig, OptimizerConfig
    from automodel.optim.schedule import Schedule
    from automodel.tasks.loss_config import LossConfig

SIZE = {
    "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "vocab_size": 512, "max_position_embeddings": 512, "num_labels": 2, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HALF_TURNED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}
KINDS = {
    "llama": ("llama", {}),
    "llama-equal-heads": ("llama", {"num_key_value_heads": 4}),
    "mistral-window": ("mistral", {"sliding_window": 32}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 128, "num_key_value_heads": 1}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "gemma": ("gemma", {}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 32,
            "attn_logit_softcapping": 0.5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "phi3": ("phi3", {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "phi3-half-turned": ("phi3", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, **HALF_TURNED}),
    "olmo2": ("olmo2", {}),
}
CLASSIFY, WRITE = "text-classification", "causal-lm"
LR = 1e-4


def make_model(kind: str, task: str, **overrides):
    from transformers import AutoConfig

    family, settings = KINDS[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZE, **settings, **overrides})
    return class_for(task_named(task).head).from_config(config)


def make_store(task: str, count: int = 64, last: int | None = None) -> TokenStore:
    """Documents of 5 to 200 tokens; `last` ends every other one. Labels of a language model: the second half."""
    rng = np.random.default_rng(0)
    writer = SampleWriter()
    for row in range(count):
        ids = rng.integers(10, 500, rng.integers(5, 200)).tolist()
        ids[1:4] = [100 + row % 2] * 3
        if last is not None and row % 2:
            ids[-1] = last
        if task == WRITE:
            labels = [-100] * (len(ids) // 2) + ids[len(ids) // 2 :]
            writer.add(row, ids, token_labels=labels)
        else:
            writer.add(row, ids, label=row % 2)
    return TokenStore.in_memory(writer.finish())


def collator(store, task: str, bucket: int = 256) -> PackedCollator:
    return PackedCollator(
        store,
        place=task_named(task).rows.labels,
        pool="last",
        bucket_tokens=bucket,
        max_seqlen=256,
        micro_batch_size=8,
        sort_tokens=True,
    )


def steps_of(store, task: str, accumulation: int, count: int):
    collate, order = collator(store, task), np.arange(len(store))
    for step in range(count):
        rows = np.take(order, range(step * 8 * accumulation, (step + 1) * 8 * accumulation), mode="wrap")
        yield StepBatch(tuple(collate(part) for part in np.split(rows, accumulation)), 0, step)


def loss_of(task: str):
    return task_named(task).loss(LossConfig(), None, 2 if task == CLASSIFY else None)


def captured(model, task: str, accumulation: int = 1, precision=torch.bfloat16, total=100, lazy=False, again=False):
    model.cuda().train()
    schedule = Schedule(LRSchedulerConfig(), total)
    optimizer = FlatAdamW(
        parameter_groups(model, OptimizerConfig(lr=LR, weight_decay=0.01)), lr=LR, max_norm=1.0, copy_dtype=precision,
        flat_gradients=accumulation > 1,
        lr_factors=torch.tensor([schedule.lr_at(s, 1.0) for s in range(total)], dtype=torch.float64),
        lazy=model.get_input_embeddings().weight if lazy else None,
    )  # fmt: skip
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")
    side = SideStream() if accumulation == 1 else None
    assert fuse(model, seed, side, 256, norms_again=again) == 3
    return CapturedStep(
        model, make_forward(model, task_named(task).head, "packed", swapped=True), loss_of(task), optimizer, schedule,
        peak_lr=LR, seed=seed, accumulates=accumulation > 1, device="cuda", side=side,
    )  # fmt: skip


def plain(model, task: str, total=100):
    model.cuda().train()
    return TrainStep(
        model, make_forward(model, task_named(task).head, "packed"), loss_of(task),
        build_optimizer(model, OptimizerConfig(lr=LR, weight_decay=0.01)), Schedule(LRSchedulerConfig(), total),
        peak_lr=LR, max_norm=1.0, precision="fp32", device="cuda",
    )  # fmt: skip


def run(step, batches):
    results = [step(i, b) for i, b in enumerate(batches)]
    return torch.stack([r.loss for r in results]).tolist()


def poison(megabytes=256):
    """NaN in the allocator's free blocks: rows that a kernel leaves unwritten show."""
    blocks = [torch.full((n,), float("nan"), device="cuda") for n in [megabytes * 2**18] + [2**18] * 16 + [2**12] * 64]
    del blocks


def bytes_asked_for() -> int:
    """Of tensors that are alive. `memory_allocated` counts the blocks that they lie in, up to 1 MiB larger each: which,
    depends on what earlier tests have left free."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def logits_and_gradients(model, forward, task: str, batch, join=lambda: None):
    logits = forward(batch)
    (loss_of(task).sum(logits, batch.labels_R) / batch.num_labels).backward()
    join()
    gradients = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach().float(), gradients


# Every family in bf16, with eight documents and with five in eight slots; a part of that is enough for the other ways.
WAYS = [
    *((kind, documents, "bf16") for kind in KINDS for documents in (8, 5)),
    *((kind, 8, "long documents") for kind in KINDS),
    *((kind, 8, "fp16") for kind in ("llama", "qwen3", "gemma3")),
]


@pytest.mark.parametrize(("kind", "documents", "how"), WAYS)
@pytest.mark.parametrize("task", [CLASSIFY, WRITE])
def test_logits_and_gradients_equal_stock(kind, task, documents, how, monkeypatch):
    """One pass of the fused model in half precision against the stock model in fp32, parameter by parameter. Once more
    as if documents were long: then torch's flash attention takes queries, keys and values apart."""
    if how == "long documents":
        monkeypatch.setattr(fused_decoder_attention, "SHORT", 0)
    dtype = torch.float16 if how == "fp16" else torch.bfloat16
    batch = collator(make_store(task), task)(range(documents)).to("cuda")
    stock, rounded = make_model(kind, task).cuda().train(), make_model(kind, task).cuda().to(dtype).train()
    exact_logits, exact = logits_and_gradients(stock, make_forward(stock, task_named(task).head, "packed"), task, batch)
    coarse_logits, coarse = logits_and_gradients(
        rounded, make_forward(rounded, task_named(task).head, "packed"), task, batch
    )
    step = captured(make_model(kind, task), task, precision=dtype)
    poison()
    logits, ours = logits_and_gradients(step.model, step.forward, task, batch, step.side.join)
    read = batch.labels_R != -100
    error = (logits - exact_logits)[read].norm()
    allowed = 2.0 * (coarse_logits - exact_logits)[read].norm() + 0.005 * exact_logits[read].norm() + 1e-3
    assert error < allowed, (kind, float(error), float(allowed))
    assert ours.keys() == exact.keys()
    whole = torch.stack([g.norm() for g in exact.values()]).norm()
    for name, expected in exact.items():
        error = (ours[name] - expected).norm()
        allowed = 2.0 * (coarse[name] - expected).norm() + 0.02 * expected.norm() + 1e-3 * whole
        assert error < allowed, (kind, name, float(error), float(allowed))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gemma3", "phi3"])
def test_norms_that_are_made_again_change_no_gradient(kind):
    """Beside a second stream: not a bit differs, and 3 layers keep two rows less of a token."""
    batch = collator(make_store(WRITE), WRITE)(range(8)).to("cuda")
    found, kept = [], []
    for again in (False, True):
        step = captured(make_model(kind, WRITE), WRITE, again=again)
        logits_and_gradients(step.model, step.forward, WRITE, batch, step.side.join)  # tables and workspaces
        step.optimizer.zero_grad(set_to_none=True)
        poison()
        gc.collect()  # models of earlier tests: what they free meanwhile would count
        before = bytes_asked_for()
        logits = step.forward(batch)
        kept.append(bytes_asked_for() - before)
        del logits
        found.append(logits_and_gradients(step.model, step.forward, WRITE, batch, step.side.join))
    assert torch.equal(found[0][0], found[1][0])
    for name, gradient in found[0][1].items():
        assert torch.equal(found[1][1][name], gradient), name
    tokens, read, row = len(batch.input_ids_T), len(batch.read_positions_R), 2 * SIZE["hidden_size"]
    assert kept[0] - kept[1] == (5 * tokens + read) * row


TRAINED = ["llama", "mistral-window", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2"]


@pytest.mark.parametrize("task", [CLASSIFY, WRITE])
@pytest.mark.parametrize(
    ("kind", "accumulation"), [*((k, 1) for k in TRAINED), *((k, 3) for k in ("llama", "qwen3", "olmo2"))]
)
def test_losses_equal_the_plain_step(kind, task, accumulation):
    """bf16, captured and fused, against fp32 and plain, over 30 steps that revisit their shapes."""
    store = make_store(task)
    reference = run(plain(make_model(kind, task), task), steps_of(store, task, accumulation, 30))
    step = captured(make_model(kind, task), task, accumulation)
    ours = run(step, steps_of(store, task, accumulation, 30))
    assert len(step.graphs) > 1
    assert not any(type(graph).__name__ == "Uncaptured" for graph in step.graphs.values())
    assert ours == pytest.approx(reference, rel=0.03, abs=0.02)
    assert ours[-1] < ours[0]


def test_an_embedding_that_is_updated_row_by_row_learns_the_same():
    store = make_store(CLASSIFY)
    losses = []
    for lazy in (False, True):
        step = captured(make_model("qwen3", CLASSIFY), CLASSIFY, lazy=lazy)
        losses.append(run(step, steps_of(store, CLASSIFY, 1, 20)))
        step.settle()
    assert losses[0] == pytest.approx(losses[1], rel=0.02, abs=0.01)


@pytest.mark.parametrize("pad", [None, 7], ids=["no pad token", "documents end with the pad token"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_block_for_pooled_tokens_alone_is_exact(kind, pad):
    """The same weights with and without the short cut: logits, and gradients of every parameter, in bf16."""
    batch = collator(make_store(CLASSIFY, last=pad), CLASSIFY)(range(5)).to("cuda")
    found = []
    for pools in (True, False):
        step = captured(make_model(kind, CLASSIFY, pad_token_id=pad), CLASSIFY)
        model = step.model
        forward = step.forward
        if not pools:
            model.model.layers[-1].forward.pools = False
            forward = _all_rows(model)
        poison()
        found.append(logits_and_gradients(model, forward, CLASSIFY, batch, step.side.join))
    (pooled, short), (whole, long) = found
    torch.testing.assert_close(pooled[:5], whole[:5], rtol=0.02, atol=0.02)
    total = torch.stack([g.norm() for g in long.values()]).norm()
    for name, gradient in long.items():
        assert (short[name] - gradient).norm() < 0.03 * gradient.norm() + 2e-3 * total, name


def _all_rows(model):
    from automodel.models.families import pooled_positions
    from automodel.models.fuse import bind_batch

    def forward(batch):
        bind_batch(model, batch)
        hidden_TN = model.model(
            input_ids=batch.input_ids_T[None], position_ids=batch.position_ids_T[None], use_cache=False,
            cu_seq_lens_q=batch.cu_seqlens_D, cu_seq_lens_k=batch.cu_seqlens_D,
            max_length_q=batch.max_seqlen, max_length_k=batch.max_seqlen,
        ).last_hidden_state[0]  # fmt: skip
        rows = pooled_positions(model.config, batch.input_ids_T, batch.position_ids_T, batch.read_positions_R)
        return model.score(hidden_TN.index_select(0, rows)).float()

    return forward


@pytest.mark.parametrize("task", [CLASSIFY, WRITE])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "olmo2", "mistral-window"])
def test_a_long_dummy_tail_changes_nothing(kind, task):
    """A bucket of 4096 leaves most of the stream to dummy documents, and several empty slots."""
    store = make_store(task)
    step = captured(make_model(kind, task), task)
    results = []
    for bucket in (1, 4096):
        batch = collator(store, task, bucket)(range(6)).to("cuda")
        step.model.zero_grad(set_to_none=True)
        poison()
        logits, gradients = logits_and_gradients(step.model, step.forward, task, batch, step.side.join)
        assert torch.isfinite(logits).all()
        assert all(torch.isfinite(g).all() for g in gradients.values())
        results.append((logits[: batch.num_labels], gradients))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0.02, atol=0.02)
    total = torch.stack([g.norm() for g in results[0][1].values()]).norm()
    for name, gradient in results[0][1].items():
        assert (results[1][1][name] - gradient).norm() < 0.03 * gradient.norm() + 2e-3 * total, name


def test_evaluation_reads_the_same_blocks_without_gradients():
    batch = collator(make_store(WRITE), WRITE)(range(8)).to("cuda")
    step = captured(make_model("qwen3", WRITE), WRITE)
    with_gradients = step.forward(batch).detach()
    step.model.eval()
    with torch.no_grad():
        assert torch.equal(step.forward(batch), with_gradients)


def test_attention_dropout_draws_anew_on_every_replay():
    batch = next(iter(steps_of(make_store(CLASSIFY), CLASSIFY, 1, 1)))
    step = captured(make_model("llama", CLASSIFY, attention_dropout=0.2), CLASSIFY)
    step.optimizer.device_state.lr_factors.zero_()
    losses = run(step, [batch] * 50)
    assert len(set(losses)) > 30
    still = captured(make_model("llama", CLASSIFY), CLASSIFY)
    still.optimizer.device_state.lr_factors.zero_()
    assert np.mean(losses) == pytest.approx(run(still, [batch])[0], abs=0.05)
