"""Schedules equal transformers', name by name, and are accepted as people write them."""

import pytest
import torch
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from automodel.config.errors import UserError
from automodel.metrics.progress import format_lr
from automodel.optim.config import LRSchedulerConfig
from automodel.optim.schedule import Schedule
from automodel.plan.check import NO_FUNCTION_OF_THE_STEP, load_run_config

STEPS, PEAK = 50, 3e-4

# (name, keyword arguments of transformers)
CASES = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.25}),
    ("cosine_with_restarts", {}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("cosine_with_min_lr", {"min_lr": 2e-5}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 1.0}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
    ("polynomial", {}),
    ("polynomial", {"lr_end": 1e-5, "power": 2.0}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 20}),
    ("warmup_stable_decay", {"num_decay_steps": 10}),
    ("warmup_stable_decay", {"num_decay_steps": 20, "min_lr_ratio": 0.1}),
    ("warmup_stable_decay", {"num_decay_steps": 20, "decay_type": "1-sqrt"}),
    ("warmup_stable_decay", {"num_decay_steps": 20, "decay_type": "linear"}),
]


def rates(schedule):
    return [schedule.lr_at(step, PEAK) for step in range(STEPS)]


def written(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: bert\ndataset: x.csv\noptimizer: {{lr: {PEAK}}}\n{text}\n")
    return load_run_config([path]).lr_scheduler


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_rates_equal_transformers(tmp_path, name, arguments, warmup):
    """The arguments go through the config under transformers' own names."""
    warmup = 0 if name == "constant" else warmup
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    theirs = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=STEPS,
        scheduler_specific_kwargs=arguments,
    )
    expected = []
    for _ in range(STEPS):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    keys = ", ".join(f"{key}: {value}" for key, value in arguments.items())
    text = f"lr_scheduler_type: {name}\nwarmup_steps: {warmup}\nlr_scheduler_kwargs: {{{keys}}}"
    ours = Schedule(written(tmp_path, text), STEPS)
    assert rates(ours) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_every_name_of_transformers_is_known():
    names = {name.value for name in SchedulerType}
    assert names - {name for name, _ in CASES} == set(NO_FUNCTION_OF_THE_STEP)


def test_warmup_ratio_rounds_up_and_min_lr_is_the_floor():
    schedule = Schedule(LRSchedulerConfig(name="cosine", warmup_ratio=0.05, min_lr=1e-5), 50)
    assert schedule.warmup_steps == 3
    assert schedule.lr_at(3, 1e-3) == pytest.approx(1e-3)
    assert schedule.lr_at(50, 1e-3) == pytest.approx(1e-5)
    assert Schedule(LRSchedulerConfig(warmup_steps=0.05), 50).warmup_steps == 3
    assert Schedule(LRSchedulerConfig(warmup_steps=1), 50).warmup_steps == 1


