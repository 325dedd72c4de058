"""The numpy arithmetic of `scores` against scikit-learn and scipy, on random data with ties and missing classes."""

import subprocess
import sys

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn import metrics as sk

from automodel.metrics.scores import label_agreement, regression_scores, single_label_scores, token_scores


@pytest.mark.parametrize("classes", [2, 3, 40])
@pytest.mark.parametrize("seed", range(4))
def test_hard_predictions(classes, seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 60))  # few rows for 40 classes: many never occur
    labels, predictions = random.integers(0, classes, count), random.integers(0, classes, count)
    if seed == 3:
        predictions[:] = 0  # nothing but one class
    chosen = [1] if classes == 2 else np.union1d(labels, predictions)
    precision, recall, f1, _ = sk.precision_recall_fscore_support(
        labels, predictions, labels=chosen, average="macro", zero_division=0
    )
    scores = label_agreement(predictions, labels, classes)
    expected = {"f1": f1, "precision": precision, "recall": recall, "mcc": sk.matthews_corrcoef(labels, predictions)}
    assert {name: scores[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    token_f1 = sk.f1_score(labels, predictions, average="macro", zero_division=0)
    tagged = token_scores(predictions, labels, np.zeros(count, np.int64), None)
    assert tagged["token_f1"] == pytest.approx(token_f1, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_area_under_roc_counts_ties_half(seed):
    random = np.random.default_rng(seed)
    labels = np.arange(50) % 2
    logits = random.integers(-2, 3, (50, 2)).astype(np.float32)  # few values: many ties
    expected = sk.roc_auc_score(labels, (logits[:, 1] - logits[:, 0]))
    assert single_label_scores(logits, labels)["auroc"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("scale", [1.0, 1e-160, 1e160])
def test_correlations(scale):
    random = np.random.default_rng(0)
    targets = random.integers(0, 6, 40) * scale  # ratings: many ties
    outputs = (targets / scale + random.normal(size=40)) * scale
    scores = regression_scores(outputs, targets) if scale == 1.0 else None
    if scores is None:  # squares of such numbers are out of range, correlations are not
        from automodel.metrics.scores import _pearson, _spearman

        scores = {"pearson": _pearson(outputs, targets), "spearman": _spearman(outputs, targets)}
    assert scores["pearson"] == pytest.approx(pearsonr(outputs / scale, targets / scale).statistic, abs=1e-12)
    assert scores["spearman"] == pytest.approx(spearmanr(outputs, targets).statistic, abs=1e-12)


def test_neither_library_is_imported():
    code = (
        "import sys, numpy as np\n"
        "from automodel.metrics import compute, scores\n"
        "labels = np.arange(8) % 2\n"
        "scores.single_label_scores(np.eye(2)[labels], labels)\n"
        "scores.regression_scores(labels * 1.0, labels + 0.5)\n"
        "print([m for m in ('sklearn', 'scipy', 'pandas') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
