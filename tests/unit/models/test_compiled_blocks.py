"""Compiled blocks: the same numbers, one graph for all equal blocks and every length, and a way back.

Traced with `aot_eager`, which does everything torch.compile does but generating code; one test generates it.
"""

import shutil

import numpy as np
import pytest
import torch

from automodel.data.collate import PackedCollator
from automodel.data.samples import SampleWriter
from automodel.data.store import TokenStore
from automodel.kernels.flat_adamw import FlatAdamW
from automodel.models.compiled_blocks import CompiledBlock, compile_blocks, repeated_blocks, restore_blocks
from automodel.models.families import FAMILIES
from automodel.models.forward import make_forward
from automodel.models.task_head import POOLED
from tiers import quick
from tiny_models import tiny


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def batches(kind: str):
    rng, writer = np.random.default_rng(0), SampleWriter()
    for row, length in enumerate([3, 9, 10, 5, 12, 30, 8, 25, 3, 14, 14, 6]):
        writer.add(row, rng.integers(3, 90, length).tolist(), label=row % 2)
    store = TokenStore.in_memory(writer.finish())
    collate = PackedCollator(
        store, place="document", pool=FAMILIES[kind].pooling, bucket_tokens=16, max_seqlen=32,
        micro_batch_size=4,
    )  # fmt: skip
    return [collate(range(i, i + 4)) for i in (0, 4, 8)]


def gradients(model, forward, batch):
    model.zero_grad()
    logits = forward(batch)
    logits.square().sum().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check(kind: str, graphs: int, tolerance: dict, **options) -> None:
    """Every batch compiled and not compiled: logits and gradients agree, and `graphs` is all that was compiled."""
    _, model = tiny(kind, "text-classification", num_labels=2)
    forward = make_forward(model.train(), POOLED, "packed")
    lengths = {b.input_ids_T.numel() for b in batches(kind)}
    assert len(lengths) == 3, "every batch has its own length"
    first = batches(kind)[0].input_ids_T.numel()
    assert first == model.config.hidden_size, "the worst length to begin with: torch takes equal sizes for one"
    plain = [gradients(model, forward, batch) for batch in batches(kind)]
    compile_blocks(model, dynamic=True, fullgraph=True, **options)
    for batch, expected in zip(batches(kind), plain):
        torch.testing.assert_close(gradients(model, forward, batch), expected, **tolerance)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize(("kind", "graphs"), quick([("bert", 1), ("albert", 1), ("gemma3_text", 2)], ("albert", 1)))
def test_equal_blocks_share_one_graph_at_every_length(kind, graphs):
    """ALBERT's first input is a view; Gemma 3 has one block with a window and one without, and shared heads."""
    check(kind, graphs, {"rtol": 1e-5, "atol": 1e-6}, backend="aot_eager")


def test_gradients_that_are_summed_in_fp32_beside_bf16_parameters():
    """Accumulating steps hold them at fixed places; torch.compile does not trace a parameter with such a gradient."""
    _, model = tiny("bert", "text-classification", num_labels=2)
    forward = make_forward(model.train(), POOLED, "packed")
    optimizer = FlatAdamW(list(model.parameters()), copy_dtype=torch.bfloat16, flat_gradients=True)
    assert {(p.dtype, p.grad.dtype) for p in model.parameters()} == {(torch.bfloat16, torch.float32)}

    def summed():
        for batch in batches("bert"):
            forward(batch).square().sum().backward()
        sums = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        return sums

    plain = summed()
    places = [p.grad.data_ptr() for p in model.parameters()]
    compile_blocks(model, backend="aot_eager", dynamic=True, fullgraph=True)
    torch.testing.assert_close(summed(), plain, rtol=2e-2, atol=1e-3)
    assert any(gradient.abs().max() > 0 for gradient in plain)
    assert [p.grad.data_ptr() for p in model.parameters()] == places
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++") and not shutil.which("clang++"), reason="needs a C++ compiler")
def test_generated_code_gives_the_same_numbers(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    check("albert", 1, {"rtol": 1e-4, "atol": 1e-5})


def test_an_evaluation_is_not_compiled_and_the_way_back_leaves_nothing():
    _, model = tiny("bert", "text-classification", num_labels=2)
    forward = make_forward(model, POOLED, "packed")
    names = list(model.state_dict())
    with torch.no_grad():
        before = forward(batches("bert")[0])
        assert compile_blocks(model, backend="aot_eager", dynamic=True) == 2
        assert all(isinstance(block.forward, CompiledBlock) for block in repeated_blocks(model))
        assert torch.equal(forward(batches("bert")[0]), before)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    assert list(model.state_dict()) == names
    restore_blocks(model)
    assert not any("forward" in block.__dict__ for block in repeated_blocks(model))


@pytest.mark.parametrize(("kind", "task", "count"), [("t5", "seq2seq", 4), ("albert", "text-classification", 1)])
def test_blocks_are_found_in_every_stack(kind, task, count):
    """Encoder and decoder of T5; ALBERT has one group that it runs for every layer."""
    _, model = tiny(kind, task)
    assert len(repeated_blocks(model)) == count
