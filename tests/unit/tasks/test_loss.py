"""Summed losses divided by their count equal the means that transformers computes."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from automodel.config.errors import UserError
from automodel.tasks.loss import IGNORE
from automodel.tasks.loss_config import LossConfig
from automodel.tasks.registry import CAUSAL_LM, TEXT_CLASSIFICATION


def logits_and_classes(n=7, c=5):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, c, generator=generator), torch.randint(0, c, (n,), generator=generator)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_torch_mean(smoothing):
    logits, labels = logits_and_classes()
    loss = TEXT_CLASSIFICATION.loss(LossConfig(label_smoothing=smoothing), "single_label_classification", 5)
    mean = loss.sum(logits, labels) / loss.count(SimpleNamespace(labels=labels, num_labels=len(labels)))
    torch.testing.assert_close(mean, F.cross_entropy(logits, labels, label_smoothing=smoothing))


def test_class_weights_mean_nothing_for_words():
    with pytest.raises(UserError, match="loss_fn.class_weights belongs to classification, and this is causal-lm"):
        CAUSAL_LM.loss(LossConfig(class_weights=(1.0, 2.0)), None, None)


def test_class_weights_divide_by_the_sum_of_weights():
    logits, labels = logits_and_classes()
    weights = (1.0, 2.0, 0.5, 3.0, 1.5)
    loss = TEXT_CLASSIFICATION.loss(LossConfig(class_weights=weights), "single_label_classification", 5)
    mean = loss.sum(logits, labels) / loss.count(SimpleNamespace(labels=labels, num_labels=len(labels)))
    torch.testing.assert_close(mean, F.cross_entropy(logits, labels, weight=torch.tensor(weights)))


def test_ignored_positions_contribute_nothing():
    logits, labels = logits_and_classes()
    loss = CAUSAL_LM.loss(LossConfig(), None, None)
    labels[2:5] = IGNORE
    kept = labels != IGNORE
    torch.testing.assert_close(loss.sum(logits, labels), F.cross_entropy(logits[kept], labels[kept], reduction="sum"))


def test_multi_label_equals_torch_mean_and_skips_filler_rows():
    logits = torch.randn(4, 3)
    targets = torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 1], [float("nan")] * 3])
    loss = TEXT_CLASSIFICATION.loss(LossConfig(), "multi_label_classification", 3)
    logits.requires_grad_()
    value = loss.sum(logits, targets) / 3
    torch.testing.assert_close(value, F.binary_cross_entropy_with_logits(logits[:3], targets[:3]))
    value.backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[3] == 0).all()


def test_regression_equals_mse():
    logits, targets = torch.randn(6, 1), torch.randn(6)
    loss = TEXT_CLASSIFICATION.loss(LossConfig(), "regression", 1)
    torch.testing.assert_close(loss.sum(logits, targets) / 6, F.mse_loss(logits.squeeze(-1), targets))


def test_sum_then_divide_is_independent_of_the_split():
    logits, labels = logits_and_classes(n=9)
    loss = TEXT_CLASSIFICATION.loss(LossConfig(), None, 5)
    whole = loss.sum(logits, labels) / 9
    parts = sum(loss.sum(logits[i:j], labels[i:j]) for i, j in ((0, 1), (1, 5), (5, 9))) / 9
    torch.testing.assert_close(whole, parts)


@pytest.mark.parametrize(
    ("cfg", "problem_type", "message"),
    [
        (LossConfig(class_weights=(1.0, 2.0)), "single_label_classification", "has 2 weights, but there are 5 classes"),
        (LossConfig(class_weights=(1.0, -1.0, 1, 1, 1)), "single_label_classification", "not negative"),
        (LossConfig(label_smoothing=0.1), "regression", "label_smoothing belongs to cross-entropy"),
    ],
)
def test_settings_that_do_not_fit_are_refused(cfg, problem_type, message):
    with pytest.raises(UserError, match=message):
        TEXT_CLASSIFICATION.loss(cfg, problem_type, 5)
