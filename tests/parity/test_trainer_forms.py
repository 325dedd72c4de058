"""Forms of data, labels and calls that a Trainer meets: ours and stock agree on each, in the engine's steps."""

from __future__ import annotations

import gc
import pickle
import random

import pytest
import torch
import transformers

from automodel import Trainer
from automodel.config.errors import UserError
from automodel.engine import product_facts
from automodel.kernels.product_speed import Timed
from trainer_pairs import LookedUp, rows, same, trainer_of


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_look_through():
    """accelerate collects garbage before every training, and half a million imported objects take 0.2 s each time."""
    gc.freeze()
    yield
    gc.unfreeze()


FORMS = {
    "regression": ("bert", {"label": "number"}, {"num_labels": 1}, {}),
    "several labels": ("bert", {"label": "several"}, {}, {}),
    "pairs": ("bert", {"pair": True}, {}, {}),
    "labels under another name": ("distilbert", {"name": "label_ids"}, {}, {}),
    "a list of rows": ("distilbert", {"plain": True}, {}, {}),
    "windows": ("modernbert", {}, {}, {}),
    "rows that end with the pad token": ("qwen2", {"end": (0,)}, {}, {}),
    "lengths grouped": ("bert", {}, {}, {"train_sampling_strategy": "group_by_length"}),
    "a floor under the rate": (
        "bert", {}, {}, {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_form(form, tmp_path):
    family, data, config, options = FORMS[form]
    made = []
    for kind in (Trainer, transformers.Trainer):
        made.append(trainer_of(kind, tmp_path, family, data, config, options))
        made[-1].train()  # at once: making a trainer seeds, and the next one would again
    same(*made)


@pytest.mark.parametrize("family", ["bert", "qwen2"])
def test_products_by_the_faster_library(family, tmp_path, monkeypatch):
    """In fp32, as Trainer computes unless it is told otherwise; oneDNN sums up in another order."""
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    timed = Timed((1.0,) * 3, (2.0,) * 3, (9.0,) * 3, 9.0)
    monkeypatch.setattr(product_facts, "time_products", lambda sample, *budget: timed)
    monkeypatch.setattr(product_facts, "LEAST_OPERATIONS", 0.0)
    made = []
    for kind in (Trainer, transformers.Trainer):
        made.append(trainer_of(kind, tmp_path, family))
        if kind is Trainer:
            plan = made[-1]._make_fast().plan
            assert (plan.precision, plan.products, plan.own_products) == ("fp32", "onednn", True)
        made[-1].train()
    same(*made)


def test_several_evaluation_datasets_models_made_by_a_function_and_evaluating_first(tmp_path):
    def accuracy(found):
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    made = []
    for kind in (Trainer, transformers.Trainer):
        sets = {"a": rows(6, seed=1), "b": rows(5, seed=2)}
        trainer = trainer_of(kind, tmp_path, eval_dataset=sets, by_init=True, compute_metrics=accuracy)
        trainer.evaluate()
        trainer.train()
        made.append(trainer)
    same(*made)
    assert "eval_b_accuracy" in made[0].state.log_history[-2]


class Drawn(LookedUp):
    """Rows that differ each time."""

    def __getitem__(self, index):
        item = super().__getitem__(index)
        item["input_ids"] = torch.where(torch.rand(item["input_ids"].shape) < 0.2, 4, item["input_ids"])
        return item


class OwnGenerator(LookedUp):
    """Draws from a generator of its own, for few rows: two readings of some may well be equal."""

    def __init__(self, given):
        super().__init__(given)
        self.rng = random.Random(0)

    def __getitem__(self, index):
        item = super().__getitem__(index)
        if self.rng.random() < 0.3:
            item["input_ids"] = torch.full_like(item["input_ids"], 4)
        return item


class Wrapped(torch.utils.data.Dataset):
    """A dataset around another one."""

    def __init__(self, given):
        self.dataset = OwnGenerator(given)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]


class KnowsItsHolder(LookedUp):
    """Two datasets that know each other."""

    def __init__(self, given):
        super().__init__(given)
        self.inner = LookedUp(given)
        self.inner.holder = self


class Counted(LookedUp):
    """Knows how often it was asked, and could mind."""

    asked = 0

    def __getitem__(self, index):
        self.asked += 1
        return super().__getitem__(index)


class Staged(LookedUp):
    """Other labels on another page."""

    stage = 0

    def __getitem__(self, index):
        item = super().__getitem__(index)
        return item if self.stage == 0 else {**item, "labels": (item["labels"] + 1) % 3}


class TurnsThePage(transformers.TrainerCallback):
    def on_epoch_begin(self, args, state, control, train_dataloader=None, **given):
        self.dataset.stage = round(state.epoch or 0)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_curriculum_is_followed(persistent, tmp_path):
    """What a callback tells the dataset as an epoch begins; workers that live on never hear of it, in stock either."""
    options = {"max_steps": -1, "num_train_epochs": 3}
    if persistent:
        options |= {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    made = []
    for trainer_kind in (Trainer, transformers.Trainer):
        trainer = trainer_of(trainer_kind, tmp_path, options=options)
        trainer.train_dataset = Staged(rows(plain=True))
        turns = TurnsThePage()
        turns.dataset = trainer.train_dataset
        trainer.add_callback(turns)
        trainer.train()
        made.append(trainer)
    assert "20 rows held" in made[0].acceleration.reason
    losses = [[entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in made]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    still = trainer_of(Trainer, tmp_path, options=options)
    still.train_dataset = Staged(rows(plain=True))
    still.train()
    without = [entry["loss"] for entry in still.state.log_history if "loss" in entry]
    assert (without == pytest.approx(losses[0], abs=1e-4)) == persistent


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (LookedUp, {}, "20 rows held"),
        (OwnGenerator, {}, "OwnGenerator has a generator of random numbers"),
        (Wrapped, {}, "Wrapped has a generator of random numbers"),
        (KnowsItsHolder, {}, "20 rows held"),
        (Counted, {}, "Counted computes its rows anew each time"),
        (LookedUp, {"max_steps": 2}, "the run takes 8 of the 20 rows of LookedUp"),
        (Drawn, {}, "Drawn computes its rows anew each time"),
    ],
)
def test_a_dataset_class_is_read_once_where_it_looks_rows_up(kind, options, reason, tmp_path):
    made = []
    for trainer_kind in (Trainer, transformers.Trainer):
        trainer = trainer_of(trainer_kind, tmp_path, options=options)
        trainer.train_dataset = kind(rows(plain=True))
        trainer.train()
        made.append(trainer)
    assert reason in made[0].acceleration.reason
    losses = [[entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in made]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


class Grows(Staged):
    """Longer rows on another page."""

    def __getitem__(self, index):
        item = LookedUp.__getitem__(self, index)
        if self.stage == 0:
            return item
        return {k: torch.cat([v] * 3) if k != "labels" else v for k, v in item.items()}


def test_rows_that_outgrow_the_plan_are_refused_in_words(tmp_path):
    trainer = trainer_of(Trainer, tmp_path, options={"max_steps": -1, "num_train_epochs": 2})
    trainer.train_dataset = Grows(rows(plain=True))
    turns = TurnsThePage()
    turns.dataset = trainer.train_dataset
    trainer.add_callback(turns)
    with pytest.raises(UserError, match="has longer rows than before training began. Give its rows as a class"):
        trainer.train()


def test_held_rows_go_to_workers_of_another_process(tmp_path):
    trainer = trainer_of(Trainer, tmp_path)
    trainer.train_dataset = LookedUp(rows(plain=True))
    fast = trainer._make_fast()
    assert fast.rows.again is not None
    there = pickle.loads(pickle.dumps(fast.rows))
    assert there.again is None
    assert torch.equal(there.collate([0, 1]).batch.input_ids_T, fast.rows.collate([0, 1]).batch.input_ids_T)
