"""The kernels of decoder blocks on a GPU, against references in fp64, in the dtypes and at the widths training uses.

    pytest -m gpu tests/gpu/test_decoder_kernels_gpu.py

Errors are ‖out − reference‖ / ‖reference‖. Memory is filled with NaN before each run, so an element that a kernel does
not write shows.
"""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BOUND = {torch.float32: 5e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
DTYPES = pytest.mark.parametrize("dtype", list(BOUND), ids=lambda d: str(d).removeprefix("torch."))


def poison(megabytes=64):
    sizes = [megabytes * 2**18] + [2**18] * 8 + [2**9] * 64
    blocks = [torch.full((size,), float("nan"), device="cuda") for size in sizes]
    del blocks


def draw(*shape, dtype=torch.float32, scale=1.0):
    return (scale * torch.randn(shape, device="cuda")).to(dtype).requires_grad_()


def check(function, reference, tensors, bound):
    """`function` and `reference` map tensors to a tuple of tensors; the reference gets them in fp64."""
    exact = [t.detach().double().requires_grad_() for t in tensors]
    poison()
    outputs, expected = function(*tensors), reference(*exact)
    upstream = [torch.randn_like(out) for out in outputs]
    poison()
    found = torch.autograd.grad(outputs, tensors, upstream)
    truth = torch.autograd.grad(expected, exact, [u.double() for u in upstream])
    errors = []
    for a, b in zip((*outputs, *found), (*expected, *truth)):
        a, b = a.detach().double(), b.detach().double()
        errors.append(((a - b).norm() / b.norm().clamp_min(1e-30)).item())
    assert max(errors) < bound, errors  # NaN fails too


@DTYPES
@pytest.mark.parametrize(("offset", "round_first"), [(0.0, True), (1.0, False), (0.0, False)])
@pytest.mark.parametrize("width", [64, 896, 1024, 2048, 2560, 4096, 8192, 12288])
def test_rms_norm(dtype, width, offset, round_first):
    from automodel.kernels.rms_norm import rms_norm, rms_norm_reference

    style = {"eps": 1e-6, "offset": offset, "round_first": round_first}
    tensors = [draw(517, width, dtype=dtype), draw(517, width, dtype=dtype), draw(width, dtype=dtype)]
    check(lambda *t: rms_norm(*t, **style), lambda *t: rms_norm_reference(*t, **style), tensors, BOUND[dtype])


@DTYPES
def test_rms_norm_of_columns_without_a_residual(dtype):
    from automodel.kernels.rms_norm import rms_norm, rms_norm_reference

    tensors = [draw(300, 1536, dtype=dtype), draw(512, dtype=dtype)]
    check(
        lambda x, w: rms_norm(x[:, 512:1024], None, w),
        lambda x, w: rms_norm_reference(x[:, 512:1024], None, w),
        tensors,
        BOUND[dtype],
    )


def test_rms_norm_gradients_are_the_same_in_every_run():
    from automodel.kernels.rms_norm import rms_norm

    tensors = [draw(4099, 1024, dtype=torch.bfloat16), draw(4099, 1024, dtype=torch.bfloat16), draw(1024)]
    upstream = torch.randn(4099, 1024, device="cuda").bfloat16()
    runs = [torch.autograd.grad(rms_norm(*tensors)[0], tensors, upstream) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("width", [250, 3072, 8192])
@pytest.mark.parametrize("keep", [False, True])
def test_swiglu_linear(dtype, activation, width, keep):
    from automodel.kernels.swiglu import swiglu_linear, swiglu_linear_reference

    tensors = [draw(517, 2 * width, dtype=dtype), draw(384, width, dtype=dtype, scale=width**-0.5)]
    with_tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        check(
            lambda x, w: (swiglu_linear(x * 1.0, w, None, activation, keep=keep),),
            lambda x, w: (swiglu_linear_reference(x, w, None, activation),),
            tensors,
            BOUND[dtype],
        )
    finally:
        torch.backends.cuda.matmul.allow_tf32 = with_tf32


HEADS = [
    (32, 8, 64, 32),  # Llama 1B
    (16, 8, 128, 64),  # Qwen3 0.6B
    (40, 8, 128, 64),
    (4, 1, 256, 128),  # Gemma 3 1B
    (24, 8, 128, 48),  # Phi-4-mini
    (0, 8, 64, 32),
    (8, 0, 64, 32),
]


@DTYPES
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "dim", "angles", "normed"),
    # No family normalises heads that turn in part.
    [(*heads, normed) for heads in HEADS for normed in (False, True) if not (normed and 2 * heads[3] < heads[2])],
)
def test_rope_heads(dtype, normed, joined, queries, keys, dim, angles):
    from automodel.kernels.rope import rope_table
    from automodel.kernels.rope_heads import HeadNorms, Heads, rope_heads, rope_heads_reference, rope_joined

    heads, T = Heads(queries, keys, dim), 333
    table = rope_table(1.0 / 10000 ** (torch.arange(angles, device="cuda") / angles), 128)
    positions = torch.randint(0, 128, (T,), device="cuda")
    counts = [n for n in (queries, keys) if n]
    tensors = [draw(T, (queries + 2 * keys) * dim, dtype=dtype)]
    tensors += [draw(dim, dtype=dtype) for _ in counts if normed]

    def norms(weights):
        if not normed:
            return None
        given = iter(weights)
        spare = torch.zeros(dim, dtype=weights[0].dtype, device="cuda")
        return HeadNorms(*(next(given) if n else spare for n in (queries, keys)), 1e-6)

    def used(made):
        return tuple(t for t in made if t.shape[1])

    def ours(x, *weights):
        if joined:
            return used(heads.split(rope_joined(x * 1.0, positions, table, heads, norms(weights))))
        return used(rope_heads(x * 1.0, positions, table, heads, norms(weights)))

    def reference(x, *weights):
        return used(rope_heads_reference(x, positions, table.double(), heads, norms(weights)))

    check(ours, reference, tensors, BOUND[dtype])
