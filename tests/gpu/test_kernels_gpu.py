"""The Triton kernels on a GPU, against references in fp64, in the dtypes training uses, and inside CUDA graphs.

    pytest -m gpu tests/gpu/test_kernels_gpu.py

Errors are ‖out − reference‖ / ‖reference‖. Memory is filled with NaN before each run, so an element that a kernel does
not write shows.
"""

import pytest
import torch
import torch.nn.functional as F

from flattened import flattened

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BOUND = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DTYPES = pytest.mark.parametrize("dtype", list(BOUND), ids=lambda d: str(d).removeprefix("torch."))


def poison(megabytes=64):
    """Leave NaN in the allocator's free blocks, where the next outputs will lie."""
    blocks = [
        torch.full((size,), float("nan"), device="cuda") for size in [megabytes * 2**18] + [2**18] * 8 + [2**9] * 64
    ]
    del blocks


def draw(*shape, dtype=torch.float32, scale=1.0):
    return (scale * torch.randn(shape, device="cuda")).to(dtype).requires_grad_()


def error(found, reference):
    found, reference = found.detach().double(), reference.detach().double()
    return ((found - reference).norm() / reference.norm().clamp_min(1e-30)).item()


def wide(tensors):
    return {k: None if v is None else v.detach().double().requires_grad_() for k, v in tensors.items()}


def assert_close(outputs, expected, tensors, exact, bound):
    upstream = [torch.randn_like(out) for out in outputs]
    inputs, exact_inputs = ([t for t in ts.values() if t is not None] for ts in (tensors, exact))
    poison()
    found = torch.autograd.grad(outputs, inputs, upstream)
    truth = torch.autograd.grad(expected, exact_inputs, [u.double() for u in upstream])
    errors = [error(a, b) for a, b in zip((*outputs, *found), (*expected, *truth))]
    assert max(errors) < bound, errors  # NaN fails too


# add_norm


@DTYPES
@pytest.mark.parametrize("width", [32, 250, 384, 768, 1024, 2048, 4096, 8192])
def test_add_norm(dtype, width):
    from automodel.kernels.add_norm import add_norm, add_norm_reference
    from automodel.kernels.philox import keep_mask

    rows, p, seed = 517, 0.1, torch.tensor([2**40 + 7], device="cuda")
    tensors = {name: draw(rows, width, dtype=dtype) for name in ("x", "residual")}
    tensors |= {name: draw(width, dtype=dtype) for name in ("weight", "norm_bias", "linear_bias")}
    exact = wide(tensors)
    poison()
    outputs = add_norm(**tensors, dropout_p=p, seed=seed, site=5, return_sum=True)
    expected = add_norm_reference(**exact, dropout_p=p, keep=keep_mask(seed, 5, rows, width, p))
    assert_close(outputs, expected, tensors, exact, BOUND[dtype])


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
def test_add_norm_with_mixed_dtypes(residual_dtype):
    from automodel.kernels.add_norm import add_norm, add_norm_reference

    tensors = {"x": draw(300, 768, dtype=torch.bfloat16), "residual": draw(300, 768, dtype=residual_dtype)}
    tensors |= {"weight": draw(768), "norm_bias": draw(768)}
    y = add_norm(**tensors)
    assert y.dtype == residual_dtype
    exact = wide(tensors)
    assert_close([y], add_norm_reference(**exact)[:1], tensors, exact, BOUND[torch.bfloat16])


def test_masks_are_the_documented_ones():
    from automodel.kernels.add_norm import add_norm
    from automodel.kernels.philox import keep_mask

    seed = torch.tensor([-(2**50) + 3], device="cuda")
    for rows, width in ((7, 768), (130, 1000), (9, 4096)):
        ones = torch.ones(rows, width, device="cuda")
        _, h = add_norm(
            ones, None, torch.ones(width, device="cuda"), dropout_p=0.3, seed=seed, site=11, return_sum=True
        )
        assert torch.equal(h != 0, keep_mask(seed, 11, rows, width, 0.3))


def test_add_norm_is_deterministic():
    from automodel.kernels.add_norm import add_norm

    seed = torch.tensor([1], device="cuda")
    tensors = [draw(4096, 768, dtype=torch.bfloat16), draw(4096, 768, dtype=torch.bfloat16), draw(768), draw(768)]
    upstream = torch.randn(4096, 768, device="cuda", dtype=torch.bfloat16)
    runs = [torch.autograd.grad(add_norm(*tensors, dropout_p=0.1, seed=seed), tensors, upstream) for _ in range(3)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other))


