"""Callbacks, metrics and datasets that reach into a run: ours and stock agree on what they see and what they change."""

from __future__ import annotations

import gc
import random

import pytest
import torch
import transformers

from automodel import Trainer
from automodel.config.errors import UserError
from trainer_pairs import LookedUp, rows, same, trainer_of

EPOCHS = {"max_steps": -1, "num_train_epochs": 3, "eval_strategy": "epoch", "eval_steps": None}
RNG = random.Random(0)


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_look_through():
    """accelerate collects garbage before every training, and half a million imported objects take 0.2 s each time."""
    gc.freeze()
    yield
    gc.unfreeze()


def both(folder, family="bert", data=None, prepare=None, **given):
    """A trainer of each kind, trained; `prepare` gets each before it is."""
    made = []
    for kind in (Trainer, transformers.Trainer):
        RNG.seed(0)
        trainer = trainer_of(kind, folder, family, data, options=EPOCHS, **given)
        if prepare is not None:
            prepare(trainer)
        trainer.train()
        made.append(trainer)
    return made


def accuracy(found):
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


class EvaluatesTraining(transformers.TrainerCallback):
    """Of many a tutorial."""

    def on_epoch_end(self, args, state, control, **kwargs):
        self._trainer.evaluate(eval_dataset=self._trainer.train_dataset, metric_key_prefix="train")


class PredictsOnEvaluation(transformers.TrainerCallback):
    def on_evaluate(self, args, state, control, **kwargs):
        if len(self.seen) <= state.epoch:
            self.seen.append(None)
            self.seen[-1] = abs(self.held.predict(self.rows).predictions).sum()


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_a_callback_that_evaluates_sees_what_stock_sees(family, tmp_path):
    def prepare(trainer):
        callback = EvaluatesTraining()
        callback._trainer = trainer
        trainer.add_callback(callback)

    ours, stock = both(tmp_path, family, prepare=prepare, compute_metrics=accuracy)
    same(ours, stock)
    assert sum("train_accuracy" in entry for entry in ours.state.log_history) == 3


def test_predictions_in_callbacks_and_in_metrics(tmp_path):
    found = {}

    def prepare(trainer):
        callback = PredictsOnEvaluation()
        callback.held, callback.rows, callback.seen = trainer, rows(7, seed=3), []
        trainer.add_callback(callback)
        nested = []

        def metrics(prediction):
            if not nested:
                nested.append(None)
                trainer.compute_metrics = None
                nested[0] = float(abs(trainer.predict(rows(5, seed=4)).predictions).sum())
                trainer.compute_metrics = metrics
            return {"nested": nested[0]}

        trainer.compute_metrics = metrics
        found[type(trainer) is Trainer] = callback.seen

    same(*both(tmp_path, "modernbert", prepare=prepare))
    assert len(found[True]) == 3
    assert found[True] == pytest.approx(found[False], abs=1e-4)


class AsksByAnotherName(transformers.TrainerCallback):
    def __init__(self):
        self.seen = []

    def look(self, **given):
        batch = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
        with torch.no_grad():
            self.seen.append(float(next(iter(v for k, v in given.items() if k[:3] == "mod"))(**batch).logits.sum()))

    def on_epoch_end(self, args, state, control, **given):
        self.look(**given)


class HoldsANet(AsksByAnotherName):
    def on_step_end(self, args, state, control, **given):
        self.look(mod=self.net)


class ReadsTheLoader(AsksByAnotherName):
    def on_epoch_end(self, args, state, control, train_dataloader=None, **given):
        self.seen.append([sorted(batch) for batch in train_dataloader])


@pytest.mark.parametrize("kind", [AsksByAnotherName, HoldsANet, ReadsTheLoader])
def test_callbacks_that_do_not_say_model(kind, tmp_path):
    seen = []

    def prepare(trainer):
        callback = kind()
        callback.net = trainer.model
        seen.append(callback.seen)
        trainer.add_callback(callback)

    same(*both(tmp_path, prepare=prepare))
    assert len(seen[0]) == len(seen[1]) >= 3
    assert seen[0] == (seen[1] if kind is ReadsTheLoader else pytest.approx(seen[1], abs=1e-5))


class Relabels(transformers.TrainerCallback):
    """In place, and few of many."""

    def on_epoch_end(self, args, state, control, **given):
        self.change()


class InADictionary(torch.utils.data.Dataset):
    def __init__(self, made):
        self.halves = {"a": LookedUp(made[:25]), "b": LookedUp(made[25:])}

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return self.halves["a" if index < 25 else "b"][index % 25]


def test_rows_that_outgrow_a_list_are_refused_with_a_way_out(tmp_path):
    trainer = trainer_of(Trainer, tmp_path, options=EPOCHS)
    trainer.train_dataset = grows = rows(plain=True)
    callback = Relabels()
    callback.change = lambda: grows.append(grows[0])
    trainer.add_callback(callback)
    with pytest.raises(UserError, match="it changed its length.* Give its rows as a class with a `set_epoch` method"):
        trainer.train()


