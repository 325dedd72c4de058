"""The arithmetic of evaluation: arrays in, named numbers out.

One function for each kind of task. They hold the conventions, which are worth reading before comparing numbers with
another tool:

- **Two classes**: `f1`, `precision` and `recall` are those of the positive class (index 1), as on GLUE's MRPC and QQP.
- **More classes**: they are macro averages over the classes that occur in the labels or in the predictions
  (scikit-learn's default); a class that nobody has and nobody predicts does not pull the mean down.
- **AUROC** of more than two classes is one-vs-rest, averaged over the classes for which it is defined, i.e. that have
  both members and non-members in the data. Where it is defined for none (one class only) it is left out of the result.
- **Multi-label** predictions are `sigmoid(logit) > 0.5`; `accuracy` is subset accuracy (every label right).
- **Entities** follow conlleval: `B-X` always starts one, `I-X` continues one of the same type and otherwise starts one.

Written out in numpy, since scikit-learn and scipy take over a second to import; tests hold every number against them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

IGNORE = -100  # label of a position that carries no loss, as in automodel.data.batch
LARGEST_CONFUSION_MATRIX = 200  # classes; beyond it the matrix (C×C numbers in summary.json) helps nobody


def single_label_scores(logits_NC: np.ndarray, labels_N: np.ndarray) -> dict[str, float]:
    """Accuracy, F1, precision, recall, MCC and AUROC of a one-of-C classifier."""
    predictions_N = logits_NC.argmax(-1)
    scores = label_agreement(predictions_N, labels_N, num_classes=logits_NC.shape[-1])
    probabilities_NC = _softmax(logits_NC)
    if logits_NC.shape[-1] == 2:
        auroc = _auroc((labels_N == 1)[:, None], probabilities_NC[:, 1:])
    else:
        auroc = _auroc(labels_N[:, None] == np.arange(logits_NC.shape[-1]), probabilities_NC)
    if auroc is not None:
        scores["auroc"] = auroc
    return scores


def label_agreement(predictions_N: np.ndarray, labels_N: np.ndarray, num_classes: int) -> dict[str, float]:
    """What can be said from hard predictions alone."""
    counts = _Counts(predictions_N, labels_N)
    averaged_C = counts.classes_C == 1 if num_classes == 2 else np.ones(len(counts.classes_C), bool)
    return {
        "accuracy": float((predictions_N == labels_N).mean()),
        "f1": _mean_ratio(2 * counts.right_C, counts.predicted_C + counts.true_C, averaged_C),
        "precision": _mean_ratio(counts.right_C, counts.predicted_C, averaged_C),
        "recall": _mean_ratio(counts.right_C, counts.true_C, averaged_C),
        "mcc": counts.matthews_correlation(),
    }


class _Counts:
    """How often each class that occurs was predicted, true, and both."""

    def __init__(self, predictions_N: np.ndarray, labels_N: np.ndarray):
        self.classes_C = np.union1d(labels_N, predictions_N)
        self.predicted_C = self._count(predictions_N)
        self.true_C = self._count(labels_N)
        self.right_C = self._count(labels_N[predictions_N == labels_N])

    def _count(self, values_N: np.ndarray) -> np.ndarray:
        return np.bincount(np.searchsorted(self.classes_C, values_N), minlength=len(self.classes_C))

    def matthews_correlation(self) -> float:
        """Correlation of predictions with labels, for any number of classes; 0 where either has only one."""
        right_C, predicted_C, true_C = (
            counts.astype(np.float64) for counts in (self.right_C, self.predicted_C, self.true_C)
        )
        total = true_C.sum()
        together = right_C.sum() * total - predicted_C @ true_C
        alone = (total**2 - predicted_C @ predicted_C) * (total**2 - true_C @ true_C)
        return float(together / math.sqrt(alone)) if alone > 0 else 0.0


def _mean_ratio(part_C: np.ndarray, whole_C: np.ndarray, averaged_C: np.ndarray) -> float:
    """Mean of part / whole over the chosen classes, 0 for a class without a whole, and 0 without classes."""
    ratios = part_C[averaged_C] / np.maximum(whole_C[averaged_C], 1)
    return float(ratios.mean()) if len(ratios) else 0.0


def multi_label_scores(logits_NC: np.ndarray, labels_NC: np.ndarray) -> dict[str, float]:
    """Subset accuracy, micro and macro F1, macro AUROC of a some-of-C classifier."""
    truth_NC = labels_NC > 0.5
    predictions_NC = logits_NC > 0.0  # sigmoid(0) = 0.5
    right_C = (truth_NC & predictions_NC).sum(0)
    wrong_C = (truth_NC ^ predictions_NC).sum(0)
    scores = {
        "accuracy": float((predictions_NC == truth_NC).all(-1).mean()),
        "f1_micro": _ratio(2 * right_C.sum(), 2 * right_C.sum() + wrong_C.sum()),
        "f1_macro": float(np.mean([_ratio(2 * right, 2 * right + wrong) for right, wrong in zip(right_C, wrong_C)])),
    }
    auroc = _auroc(truth_NC, logits_NC)
    if auroc is not None:
        scores["auroc"] = auroc
    return scores


def regression_scores(outputs: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Errors and correlations; with several targets, correlations and R² are means over them.

    A correlation with a constant is not defined and is reported as NaN, as scipy does."""
    outputs_NK = outputs.reshape(len(outputs), -1).astype(np.float64)
    targets_NK = targets.reshape(len(targets), -1).astype(np.float64)
    if outputs_NK.shape != targets_NK.shape:
        raise ValueError(f"{outputs_NK.shape[1]} outputs for {targets_NK.shape[1]} regression targets")
    error_NK = outputs_NK - targets_NK
    mse = float((error_NK**2).mean())
    total_K = ((targets_NK - targets_NK.mean(0)) ** 2).sum(0)
    residual_K = (error_NK**2).sum(0)
    r2_K = np.where(total_K > 0, 1.0 - residual_K / np.where(total_K > 0, total_K, 1.0), np.nan)
    columns = range(outputs_NK.shape[1])
    return {
        "mse": mse,
        "rmse": math.sqrt(mse) if mse == mse else math.nan,
        "mae": float(np.abs(error_NK).mean()),
        "pearson": float(np.mean([_pearson(outputs_NK[:, k], targets_NK[:, k]) for k in columns])),
        "spearman": float(np.mean([_spearman(outputs_NK[:, k], targets_NK[:, k]) for k in columns])),
        "r2": float(np.mean(r2_K)),
    }


