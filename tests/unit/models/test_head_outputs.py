"""A loss that makes the logits itself gives what it gives over logits: sums, gradients, scores; and its memory."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from automodel.config.errors import UserError
from automodel.kernels import logits_memory
from automodel.models.head_outputs import Unprojected
from automodel.tasks.loss import IGNORE
from automodel.tasks.loss_config import LossConfig
from automodel.tasks.registry import CAUSAL_LM, TEXT_CLASSIFICATION

ROWS, WIDTH, WORDS = 300, 16, 128


def batch_of(labels):
    """A batch as far as a loss looks at it."""
    return SimpleNamespace(labels=labels, num_labels=len(labels))


def draw(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(WORDS, WIDTH, generator=generator).requires_grad_()
    labels = torch.randint(0, WORDS, (ROWS,), generator=generator)
    labels[::3] = IGNORE
    return hidden, weight, labels


def loss_of(**settings):
    return CAUSAL_LM.loss(LossConfig(**settings), None, None)


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}], ids=["plain", "smooth", "z"])
@pytest.mark.parametrize("special", [{}, {"softcap": 2.0, "logit_scale": 0.5}], ids=["plain head", "capped head"])
def test_both_forms_give_the_same(settings, special):
    hidden, weight, labels = draw()
    loss, outputs = loss_of(**settings), Unprojected(hidden, weight, **special)
    scale = torch.tensor(1 / 200)
    ours, theirs = (
        loss.scaled_sum(outputs, batch_of(labels), scale),
        loss.scaled_sum(outputs.logits(), batch_of(labels), scale),
    )
    torch.testing.assert_close(ours, theirs)
    expected = torch.autograd.grad(theirs, (hidden, weight))
    ours.backward()
    for mine, other in zip((hidden.grad, weight.grad), expected):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    summed = loss.sum(outputs, labels) / 200
    torch.testing.assert_close(summed, ours)
    torch.testing.assert_close(torch.autograd.grad(summed, weight)[0], expected[1], rtol=1e-4, atol=1e-6)


def test_z_loss_is_for_learning_and_not_for_the_likelihood():
    hidden, weight, labels = draw()
    outputs = Unprojected(hidden, weight)
    plain, penalised = loss_of(), loss_of(z_loss=0.1)
    kept = labels != IGNORE
    penalty = 0.1 * outputs.logits().logsumexp(-1)[kept].square().sum()
    torch.testing.assert_close(penalised.sum(outputs, labels), plain.sum(outputs, labels) + penalty)
    torch.testing.assert_close(penalised.scores(outputs, batch_of(labels)).loss, plain.sum(outputs, labels))
    logits = outputs.logits()
    torch.testing.assert_close(penalised.scores(logits, batch_of(labels)).loss, plain.sum(logits, labels))
    expected = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(plain.sum(logits, labels), expected)


def test_smoothing_is_for_learning_and_not_for_the_likelihood():
    """A perplexity is made of it. Classifiers are evaluated with what they are trained on, as in HF Trainer."""
    hidden, weight, labels = draw()
    outputs = Unprojected(hidden, weight)
    logits = outputs.logits()
    expected = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    smoothed = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=0.1)
    loss = loss_of(label_smoothing=0.1)
    for form in (outputs, logits):
        torch.testing.assert_close(loss.scores(form, batch_of(labels)).loss, expected)
        torch.testing.assert_close(loss.sum(form, labels), smoothed)
    classes = TEXT_CLASSIFICATION.loss(LossConfig(label_smoothing=0.1), None, logits.shape[-1])
    torch.testing.assert_close(classes.scores(logits, batch_of(labels)).loss, smoothed)


def test_labels_of_a_rectangle_are_taken_as_they_come():
    hidden, weight, labels = draw()
    outputs, loss = Unprojected(hidden, weight), loss_of()
    torch.testing.assert_close(loss.sum(outputs, labels.reshape(10, 30)), loss.sum(outputs, labels))
    assert loss.scores(outputs, batch_of(labels.reshape(10, 30))).right == loss.scores(outputs, batch_of(labels)).right


class Widest(TorchDispatchMode):
    """The most rows of logits that any operation gives."""

    rows = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[1] == WORDS:
                self.rows = max(self.rows, tensor.shape[0])
        return out


@pytest.mark.parametrize("learns", [True, False])
def test_no_more_rows_of_logits_than_the_buffer_holds(monkeypatch, learns):
    monkeypatch.setitem(logits_memory.BUFFER_BYTES, "cpu", 128 * WORDS * 4)
    hidden, weight, labels = draw()
    outputs, loss = Unprojected(hidden, weight), loss_of()
    with Widest() as seen:
        if learns:
            loss.scaled_sum(outputs, batch_of(labels), torch.tensor(1.0)).backward()
        else:
            loss.scores(outputs, batch_of(labels))
    assert seen.rows == 128
    with Widest() as seen:
        loss.sum(outputs.logits(), labels)
    assert seen.rows == ROWS


def test_z_loss_belongs_to_cross_entropy_alone():
    with pytest.raises(UserError, match=r"loss_fn\.z_loss belongs to cross-entropy"):
        TEXT_CLASSIFICATION.loss(LossConfig(z_loss=1e-4), "regression", 1)
    with pytest.raises(UserError, match="Keep one"):
        TEXT_CLASSIFICATION.loss(LossConfig(z_loss=1e-4, class_weights=(1.0, 2.0)), None, 2)
    classifier = TEXT_CLASSIFICATION.loss(LossConfig(z_loss=1e-2), "single_label_classification", 3)
    logits, labels = torch.randn(4, 3), torch.tensor([0, 2, IGNORE, 1])
    kept = labels != IGNORE
    expected = F.cross_entropy(logits[kept], labels[kept], reduction="sum")
    expected = expected + 1e-2 * logits[kept].logsumexp(-1).square().sum()
    torch.testing.assert_close(classifier.sum(logits, labels), expected)
