"""Long pieces of the optimizer's buffers, walked over as they lie: the same norms and weights as block by block."""

import pytest
import torch

from automodel.kernels import flat_parameters
from automodel.kernels.flat_adamw import FlatAdamW
from automodel.kernels.flat_parameters import BLOCK

SHAPES = [(96, BLOCK // 32), (40, BLOCK // 8), (7, 100), (64, BLOCK // 64), (3,)]  # the third is padded


def make(precision, late, **options):
    """Matrices 0, 1 and 2 are of one group, 3 of another; the first four, or as many as `late` says, are put off."""
    torch.manual_seed(0)
    held = torch.bfloat16 if precision == "bf16-pure" else torch.float32
    parameters = [torch.nn.Parameter(torch.randn(shape).to(held)) for shape in SHAPES]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.0}]
    copy = torch.bfloat16 if precision == "bf16" else None
    optimizer = FlatAdamW(
        groups,
        lr=1e-2,
        max_norm=0.5,
        copy_dtype=copy,
        late=[parameters[: 4 if late is True else late]] if late else [],
        **options,
    )
    return parameters, optimizer


def train(parameters, optimizer, steps=3, beside=False, without=()):
    norms = []
    for step in range(steps):
        for part in range(len(optimizer.flat.late_parts)):
            optimizer.update_late(part, beside)
        draw = torch.Generator().manual_seed(step)
        for index, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
            parameter.grad = None if index in without else gradient
        optimizer.step()
        norms.append(optimizer.grad_norm.item())
    optimizer.settle()
    return norms, [p.detach().float() for p in parameters], optimizer.state_dict()["state"]


def test_neighbours_of_one_group_are_one_run():
    parameters, optimizer = make("bf16", late=True)
    runs = optimizer.flat.late_parts[0].runs
    assert [(run.start, run.blocks, run.group) for run in runs] == [(0, 3 + 5 + 1, 0), (9 * BLOCK, 1, 1)]
    runs[0].gradient.fill_(1.0)
    assert all(parameter.gradient_place.min() == 1.0 for parameter in parameters[:3])
    assert parameters[3].gradient_place.abs().max() == 0.0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
@pytest.mark.parametrize("beside", [False, True])
def test_a_late_part_of_several_runs_is_updated_as_at_once(path, precision, beside):
    plain = train(*make(precision, late=False))
    late = train(*make(precision, late=True), beside=beside)
    assert plain[0][0] > 0.5, "clipped"
    torch.testing.assert_close(late, plain, rtol=1e-6, atol=1e-6)


def test_a_skipped_step_leaves_a_run_alone(path):
    parameters, optimizer = make("fp32", late=True, skip_nonfinite=True)
    before = [p.detach().clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, float("inf"))
    optimizer.step()
    optimizer.update_late(0)
    assert all(torch.equal(p, b) for p, b in zip(parameters, before))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
@pytest.mark.parametrize("without", [(), (1,)])
def test_what_is_long_and_not_put_off_is_updated_as_one_piece(path, monkeypatch, precision, without):
    """A table of words beside layers that are put off. Without a gradient it is left alone."""
    plain = train(*make(precision, late=False), without=without)
    monkeypatch.setattr(flat_parameters, "LONG_BLOCKS", 3)
    parameters, optimizer = make(precision, late=1)
    assert optimizer.flat.long == [1]
    assert len(optimizer.flat.short_blocks) == 3  # those of 2, 3 and 4
    torch.testing.assert_close(train(parameters, optimizer, without=without), plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("flat", "without"), [(False, ()), (False, (1,)), (True, ())])
def test_long_gradients_have_the_same_norm(path, monkeypatch, flat, without):
    """Each has a launch of its own; whoever has padding, or no gradient in this step, is not one of them."""
    short = train(*make("fp32", late=False), without=without)[0]
    monkeypatch.setattr(flat_parameters, "LONG_BLOCKS", 3)
    parameters, optimizer = make("fp32", late=False, flat_gradients=flat)
    assert optimizer.flat.long == [0, 1]
    norms = []
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        for index, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=draw)
            if flat:
                parameter.grad.copy_(gradient)
            else:
                parameter.grad = None if index in without else gradient
        optimizer.step()
        norms.append(optimizer.grad_norm.item())
    assert norms == pytest.approx(short, rel=1e-6)
