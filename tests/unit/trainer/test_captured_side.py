"""Everything around captured steps that needs no GPU: a step over flat AdamW stands in for the CUDA graphs.

The optimizer, its bf16 copies and its state are the real ones (their torch reference runs on the CPU); only recording
and replaying are left out. What is held against stock Trainer: losses, rates, checkpoints in both directions,
evaluations in full precision, the optimizer and the weights that are left afterwards.
"""

from __future__ import annotations

import dataclasses
import weakref

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset

from automodel.config.errors import UserError
from automodel.engine.captured import CapturedStep
from automodel.engine.step import StepResult
from automodel.kernels.flat_adamw import FlatAdamW
from automodel.models.forward import make_loss_forward
from automodel.optim.build import parameter_groups
from automodel.trainer import fast_evaluation, fast_path
from automodel.trainer.arguments import TrainingArguments
from automodel.trainer.obstacles import freezes_parameters
from automodel.trainer.trainer import Trainer
from tiny_models import tiny
from tiny_runs import make_tokenizer


class Replayed(CapturedStep):
    """A captured step without CUDA."""

    def __init__(self, model, forward, loss, optimizer, schedule, peak):
        self.model, self.forward, self.loss, self.optimizer = model, forward, loss, optimizer
        self.schedule, self.peak_lr, self.late, self.unsettled = schedule, peak, None, 0
        self.seed, self.graphs = torch.zeros(1, dtype=torch.int64), {}

    def __call__(self, index, batch):
        count = sum(self.loss.count(b) for b in batch.micro_batches)
        total = torch.zeros(())
        for micro_batch in batch.micro_batches:
            loss = self.loss.scaled_sum(self.forward(micro_batch), micro_batch, torch.tensor(1.0 / count))
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        lr = self.schedule.lr_at(index, self.peak_lr)
        return StepResult(total, self.optimizer.grad_norm.squeeze(0), lr, batch.num_tokens, batch.num_documents)


@pytest.fixture
def replayed(monkeypatch):
    """Plans say `captured`, and steps are the stand-in."""
    planned = fast_path.make_plan

    def plan(*args, **kwargs):
        return dataclasses.replace(planned(*args, **kwargs), capture=True)

    def step(prepared, model):
        cfg, made = prepared.cfg, prepared.plan
        peak = cfg.optimizer.lr
        schedule = fast_path.Schedule(cfg.lr_scheduler, made.total_steps)
        factors = [schedule.lr_at(s, peak) / peak for s in range(made.total_steps)]
        optimizer = FlatAdamW(
            parameter_groups(model, cfg.optimizer), lr=peak, betas=cfg.optimizer.betas, eps=cfg.optimizer.eps,
            max_norm=cfg.training_optimizations.gradient_clipping or float("inf"),
            copy_dtype=torch.bfloat16 if made.precision == "bf16" else None,
            flat_gradients=made.grad_acc_steps > 1, lr_factors=torch.tensor(factors, dtype=torch.float64),
        )  # fmt: skip
        forward = make_loss_forward(model, prepared.task.head, made.path, fused=False)
        return Replayed(model, forward, prepared.loss, optimizer, schedule, peak)

    monkeypatch.setattr(fast_path, "make_plan", plan)
    monkeypatch.setattr(fast_path, "make_captured_step", step)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)


def rows(count, seed=0):
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        ids = random.integers(5, 40, int(random.integers(3, 20))).tolist()
        made.append({"input_ids": ids, "attention_mask": [1] * len(ids), "label": ids[0] % 3})
    return Dataset.from_list(made)