def token_scores(
    predictions_N: np.ndarray, labels_N: np.ndarray, documents_N: np.ndarray, label_names: Sequence[str] | None
) -> dict[str, float]:
    """Token accuracy and macro F1; entity precision, recall and F1 where the label names are BIO.

    `documents_N` numbers the document of each token: an entity never crosses into the next one."""
    counts = _Counts(predictions_N, labels_N)
    every_C = np.ones(len(counts.classes_C), bool)
    scores = {
        "accuracy": float((predictions_N == labels_N).mean()),
        "token_f1": _mean_ratio(2 * counts.right_C, counts.predicted_C + counts.true_C, every_C),
    }
    if label_names is not None and is_bio(label_names):
        scores |= entity_scores(
            entity_spans(labels_N, documents_N, label_names), entity_spans(predictions_N, documents_N, label_names)
        )
    return scores


def is_bio(label_names: Sequence[str]) -> bool:
    """Whether every label is `O`, `B-…` or `I-…` and there are entities among them; a class that only `num_labels` asks
    for (`LABEL_5`) is in none.

    Other schemes (BIOES) get no entity scores rather than wrong ones."""
    return any(name[:2] in ("B-", "I-") for name in label_names) and all(
        name == "O" or name[:2] in ("B-", "I-") or name.startswith("LABEL_") for name in label_names
    )


def entity_spans(
    labels_N: np.ndarray, documents_N: np.ndarray, label_names: Sequence[str]
) -> set[tuple[int, int, str]]:
    """Entities as (first token, last token, type)."""
    spans = set()
    start, kind = 0, ""
    previous_document = None
    for place, (label, document) in enumerate(zip(labels_N.tolist(), documents_N.tolist())):
        name = label_names[label]
        prefix, new_kind = name[:2], name[2:]
        outside = prefix not in ("B-", "I-")
        continues = not outside and prefix == "I-" and kind == new_kind and document == previous_document
        if kind and not continues:
            spans.add((start, place - 1, kind))
            kind = ""
        if not outside and not continues:
            start, kind = place, new_kind
        previous_document = document
    if kind:
        spans.add((start, len(labels_N) - 1, kind))
    return spans


