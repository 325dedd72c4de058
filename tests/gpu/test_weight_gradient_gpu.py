"""Gradients of weights with their squares on the way, on a GPU, against fp64.

pytest -m gpu tests/gpu/test_weight_gradient_gpu.py
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    from automodel.kernels.dispatch import HOPPER, capability
    from automodel.kernels.weight_gradient import product_programs, squared_product

    only_hopper = pytest.mark.skipif(
        capability(torch.device("cuda", 0)) // 10 != HOPPER // 10, reason="the kernel is for Hopper"
    )
else:
    only_hopper = pytest.mark.skip(reason="needs a CUDA device")

SIZES = [(1408, 2048, 2048), (1393, 16_384, 2048), (1, 2048, 8192), (2048, 3072, 2048), (333, 136, 264), (64, 8, 8)]


@only_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), SIZES)
def test_product_and_squares_against_fp64(dtype, tokens, outputs, inputs):
    generator = torch.Generator("cuda").manual_seed(tokens)
    dy, x = (torch.randn(tokens, n, generator=generator, device="cuda").to(dtype) for n in (outputs, inputs))
    squares = torch.full((product_programs(outputs, inputs, dy.device),), float("nan"), device="cuda")
    made = [torch.full((outputs, inputs), float("nan"), device="cuda", dtype=dtype) for _ in range(2)]
    sums = []
    for gradient in made:
        squared_product(dy, x, gradient, squares)
        sums.append(squares.double().sum())
    exact = dy.double().t() @ x.double()
    assert torch.equal(*made), "the same in every run"
    error = (made[0].double() - exact).norm() / exact.norm()
    assert float(error) < (3e-3 if dtype == torch.bfloat16 else 4e-4)
    assert float(sums[0]) == float(sums[1])
    assert float(sums[0]) == pytest.approx(float(made[0].double().square().sum()), rel=1e-5)
