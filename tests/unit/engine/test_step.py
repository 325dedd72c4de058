"""The plain step: clipping, the TF32 setting of the process, which is borrowed, and skipped fp16 steps, which count."""

from contextlib import suppress

import pytest
import torch

import tiny_runs as tiny
from automodel.engine.diverged import DivergedError
from automodel.engine.evaluate import Evaluator
from automodel.engine.fit import OutOfMemoryError
from automodel.engine.loop import MOST_SKIPPED
from automodel.engine.observe import Observer
from automodel.engine.run import finetune
from automodel.engine.step import TrainStep, clip, fp32_products
from automodel.plan.check import load_run_config


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    path = tiny.write_run(tmp_path)
    return lambda *settings: load_run_config([path], settings)


@pytest.mark.parametrize("before", ["highest", "high"])
@pytest.mark.parametrize(("tf32", "inside"), [(True, "high"), (False, "highest")])
def test_the_tf32_switch_is_put_back(before, tf32, inside):
    original = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before)
    try:
        with suppress(RuntimeError), fp32_products(tf32):
            assert torch.get_float32_matmul_precision() == inside
            raise RuntimeError("a run that fails in the middle")
        assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision(original)


@pytest.mark.parametrize("max_norm", [0.5, 4.9999995, 5.0, 5.00001, float("inf"), float("nan")])
@pytest.mark.parametrize("values", [(3.0, 4.0), (float("nan"), 4.0), (float("inf"), 4.0)])
def test_clips_as_torch_does_to_the_bit(max_norm, values):
    ours, theirs = ([torch.nn.Parameter(torch.zeros(1)) for _ in values] for _ in range(2))
    for parameters in (ours, theirs):
        for parameter, value in zip(parameters, values):
            parameter.grad = torch.tensor([value])
    unused = torch.nn.Parameter(torch.zeros(1))
    norm = clip([*ours, unused], max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close([p.grad for p in ours], [p.grad for p in theirs], rtol=0, atol=0, equal_nan=True)
    assert unused.grad is None


def test_an_fp32_run_computes_in_fp32_whatever_the_process_was_set_to(run):
    seen = []

    class Look(Observer):
        def step_begins(self):
            seen.append(torch.get_float32_matmul_precision())

    torch.set_float32_matmul_precision("high")
    try:
        finetune(run("step_scheduler.max_steps=2"), observer=Look())
        assert seen == ["highest"] * 2
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_run_without_fp16_skips_nothing(run):
    assert finetune(run("step_scheduler.max_steps=2")).summary["skipped_steps"] == 0


@pytest.mark.parametrize(("skipped", "stops"), [(MOST_SKIPPED, False), (MOST_SKIPPED + 1, True)])
def test_fp16_that_skips_most_steps_ends_with_an_error(run, monkeypatch, skipped, stops):
    """A stand-in for hardware: the norm is infinite, the plan says fp16, and the step says how many were skipped."""
    import dataclasses

    import automodel.engine.loop as loop

    monkeypatch.setattr(TrainStep, "skipped_steps", lambda self: skipped)
    check = loop._check_finite
    seen = []

    def overflowing(state, result):
        prepared = dataclasses.replace(state.prepared, plan=dataclasses.replace(state.prepared.plan, precision="fp16"))
        seen.append(state.state.step)
        check(dataclasses.replace(state, prepared=prepared), dataclasses.replace(result, grad_norm=torch.tensor(1e400)))

    monkeypatch.setattr(loop, "_check_finite", overflowing)
    cfg = run("step_scheduler.max_steps=4", "step_scheduler.val_every_steps=2")
    if stops:
        with pytest.raises(
            DivergedError, match="fp16 gradient norm, for more than half of all steps, is inf at step 2"
        ):
            finetune(cfg)
    else:
        assert finetune(cfg).summary["steps"] == 4
        assert seen == [2, 4]


def test_a_step_of_nothing_but_a_class_without_weight_teaches_nothing(run):
    cfg = run("dataloader.batch_size=1", "step_scheduler.max_steps=6", "loss_fn.class_weights=[0.0, 1.0]")
    summary = finetune(cfg).summary
    assert summary["status"] == "finished"
    assert 0.0 < summary["train_loss"] < 1.0


def without_memory(monkeypatch, calls):
    """Forward passes of the steps to come that find no memory, counted from 1. Returns all that are made."""
    made, seen = TrainStep.__init__, []

    def watched(step, *args, **kw):
        made(step, *args, **kw)
        forward = step.forward

        def count(batch):
            seen.append(batch)
            if len(seen) in calls:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")
            return forward(batch)

        step.forward = count

    monkeypatch.setattr(TrainStep, "__init__", watched)
    return seen


SETTINGS = (
    "model.hidden_dropout_prob=0",
    "dataloader.batch_size=4",
    "step_scheduler.grad_acc_steps=2",
    "step_scheduler.max_steps=4",
    "step_scheduler.ckpt_every_steps=2",
    "validation_dataset=null",
    "model.attention_probs_dropout_prob=0",
)


def test_a_step_that_finds_no_memory_is_begun_once_more(run, monkeypatch):
    """In its second micro-batch, when the first one's gradients are there: they count once."""
    truth = finetune(run(*SETTINGS)).summary
    seen = without_memory(monkeypatch, {4})
    found = finetune(run(*SETTINGS), overwrite=True).summary
    assert len(seen) == 8 + 2, "the second step's two micro-batches were computed again"
    assert found["train_loss"] == truth["train_loss"]


def test_a_run_without_memory_ends_in_words_and_goes_on_later(run, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        without_memory(patch, range(6, 100))
        with pytest.raises(OutOfMemoryError, match="ran out of memory after step 2") as error:
            finetune(run(*SETTINGS))
    assert "The checkpoint of step 2 is kept; --resume continues after it." in str(error.value)
    assert error.value.exit_code == 1
    assert (tmp_path / "out" / "run" / "report.html").exists(), "what it learned so far can be looked at"
    assert finetune(run(*SETTINGS), resume=True).summary["steps"] == 4


def short_evaluations(monkeypatch, calls):
    """Evaluations that find no memory, counted from 1. Returns a list of all that are asked for."""
    measured, seen = Evaluator.__call__, []

    def counted(evaluator):
        seen.append(evaluator)
        if len(seen) in calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return measured(evaluator)

    monkeypatch.setattr(Evaluator, "__call__", counted)
    return seen


VALIDATED = (*(s for s in SETTINGS if s != "validation_dataset=null"), "step_scheduler.val_every_steps=2")


def test_an_evaluation_that_finds_no_memory_is_tried_again(run, monkeypatch):
    with monkeypatch.context() as patch:
        usual = short_evaluations(patch, ())
        truth = finetune(run(*VALIDATED)).summary
    seen = short_evaluations(monkeypatch, {1})
    found = finetune(run(*VALIDATED), overwrite=True).summary
    assert len(seen) == len(usual) + 1
    assert (found["train_loss"], found["validation"]) == (truth["train_loss"], truth["validation"])


def test_what_was_learned_is_saved_where_an_evaluation_never_finds_memory(run, monkeypatch):
    with monkeypatch.context() as patch:
        short_evaluations(patch, range(1, 100))
        with pytest.raises(OutOfMemoryError, match="after step 2. The checkpoint of step 2 is kept"):
            finetune(run(*VALIDATED, "step_scheduler.ckpt_every_steps=4"))
    assert finetune(run(*VALIDATED, "step_scheduler.ckpt_every_steps=4"), resume=True).summary["steps"] == 4