def trained(kind, folder, resume=None, **options):
    _, model = tiny("bert", "text-classification", pad_token_id=0, num_labels=3)
    settings = {
        "max_steps": 8, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1, "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 3,
        "weight_decay": 0.1, "warmup_steps": 2,
    }  # fmt: skip
    tokenizer = make_tokenizer()
    trainer = kind(
        model=model, args=TrainingArguments(str(folder), **settings | options), train_dataset=rows(20),
        eval_dataset=rows(6, 1), data_collator=transformers.DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def test_losses_rates_norms_evaluations_and_what_is_left(tmp_path, replayed):
    ours, stock = trained(Trainer, tmp_path / "a"), trained(transformers.Trainer, tmp_path / "b")
    assert ours.acceleration.path == "captured"
    for key in ("loss", "eval_loss", "learning_rate", "grad_norm"):
        assert logged(ours, key) == pytest.approx(logged(stock, key), abs=1e-4, rel=1e-4), key
    assert type(ours.optimizer) is torch.optim.AdamW
    state, expected = ours.optimizer.state_dict()["state"], stock.optimizer.state_dict()["state"]
    for index, entry in expected.items():
        assert float(state[index]["step"]) == float(entry["step"])
        torch.testing.assert_close(state[index]["exp_avg_sq"], entry["exp_avg_sq"], atol=1e-5, rtol=1e-3)
    storages = {p.untyped_storage().data_ptr() for p in ours.model.parameters()}
    assert len(storages) == len(list(ours.model.parameters()))
    for trainer in (ours, stock):
        trainer.train()
    assert logged(ours, "loss") == pytest.approx(logged(stock, "loss"), abs=1e-3)


def test_one_pass_over_several_evaluation_batches(tmp_path, replayed, monkeypatch):
    passes, calls = [], []

    class Counts(transformers.TrainerCallback):
        def on_prediction_step(self, args, state, control, **kwargs):
            calls.append(state.global_step)

    def asked(logits, labels):
        assert len(logits) == len(labels) <= 2
        return logits.argmax(-1)

    def kind(of):
        def make(**kwargs):
            right = {"compute_metrics": lambda p: {"right": float((p.predictions == p.label_ids).mean())}}
            return of(**kwargs, **right, preprocess_logits_for_metrics=asked, callbacks=[Counts()])

        return make

    def at_once(fast, rows, size):
        passes.append(size)
        return 2

    monkeypatch.setattr(fast_evaluation, "batches_at_once", at_once)
    found = []
    for name, of in (("a", Trainer), ("b", transformers.Trainer)):
        trainer = trained(kind(of), tmp_path / name, per_device_eval_batch_size=2)
        found.append([logged(trainer, "eval_loss"), logged(trainer, "eval_right"), list(calls)])
        calls.clear()
    assert passes == [2]
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5)
    assert found[0][1:] == found[1][1:]


def test_checkpoints_go_both_ways(tmp_path, replayed):
    options = {"save_strategy": "steps", "save_steps": 4}
    ours = trained(Trainer, tmp_path / "ours", **options)
    stock = trained(transformers.Trainer, tmp_path / "stock", **options)
    for writer, reader in (("ours", transformers.Trainer), ("stock", Trainer), ("ours", Trainer)):
        again = trained(
            reader, tmp_path / f"{writer}-{reader.__module__}", str(tmp_path / writer / "checkpoint-4"), **options
        )
        assert logged(again, "loss") == pytest.approx(logged(stock, "loss"), abs=1e-4)
        assert logged(again, "learning_rate") == pytest.approx(logged(stock, "learning_rate"))
    files = [sorted(p.name for p in (tmp_path / name / "checkpoint-4").iterdir()) for name in ("ours", "stock")]
    assert files[0] == files[1]
    assert logged(ours, "loss") == pytest.approx(logged(stock, "loss"), abs=1e-4)


def test_callbacks_see_and_set_the_rate_of_the_next_step(tmp_path, replayed):
    seen: dict[type, list] = {Trainer: [], transformers.Trainer: []}

    def kind(of):
        class Rates(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, optimizer=None, **kwargs):
                seen[of].append(optimizer.param_groups[0]["lr"])
                if state.global_step % 3 == 0:
                    for group in optimizer.param_groups:
                        group["lr"] = 5e-3

            def on_evaluate(self, args, state, control, **kwargs):
                seen[of].append(kwargs["model"].training)

        return lambda **given: of(**given, callbacks=[Rates()])

    ours, stock = (trained(kind(of), tmp_path / of.__module__) for of in seen)
    assert seen[Trainer] == pytest.approx(seen[transformers.Trainer])
    assert logged(ours, "loss") == pytest.approx(logged(stock, "loss"), abs=1e-4)
    assert logged(ours, "loss") != pytest.approx(logged(trained(Trainer, tmp_path), "loss"), abs=1e-4)