def test_wsd_is_transformers_schedule_with_a_linear_decay():
    """From the first step on: a warm-up begins at the floor, not at 0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    kind = {"num_decay_steps": 20, "min_lr_ratio": 0.1, "decay_type": "linear"}
    theirs = get_scheduler(
        "warmup_stable_decay", optimizer, num_warmup_steps=7, num_training_steps=STEPS, scheduler_specific_kwargs=kind
    )
    ours = Schedule(LRSchedulerConfig(name="wsd", warmup_steps=7, decay_steps=20, min_lr_ratio=0.1), STEPS)
    assert rates(ours) == pytest.approx([PEAK * theirs.lr_lambdas[0](step) for step in range(STEPS)], rel=1e-12)
    assert ours.lr_at(0, PEAK) == pytest.approx(0.1 * PEAK)


def test_wsd_is_flat_then_falls_to_zero():
    schedule = Schedule(LRSchedulerConfig(name="wsd", warmup_steps=5, decay_ratio=0.2), 100)
    assert schedule.lr_at(4, 1.0) < 1.0
    assert {schedule.lr_at(s, 1.0) for s in (5, 50, 80)} == {1.0}
    assert schedule.lr_at(90, 1.0) == pytest.approx(0.5)
    assert schedule.lr_at(100, 1.0) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "lr_scheduler: {name: cosine, warmup_ratio: 0.1, min_lr: 1e-5}",
        "lr_scheduler: {lr_decay_style: cosine, num_warmup_steps: 5, min_lr: 1e-5}",
        "lr_scheduler: {lr_scheduler_type: cosine, lr_warmup_steps: 5, lr_scheduler_kwargs: {min_lr: 1e-5}}",
        "lr_scheduler_type: cosine\nwarmup_ratio: 0.1\nlr_scheduler: {min_lr: 1e-5}",
        "lr_scheduler: cosine\nwarmup_steps: 0.1\nlr_scheduler_kwargs: {min_lr: 1e-5}",
    ],
)
def test_one_schedule_in_many_spellings(tmp_path, text):
    reference = Schedule(LRSchedulerConfig(name="cosine", warmup_steps=5, min_lr=1e-5), STEPS)
    assert rates(Schedule(written(tmp_path, text), STEPS)) == rates(reference)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr_scheduler: reduce_lr_on_plateau", "`reduce_lr_on_plateau` changes the rate by what was measured so far"),
        ("lr_scheduler: greedy", "`greedy` changes the rate by what was measured"),
        ("lr_scheduler: cosine_with_min_lr", "lr_scheduler.min_lr: is missing"),
        ("lr_scheduler: {min_lr: 1e-5, min_lr_ratio: 0.1}", "lr_scheduler.min_lr_ratio: give this or `min_lr`"),
        ("lr_scheduler: {name: constant, min_lr: 1e-5}", "does not fall, so it has no lowest rate"),
        ("lr_scheduler: {name: cosine, power: 2}", "belongs to `name: polynomial`, but the name is `cosine`"),
        ("lr_scheduler: {decay_steps: 5}", "belongs to `name: wsd` or `name: warmup_stable_decay`"),
        ("lr_scheduler: {min_lr: 1}", "is 1.0, not below the peak"),
        ("lr_scheduler: {warmup_steps: 1.5}", "lr_scheduler.warmup_steps: "),
        ("lr_scheduler_kwargs: {num_cyles: 2}", "lr_scheduler.num_cyles: there is no such key; did you mean `num_cycl"),
        ("lr_scheduler: {name: cosine}\nlr_scheduler_type: linear", "is another name for `lr_scheduler.name`"),
        ("lr_scheduler: linaer", "Did you mean `linear`"),
    ],
)
def test_wrong_ones_are_told(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        written(tmp_path, text)


def line_of(name, settings):
    """What the plan says of a schedule over 100 steps with a peak of 1e-4."""
    from automodel.data.config import DatasetConfig
    from automodel.models.config import ModelConfig
    from automodel.optim.config import OptimizerConfig
    from automodel.plan.config import RunConfig
    from automodel.plan.remarks import how_it_learns

    cfg = RunConfig(
        model=ModelConfig(pretrained_model_name_or_path="x"), dataset=DatasetConfig(path="x"),
        optimizer=OptimizerConfig(lr=1e-4), lr_scheduler=LRSchedulerConfig(name=name, **settings),
    )  # fmt: skip
    (line,) = (d for d in how_it_learns(cfg, 100, None) if d.name == "schedule")
    return line.reason


@pytest.mark.parametrize(("name", "settings", "words"), [
    ("linear", {"warmup_steps": 1}, "1 warm-up step, then down to 0"),
    ("constant", {}, "no warm-up"),
    ("inverse_sqrt", {"warmup_steps": 10}, "10 warm-up steps, then by the square root of the steps, 3.2e-5 at the end"),
    ("wsd", {"warmup_ratio": 0.1}, "10 warm-up steps, then steady, and down to 0 in the last 20"),
    ("wsd", {"decay_ratio": 0.25, "min_lr_ratio": 0.1}, "no warm-up, then steady, and down to 1.0e-5 in the last 25"),
    ("wsd", {"warmup_ratio": 0.8}, "80 warm-up steps, then down to 0 in the last 20"),
    ("wsd", {"warmup_ratio": 0.9},
     "90 warm-up steps, then from 5.0e-5 down to 0: warm-up and decay (90 + 20) are more than the 100 steps"),
    ("warmup_stable_decay", {"decay_steps": 200},
     "no warm-up, then from 5.0e-5 down to 0: warm-up and decay (0 + 200) are more than the 100 steps"),
    ("cosine", {}, "no warm-up, then down to 0"),
    ("cosine", {"num_cycles": 2}, "no warm-up, then a cosine of 2 waves, 1.0e-4 at the end"),
    ("cosine", {"num_cycles": 0.25}, "no warm-up, then a cosine of 0.25 waves, 5.1e-5 at the end"),
    ("cosine_with_restarts", {"num_cycles": 4}, "no warm-up, then a cosine of 4 falls, 3.9e-7 at the end"),
])  # fmt: skip
def test_the_plan_says_what_the_rate_does(name, settings, words):
    assert line_of(name, settings) == words


@pytest.mark.parametrize(("name", "kwargs"), [
    ("cosine", {"num_cycles": 2}), ("cosine", {"num_cycles": 0.25}), ("cosine_with_restarts", {"num_cycles": 4}),
])  # fmt: skip
def test_the_last_rate_that_the_plan_names_is_transformers_own(name, kwargs):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-4)
    scheduler = get_scheduler(name, optimizer, 0, 100, scheduler_specific_kwargs=kwargs)
    for _ in range(99):
        optimizer.step()
        scheduler.step()
    assert line_of(name, kwargs).endswith(f" {format_lr(optimizer.param_groups[0]['lr'])} at the end")