def test_a_replayed_graph_draws_new_masks_and_its_backward_uses_them():
    from automodel.kernels.add_norm import add_norm

    seed = torch.tensor([1], device="cuda")
    x = torch.ones(64, 768, device="cuda", requires_grad=True)
    weight = torch.ones(768, device="cuda")

    def step():
        seed.add_(1)
        _, h = add_norm(x, None, weight, dropout_p=0.5, seed=seed, return_sum=True)
        return h.detach(), torch.autograd.grad(h, x, torch.ones_like(h))[0]

    graph, (h, dx) = capture(step)
    draws = []
    for _ in range(2):
        graph.replay()
        assert torch.equal(h != 0, dx != 0)
        draws.append(h.clone())
    assert not torch.equal(*draws)


def capture(step):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = step()
    return graph, out


# bias_gelu and geglu


@DTYPES
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize(("rows", "width"), [(517, 3072), (2048, 1536), (33, 1000)])
def test_bias_gelu(dtype, approximate, rows, width):
    from automodel.kernels.bias_gelu import bias_gelu, bias_gelu_reference

    tensors = {"x": draw(rows, width, dtype=dtype, scale=2.0), "bias": draw(width, dtype=dtype)}
    exact = wide(tensors)
    poison()
    y = bias_gelu(**tensors, approximate=approximate)
    expected = bias_gelu_reference(**exact, approximate=approximate)
    assert_close([y], [expected], tensors, exact, BOUND[dtype])


@DTYPES
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize(("rows", "width"), [(517, 1152), (2048, 2624), (33, 100)])
def test_geglu(dtype, approximate, rows, width):
    from automodel.kernels.bias_gelu import geglu, geglu_reference

    tensors = {"x": draw(rows, 2 * width, dtype=dtype, scale=2.0)}
    exact = wide(tensors)
    poison()
    y = geglu(**tensors, approximate=approximate)
    assert_close([y], [geglu_reference(**exact, approximate=approximate)], tensors, exact, BOUND[dtype])


