"""Fused encoder blocks, embeddings and heads against stock transformers, in fp32 and on the CPU: logits and gradients
of every family to 1e-5, each document alone. Here they run on the kernels' torch references; the kernels run in
`tests/unit/kernels/test_encoder_blocks.py` (interpreter) and in `tests/gpu/test_captured_step.py`."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from automodel.data.collate import _runs
from automodel.kernels.flat_parameters import FlatParameters
from automodel.models.families import packing_support
from automodel.models.forward import make_forward, make_loss_forward
from automodel.models.fuse import fuse, unfuse
from automodel.models.head_outputs import Unprojected
from automodel.models.task_head import POOLED
from automodel.optim.build import parameter_groups
from automodel.optim.config import OptimizerConfig
from automodel.tasks.loss import SupervisedLoss
from automodel.tasks.registry import task_named
from parity.test_packed_families import CLASSES, TOLERANCE, assert_same_logits_and_gradients, documents, packed
from tiny_models import tiny

# Wide enough for every weight to fill its blocks of the flat buffer, which lets neighbours be joined.
BERT = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
SIZES = {
    "bert": BERT,
    "roberta": BERT,
    "xlm-roberta": BERT,
    "camembert": BERT,
    "electra": BERT | {"embedding_size": 32},
    "distilbert": {"dim": 64, "n_heads": 4, "hidden_dim": 96},
    "modernbert": BERT | {"num_hidden_layers": 4, "local_attention": 6},
}
CASES = [
    *((kind, task, {}) for kind in SIZES for task in ("text-classification", "token-classification")),
    ("modernbert", "text-classification", {"classifier_pooling": "mean"}),
    ("modernbert", "text-classification", {"num_hidden_layers": 3}),  # the last layer has a window: nothing is pooled
]


def fused(kind: str, task: str, **overrides):
    """(fused model, stock copy)."""
    _, stock = tiny(kind, task, num_labels=CLASSES, **{**SIZES[kind], **overrides})
    ours = deepcopy(stock)
    FlatParameters(parameter_groups(ours, OptimizerConfig()))
    assert fuse(ours, torch.zeros(1, dtype=torch.int64), None, 24) >= 2
    return ours, stock


def sorted_batch(ours, task: str):
    """A batch with its tokens in order, as captured steps get it."""
    batch = packed(documents(0), task, packing_support(ours.config, task_named(task).head).pooling)
    return replace(batch, token_runs_2T=torch.from_numpy(_runs(batch.input_ids_T.numpy())))


def assert_a_step_learns_the_same(kind: str, **overrides) -> None:
    """Loss and gradients of a training step with the head inside the loss, against the stock model's logits."""
    task = "text-classification"
    ours, stock = fused(kind, task, **overrides)
    ours.train()  # without dropout: tiny configs have none
    forward, batch, scale = (
        make_loss_forward(ours, task_named(task).head, "packed", swapped=True),
        sorted_batch(ours, task),
        0.25,
    )
    outputs = forward(batch)
    assert isinstance(outputs, Unprojected) == (kind != "modernbert")
    loss = SupervisedLoss("classes").scaled_sum(outputs, batch, torch.tensor(scale))
    loss.backward()
    logits = make_forward(stock, task_named(task).head, "packed")(batch)
    expected = F.cross_entropy(logits, batch.labels_R, ignore_index=-100, reduction="sum") * scale
    expected.backward()
    torch.testing.assert_close(loss, expected, **TOLERANCE)
    theirs = {name: p.grad for name, p in stock.named_parameters()}
    for name, parameter in ours.named_parameters():
        if theirs[name] is not None:
            assert parameter.grad is not None, f"no gradient reaches {name}"
            torch.testing.assert_close(parameter.grad, theirs[name], **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("kind", "task", "overrides"), CASES, ids=lambda v: v if isinstance(v, str) else str(v))
def test_equal_to_each_document_alone(kind, task, overrides):
    ours, stock = fused(kind, task, **overrides)
    assert_same_logits_and_gradients(
        ours, stock, make_forward(ours, task_named(task).head, "packed", swapped=True), task, documents(0)
    )


@pytest.mark.parametrize("kind", ["bert", "electra"])
def test_text_pairs(kind):
    ours, stock = fused(kind, "text-classification")
    forward = make_forward(ours, POOLED, "packed", swapped=True)
    assert_same_logits_and_gradients(ours, stock, forward, "text-classification", documents(0, pairs=True))


@pytest.mark.parametrize("kind", SIZES)
def test_a_training_step_learns_the_same(kind):
    assert_a_step_learns_the_same(kind)


def test_evaluation_gets_logits():
    ours, _ = fused("bert", "text-classification")
    forward = make_loss_forward(ours.eval(), POOLED, "packed", swapped=True)
    assert isinstance(forward(sorted_batch(ours, "text-classification")), torch.Tensor)


def test_unfused_it_is_the_stock_model_again():
    ours, stock = fused("modernbert", "text-classification")
    unfuse(ours)
    ids = documents(0)[0]["ids"].unsqueeze(0)
    torch.testing.assert_close(ours(input_ids=ids).logits, stock(input_ids=ids).logits)
