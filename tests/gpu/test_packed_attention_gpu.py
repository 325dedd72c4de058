"""The CUDA kernels against the reference, and a whole packed step without one host sync."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from automodel.data.batch import PackedBatch
from automodel.kernels.attention import Attention
from automodel.models.capped_attention import capped_attention, capped_attention_reference
from automodel.models.forward import make_forward
from automodel.models.packed_attention import packed_attention, packed_attention_reference
from automodel.models.task_head import POOLED
from automodel.tasks.registry import task_named

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

spec = importlib.util.spec_from_file_location("tiny_models", Path(__file__).parents[1] / "tiny_models.py")
tiny_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny_models)

BOUNDARIES = [0, 40, 80, 191, 192, 256, 256]
TOKENS = 256
TOLERANCE = {torch.float32: {"atol": 2e-5, "rtol": 1e-4}, torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "longest"), [(4, 64, 120), (4, 64, 2 * TOKENS), (2, 64, 120), (2, 36, 120)]
)
def test_cuda_equals_the_reference(dtype, causal, window, kv_heads, head_dim, longest):
    generator = torch.Generator(device="cuda").manual_seed(0)
    tensors = [
        torch.randn(1, TOKENS, heads, head_dim, generator=generator, device="cuda", dtype=dtype).transpose(1, 2)
        for heads in (4, kv_heads, kv_heads)
    ]
    upstream = torch.randn(1, TOKENS, 4, head_dim, generator=generator, device="cuda", dtype=dtype)
    module = nn.Module()
    module.is_causal = causal
    inputs = [x.detach().requires_grad_() for x in tensors]
    mine, _ = packed_attention(
        module,
        *inputs,
        None,
        scaling=0.2,
        sliding_window=window,
        cu_seq_lens_q=torch.tensor(BOUNDARIES, dtype=torch.int32, device="cuda"),
        max_length_q=longest,
    )
    exact = [x.detach().double().requires_grad_() for x in tensors]
    theirs = packed_attention_reference(*exact, BOUNDARIES, causal, window, 0.2, 0.0)
    torch.testing.assert_close(mine.double(), theirs, **TOLERANCE[dtype])
    for a, b in zip(torch.autograd.grad(mine, inputs, upstream), torch.autograd.grad(theirs, exact, upstream.double())):
        torch.testing.assert_close(a.double(), b, **TOLERANCE[dtype])


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(4, 64), (2, 128), (2, 256)])
def test_capped_scores_equal_their_definition(window, kv_heads, head_dim):
    how = Attention(4, kv_heads, head_dim, 0.2, causal=True, softcap=1.5)
    generator = torch.Generator(device="cuda").manual_seed(0)
    tensors = [
        torch.randn(1, heads, TOKENS, head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        for heads in (4, kv_heads, kv_heads)
    ]
    upstream = torch.randn(1, TOKENS, 4, head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)
    inputs = [x.detach().requires_grad_() for x in tensors]
    boundaries = torch.tensor(BOUNDARIES, dtype=torch.int32, device="cuda")
    torch.cuda.set_sync_debug_mode("error")  # the boundaries stay on the device
    try:
        mine = capped_attention(*inputs, boundaries, 120, window, how)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exact = [x.detach().double().requires_grad_() for x in tensors]
    theirs = capped_attention_reference(*exact, BOUNDARIES, window, how)
    torch.testing.assert_close(mine.double(), theirs, **TOLERANCE[torch.bfloat16])
    for a, b in zip(torch.autograd.grad(mine, inputs, upstream), torch.autograd.grad(theirs, exact, upstream.double())):
        # Keys of two heads each sum up 222 products of rounded weights: one element of 131,072 is 0.022 away.
        torch.testing.assert_close(a.double(), b, atol=3e-2, rtol=2e-2)


def stream() -> PackedBatch:
    lengths = [40, 40, 111, 1, 64]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return PackedBatch(
        input_ids_T=torch.randint(5, tiny_models.VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(0)),
        position_ids_T=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens_D=torch.tensor(BOUNDARIES, dtype=torch.int32),
        max_seqlen=120,
        read_positions_R=starts[1:] - 1,
        labels_R=torch.tensor([0, 1, 1, 0, 1]),
        token_type_ids_T=None,
        num_documents=5,
        num_tokens=TOKENS,
        num_labels=5,
    ).to("cuda")


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("kind", "task", "options"),
    [
        ("bert", "text-classification", {}),
        ("roberta", "text-classification", {}),
        ("modernbert", "text-classification", {"classifier_pooling": "mean"}),
        ("llama", "text-classification", {"pad_token_id": 2}),
        ("qwen3", "causal-lm", {}),
        ("gpt2", "causal-lm", {"pad_token_id": 2}),
    ],
)
def test_a_packed_step_never_waits_for_the_device(kind, task, options, autocast, dropout):
    name = {"bert": "attention_probs_dropout_prob", "roberta": "attention_probs_dropout_prob", "gpt2": "attn_pdrop"}
    if kind == "modernbert" and not autocast:
        pytest.skip("fp32 with a sliding window reads the boundaries on the host")
    options = {**options, "max_position_embeddings": 128, name.get(kind, "attention_dropout"): dropout}
    if kind == "gpt2":
        options["n_positions"] = options.pop("max_position_embeddings")
    _, model = tiny_models.tiny(kind, task, **options)
    model.cuda().train()
    forward, batch = make_forward(model, task_named(task).head, "packed"), stream()
    for debug in ("default", "error"):
        torch.cuda.set_sync_debug_mode(debug)
        try:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                logits = forward(batch)
            F.cross_entropy(logits.float(), batch.labels_R).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_logits_on_the_device_equal_the_cpu(kind):
    _, model = tiny_models.tiny(kind, "text-classification", max_position_embeddings=128)
    batch = stream()
    with torch.no_grad():
        expected = make_forward(model, POOLED, "packed")(batch.to("cpu"))
        got = make_forward(model.cuda(), POOLED, "packed")(batch)
    torch.testing.assert_close(got.cpu(), expected, atol=1e-4, rtol=1e-4)
