"""Bins of so many tokens: losses and gradients are those of every document alone, however the bins are cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from automodel.data.batch import IGNORE, StepBatch
from automodel.data.bins import BinOrder
from automodel.data.collate import PackedCollator
from automodel.data.samples import SampleWriter
from automodel.data.store import TokenStore
from automodel.models.forward import make_forward
from automodel.tasks.loss_config import LossConfig
from automodel.tasks.registry import task_named
from tiny_models import VOCAB, tiny

SIZE = 48
LONGEST = 20


def store_of(task: str, count: int = 40) -> TokenStore:
    random = np.random.default_rng(3)
    writer = SampleWriter()
    for row in range(count):
        length = int(random.integers(3, LONGEST + 1))
        ids = random.integers(5, VOCAB, length)
        if task == "causal-lm":
            labels = np.where(np.arange(length) < length // 3, IGNORE, ids)
            writer.add(row, ids, token_labels=labels)
        else:
            writer.add(row, ids, label=row % 3)
    return TokenStore.in_memory(writer.finish())


def bins_of(store: TokenStore, task: str, pool: str, step: int, bins: int, static: bool) -> StepBatch:
    order = BinOrder(store.lengths, SIZE, bins_per_step=bins, seed=1)
    collate = PackedCollator(
        store,
        task_named(task).rows.labels,
        pool=pool,
        bucket_tokens=SIZE if static else 1,
        bucket_reads=8 if static else 0,
        max_seqlen=LONGEST,
        micro_batch_size=order.most_documents,
    )
    return StepBatch(tuple(collate(chosen) for chosen in order.micro_batches(0, step)), 0, step)


def learn(model, forward, loss, batch: StepBatch) -> float:
    """Loss and gradients of a step, as `TrainStep` forms them: sums over micro-batches, divided once."""
    model.zero_grad()
    total = 0.0
    for micro_batch in batch.micro_batches:
        part = loss.sum(forward(micro_batch), micro_batch.labels_R) / batch.label_count
        part.backward()
        total += float(part.detach())
    return total


def learn_alone(model, loss, store: TokenStore, task: str, batch: StepBatch) -> float:
    """The same by stock transformers, one document at a time."""
    model.zero_grad()
    total = 0.0
    for index in (i for b in batch.micro_batches for i in b.indices):
        part = slice(store.offsets[index], store.offsets[index + 1])
        logits = model(input_ids=torch.as_tensor(store.input_ids[part].astype("int64"))[None]).logits
        if task == "causal-lm":
            logits, labels = logits[0, :-1], torch.as_tensor(store.token_labels[part].astype("int64"))[1:]
        else:
            labels = torch.as_tensor(store.labels[index : index + 1])
        value = loss.sum(logits, labels) / batch.label_count
        value.backward()
        total += float(value.detach())
    return total


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def close(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(left[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


FAMILIES = [
    ("llama", "causal-lm", "last"),
    ("gpt2", "causal-lm", "last"),
    ("bert", "text-classification", "first"),
    ("qwen2", "text-classification", "last"),
]


@pytest.mark.parametrize("static", [True, False], ids=["filled up", "as they are"])
@pytest.mark.parametrize(("kind", "task", "pool"), FAMILIES, ids=[f"{kind}-{task}" for kind, task, _ in FAMILIES])
def test_losses_and_gradients_are_those_of_every_document_alone(kind, task, pool, static):
    store = store_of(task)
    batch = bins_of(store, task, pool, step=1, bins=3, static=static)
    assert len(batch.micro_batches) == 3
    settings = {"num_labels": 3, "pad_token_id": 0} if task == "text-classification" else {}
    _, stock = tiny(kind, task, **settings)
    _, ours = tiny(kind, task, **settings)
    ours.load_state_dict(stock.state_dict())
    loss = task_named(task).loss(LossConfig(), None, settings.get("num_labels"))
    expected = learn_alone(stock, loss, store, task, batch)
    assert learn(ours, make_forward(ours, task_named(task).head, "packed"), loss, batch) == pytest.approx(
        expected, rel=1e-5
    )
    close(gradients(ours), gradients(stock))


def test_one_large_bin_is_the_same_step_as_several_small_ones():
    """Accumulation over bins is a sum over documents: the same documents in one micro-batch give the same step."""
    task = "causal-lm"
    store = store_of(task)
    several = bins_of(store, task, "last", step=0, bins=4, static=True)
    documents = [i for b in several.micro_batches for i in b.indices]
    together = PackedCollator(store, task_named(task).rows.labels, max_seqlen=LONGEST, micro_batch_size=len(documents))(
        documents
    )
    _, model = tiny("llama", task)
    forward, loss = (
        make_forward(model, task_named(task).head, "packed"),
        task_named(task).loss(LossConfig(), None, None),
    )
    first = learn(model, forward, loss, several)
    apart = gradients(model)
    assert learn(model, forward, loss, StepBatch((together,), 0, 0)) == pytest.approx(first, rel=1e-6)
    close(gradients(model), apart)
