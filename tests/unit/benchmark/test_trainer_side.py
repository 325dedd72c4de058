"""The run's settings in Trainer's words, on machines this test does not have."""

import json

import pytest

from automodel.benchmark.sides import STOCK, TRAINERS, TUNED

JOB = {
    "task": "text-classification",
    "device": "cpu",
    "precision": "fp32",
    "seed": 0,
    "max_length": 512,
    "micro_batch_size": 8,
    "eval_batch_size": 16,
    "grad_acc_steps": 2,
    "total_steps": 125,
    "val_every_steps": 25,
    "ckpt_every_steps": 50,
    "log_every_steps": 10,
    "checkpoint": {
        "enabled": True,
        "keep_last": 2,
        "keep_best": True,
        "best_metric": "loss",
        "best_mode": "min",
    },
    "optimizer": {
        "name": "adamw",
        "lr": 2e-5,
        "weight_decay": 0.01,
        "betas": [0.9, 0.98],
        "eps": 1e-6,
        "decay_norms_and_biases": False,
    },
    "gradient_clipping": 1.0,
    "label_smoothing": 0.1,
    "gradient_checkpointing": False,
    "shuffle": True,
    "drop_last": False,
    "order": {"group_by_length": False},
    "num_workers": None,
}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    from transformers import TrainingArguments

    from automodel.benchmark.trainer_side import training_options

    folder = tmp_path_factory.mktemp("trainer")

    def make(settings, **changes):
        options = training_options({**JOB, **changes}, settings, folder)
        bf16 = options.pop("bf16", False)  # refused where there is no GPU
        made = TrainingArguments(**options)
        made.bf16 = bf16
        return made

    return make


def test_every_side_gets_the_runs_own_settings(arguments):
    for settings in (STOCK, TUNED):
        made = arguments(settings)
        assert (made.max_steps, made.per_device_train_batch_size, made.gradient_accumulation_steps) == (125, 8, 2)
        assert (made.learning_rate, made.weight_decay) == (2e-5, 0.01)
        assert (made.adam_beta1, made.adam_beta2, made.adam_epsilon) == (0.9, 0.98, 1e-6)
        assert (made.max_grad_norm, made.label_smoothing_factor) == (1.0, 0.1)
        assert (made.eval_steps, made.save_steps, made.save_total_limit) == (25, 50, 2)
        assert made.load_best_model_at_end
        assert made.logging_steps == 10


def test_the_tuned_side_uses_what_trainer_offers(arguments):
    made = arguments(TUNED, device="cuda", precision="bf16")
    assert made.bf16
    assert made.train_sampling_strategy == "group_by_length"
    assert made.optim == "adamw_torch_fused"
    assert made.dataloader_num_workers == 4
    assert made.dataloader_persistent_workers
    assert not made.torch_compile
    assert arguments(TRAINERS["hf-trainer-compile"].trainer, device="cuda", precision="bf16").torch_compile
    plain = arguments(TRAINERS["hf-trainer-ungrouped"].trainer, device="cuda", precision="bf16")
    assert (plain.train_sampling_strategy, plain.bf16, plain.optim) == ("random", True, "adamw_torch_fused")


def test_the_stock_side_is_left_as_trainer_comes(arguments):
    made = arguments(STOCK, device="cuda", precision="bf16", num_workers=4)
    assert not made.bf16
    assert made.train_sampling_strategy == "random"
    assert made.dataloader_num_workers == 0


@pytest.mark.parametrize(
    ("settings", "shuffle", "grouped", "same"),
    [
        (STOCK, True, False, True),
        (TUNED, True, False, False),  # it groups by length, and the run does not
        (TUNED, True, True, True),
        (TUNED, False, False, True),
        (TRAINERS["hf-trainer-ungrouped"].trainer, True, False, True),
    ],
)
def test_which_sides_read_rows_in_the_runs_order(arguments, settings, shuffle, grouped, same):
    from automodel.benchmark.trainer_side import in_the_runs_order

    changes = {"shuffle": shuffle, "order": {"group_by_length": grouped}}
    assert in_the_runs_order({**JOB, **changes}, settings) == same
    assert (arguments(settings, **changes).train_sampling_strategy == "group_by_length") == (not same)


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"group_by_length": True, "sort_within_step": True}])
def test_rows_come_as_the_run_reads_them(options):
    """Through a loader of Trainer's, two epochs of 21 rows, two micro-batches of four in a step."""
    import numpy as np
    from torch.utils.data import DataLoader

    from automodel.benchmark.trainer_rows import RowsInOrder
    from automodel.data.order import StepOrder

    lengths = np.random.default_rng(0).integers(3, 30, 21)
    order = StepOrder(lengths=lengths, micro_batch_size=4, grad_acc_steps=2, seed=3, **options)
    rows = RowsInOrder(order)
    loader = DataLoader(range(21), batch_size=4, sampler=rows, drop_last=bool(options.get("drop_last")))
    for epoch in range(2):
        rows.set_epoch(epoch)
        steps = [order.micro_batches(epoch, step) for step in range(order.steps_per_epoch)]
        assert [batch.tolist() for batch in loader] == [part.tolist() for step in steps for part in step]
        assert len(rows) == sum(len(part) for step in steps for part in step)


def test_no_clipping_no_saving(arguments):
    made = arguments(TUNED, gradient_clipping=None, checkpoint={**JOB["checkpoint"], "enabled": False})
    assert made.max_grad_norm == 0
    assert made.save_strategy == "no"
    assert not made.load_best_model_at_end


def test_stock_rows_are_padded_when_tokenised_and_counted_without_padding():
    from automodel.benchmark.trainer_rows import TOKENS, StoreRows, make_collator
    from automodel.data.samples import SampleWriter
    from automodel.data.store import TokenStore

    writer = SampleWriter()
    writer.add(0, [5, 6, 7], label=1)
    writer.add(1, [8, 9], label=0)
    rows = StoreRows(TokenStore.in_memory(writer.finish()), "document", pad_token_id=0, pad_to=6)
    first = rows[0]
    assert first["input_ids"] == [5, 6, 7, 0, 0, 0]
    assert first["attention_mask"] == [1, 1, 1, 0, 0, 0]
    assert first["labels"] == 1
    json.dumps(first)  # plain numbers, as a tokenised dataset gives
    batch = make_collator(None, "text-classification", "max_length", None)([rows[0], rows[1]])
    assert batch["input_ids"].shape == (2, 6)
    assert batch[TOKENS] == 5
    assert batch["labels"].tolist() == [1, 0]
