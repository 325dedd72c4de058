"""Which evaluation is the best, and how patience counts: as transformers' EarlyStoppingCallback does."""

import math
import random
from types import SimpleNamespace

import pytest

from automodel.checkpoint.config import CheckpointConfig
from automodel.config.errors import UserError
from automodel.data.config import DatasetConfig
from automodel.engine.prepare import _best
from automodel.engine.state import Best, TrainState
from automodel.models.config import ModelConfig
from automodel.plan.check import load_run_config
from automodel.plan.config import RunConfig
from automodel.tasks.registry import task_named


def stock(values: list[float], greater: bool, threshold: float) -> tuple[list[int], float]:
    """The counter after each evaluation, and the best value, of transformers' own callback and Trainer."""
    from transformers import EarlyStoppingCallback, Trainer

    callback = EarlyStoppingCallback(early_stopping_patience=10**6, early_stopping_threshold=threshold)
    args = SimpleNamespace(metric_for_best_model="score", greater_is_better=greater, save_strategy="no")
    state = SimpleNamespace(best_metric=None, best_global_step=None, global_step=0)
    trainer = SimpleNamespace(args=args, state=state)
    counts = []
    for value in values:
        metrics = {"eval_score": value}
        callback.on_evaluate(args, state, None, metrics)  # Trainer.evaluate calls it before the best one is known
        Trainer._determine_best_metric(trainer, metrics, trial=None)
        counts.append(callback.early_stopping_patience_counter)
    return counts, state.best_metric


def ours(values: list[float], greater: bool, threshold: float) -> tuple[list[int], Best]:
    best, counts = Best("score", "max" if greater else "min", threshold), []
    for number, value in enumerate(values):
        best.update(number, value)
        counts.append(best.stale)
    return counts, best


@pytest.mark.parametrize("greater", [True, False])
@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.3, 10.0])
def test_it_counts_as_trainers_callback(greater, threshold):
    drawn = random.Random(0)
    walks = [[1.0 - 0.01 * n for n in range(20)], [0.5] * 5, [0.1, 0.5, 0.4, 0.8, 0.79, 0.81, 2.0]]
    for _ in range(50):
        walk = [drawn.random()]
        while len(walk) < 30:
            walk.append(round(walk[-1] + drawn.uniform(-0.2, 0.2), 2))
        walks.append(walk)
        walks.append([walk[0], *(math.nan if drawn.random() < 0.2 else value for value in walk[1:])])
    for walk in walks:
        (expected, value), (counts, best) = stock(walk, greater, threshold), ours(walk, greater, threshold)
        assert counts == expected
        finite = [v for v in walk if not math.isnan(v)]
        assert best.value == value == (max if greater else min)(finite)
        assert best.step == walk.index(best.value)


def test_slow_gains_are_the_best_and_still_end_the_run():
    """The best weights were those of the last gain of more than `min_delta`, which is not what was asked for."""
    counts, best = ours([0.69, 0.60, 0.33, 0.24], greater=False, threshold=0.3)
    assert (best.value, best.step) == (0.24, 3)
    assert counts == [0, 1, 2, 3]
    assert [ours([0.69, 0.60], False, 0.3)[1].update(9, value) for value in (0.59, 0.59, 0.7, math.nan)] == [
        True, True, False, False,
    ]  # fmt: skip


def test_a_value_that_is_no_number_is_never_the_best():
    best = Best("pearson", "max")
    assert not best.update(1, math.nan)
    assert (best.value, best.stale) == (None, 1)
    assert best.update(2, -0.5)
    assert (best.value, best.step, best.stale) == (-0.5, 2, 0)


def test_a_state_that_an_older_version_saved_goes_on():
    saved = {
        "step": 4, "epoch": 1.0, "tokens": 10, "samples": 4, "train_seconds": 1.0, "window_steps": 0,
        "window_loss": 0.0, "closed_loss": 2.0, "last_validation": None,
        "best": {"metric": "loss", "mode": "min", "min_delta": 0.3, "value": 0.6, "step": 2, "stale": 1},
    }  # fmt: skip
    state = TrainState.from_json(saved)
    assert state.to_json() == saved
    assert state.best.update(6, 0.5)
    assert (state.best.value, state.best.step, state.best.stale) == (0.5, 6, 2)


@pytest.mark.parametrize(("watched", "best"), [("eval_f1", "f1"), ("f1", "eval_f1"), ("matthews_correlation", "mcc")])
def test_two_names_of_one_metric_are_no_contradiction(tmp_path, watched, best):
    """Trainer's names and `evaluate`'s are known; the raw texts were compared."""
    file = tmp_path / "run.yaml"
    file.write_text("model: bert\ndataset: x.csv\nvalidation_dataset: y.csv\n")
    cfg = load_run_config([file], [f"early_stopping.metric={watched}", f"checkpoint.best_metric={best}"])
    assert (cfg.early_stopping.metric, cfg.checkpoint.best_metric) == (watched, best)


@pytest.mark.parametrize(
    ("metric", "mode"), [(None, "max"), ("perplexity", "max"), ("f1", "min"), ("eval_loss", "max")]
)
def test_the_worst_is_never_exported_as_the_best(metric, mode):
    def config(best_mode: str) -> RunConfig:
        told = {"model": ModelConfig(pretrained_model_name_or_path="bert"), "dataset": DatasetConfig(path="a.csv")}
        return RunConfig(**told, checkpoint=CheckpointConfig(best_metric=metric, best_mode=best_mode))

    task = "causal-lm" if metric == "perplexity" else "text-classification"
    with pytest.raises(UserError, match=rf"checkpoint.best_mode: is {mode}, but the \w+ \w+ is the best"):
        _best(config(mode), task_named(task), None)
    other = "min" if mode == "max" else "max"
    assert _best(config(other), task_named(task), None)[1] == other
