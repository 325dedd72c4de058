"""Gradients of many micro-batches are summed in fp32, whatever the model computes in."""

import pytest
import torch

from flattened import flattened

LR = 1e-2


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def loss_of(model, step, dtype):
    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
    return model(inputs.to(dtype)).float().square().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_six_hundredth_micro_batch_counts_like_the_first(dtype):
    model = net()
    flattened(model, lr=LR, copy_dtype=dtype, flat_gradients=True)
    loss_of(model, 0, dtype).backward()
    once = [p.grad.clone() for p in model.parameters()]
    for _ in range(599):
        loss_of(model, 0, dtype).backward()
    for parameter, gradient in zip(model.parameters(), once):
        assert parameter.dtype == dtype
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad, 600 * gradient, rtol=1e-4, atol=0)


def test_the_update_is_that_of_the_sum(path):
    """Three micro-batches through the flat gradients against plain AdamW on their sum; the 16-bit gradients are shared,
    so the sum and the update are all that can differ."""
    ours, theirs = net(), net()
    options = {"lr": LR, "weight_decay": 0.1, "max_norm": 1.0}
    flat = flattened(ours, copy_dtype=torch.bfloat16, flat_gradients=True, **options)
    plain = flattened(theirs, copy_dtype=None, **options)
    for step in range(3):
        sums = [torch.zeros(p.shape) for p in ours.parameters()]
        for micro in range(3):
            before = [p.grad.clone() for p in ours.parameters()]
            loss_of(ours, 10 * step + micro, torch.bfloat16).backward()
            for total, parameter, old in zip(sums, ours.parameters(), before):
                total += parameter.grad - old
        for parameter, total in zip(theirs.parameters(), sums):
            parameter.grad = total
        flat.step()
        plain.step()
        plain.zero_grad()
        assert all(not p.grad.any() for p in ours.parameters())
        assert flat.grad_norm.item() == pytest.approx(plain.grad_norm.item(), rel=1e-5)
    for weight, expected in zip(flat.full_precision_weights(ours).values(), theirs.parameters()):
        torch.testing.assert_close(weight, expected.detach(), rtol=1e-5, atol=1e-6)


def test_pure_bf16_keeps_everything_in_bf16():
    model = net().bfloat16()
    flattened(model, lr=LR, flat_gradients=True)
    loss_of(model, 0, torch.bfloat16).backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