@pytest.mark.parametrize("what", ["labels of a class", "labels of a part", "a row of a list", "held-out rows"])
def test_rows_that_are_changed_in_place_are_followed(what, tmp_path):
    def prepare(trainer):
        callback = Relabels()
        if what == "labels of a class":
            trainer.train_dataset = LookedUp(rows(50, plain=True))
            labels = trainer.train_dataset.labels
            callback.change = lambda: labels.__setitem__(1, (labels[1] + 1) % 3)
        elif what == "labels of a part":
            trainer.train_dataset = InADictionary(rows(50, plain=True))
            labels = trainer.train_dataset.halves["b"].labels
            callback.change = lambda: labels.__setitem__(1, (labels[1] + 1) % 3)
        elif what == "a row of a list":
            trainer.train_dataset = changed = rows(50, plain=True)
            callback.change = lambda: changed[1].update(label=(changed[1]["label"] + 1) % 3)
        else:
            trainer.eval_dataset = changed = rows(6, plain=True, seed=1)
            callback.change = lambda: [row.update(label=(row["label"] + 1) % 3) for row in changed]
        trainer.add_callback(callback)

    ours, stock = both(tmp_path, prepare=prepare, compute_metrics=accuracy)
    same(ours, stock)


class DrawsFromAGlobal(LookedUp):
    """For few rows: two readings of some may well be equal."""

    def __getitem__(self, index):
        item = super().__getitem__(index)
        if self.is_drawn():
            item["input_ids"] = torch.full_like(item["input_ids"], 4)
        return item

    def is_drawn(self):
        return RNG.random() < 0.05


class Notes(LookedUp):
    """Knows who was asked for, and could mind."""

    def __init__(self, made):
        super().__init__(made)
        self.noted = []

    def __getitem__(self, index):
        self.noted.append(index)
        return super().__getitem__(index)


class Remembers(LookedUp):
    """A cache is no reason to read rows one by one."""

    def __init__(self, made):
        super().__init__(made)
        self.kept = {}
        self.order = torch.randperm(len(made), generator=torch.Generator().manual_seed(0))

    def __getitem__(self, index):
        if index not in self.kept:
            self.kept[index] = super().__getitem__(index)
        return self.kept[index]


class Locked(LookedUp):
    """Holds what cannot be compared, and labels elsewhere."""

    def __init__(self, made):
        super().__init__(made)
        self.opened = open("/dev/null")  # noqa: SIM115


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (DrawsFromAGlobal, "DrawsFromAGlobal has a generator of random numbers"),
        (Notes, "Notes computes its rows anew each time"),
        (Remembers, "20 rows held"),
        (Locked, "20 rows held"),
    ],
)
def test_what_a_dataset_does_beside_looking_rows_up(kind, reason, tmp_path):
    def prepare(trainer):
        trainer.train_dataset = kind(rows(plain=True))

    ours, stock = both(tmp_path, prepare=prepare)
    assert reason in ours.acceleration.reason
    losses = [[entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (ours, stock)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_a_change_that_nobody_can_compare_is_found_by_reading(tmp_path):
    def prepare(trainer):
        trainer.train_dataset = Locked(rows(50, plain=True))
        labels, callback = trainer.train_dataset.labels, Relabels()
        callback.change = lambda: labels.__setitem__(1, (labels[1] + 1) % 3)
        trainer.add_callback(callback)

    same(*both(tmp_path, prepare=prepare))


@pytest.mark.parametrize("form", ["several", "one number", "names"])
def test_what_is_made_of_logits_for_metrics(form, tmp_path):
    def made(logits, labels):
        several = logits.argmax(-1), logits
        return {"several": several, "one number": logits.sum(), "names": {"best": several[0], "all": logits}}[form]

    def metrics(found):
        parts = found.predictions
        parts = list(parts.values()) if isinstance(parts, dict) else parts if isinstance(parts, tuple) else [parts]
        return {f"sum{number}": float(part.sum()) for number, part in enumerate(parts)}

    def prepare(trainer):
        trainer.args.per_device_eval_batch_size = 4

    same(*both(tmp_path, prepare=prepare, preprocess_logits_for_metrics=made, compute_metrics=metrics))


def test_a_target_that_is_no_number_is_as_visible_as_in_stock(tmp_path):
    def prepare(trainer):
        held = rows(plain=True, label="number")
        held[7]["label"] = float("nan")
        trainer.train_dataset = held

    ours, stock = both(tmp_path, data={"label": "number"}, prepare=prepare, config={"num_labels": 1})
    assert "row 7 has a label that is no number" in ours.acceleration.reason
    norms = [[entry["grad_norm"] for entry in t.state.log_history if "grad_norm" in entry] for t in (ours, stock)]
    assert norms[0] == pytest.approx(norms[1], abs=1e-4, nan_ok=True)
    assert norms[0][-1] != norms[0][-1]
