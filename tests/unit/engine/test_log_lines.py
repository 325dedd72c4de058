"""Log lines come when their numbers do, each of the right steps, and none is lost."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import automodel.engine.log_lines as log_lines
import tiny_runs as tiny
from automodel.engine.diverged import DivergedError
from automodel.engine.log_lines import LogLines
from automodel.engine.run import finetune
from automodel.engine.state import Best, TrainState
from automodel.engine.step import StepResult
from automodel.metrics.throughput import Throughput
from automodel.plan.check import load_run_config


class Device:
    """Has done the first so many steps."""

    done = 0
    waited = 0

    def sent_now(self, step: int):
        return SimpleNamespace(query=lambda: self.done >= step, synchronize=lambda: self._wait(step))

    def _wait(self, step: int) -> None:
        self.waited += step > self.done
        self.done = max(self.done, step)


class Log(LogLines):
    """With a run that has only what lines are about."""

    def __init__(self, monkeypatch, together: bool = False):
        self.told: list[tuple[int, dict]] = []
        self.state, self.gpu = TrainState(Best("loss", "min")), Device()
        monkeypatch.setattr(log_lines, "sent_now", lambda device: self.gpu.sent_now(self.state.step))
        section = SimpleNamespace(lr=1.0, warmup_steps=0, warmup_ratio=0.1, gradient_clipping=1.0)
        run = SimpleNamespace(
            prepared=SimpleNamespace(
                plan=SimpleNamespace(device="cuda", precision="fp32"),
                ranks=SimpleNamespace(together=together),
                cfg=SimpleNamespace(optimizer=section, lr_scheduler=section, training_optimizations=section),
            ),
            state=self.state, started=0.0, checkpoints=None,
            progress=SimpleNamespace(step=lambda step, values: None),
            trackers=SimpleNamespace(log=lambda step, values, split: self.told.append((step, values))),
        )  # fmt: skip
        super().__init__(run, Throughput(), SimpleNamespace(read=lambda: 1.0))  # ty: ignore[invalid-argument-type]
        self.norm = torch.zeros(())  # one place for the norms of all steps, as a captured step has it

    def step(self, loss: float, due: bool = False, wait: bool = False) -> None:
        """Queues a step; its number is its norm and its rate."""
        self.norm.fill_(self.state.step + 1)
        result = StepResult(torch.tensor(loss), self.norm, float(self.state.step + 1), 10, 1)
        self.state.add(result, epoch=0.0)
        self.throughput.update(1, 10)
        if due:
            self.due(result)
        self.write(wait)

    def lines(self) -> list[tuple]:
        return [(step, v["loss"], v["grad_norm"], v["lr"]) for step, v in self.told]


@pytest.fixture
def log(monkeypatch):
    return Log(monkeypatch)


def test_a_line_is_written_when_it_is_there_and_nobody_waits_for_it(log):
    log.step(1.0)
    log.step(3.0, due=True)
    log.step(10.0)
    assert not log.told
    log.gpu.done = 2
    log.step(20.0)
    assert log.lines() == [(2, 2.0, 2.0, 2.0)]  # its own losses and norm, although two more steps were queued
    assert log.gpu.waited == 0
    assert log.state.closed_loss == 4.0
    assert log.state.window.total() == 30.0


def test_the_next_line_waits_for_the_one_before(log):
    log.step(1.0, due=True)
    log.step(2.0, due=True)
    assert log.lines() == [(1, 1.0, 1.0, 1.0)]
    assert log.gpu.waited == 1


def test_before_an_evaluation_or_a_checkpoint_everything_is_told(log):
    log.step(1.0, due=True)
    log.step(2.0)
    log.step(3.0, wait=True)
    assert log.lines() == [(1, 1.0, 1.0, 1.0)]
    log.step(6.0, due=True, wait=True)
    assert log.lines()[-1] == (4, 11 / 3, 4.0, 4.0)
    assert log.state.mean_loss() == 3.0


def test_ranks_write_a_line_after_the_same_step(monkeypatch):
    """One has done it long ago, the other has not: whatever it raises, both raise it there."""
    for done in (0, 9):
        log = Log(monkeypatch, together=True)
        log.gpu.done = done
        log.step(float("nan"), due=True)
        assert not log.told
        with pytest.raises(DivergedError, match="loss is NaN at step 1"):
            log.step(1.0)


def test_a_loss_that_is_no_number_names_its_own_step(log):
    log.step(1.0)
    log.step(float("nan"), due=True)
    log.step(1.0)
    log.gpu.done = 2
    with pytest.raises(DivergedError, match="loss is NaN at step 2"):
        log.step(1.0)
    assert [step for step, _ in log.told] == [2]  # the line itself is kept


def test_the_first_of_several_losses_that_are_no_numbers_is_named(log):
    log.step(1.0, due=True)
    for loss in (2.0, float("inf"), float("nan")):
        log.step(loss)
    with pytest.raises(DivergedError, match="loss is NaN at step 3,"):
        log.step(4.0, due=True, wait=True)


def test_a_run_that_ends_between_lines_tells_of_its_last_steps(log):
    log.step(1.0, due=True, wait=True)
    log.step(2.0)
    log.step(4.0)
    for _ in range(2):
        log.end(StepResult(torch.tensor(0.0), log.norm, 3.0, 10, 1))
    assert log.lines() == [(1, 1.0, 1.0, 1.0), (3, 3.0, 3.0, 3.0)]


def test_an_error_does_not_take_the_line_with_it(log):
    def broken(*losses: float) -> None:
        with log:
            for number, loss in enumerate(losses):
                log.step(loss, due=number == 0)
            raise MemoryError

    with pytest.raises(MemoryError):
        broken(1.0, 2.0)
    assert log.lines() == [(1, 1.0, 1.0, 1.0)]
    with pytest.raises(MemoryError):  # no second error in place of the first
        broken(float("nan"))


def test_a_real_run_logs_every_line_with_the_losses_of_its_own_steps(tmp_path, monkeypatch):
    """The device is always three steps behind; the numbers are those of a device that is not."""
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    config = tiny.write_run(tmp_path, rows=64)

    def logged(folder: str) -> list[tuple]:
        settings = [
            f"checkpoint.checkpoint_dir={tmp_path / folder}", "step_scheduler.max_steps=14", "dataloader.batch_size=4",
            "step_scheduler.log_every_steps=3", "step_scheduler.ckpt_every_steps=7",
        ]  # fmt: skip
        finetune(load_run_config([config], settings))
        text = (tmp_path / folder / "run" / "metrics.jsonl").read_text()
        rows = [row for row in map(json.loads, text.splitlines()) if "grad_norm" in row]
        return [(row["step"], row["loss"], row["grad_norm"], row["lr"], row["epoch"]) for row in rows]

    at_once = logged("a")
    queries = []

    class Late:
        def __init__(self):
            self.asked = 0

        def query(self) -> bool:
            self.asked += 1
            queries.append(self.asked)
            return self.asked > 3

        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(log_lines, "sent_now", lambda device: Late())
    assert logged("b") == at_once
    assert [step for step, *_ in at_once] == [3, 6, 9, 12, 14]
    assert max(queries) >= 3
