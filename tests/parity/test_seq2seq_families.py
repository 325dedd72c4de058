"""Every encoder-decoder that transformers maps learns what transformers itself would have it learn: the same loss and
gradients from one batch, the batch's labels left alone, and a curve of stock Trainer's."""

from __future__ import annotations

import io
import os

import pytest
import torch
import torch.nn.functional as F
import yaml
from rich.console import Console
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as MAPPED

import tiny_runs as tiny
from architectures.tiny import default_config, tiny_model
from automodel.config.errors import UserError
from automodel.data.batch import IGNORE, PaddedBatch
from automodel.engine.run import finetune
from automodel.models.forward import make_forward
from automodel.models.task_head import TARGET
from automodel.plan.check import load_run_config
from automodel.tasks.infer import require_task, tasks_of
from automodel.tasks.registry import SEQ2SEQ

LISTENS = {kind for kind in MAPPED if not default_config(kind).is_encoder_decoder}
"""Decoders with an audio encoder, which transformers lists among the encoder-decoders."""
OWN_LOSS = {"prophetnet"}
"""What the logits alone do not give: the losses of several tokens ahead (`test_own_loss.py`)."""
STEPS = 10


def batch_of(pad: int) -> PaddedBatch:
    """Two rows with padding in source and target."""
    drawn = torch.Generator().manual_seed(1)
    ids_BS = torch.randint(5, 90, (2, 11), generator=drawn)
    mask_BS = torch.ones_like(ids_BS)
    labels = torch.randint(5, 90, (2, 7), generator=drawn)
    ids_BS[1, 6:] = pad
    mask_BS[1, 6:] = 0
    labels[1, 4:] = IGNORE
    return PaddedBatch(ids_BS, mask_BS, labels, None, 2, 17, 11)


def stock_inputs(model, labels):
    """What `DataCollatorForSeq2Seq` makes, for a model that may write into it."""
    if not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return {"labels": labels.clone()}
    shifted = model.prepare_decoder_input_ids_from_labels(labels=labels.clone())
    return {"labels": labels.clone(), "decoder_input_ids": shifted}


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", sorted(set(MAPPED) - LISTENS - OWN_LOSS))
def test_loss_and_gradients_are_stock(kind):
    model = tiny_model(kind, "seq2seq")
    batch = batch_of(model.config.get_text_config(decoder=True).pad_token_id or 0)
    labels = batch.labels.clone()
    stock = model(
        input_ids=batch.input_ids_BS, attention_mask=batch.attention_mask_BS, **stock_inputs(model, labels)
    )  # fmt: skip
    wanted = gradients(model, stock.loss)
    logits = make_forward(model, TARGET, "padded")(batch)
    assert torch.equal(batch.labels, labels), "the model wrote into the labels of the batch"
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE)
    torch.testing.assert_close(loss, stock.loss, rtol=1e-6, atol=1e-6)
    ours = gradients(model, loss)
    assert ours.keys() == wanted.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", sorted(LISTENS))
def test_decoders_that_listen_are_no_encoder_decoders(kind):
    config = default_config(kind)
    assert SEQ2SEQ not in tasks_of(config)
    with pytest.raises(UserError, match=f"is a {config.model_type} model"):
        require_task(config, SEQ2SEQ, "name")


def trainer_losses(folder, rows):
    """Stock Trainer over the rows in their order, with decoder inputs where the model has a method for them."""
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForSeq2SeqLM, Trainer, TrainingArguments

    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "model")

    def collate(chosen):
        padded = torch.nn.utils.rnn.pad_sequence
        ids_BS = padded([torch.tensor(r["input_ids"]) for r in chosen], batch_first=True, padding_value=0)
        lengths_B = torch.tensor([len(r["input_ids"]) for r in chosen])
        mask_BS = (torch.arange(ids_BS.shape[1])[None] < lengths_B[:, None]).long()
        labels = padded([torch.tensor(r["labels"]) for r in chosen], batch_first=True, padding_value=IGNORE)
        return {"input_ids": ids_BS, "attention_mask": mask_BS, **stock_inputs(model, labels)}

    class InOrder(Trainer):
        def _get_train_sampler(self, *args):
            return SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(
        output_dir=str(folder / "hf"), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-3,
        weight_decay=0.01, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = InOrder(model=model, args=arguments, train_dataset=rows, data_collator=collate)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("kind", ["blenderbot", "fsmt", "m2m_100"])
def test_a_curve_is_that_of_stock_trainer(tmp_path, monkeypatch, kind):
    from transformers import AutoTokenizer

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    tokenizer = tiny.make_tokenizer(decoder=True)
    tiny_model(
        kind, "seq2seq", pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.eos_token_id, forced_eos_token_id=None,
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    tokenizer.save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rows = []
    for number, review in enumerate(tiny.reviews(4 * STEPS, longest=12)):
        ids = tokenizer(review["text"])["input_ids"] + [tokenizer.eos_token_id]
        rows.append({"input_ids": ids, "labels": [*ids[: 2 + number % 4], tokenizer.eos_token_id]})
    tiny.write_jsonl(tmp_path / "train.jsonl", rows)
    run = {
        "task": "seq2seq",
        "model": os.fspath(tmp_path / "model"),
        "dataset": {"path": os.fspath(tmp_path / "train.jsonl")},
        "dataloader": {"shuffle": False, "batch_size": 4, "group_by_length": False},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.01},
        "training_optimizations": {"precision": "fp32"},
        "step_scheduler": {"max_steps": STEPS, "log_every_steps": 1},
        "checkpoint": {"checkpoint_dir": os.fspath(tmp_path / "out"), "enabled": False},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    finetune(load_run_config([tmp_path / "run.yaml"]), console=Console(file=io.StringIO()))
    ours = list(tiny.losses(tmp_path / "out").values())
    assert ours == pytest.approx(trainer_losses(tmp_path, rows), rel=1e-5)
    assert ours[-1] < ours[0] * 0.99, "nothing was learned, so equality would prove little"
