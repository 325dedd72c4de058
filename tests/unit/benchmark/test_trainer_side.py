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


def test_without_shuffling_every_side_reads_in_order(arguments):
    for settings in (STOCK, TUNED):
        assert arguments(settings, shuffle=False).train_sampling_strategy == "sequential"


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
    rows = StoreRows(TokenStore.in_memory(writer.finish()), "text-classification", pad_token_id=0, pad_to=6)
    first = rows[0]
    assert first["input_ids"] == [5, 6, 7, 0, 0, 0]
    assert first["attention_mask"] == [1, 1, 1, 0, 0, 0]
    assert first["labels"] == 1
    json.dumps(first)  # plain numbers, as a tokenised dataset gives
    batch = make_collator(None, "text-classification", "max_length", None)([rows[0], rows[1]])
    assert batch["input_ids"].shape == (2, 6)
    assert batch[TOKENS] == 5
    assert batch["labels"].tolist() == [1, 0]