def entity_scores(truth: set[tuple[int, int, str]], predicted: set[tuple[int, int, str]]) -> dict[str, float]:
    """Precision, recall and micro F1 over exact spans with their types."""
    right = len(truth & predicted)
    precision = right / len(predicted) if predicted else 0.0
    recall = right / len(truth) if truth else 0.0
    f1 = 2 * precision * recall / (precision + recall) if right else 0.0
    return {"entity_f1": f1, "entity_precision": precision, "entity_recall": recall}


def language_model_scores(loss_sum: float, correct: float | None, count: float) -> dict[str, float]:
    """Perplexity and token accuracy from sums over the tokens that carry a label."""
    mean_loss = loss_sum / count
    scores = {"perplexity": math.exp(mean_loss) if mean_loss < 700.0 else (math.inf if mean_loss > 0 else math.nan)}
    if correct is not None:
        scores["accuracy"] = correct / count
    return scores


def negative_log_likelihood(logits_NV: np.ndarray, labels_N: np.ndarray) -> float:
    """Summed -log p(label), in float64."""
    logits_NV = logits_NV.astype(np.float64)
    peak_N = logits_NV.max(-1)
    log_sum_N = peak_N + np.log(np.exp(logits_NV - peak_N[:, None]).sum(-1))
    return float((log_sum_N - logits_NV[np.arange(len(labels_N)), labels_N]).sum())


def confusion(predictions_N: np.ndarray, labels_N: np.ndarray, num_classes: int) -> list[list[int]] | None:
    """Counts with true classes as rows and predicted ones as columns; None for very many classes."""
    if num_classes > LARGEST_CONFUSION_MATRIX:
        return None
    cells = labels_N.astype(np.int64) * num_classes + predictions_N.astype(np.int64)
    return np.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes).tolist()


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


def _softmax(logits_NC: np.ndarray) -> np.ndarray:
    weights_NC = np.exp(logits_NC.astype(np.float64) - logits_NC.max(-1, keepdims=True))
    return weights_NC / weights_NC.sum(-1, keepdims=True)


def _auroc(truth_NC: np.ndarray, scores_NC: np.ndarray) -> float | None:
    """Mean over the columns that have both positives and negatives; None where there is none, or scores are NaN."""
    if not np.isfinite(scores_NC).all():
        return None
    defined = [c for c in range(truth_NC.shape[1]) if truth_NC[:, c].any() and not truth_NC[:, c].all()]
    if not defined:
        return None
    return float(np.mean([_area_under_roc(truth_NC[:, c], scores_NC[:, c]) for c in defined]))


def _area_under_roc(truth_N: np.ndarray, scores_N: np.ndarray) -> float:
    """The chance that a member scores above a non-member (ties count half), which is the area."""
    members = int(truth_N.sum())
    others = len(truth_N) - members
    above = _ranks(scores_N)[truth_N].sum() - members * (members + 1) / 2
    return float(above / (members * others))


def _ranks(values_N: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of theirs."""
    _, group_N, sizes = np.unique(values_N, return_inverse=True, return_counts=True)
    return (sizes.cumsum() - (sizes - 1) / 2)[group_N]


def _pearson(a_N: np.ndarray, b_N: np.ndarray) -> float:
    if not _correlates(a_N, b_N):
        return math.nan
    a_N, b_N = a_N - a_N.mean(), b_N - b_N.mean()
    # Scaled before squaring: very large or small values neither overflow nor vanish.
    a_N, b_N = a_N / np.abs(a_N).max(), b_N / np.abs(b_N).max()
    return float(np.clip(a_N @ b_N / math.sqrt((a_N @ a_N) * (b_N @ b_N)), -1.0, 1.0))


def _spearman(a_N: np.ndarray, b_N: np.ndarray) -> float:
    return _pearson(_ranks(a_N), _ranks(b_N)) if _correlates(a_N, b_N) else math.nan


def _correlates(a_N: np.ndarray, b_N: np.ndarray) -> bool:
    """Whether a correlation is defined: two points or more, finite, neither side constant."""
    finite = bool(np.isfinite(a_N).all() and np.isfinite(b_N).all())
    return finite and len(a_N) > 1 and np.ptp(a_N) > 0 and np.ptp(b_N) > 0
