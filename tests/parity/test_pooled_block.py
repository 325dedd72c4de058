"""The last block for the pooled token only, and layers that are one operation on the CPU: logits and gradients equal
stock transformers on each document alone."""

import pytest
import torch

from automodel.data.batch import IGNORE
from automodel.data.collate import PackedCollator
from automodel.data.samples import SampleWriter
from automodel.data.store import TokenStore
from automodel.models.cpu_block import use_cpu_blocks
from automodel.models.forward import make_forward, stock_attention
from automodel.models.pooled_block import pool_last_block
from automodel.models.task_head import TOKENS
from automodel.tasks.loss_config import LossConfig
from automodel.tasks.registry import task_named
from tiny_models import tiny

TASK = "text-classification"
LENGTHS = (5, 1, 9, 12, 3)


def batch_of(bucket_tokens: int):
    writer = SampleWriter()
    generator = torch.Generator().manual_seed(1)
    for row, length in enumerate(LENGTHS):
        writer.add(row, torch.randint(5, 30, (length,), generator=generator).tolist(), label=row % 2)
    store = TokenStore.in_memory(writer.finish())
    collate = PackedCollator(
        store, place=task_named(TASK).rows.labels, bucket_tokens=bucket_tokens, max_seqlen=16, micro_batch_size=8
    )
    return store, collate(range(len(LENGTHS)))


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("bucket_tokens", [1, 32], ids=["no tail", "dummy tail and unused slots"])
@pytest.mark.parametrize("whole_layers", [False, True], ids=["stock layers", "whole layers"])
@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta", "electra"])
def test_logits_and_gradients_equal_stock(kind, whole_layers, bucket_tokens):
    store, batch = batch_of(bucket_tokens)
    _, stock = tiny(kind, TASK)
    _, ours = tiny(kind, TASK)
    ours.load_state_dict(stock.state_dict())
    loss = task_named(TASK).loss(LossConfig(), None, 2)
    alone = []
    for row in range(len(store)):
        ids = torch.as_tensor(store.input_ids[store.offsets[row] : store.offsets[row + 1]].astype("int64"))[None]
        alone.append(stock(input_ids=ids).logits[0])
    expected = torch.stack(alone)
    labels = batch.labels_R[batch.labels_R != IGNORE]
    loss.sum(expected, labels).backward()

    assert pool_last_block(ours)
    if whole_layers:
        assert use_cpu_blocks(ours) == ours.config.num_hidden_layers - 1
    logits = make_forward(ours, task_named(TASK).head, "packed", swapped=True)(batch)
    torch.testing.assert_close(logits[: len(store)], expected, rtol=1e-5, atol=1e-5)
    loss.sum(logits, batch.labels_R).backward()
    theirs, mine = gradients(stock), gradients(ours)
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    ids = torch.as_tensor(store.input_ids[store.offsets[3] : store.offsets[4]].astype("int64"))[None]
    with stock_attention(ours):
        torch.testing.assert_close(ours(input_ids=ids).logits[0], expected[3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(make_forward(ours, task_named(TASK).head, "packed", swapped=True)(batch), logits)


def test_a_family_without_the_swap_is_left_alone():
    _, model = tiny("modernbert", TASK)
    assert not pool_last_block(model)
    assert not use_cpu_blocks(model)


def test_taggers_have_whole_layers_throughout():
    _, batch = batch_of(1)
    _, model = tiny("bert", "token-classification")
    forward = make_forward(model, TOKENS, "packed")
    expected = forward(batch)
    assert use_cpu_blocks(model) == model.config.num_hidden_layers
    torch.testing.assert_close(forward(batch), expected, rtol=1e-5, atol=1e-5)


def test_whole_layers_drop_while_they_learn():
    _, batch = batch_of(1)
    _, model = tiny("bert", TASK, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    forward = make_forward(model, task_named(TASK).head, "packed")
    model.eval()
    expected = forward(batch)
    assert use_cpu_blocks(model)
    torch.testing.assert_close(forward(batch), expected, rtol=1e-5, atol=1e-5)
    model.train()
    assert not torch.allclose(forward(batch), forward(batch))
