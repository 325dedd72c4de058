"""The padded path gives stock transformers' logits and, with a plain cross-entropy on top, stock transformers' loss:
T5 and BART with their own decoder inputs, DeBERTa and padded decoders with padding in the batch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from automodel.data.batch import IGNORE, PaddedBatch
from automodel.models.forward import make_forward
from automodel.models.task_head import NEXT_TOKEN, POOLED
from automodel.tasks.registry import SEQ2SEQ

spec = importlib.util.spec_from_file_location("tiny_models", Path(__file__).parents[1] / "tiny_models.py")
tiny_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny_models)

LENGTHS = (5, 12, 9)
WIDTH = 12
TARGET = 7


def rectangle(pad: int, labels: torch.Tensor, types: bool = False) -> PaddedBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, tiny_models.VOCAB, (len(LENGTHS), WIDTH), generator=generator)
    mask = torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]
    return PaddedBatch(
        input_ids_BS=torch.where(mask, ids, pad),
        attention_mask_BS=mask.long(),
        labels=labels,
        token_type_ids_BS=(torch.arange(WIDTH).expand(len(LENGTHS), -1) > 3).long() * mask if types else None,
        num_documents=len(LENGTHS),
        num_tokens=sum(LENGTHS),
        num_labels=int((labels != IGNORE).sum()),
    )


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_summarisation_equals_the_stock_loss_and_gradients(kind):
    config, model = tiny_models.tiny(kind, "seq2seq")
    labels = torch.randint(5, tiny_models.VOCAB, (3, TARGET), generator=torch.Generator().manual_seed(1))
    labels[0, 4:] = IGNORE  # short targets: IGNORE becomes the pad token in the decoder's inputs
    batch = rectangle(config.pad_token_id, labels)
    logits = make_forward(model, SEQ2SEQ.head, "padded")(batch)
    stock = model(input_ids=batch.input_ids_BS, attention_mask=batch.attention_mask_BS, labels=labels)
    torch.testing.assert_close(logits, stock.logits, rtol=0, atol=0)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    torch.testing.assert_close(loss, stock.loss)
    assert_same_gradients(gradients(model, loss), gradients(model, stock.loss))


@pytest.mark.parametrize(
    ("kind", "types"), [("deberta-v2", False), ("mpnet", False), ("bert", True), ("roberta", False)]
)
def test_padded_classification_equals_stock(kind, types):
    config, model = tiny_models.tiny(kind, "text-classification", num_labels=3)
    batch = rectangle(config.pad_token_id, torch.tensor([0, 2, 1]), types)
    logits = make_forward(model, POOLED, "padded")(batch)
    inputs = {"input_ids": batch.input_ids_BS, "attention_mask": batch.attention_mask_BS}
    if types:
        inputs["token_type_ids"] = batch.token_type_ids_BS
    stock = model(**inputs, labels=batch.labels)
    assert logits.shape == (3, 3)
    loss = F.cross_entropy(logits, batch.labels)
    torch.testing.assert_close(loss, stock.loss)
    assert_same_gradients(gradients(model, loss), gradients(model, stock.loss))


def test_padded_causal_lm_labels_are_already_shifted():
    _, model = tiny_models.tiny("llama", "causal-lm")
    mask = torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]
    batch = rectangle(0, torch.zeros(3, WIDTH, dtype=torch.long))
    own = torch.where(mask, batch.input_ids_BS, IGNORE)
    shifted = F.pad(own[:, 1:], (0, 1), value=IGNORE)
    logits = make_forward(model, NEXT_TOKEN, "padded")(batch)
    stock = model(input_ids=batch.input_ids_BS, attention_mask=batch.attention_mask_BS, labels=own)
    loss = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=IGNORE)
    torch.testing.assert_close(loss, stock.loss)
