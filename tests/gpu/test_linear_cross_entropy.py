"""The loss without logits on a real GPU: against fp64, in a CUDA graph, without waiting for the host, in little memory.

pytest -m gpu tests/gpu/test_linear_cross_entropy.py
"""

from __future__ import annotations

import pytest
import torch

from automodel.kernels.linear_cross_entropy import (
    IGNORE,
    PLAIN,
    CrossEntropy,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_cross_entropy_scores,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Norm of the error over norm of the truth. In half precision logits are rounded, as everywhere.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 4e-3}
FORMS = {
    "plain": PLAIN,
    "smoothed": CrossEntropy(label_smoothing=0.1),
    "z-loss": CrossEntropy(z_loss=1e-3),
    "capped": CrossEntropy(softcap=3.0),
    "everything": CrossEntropy(logit_scale=0.5, softcap=5.0, z_loss=1e-3, label_smoothing=0.1),
}


@pytest.fixture(autouse=True)
def full_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def draw(rows, width, words, dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(rows, width, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(words, width, device="cuda") / width**0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, words, (rows,), device="cuda")
    labels[::10] = IGNORE
    return hidden, weight, labels


def poison(megabytes=512):
    """NaN in the allocator's free blocks: what a kernel leaves unwritten shows."""
    blocks = [torch.full((n,), float("nan"), device="cuda") for n in [megabytes * 2**18] + [2**18] * 16 + [2**12] * 64]
    del blocks


def errors(found, exact):
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, exact)]


# Every form at two sizes; two of them are enough at the largest.
SIZES = [(words, form) for words in (1000, 50_257) for form in FORMS.values()]
SIZES += [(128_256, PLAIN), (128_256, FORMS["everything"])]


@pytest.mark.parametrize(("words", "form"), SIZES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_loss_and_gradients_against_fp64(dtype, words, form):
    hidden, weight, labels = draw(333, 256, words, dtype)
    scale = torch.tensor(1 / 300 if dtype != torch.float16 else 2.0**10 / 300, device="cuda")
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = linear_cross_entropy_reference(*wide, labels, scale=scale.double(), form=form)
    exact = (expected.detach(), *torch.autograd.grad(expected, wide))
    poison()
    loss = linear_cross_entropy(hidden, weight, labels, scale=scale, form=form, chunk_rows=128, unit_upstream=True)
    found = (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))
    worst = max(errors(found, exact))
    assert worst < BOUNDS[dtype], errors(found, exact)
    assert (found[1][labels == IGNORE] == 0).all()


@pytest.mark.parametrize("words", [1000, 50_257])
def test_a_bias_and_an_upstream_gradient(words):
    hidden, weight, labels = draw(200, 128, words, torch.float32)
    bias = torch.randn(words, device="cuda").requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    (3 * linear_cross_entropy_reference(wide[0], wide[1], labels, bias=wide[2])).backward()
    (3 * linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_rows=64)).backward()
    assert max(errors([t.grad for t in (hidden, weight, bias)], [t.grad for t in wide])) < 1e-5


def test_many_chunks_round_a_bf16_gradient_little_more_than_one():
    """What accumulating dW over chunks in bf16 costs, beside what bf16 costs anyway."""
    hidden, weight, labels = draw(4096, 256, 32_000)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = linear_cross_entropy_reference(*wide, labels)
    (exact,) = torch.autograd.grad(expected, wide[1:])
    found = {}
    for chunk_rows in (4096, 1024, 512):
        loss = linear_cross_entropy(hidden, weight, labels, chunk_rows=chunk_rows, unit_upstream=True)
        found[chunk_rows] = errors(torch.autograd.grad(loss, weight), [exact])[0]
    print({k: f"{v:.2e}" for k, v in found.items()})
    assert found[4096] < 1e-2
    assert found[1024] < 1.5 * found[4096] + 1e-3
    assert found[512] < 2.0 * found[4096] + 2e-3


def test_scores_without_gradients():
    hidden, weight, labels = draw(1000, 256, 50_257)
    logits = (hidden @ weight.t()).detach()
    best = logits.float().cpu().argmax(1)  # on the CPU the first of equal ones
    labels[1:500] = best[1:500].cuda()
    labels[::10] = IGNORE
    loss, right = linear_cross_entropy_scores(hidden.detach(), weight.detach(), labels, chunk_rows=1000)
    expected = linear_cross_entropy_reference(hidden.detach().double(), weight.detach().double(), labels)
    assert float(loss) == pytest.approx(float(expected), rel=1e-3)
    counted = ((best == labels.cpu()) & (labels.cpu() != IGNORE)).sum()
    assert abs(int(right) - int(counted)) <= 2  # another GEMM may round a logit otherwise
    assert counted > 400


def test_inside_a_cuda_graph_it_follows_its_inputs():
    hidden, weight, labels = draw(700, 256, 32_000)
    scale = torch.tensor([1 / 600], device="cuda")

    def work():
        loss = linear_cross_entropy(hidden, weight, labels, scale=scale[0], chunk_rows=256, unit_upstream=True)
        return (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = work()
    for seed in (1, 2):
        other = draw(700, 256, 32_000, seed=seed)
        with torch.no_grad():
            for mine, new in zip((hidden, weight, labels), other):
                mine.copy_(new)
            scale.fill_(0.5 / seed)
        graph.replay()
        replayed = [t.clone() for t in captured]
        assert max(errors(replayed, work())) < 1e-3  # cuBLAS may choose otherwise inside a graph


def test_it_never_waits_for_the_device():
    hidden, weight, labels = draw(700, 256, 32_000)
    scale = torch.tensor(1 / 600, device="cuda")
    linear_cross_entropy(hidden, weight, labels, scale=scale).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy(hidden, weight, labels, scale=scale, unit_upstream=True).backward()
        linear_cross_entropy_scores(hidden, weight, labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def peak_bytes(work) -> int:
    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = work()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def test_the_peak_is_a_buffer_and_the_gradients():
    hidden, weight, labels = draw(16_384, 512, 128_256)
    logits = 2 * 16_384 * 128_256

    def ours():
        loss = linear_cross_entropy(hidden, weight, labels, unit_upstream=True)
        return torch.autograd.grad(loss, (hidden, weight))

    peak = peak_bytes(ours)
    gradients = 2 * (hidden.numel() + weight.numel())
    print(f"peak {peak / 2**30:.2f} GiB, of which gradients {gradients / 2**30:.2f}; logits {logits / 2**30:.2f}")
    assert peak < 2**30 + gradients + 2**26
    assert peak < 0.4 * logits
    with torch.no_grad():
        assert peak_bytes(lambda: linear_cross_entropy_scores(hidden, weight, labels)) < 2**30 + 2**26


def test_a_tied_weight_gets_both_gradients_in_place():
    _, weight, labels = draw(512, 128, 5000, torch.float32)
    ids = torch.randint(0, 5000, (512,), device="cuda")
    twin = weight.detach().double().requires_grad_()
    linear_cross_entropy(torch.nn.functional.embedding(ids, weight) * 3, weight, labels).backward()
    linear_cross_entropy_reference(torch.nn.functional.embedding(ids, twin) * 3, twin, labels).backward()
    assert errors([weight.grad], [twin.grad])[0] < 1e-5