def test_whoever_freezes_along_the_way_is_told(tmp_path, replayed):
    class Freezes(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            for parameter in model.bert.embeddings.parameters():
                parameter.requires_grad = False

    class Hides(transformers.TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            Freezes.on_train_begin(self, *args, **kwargs)

    class Counts(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            print(sum(p.numel() for p in model.parameters() if p.requires_grad))

    assert freezes_parameters(Freezes())
    assert not freezes_parameters(Counts())
    assert not freezes_parameters(transformers.EarlyStoppingCallback())
    with pytest.raises(UserError, match=r"bert.embeddings.word_embeddings.weight was frozen after training began"):
        trained(lambda **given: Trainer(**given, callbacks=[Hides()]), tmp_path)


def test_half_copies_are_put_aside_for_whoever_looks(tmp_path, replayed):
    seen = []

    class Looks(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(next(iter(found["it"]().parameters())).dtype)  # behind everybody's back

        def on_step_begin(self, args, state, control, model=None, **kwargs):
            seen.append(("asked for", model.dtype))

    class Watched(Trainer):
        def prediction_step(self, model, *args, **kwargs):
            seen.append(("evaluated in", model.dtype))
            return super().prediction_step(model, *args, **kwargs)

    found = {}

    def with_callback(*args, **kwargs):
        found["it"] = weakref.ref(kwargs["model"])
        return Watched(*args, callbacks=[Looks()], **kwargs)

    ours = trained(with_callback, tmp_path / "a", bf16=True, save_strategy="steps", save_steps=4)
    stock = trained(transformers.Trainer, tmp_path / "b", bf16=True)
    assert seen.count(torch.bfloat16) == 8
    assert seen.count(("asked for", torch.float32)) == 8
    assert ("evaluated in", torch.float32) in seen
    assert ("evaluated in", torch.bfloat16) not in seen
    assert {p.dtype for p in ours.model.parameters()} == {torch.float32}
    saved = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "a" / "checkpoint-8")
    for name, tensor in ours.model.state_dict().items():
        torch.testing.assert_close(tensor, saved.state_dict()[name])
    assert logged(ours, "loss") == pytest.approx(logged(stock, "loss"), abs=3e-2)


def test_an_error_in_the_middle_leaves_a_model_that_works(tmp_path, replayed):
    class Breaks(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise KeyboardInterrupt

    made = []

    def with_callback(*args, **kwargs):
        made.append(Trainer(*args, callbacks=[Breaks()], **kwargs))
        return made[0]

    with pytest.raises(KeyboardInterrupt):
        trained(with_callback, tmp_path, bf16=True)
    assert {p.dtype for p in made[0].model.parameters()} == {torch.float32}
    assert made[0].evaluate()["eval_loss"] > 0


def test_gradients_that_accumulate_stay_in_their_places(tmp_path, replayed):
    options = {"gradient_accumulation_steps": 2, "max_steps": 6}
    ours, stock = trained(Trainer, tmp_path / "a", **options), trained(transformers.Trainer, tmp_path / "b", **options)
    assert ours.acceleration.path == "captured"
    for key in ("loss", "grad_norm"):
        assert logged(ours, key) == pytest.approx(logged(stock, key), abs=1e-4, rel=1e-4), key
    options |= {"bf16": True, "save_strategy": "steps", "save_steps": 2, "prediction_loss_only": True}
    ours, stock = trained(Trainer, tmp_path / "c", **options), trained(transformers.Trainer, tmp_path / "d", **options)
    assert logged(ours, "loss") == pytest.approx(logged(stock, "loss"), abs=5e-2)


@pytest.mark.parametrize(("batches", "accumulation"), [(6, 1), (6, 2), (7, 2), (7, 3), (2, 4)])
def test_dropout_of_a_resumed_run_counts_on_where_it_was(batches, accumulation):
    """Every micro-batch draws with a seed of its own; a resumed run must not draw one of them again."""
    drawn = 0
    for step in range(20):
        assert fast_path.passes_of(step, range(batches), accumulation) == drawn
        in_epoch = step % -(-batches // accumulation)
        drawn += min(accumulation, batches - in_epoch * accumulation)
    assert fast_path.passes_of(5, iter(()), accumulation) == 5 * accumulation
    assert fast_path.passes_of(0, [], accumulation) == 0