@pytest.mark.parametrize("kernel", ["bias_gelu", "geglu", "swiglu"])
def test_more_rows_than_the_second_axis_of_a_grid_has(kernel):
    """65,535 programs of 4 rows; the last rows are those that would be missing."""
    from automodel.kernels.bias_gelu import bias_gelu, bias_gelu_reference, geglu, geglu_reference
    from automodel.kernels.swiglu import swiglu, swiglu_reference

    ours, truth = {
        "bias_gelu": (bias_gelu, lambda x: bias_gelu_reference(x, None)),
        "geglu": (geglu, geglu_reference),
        "swiglu": (swiglu, swiglu_reference),
    }[kernel]
    x = draw(262_148, 1024 if kernel == "bias_gelu" else 2048, dtype=torch.bfloat16)
    last = x.detach()[-8:].float().requires_grad_()
    y = ours(x.clone())  # which swiglu writes over
    y.sum().backward()
    expected = truth(last)
    expected.sum().backward()
    torch.testing.assert_close(y[-8:].float(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(x.grad[-8:].float(), last.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_past_the_end_add_nothing_where_all_scores_are_low(dtype):
    from automodel.kernels.attention import Attention, attention, attention_reference

    how, length = Attention(2, 2, 64, 0.125), 40
    heads = torch.randn(length, 6, 64, device="cuda") * 0.1
    heads[:, :2, 0], heads[:, 2:4, 0], heads[:, 4:] = 20.0, -8.0, torch.randn(length, 2, 64, device="cuda")
    qkv = heads.flatten(1).to(dtype).requires_grad_()
    twin = qkv.detach().float().requires_grad_()
    boundaries = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    upstream = torch.randn(length, 128, device="cuda")
    attention(qkv, boundaries, length, how).backward(upstream.to(dtype))
    attention_reference(twin, boundaries, how).backward(upstream.to(dtype).float())
    torch.testing.assert_close(qkv.grad.float(), twin.grad, rtol=5e-2, atol=5e-2)


# FlatAdamW


def network(dtype=torch.float32):
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Embedding(1000, 96), torch.nn.Linear(96, 389), torch.nn.LayerNorm(389), torch.nn.Linear(389, 2)
    ).to("cuda", dtype)


def set_gradients(nets, step):
    generator = torch.Generator("cuda").manual_seed(step)
    for parameters in zip(*(net.parameters() for net in nets)):
        g = torch.randn(parameters[0].shape, generator=generator, device="cuda")
        for p in parameters:
            p.grad = g.to(p.dtype)


@pytest.mark.parametrize("copy_dtype", [None, torch.bfloat16, torch.float16])
def test_flat_adamw_equals_torch(copy_dtype):

    ours, theirs = network(), network()
    flat = flattened(ours, lr=1e-2, weight_decay=0.1, max_norm=1.0, copy_dtype=copy_dtype)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
    for step in range(10):
        set_gradients((ours,), step)
        for p, q in zip(ours.parameters(), theirs.parameters()):
            q.grad = p.grad.to(torch.float32, copy=True)  # clipping works in place
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        flat.step()
        plain.step()
        assert flat.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    weights = flat.full_precision_weights(ours)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
        assert error(weights[name], q) < 1e-6
        assert torch.equal(p, weights[name].to(p.dtype))


def test_flat_adamw_in_pure_bf16_stays_near_fp32():

    narrow, exact = network(torch.bfloat16), network()
    optimizers = [flattened(net, lr=1e-2, weight_decay=0.1, max_norm=1.0) for net in (narrow, exact)]
    for step in range(5):
        set_gradients((narrow, exact), step)
        for optimizer in optimizers:
            optimizer.step()
    assert all(error(p, q) < 2e-2 for p, q in zip(narrow.parameters(), exact.parameters()))


def test_parameters_of_two_precisions_in_one_launch():
    from automodel.kernels.flat_adamw import FlatAdamW

    net, exact = network(), network()
    groups = [
        [
            {"params": [p for p in n.parameters() if p.ndim >= 2]},
            {"params": [p for p in n.parameters() if p.ndim < 2], "full_precision": True, "weight_decay": 0.0},
        ]
        for n in (net, exact)
    ]
    flat = FlatAdamW(groups[0], lr=1e-2, max_norm=1.0, copy_dtype=torch.bfloat16)
    reference = FlatAdamW(groups[1], lr=1e-2, max_norm=1.0)
    for step in range(3):
        set_gradients((net,), step)
        for p, q in zip(net.parameters(), exact.parameters()):
            q.grad = p.grad.float()
        flat.step()
        reference.step()
    assert flat.grad_norm.item() == pytest.approx(reference.grad_norm.item(), rel=1e-6)
    for weight, q in zip(flat.full_precision_weights(net).values(), exact.parameters()):
        assert error(weight, q) < 1e-6


def loss_of(net, ids):
    return F.cross_entropy(net(ids).float(), ids % 2)


@pytest.mark.parametrize("flat_gradients", [False, True])
def test_captured_steps_equal_eager_ones(flat_gradients):

    factors = torch.linspace(1, 0.1, 8)
    options = {"lr": 1e-2, "weight_decay": 0.1, "max_norm": 0.5, "lr_factors": factors, "copy_dtype": torch.bfloat16}
    captured, eager = network(), network()
    optimizers = [flattened(n, **options, flat_gradients=flat_gradients) for n in (captured, eager)]
    sizes = (64, 256)  # two buckets, two graphs, gradients at different addresses
    batches = {size: torch.zeros(size, dtype=torch.int64, device="cuda") for size in sizes}

    def step(net, optimizer, ids):
        loss_of(net, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    saved = optimizers[0].state_dict()
    graphs = {size: capture(lambda ids=ids: step(captured, optimizers[0], ids))[0] for size, ids in batches.items()}
    optimizers[0].finish_capture()
    optimizers[0].load_state_dict(saved)  # undo the warm-up steps
    for index in range(8):
        size = sizes[index % 2]
        ids = torch.randint(0, 1000, (size,), device="cuda", generator=torch.Generator("cuda").manual_seed(index))
        batches[size].copy_(ids)
        graphs[size].replay()
        step(eager, optimizers[1], ids)
        assert optimizers[0].grad_norm.item() == pytest.approx(optimizers[1].grad_norm.item(), rel=1e-2)
    assert int(optimizers[0].step_count) == 8
    weights = [o.full_precision_weights(n) for o, n in zip(optimizers, (captured, eager))]
    assert all(error(weights[0][name], weights[1][name]) < 1e-2 for name in weights[0])


def test_an_unfinished_capture_trains_nothing():

    net = network()
    optimizer = flattened(net, lr=1e-2, max_norm=1.0)
    ids = torch.arange(64, device="cuda")

    def step():
        loss_of(net, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    graph, _ = capture(step)
    before = [p.detach().clone() for p in net.parameters()]
    graph.replay()
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before))
    optimizer.finish_capture()
    graph.replay()
    assert not torch.equal(net[1].weight, before[1])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_bad_step_is_skipped(bad):

    net = network()
    optimizer = flattened(net, lr=1e-2, initial_loss_scale=1024.0, copy_dtype=torch.float16)
    before = [p.detach().clone() for p in net.parameters()]
    set_gradients((net,), 0)
    net[1].bias.grad[5] = bad
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before))
    assert optimizer.loss_scale.item() == 512.0
    assert int(optimizer.step_count) == 0
