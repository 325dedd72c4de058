"""The largest batch of a run is known beforehand, and a plan that does not fit is halved without changing the step."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from automodel.config.errors import UserError
from automodel.data.order import StepOrder
from automodel.distributed.layout import Layout
from automodel.engine.fit import halved, largest_micro_batch
from automodel.plan.plan import Decision, Plan


def order_of(lengths, **more):
    settings = {"micro_batch_size": 4, "grad_acc_steps": 2, "seed": 0, "shuffle": True, "drop_last": False}
    return StepOrder(lengths=np.asarray(lengths), group_by_length=False, sort_within_step=False, **(settings | more))


def test_the_largest_batch_is_the_largest_of_all_that_will_come():
    lengths = np.random.default_rng(0).integers(1, 500, 100)
    order = order_of(lengths)
    found = largest_micro_batch(order, 3 * order.steps_per_epoch)
    every = [b for e in range(3) for s in range(order.steps_per_epoch) for b in order.micro_batches(e, s)]
    assert lengths[found].sum() == max(lengths[b].sum() for b in every)
    assert lengths[found].sum() < np.sort(lengths)[-4:].sum(), "an impossible batch would ask for too much memory"


@dataclasses.dataclass(frozen=True)
class Stub:
    plan: Plan
    hardware: SimpleNamespace
    layout: Layout


def prepared(micro, accumulation, ranks=1):
    numbers = {f.name: 0 for f in dataclasses.fields(Plan)}
    plan = Plan(
        **numbers
        | {
            "micro_batch_size": micro,
            "grad_acc_steps": accumulation,
            "global_batch_size": micro * accumulation * ranks,
            "max_length": 512,
            "decisions": (Decision("batch", "", ""),),
        }
    )
    return Stub(plan, SimpleNamespace(name="Small GPU"), Layout(replicas=ranks))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("micro", "accumulation"), [(8, 1), (6, 2), (5, 1), (32, 4)])
def test_halving_keeps_the_examples_of_a_step(micro, accumulation, ranks):
    plan = halved(prepared(micro, accumulation, ranks)).plan
    assert plan.micro_batch_size * plan.grad_acc_steps == micro * accumulation
    assert plan.micro_batch_size <= micro // 2
    assert "ran out of GPU memory" in plan.decisions[0].reason


def test_one_example_that_does_not_fit_is_the_end():
    with pytest.raises(UserError, match="Even one example of 512 tokens does not fit into the memory of Small GPU"):
        halved(prepared(1, 8))
