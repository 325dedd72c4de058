"""Metrics against scikit-learn, scipy and numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn import metrics as sk

from automodel.config.errors import UserError
from automodel.metrics.compute import (
    ALSO_CALLED,
    EvalAccumulator,
    better,
    compute_metrics,
    metric_called,
    metric_names,
)
from automodel.tasks.registry import task_named

SINGLE = "single_label_classification"
MULTI = "multi_label_classification"
BIO = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_binary_scores_are_those_of_the_positive_class():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(200, 2)), rng.integers(0, 2, 200)
    predictions = logits.argmax(-1)
    found = compute_metrics(SINGLE, logits, labels)
    assert found.values == pytest.approx(
        {
            "accuracy": sk.accuracy_score(labels, predictions),
            "f1": sk.f1_score(labels, predictions),
            "precision": sk.precision_score(labels, predictions),
            "recall": sk.recall_score(labels, predictions),
            "mcc": sk.matthews_corrcoef(labels, predictions),
            "auroc": sk.roc_auc_score(labels, softmax(logits)[:, 1]),
        }
    )
    assert found.confusion_matrix == sk.confusion_matrix(labels, predictions).tolist()


def test_many_classes_are_macro_averages():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 5, 300)
    logits = rng.normal(size=(300, 5)) + 1.5 * np.eye(5)[labels]
    predictions = logits.argmax(-1)
    found = compute_metrics("single_label_classification", logits, labels).values
    assert found["f1"] == pytest.approx(sk.f1_score(labels, predictions, average="macro"))
    assert found["precision"] == pytest.approx(sk.precision_score(labels, predictions, average="macro"))
    assert found["recall"] == pytest.approx(sk.recall_score(labels, predictions, average="macro"))
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(labels, softmax(logits), multi_class="ovr"))


def test_a_class_that_does_not_occur_neither_breaks_nor_lowers_the_scores():
    labels = np.array([0, 1, 0, 1])
    logits = np.eye(3)[labels] * 5.0  # class 2 is never right and never predicted
    found = compute_metrics(SINGLE, logits, labels)
    assert found.values["f1"] == found.values["auroc"] == found.values["accuracy"] == 1.0
    assert found.confusion_matrix == [[2, 0, 0], [0, 2, 0], [0, 0, 0]]


def test_auroc_is_left_out_where_it_is_not_defined():
    one_class = compute_metrics(SINGLE, np.array([[0.1, 2.0], [1.0, 0.0]]), np.array([1, 1]))
    assert "auroc" not in one_class.values
    assert one_class.values["accuracy"] == 0.5
    diverged = compute_metrics(SINGLE, np.full((4, 2), np.nan), np.array([0, 1, 0, 1]))
    assert "auroc" not in diverged.values


def test_very_many_classes_have_no_confusion_matrix():
    logits = np.eye(300)
    assert compute_metrics(SINGLE, logits, np.arange(300)).confusion_matrix is None


def test_multi_label():
    rng = np.random.default_rng(2)
    logits, labels = rng.normal(size=(100, 4)), (rng.random((100, 4)) > 0.6).astype(np.float32)
    predictions = (1 / (1 + np.exp(-logits)) > 0.5).astype(int)
    found = compute_metrics(MULTI, logits, labels)
    assert found.values == pytest.approx(
        {
            "accuracy": sk.accuracy_score(labels, predictions),
            "f1_micro": sk.f1_score(labels, predictions, average="micro"),
            "f1_macro": sk.f1_score(labels, predictions, average="macro"),
            "auroc": sk.roc_auc_score(labels, logits, average="macro"),
        }
    )
    assert found.confusion_matrix is None


def test_multi_label_auroc_skips_columns_without_both_values():
    labels = np.array([[1, 0], [0, 0], [1, 0]], dtype=np.float32)
    logits = np.array([[2.0, -1], [-2.0, -1], [1.0, -1]])
    assert compute_metrics(MULTI, logits, labels).values["auroc"] == 1.0
    nothing = compute_metrics(MULTI, logits, np.zeros((3, 2)))
    assert "auroc" not in nothing.values


def test_regression():
    rng = np.random.default_rng(3)
    targets = rng.normal(size=50)
    outputs = targets + 0.3 * rng.normal(size=50)
    found = compute_metrics("regression", outputs[:, None], targets).values
    assert found == pytest.approx(
        {
            "mse": sk.mean_squared_error(targets, outputs),
            "rmse": math.sqrt(sk.mean_squared_error(targets, outputs)),
            "mae": sk.mean_absolute_error(targets, outputs),
            "pearson": pearsonr(outputs, targets).statistic,
            "spearman": spearmanr(outputs, targets).statistic,
            "r2": sk.r2_score(targets, outputs),
        }
    )


def test_regression_with_several_targets_averages_over_them():
    rng = np.random.default_rng(4)
    targets = rng.normal(size=(40, 3))
    outputs = targets + rng.normal(size=(40, 3))
    found = compute_metrics("regression", outputs, targets).values
    assert found["r2"] == pytest.approx(sk.r2_score(targets, outputs))
    assert found["pearson"] == pytest.approx(np.mean([pearsonr(outputs[:, k], targets[:, k])[0] for k in range(3)]))


def test_regression_of_a_constant_or_a_diverged_model_is_nan_not_a_crash():
    constant = compute_metrics("regression", np.ones((4, 1)), np.arange(4.0)).values
    assert math.isnan(constant["pearson"])
    assert constant["mse"] == pytest.approx(1.5)
    diverged = compute_metrics("regression", np.full((4, 1), np.nan), np.arange(4.0)).values
    assert all(math.isnan(value) for value in diverged.values())


def names_to_labels(names):
    return np.array([BIO.index(name) for name in names])


def test_entities_by_hand():
    """Two of three entities found exactly, one more with a wrong end."""
    truth = names_to_labels(["B-PER", "I-PER", "O", "B-LOC", "O", "B-PER"])
    guess = names_to_labels(["B-PER", "I-PER", "O", "B-LOC", "I-LOC", "B-PER"])
    logits = np.eye(5)[guess][None]
    found = compute_metrics("tags", logits, truth[None], BIO).values
    assert found["accuracy"] == pytest.approx(5 / 6)
    assert found["entity_precision"] == pytest.approx(2 / 3)
    assert found["entity_recall"] == pytest.approx(2 / 3)
    assert found["entity_f1"] == pytest.approx(2 / 3)
    assert found["token_f1"] == pytest.approx(sk.f1_score(truth, guess, average="macro", zero_division=0))


def test_an_inside_tag_without_a_beginning_starts_an_entity():
    truth = names_to_labels(["I-PER", "I-PER", "I-LOC", "B-LOC"])  # PER, LOC, LOC
    guess = names_to_labels(["B-PER", "I-PER", "B-LOC", "B-LOC"])
    found = compute_metrics("tags", np.eye(5)[guess][None], truth[None], BIO).values
    assert found["entity_f1"] == 1.0


def test_entities_end_with_their_document():
    truth = np.stack([names_to_labels(["O", "B-PER"]), names_to_labels(["I-PER", "O"])])
    one_entity = np.concatenate(truth)
    as_documents = compute_metrics("tags", np.eye(5)[truth], truth, BIO)
    assert as_documents.values["entity_f1"] == 1.0
    packed = EvalAccumulator("tags", BIO)
    guess = one_entity.copy()
    guess[2] = BIO.index("B-PER")  # right if the document ends before it, wrong if the entity went on
    documents = torch.tensor([0, 0, 1, 1])
    packed.update(torch.eye(5)[guess], torch.tensor(one_entity), 1.0, 4, documents=documents)
    assert packed.result().values["entity_f1"] == 1.0
    unaware = EvalAccumulator("tags", BIO)
    unaware.update(torch.eye(5)[guess], torch.tensor(one_entity), 1.0, 4)
    assert unaware.result().values["entity_f1"] == 0.0


def test_entity_scores_need_bio_names():
    labels = np.array([[0, 1]])
    for names in (None, ["NOUN", "VERB"], ["O", "S-PER"]):
        assert "entity_f1" not in compute_metrics("tags", np.eye(2)[labels], labels, names).values


def test_ignored_labels_do_not_count():
    logits = np.array([[[0.0, 3.0], [3.0, 0.0], [0.0, 3.0]]])
    found = compute_metrics("tags", logits, np.array([[1, 1, -100]]), ["A", "B"])
    assert found.values["accuracy"] == 0.5
    assert found.confusion_matrix == [[0, 0], [1, 1]]


@pytest.mark.parametrize("task", ["causal-lm", "seq2seq"])
def test_language_model(task):
    rng = np.random.default_rng(5)
    logits, labels = rng.normal(size=(3, 7, 11)), rng.integers(0, 11, (3, 7))
    labels[0, :4] = -100
    flat = torch.tensor(logits).reshape(-1, 11)
    loss = torch.nn.functional.cross_entropy(flat, torch.tensor(labels).reshape(-1)).item()
    found = compute_metrics(task_named(task).metrics(None), logits, labels).values
    kept = labels != -100
    assert found["loss"] == pytest.approx(loss)
    assert found["perplexity"] == pytest.approx(math.exp(loss))
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == labels)[kept].mean())


def test_accumulated_language_model_equals_the_whole():
    rng = np.random.default_rng(6)
    logits = torch.tensor(rng.normal(size=(4, 5, 13)), dtype=torch.float32)
    labels = torch.tensor(rng.integers(0, 13, (4, 5)))
    labels[1, 2:] = -100
    accumulator = EvalAccumulator("tokens")
    for rows in (slice(0, 1), slice(1, 4)):
        loss_sum = torch.nn.functional.cross_entropy(
            logits[rows].reshape(-1, 13), labels[rows].reshape(-1), reduction="sum"
        )
        accumulator.update(logits[rows], labels[rows], loss_sum, int((labels[rows] != -100).sum()), (0,))
    whole = compute_metrics("tokens", logits.numpy(), labels.numpy()).values
    assert accumulator.result().values == pytest.approx(whole, rel=1e-6)
    kept = [value for value in vars(accumulator).values() if isinstance(value, list) and value and value != [0, 0]]
    assert kept == []  # no logits are held back


def test_language_model_without_logits_reports_no_accuracy():
    accumulator = EvalAccumulator("tokens")
    accumulator.update(None, torch.zeros(4, dtype=torch.long), torch.tensor(8.0), 4)
    assert accumulator.result().values == pytest.approx({"loss": 2.0, "perplexity": math.exp(2.0)})


def test_perplexity_of_a_huge_or_diverged_loss():
    for loss, expected in ((1e6, math.inf), (math.inf, math.inf)):
        accumulator = EvalAccumulator("tokens")
        accumulator.update(None, torch.zeros(1), loss, 1)
        assert accumulator.result().values["perplexity"] == expected
    accumulator = EvalAccumulator("tokens")
    accumulator.update(None, torch.zeros(1), math.nan, 1)
    assert math.isnan(accumulator.result().values["perplexity"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulated_classifier_equals_the_whole_and_drops_padded_slots(dtype):
    rng = np.random.default_rng(7)
    logits = torch.tensor(rng.normal(size=(9, 3))).to(dtype)
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, -100, -100])
    accumulator = EvalAccumulator(SINGLE, ["a", "b", "c"])
    buffer = torch.empty(3, 3, dtype=dtype)  # the same memory for every batch, as a captured step has
    for first in (0, 3, 6):
        buffer.copy_(logits[first : first + 3])
        part = labels[first : first + 3]
        accumulator.update(buffer, part, torch.tensor(1.5), int((part != -100).sum()), range(first, first + 3))
    found = accumulator.result()
    whole = compute_metrics(SINGLE, logits[:7].float().numpy(), labels[:7].numpy())
    assert found.values == pytest.approx(whole.values | {"loss": 4.5 / 7})
    assert found.confusion_matrix == whole.confusion_matrix
    assert accumulator.indices == tuple(range(9))


def test_metrics_in_the_words_of_others():
    asked = ["eval_loss", "eval_matthews_correlation", "roc_auc", "pearsonr", "f1"]
    assert [metric_called(name) for name in asked] == ["loss", "mcc", "auroc", "pearson", "f1"]
    assert all(better(name) for name in map(metric_called, ALSO_CALLED))


def test_accumulated_regression_drops_padded_slots_and_no_target():
    accumulator = EvalAccumulator("regression")
    targets = torch.tensor([[1.0], [4.0], [torch.nan], [-100.0]])  # -100 is a temperature like any other
    accumulator.update(torch.tensor([[1.0], [2.0], [9.0], [-99.0]]), targets, 5.0, 3)
    assert accumulator.result().values["mse"] == pytest.approx(5 / 3)


def test_examples_that_weigh_nothing_are_not_missing():
    accumulator = EvalAccumulator(SINGLE)
    accumulator.update(torch.zeros(2, 2), torch.tensor([1, 1]), 0.0, 0)
    with pytest.raises(UserError, match=r"whose weight in loss_fn\.class_weights is 0"):
        accumulator.result()


def test_an_evaluation_of_nothing_says_so():
    with pytest.raises(UserError, match="no labelled example"):
        EvalAccumulator("tokens").result()
    with pytest.raises(UserError, match="no labelled example"):
        compute_metrics(SINGLE, np.zeros((1, 2)), np.array([-100]))


@pytest.mark.parametrize(
    ("name", "direction"),
    [("loss", "min"), ("perplexity", "min"), ("rmse", "min"), ("accuracy", "max"), ("r2", "max"), ("entity_f1", "max")],
)
def test_better(name, direction):
    assert better(name) == direction


def test_an_unknown_metric_gets_the_nearest_name():
    with pytest.raises(UserError, match=r"unknown metric 'acuracy' \(did you mean 'accuracy'\?\); known metrics: "):
        better("acuracy")


@pytest.mark.parametrize(
    ("task", "problem_type"),
    [("text-classification", SINGLE), ("text-classification", MULTI), ("text-classification", "regression")],
)
def test_every_reported_metric_is_a_known_one(task, problem_type):
    rng = np.random.default_rng(8)
    labels = rng.integers(0, 2, 20) if problem_type == SINGLE else rng.integers(0, 2, (20, 2)).astype(float)
    reported = compute_metrics(task_named(task).metrics(problem_type), rng.normal(size=(20, 2)), labels).values
    assert {"loss", *reported} == set(metric_names(task_named(task).metrics(problem_type)))
    assert all(better(name) for name in reported)


def test_classes_that_only_num_labels_asks_for_hide_no_entities():
    from automodel.metrics.scores import is_bio

    assert is_bio(["O", "B-PER", "I-PER", "LABEL_3"])
    assert not is_bio(["LABEL_0", "LABEL_1"])
    assert not is_bio(["O", "B-PER", "E-PER"])
