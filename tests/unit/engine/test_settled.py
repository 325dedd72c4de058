"""What steps put off is done before anybody reads weights, also where the step itself had to rehearse."""

from types import SimpleNamespace

import pytest
import torch

from automodel.data.batch import StepBatch
from automodel.distributed.world import ALONE
from automodel.engine.captured import CapturedStep
from automodel.engine.together import TogetherStep
from automodel.kernels.flat_adamw import FlatAdamW


def stepped(kind) -> CapturedStep:
    """A step without a GPU whose replay rehearses, as the first one of a shape does."""
    step = kind.__new__(kind)
    weight = torch.nn.Parameter(torch.ones(4, 4))
    step.optimizer = FlatAdamW([weight], lr=0.1, late=[[weight]])
    step.unsettled, step.apart, step.peak_lr, step.ranks = 0, kind is TogetherStep, 0.1, ALONE
    step.last_loss, step.schedule = torch.zeros(()), SimpleNamespace(lr_at=lambda index, peak: peak)

    def learn() -> None:
        step.settle()
        step.optimizer.update_late(0)
        weight.grad = torch.ones(4, 4)
        step.optimizer.step()
        weight.grad = None

    step._learn_nothing = step._update = lambda: None
    step._sum = lambda marked: learn()
    step._replay = lambda batch, count: learn()
    step.weight = weight
    return step


@pytest.mark.parametrize("kind", [CapturedStep, TogetherStep])
def test_an_evaluation_after_a_step_that_rehearsed(kind, monkeypatch):
    step = stepped(kind)
    monkeypatch.setattr(StepBatch, "num_tokens", 1)
    monkeypatch.setattr(StepBatch, "num_documents", 1)
    batch = StepBatch((), 0, 0, 1)
    step(0, batch) if kind is TogetherStep else _one(step, batch)
    assert torch.equal(step.weight, torch.ones(4, 4)), "the update waits for the next step"
    with step.compute():
        torch.testing.assert_close(step.weight.detach(), torch.full((4, 4), 0.9 - 0.001))


def _one(step: CapturedStep, batch: StepBatch) -> None:
    step.apart, step._update = True, lambda: step._replay(None, 1.0)
    step(0, batch)


def test_loading_a_state_forgets_nothing_that_waits():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = FlatAdamW([weight], lr=0.1, weight_decay=0.0, late=[[weight]])
    kept = optimizer.state_dict()
    weight.grad = torch.ones(4, 4)
    optimizer.step()
    optimizer.load_state_dict(kept)
    before = weight.detach().clone()
    optimizer.update_late(0)
    assert torch.equal(weight, before), "an update of the time before would be done to the weights that were loaded"
