"""The drop-in Trainer on a real GPU: captured steps against stock Trainer.

    pytest -m gpu tests/gpu/test_trainer_gpu.py

fp32 is compared number by number; in bf16 the measure is how far stock Trainer itself is from its own fp32 run.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    import transformers
    from datasets import Dataset

    from automodel import Trainer, TrainingArguments
    from tiny_runs import make_tokenizer

VOCAB = 60
ENCODER = {
    "dim": 256, "n_layers": 3, "n_heads": 4, "hidden_dim": 512, "vocab_size": VOCAB, "max_position_embeddings": 256,
    "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "pad_token_id": 0, "num_labels": 3,
}  # fmt: skip
DECODER = {
    "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "vocab_size": VOCAB, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip


def rows(task, count=120, seed=0):
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        ids = random.integers(5, VOCAB, int(random.integers(8, 120))).tolist()
        row = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        made.append(row | {"label": ids[0] % 3} if task == "text-classification" else row)
    return Dataset.from_list(made)


def model_for(task):
    torch.manual_seed(0)
    if task == "text-classification":
        config = transformers.DistilBertConfig(**ENCODER)
        return transformers.DistilBertForSequenceClassification(config)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))


def trained(kind, folder, task, resume=None, **options):
    tokenizer = make_tokenizer(decoder=task != "text-classification")
    collator = (
        transformers.DataCollatorWithPadding(tokenizer)
        if task == "text-classification"
        else transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    )
    settings = {
        "max_steps": 24, "per_device_train_batch_size": 8, "learning_rate": 5e-4, "logging_steps": 1,
        "weight_decay": 0.01, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "warmup_steps": 4,
        "eval_strategy": "steps", "eval_steps": 10,
    } | options  # fmt: skip
    trainer = kind(
        model=model_for(task), args=TrainingArguments(str(folder), **settings), train_dataset=rows(task),
        eval_dataset=rows(task, 30, 1), data_collator=collator, processing_class=tokenizer,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def values(trainer, key="loss"):
    return np.asarray([entry[key] for entry in trainer.state.log_history if key in entry])


@pytest.mark.parametrize("task", ["text-classification", "causal-lm"])
def test_fp32_captured_steps_have_the_losses_of_stock(tmp_path, task):
    torch.backends.cuda.matmul.allow_tf32 = False
    ours = trained(Trainer, tmp_path / "a", task)
    stock = trained(transformers.Trainer, tmp_path / "b", task)
    assert ours.acceleration.path == "captured"
    for key in ("loss", "eval_loss", "learning_rate"):
        np.testing.assert_allclose(values(ours, key), values(stock, key), atol=1e-3, err_msg=key)
    np.testing.assert_allclose(values(ours, "grad_norm"), values(stock, "grad_norm"), rtol=2e-2)


@pytest.mark.parametrize("task", ["text-classification", "causal-lm"])
def test_bf16_is_as_near_to_fp32_as_stock_bf16(tmp_path, task):
    ours = trained(Trainer, tmp_path / "a", task, bf16=True)
    stock = trained(transformers.Trainer, tmp_path / "b", task, bf16=True)
    exact = trained(transformers.Trainer, tmp_path / "c", task)
    assert ours.acceleration.path == "captured"
    for key in ("loss", "eval_loss"):
        own = np.abs(values(ours, key) - values(exact, key)).max()
        theirs = np.abs(values(stock, key) - values(exact, key)).max()
        assert own <= max(4 * theirs, 0.03), key
    assert {p.dtype for p in ours.model.parameters()} == {torch.float32}
    assert len({p.untyped_storage().data_ptr() for p in ours.model.parameters()}) == len(list(ours.model.parameters()))


def test_accumulation_of_a_language_model(tmp_path):
    options = {"gradient_accumulation_steps": 3, "max_steps": 10}
    ours = trained(Trainer, tmp_path / "a", "causal-lm", **options)
    stock = trained(transformers.Trainer, tmp_path / "b", "causal-lm", **options)
    assert ours.acceleration.path == "captured"
    np.testing.assert_allclose(values(ours), values(stock), atol=1e-3)


def test_checkpoints_are_stocks_and_both_trainers_resume_from_them(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 12, "bf16": True}
    whole = trained(Trainer, tmp_path / "a", "text-classification", **options)
    checkpoint = str(tmp_path / "a" / "checkpoint-12")
    for name, kind in (("b", Trainer), ("c", transformers.Trainer)):
        again = trained(kind, tmp_path / name, "text-classification", resume=checkpoint, **options)
        np.testing.assert_allclose(values(again)[12:], values(whole)[12:], atol=0.05)
        assert values(again, "learning_rate")[12:] == pytest.approx(values(whole, "learning_rate")[12:])
    stock = transformers.DistilBertForSequenceClassification.from_pretrained(checkpoint)
    assert {p.dtype for p in stock.parameters()} == {torch.float32}


def test_train_twice_evaluate_and_predict_afterwards(tmp_path):
    ours = trained(Trainer, tmp_path / "a", "text-classification", bf16=True)
    stock = trained(transformers.Trainer, tmp_path / "b", "text-classification", bf16=True)
    for trainer in (ours, stock):
        trainer.train()
    assert ours.acceleration.path == "captured"
    assert values(ours)[-3:] == pytest.approx(values(stock)[-3:], abs=0.1)
    test = rows("text-classification", 20, seed=7)
    assert ours.predict(test).predictions.shape == (20, 3)
    assert ours.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], abs=0.1)


def test_evaluations_in_one_pass_and_rates_that_a_callback_sets(tmp_path):
    """Fifteen of Trainer's evaluation batches are one forward pass; a rate that a callback sets holds for a step."""
    seen = {}

    def kind(of):
        seen[of] = []

        class Rates(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, optimizer=None, **kwargs):
                seen[of].append(optimizer.param_groups[0]["lr"])
                if state.global_step % 5 == 0:
                    for group in optimizer.param_groups:
                        group["lr"] = 2e-3

            def on_prediction_step(self, args, state, control, **kwargs):
                seen[of].append(state.global_step)

        right = {"compute_metrics": lambda p: {"sum": float(np.abs(p.predictions).sum()), "rows": len(p.label_ids)}}
        return lambda **given: of(**given, **right, callbacks=[Rates()])

    both = [trained(kind(of), tmp_path, "text-classification", per_device_eval_batch_size=2)
            for of in (Trainer, transformers.Trainer)]  # fmt: skip
    assert both[0].acceleration.path == "captured"
    assert seen[Trainer] == pytest.approx(seen[transformers.Trainer])
    for key, tolerance in (("loss", 2e-3), ("eval_loss", 2e-3), ("eval_sum", 0.5), ("eval_rows", 0)):
        np.testing.assert_allclose(values(both[0], key), values(both[1], key), atol=tolerance, err_msg=key)


def test_packed_rows_of_supervised_tuning_are_captured(tmp_path):
    from automodel import SFTConfig, SFTTrainer

    tokenizer = make_tokenizer(decoder=True)
    texts = Dataset.from_list([{"text": tokenizer.decode(row["input_ids"])} for row in rows("causal-lm", 60)])
    losses = []
    for own in (False, True):
        config = SFTConfig(
            str(tmp_path), packing=True, max_length=200, per_device_train_batch_size=2, max_steps=10, bf16=False,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, learning_rate=5e-4,
            torch_empty_cache_steps=5 if own else None,
        )  # fmt: skip
        trainer = SFTTrainer(model_for("causal-lm"), config, train_dataset=texts, processing_class=tokenizer)
        trainer.train()
        assert trainer.acceleration.path == ("stock" if own else "captured")
        losses.append(values(trainer))
    np.testing.assert_allclose(*losses, atol=5e-3)
