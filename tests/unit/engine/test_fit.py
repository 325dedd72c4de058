"""The largest batch of a run is known beforehand, and a plan that does not fit is halved without changing the step."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from automodel.config.errors import UserError
from automodel.data.order import StepOrder
from automodel.distributed.layout import Layout
from automodel.distributed.world import ALONE
from automodel.engine import fit, steps
from automodel.engine.fit import bytes_to_come, fits, halved, largest_micro_batch
from automodel.optim.kinds import KINDS
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


def test_the_largest_rectangle_is_not_the_one_with_the_most_tokens():
    order = order_of([100, 1, 1, 1, 40, 40, 40, 40], shuffle=False, grad_acc_steps=1)
    assert largest_micro_batch(order, 2).tolist() == [4, 5, 6, 7]
    assert largest_micro_batch(order, 2, padded=True).tolist() == [0, 1, 2, 3]


@dataclasses.dataclass(frozen=True)
class Stub:
    plan: Plan
    hardware: SimpleNamespace
    layout: Layout
    cfg: SimpleNamespace
    ranks: object = ALONE
    adapter: object = None


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
    return Stub(plan, SimpleNamespace(name="Small GPU"), Layout(replicas=ranks), SimpleNamespace(seed=0))


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


@pytest.fixture(autouse=True)
def no_gpu_to_ask(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1600)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)


class SmallStep:
    """An eager step with room for so many tokens."""

    def __init__(self, room):
        self.room, self.parameters, self.tried = room, [torch.zeros(10, 10)], []

    def probe(self, batch):
        self.tried.append(batch)
        if len(batch) > self.room:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    ("side", "fused", "recorded"),
    [(None, True, False), (object(), True, True), (object(), False, False)],
    ids=["one stream", "two streams", "two, of which nobody uses the second"],
)
def test_a_captured_step_on_two_streams_is_tried_as_a_graph(monkeypatch, side, fused, recorded):
    asked = []

    class Captured:
        def probe(self, batch, recorded):
            asked.append(recorded)

    monkeypatch.setattr(fit, "CapturedStep", Captured)
    step, run = Captured(), eager(8, path="packed")
    run = dataclasses.replace(run, plan=dataclasses.replace(run.plan, fused_kernels=fused))
    step.side = side
    assert fits(run, step, loader_of(run))
    assert fits(dataclasses.replace(run, adapter=object()), step, loader_of(run))
    assert step.largest == list(largest_micro_batch(loader_of(run).order, run.plan.total_steps))
    assert asked == [recorded, False], "gradients of adapters take no memory worth the attempt"


@pytest.mark.parametrize(("room", "then"), [(16, []), (8, [(8, False, False)])], ids=["all of it", "half of it"])
def test_the_second_stream_goes_before_batches_are_halved(monkeypatch, room, then):
    """Its memory is its own; without it the same batch may fit, and no gradients have to be summed up."""
    tried, handed_on = [], []

    class Captured:
        def __init__(self, plan):
            self.plan, self.side = plan, object() if plan.second_stream and plan.grad_acc_steps == 1 else None

        def probe(self, batch, recorded):
            tried.append((self.plan.micro_batch_size, self.side is not None, self.plan.late_update))
            if self.side is not None or self.plan.micro_batch_size > room:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

        def hand_on_streams(self):
            handed_on.append(self.plan.micro_batch_size)

    run = eager(16, path="packed")
    lines = (*run.plan.decisions, Decision("update", "under the next step", ""))
    settings = {"decisions": lines, "late_update": True, "second_stream": True, "fused_kernels": True}
    run = dataclasses.replace(run, plan=dataclasses.replace(run.plan, **settings))
    monkeypatch.setattr(steps, "make_step", lambda prepared, notes: (None, Captured(prepared.plan)))
    monkeypatch.setattr(steps, "make_step_loader", loader_of)
    monkeypatch.setattr(steps.ahead, "wait", lambda: None)
    for module in (fit, steps):
        monkeypatch.setattr(module, "CapturedStep", Captured)
    found, _, _ = steps.make_fitting_step(run)
    assert tried == [(16, True, True), (16, False, False), *then]
    assert handed_on == [16] * (len(tried) - 1), "streams of every attempt but the last"
    said = {d.name: d for d in found.plan.decisions}
    assert said["streams"].value == "one"
    assert "update" not in said
    assert found.plan.micro_batch_size * found.plan.grad_acc_steps == 16


def loader_of(prepared):
    order = order_of([8] * 64, micro_batch_size=prepared.plan.micro_batch_size, grad_acc_steps=1)
    return SimpleNamespace(order=order, collate=list, own=list, ranks=1)


def eager(micro, path="padded", optimizer="adamw"):
    plan = {"path": path, "optimizer": KINDS[optimizer], "device": "cpu", "precision": "fp32", "total_steps": 4}
    whole = prepared(micro, 1)
    return dataclasses.replace(whole, plan=dataclasses.replace(whole.plan, checkpointing="none", **plan))


@pytest.mark.parametrize("path", ["packed", "padded"])
def test_an_eager_step_is_tried_with_the_largest_batch(monkeypatch, path):
    run, step = eager(16, path), SmallStep(16)
    held = []
    monkeypatch.setattr(fit, "_try", lambda step, batch, free, device: (held.append(free), step.probe(batch)))
    assert fits(run, step, loader_of(run))
    assert [len(batch) for batch in step.tried] == [16, 16]
    assert held == [100 * 8, 100 * 8 + 200], "states, then holes too: an eighth of what the first trial took"
    assert step.most_bytes == 1600, "a snapshot leaves it to the step that will need it"
    assert not fits(run, SmallStep(15), loader_of(run))


@pytest.mark.parametrize(("optimizer", "copies"), [("adamw", 2), ("sgd", 1), ("lion", 1), ("paged_adamw_32bit", 0)])
def test_room_is_held_free_for_states_that_the_first_step_makes(optimizer, copies):
    run = eager(16, optimizer=optimizer)
    assert bytes_to_come(run, SmallStep(16)) == 100 * 4 * copies
    summed = dataclasses.replace(run, plan=dataclasses.replace(run.plan, grad_acc_steps=2))
    assert bytes_to_come(summed, SmallStep(16)) == 100 * 4 * (copies + 1), "the gradients of the micro-batch before"


def test_eager_steps_on_a_gpu_are_halved_until_they_fit(monkeypatch):
    """The loop that makes a step; what is tried, is tried on the CPU."""
    run, made = eager(16), []
    run = dataclasses.replace(run, plan=dataclasses.replace(run.plan, device="cuda"))

    def make(prepared, notes):
        made.append(prepared.plan.micro_batch_size)
        return None, SmallStep(5)

    monkeypatch.setattr(steps, "make_step", make)
    monkeypatch.setattr(steps, "make_step_loader", loader_of)
    monkeypatch.setattr(steps, "fits", lambda prepared, *rest: fits(eager(prepared.plan.micro_batch_size), *rest))
    found, _, _ = steps.make_fitting_step(run)
    assert made == [16, 8, 4]
    assert (found.plan.micro_batch_size, found.plan.grad_acc_steps) == (4, 4)
    assert "ran out of GPU memory" in found.plan.decisions[0].reason
