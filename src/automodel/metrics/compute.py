"""Evaluation metrics by the kind of what is scored, from arrays or batch by batch.

`compute_metrics` takes all logits and labels at once. `EvalAccumulator` takes them as an evaluation produces them and
is what the engine uses: a classifier's logits are small and are kept, of tags only the predictions are kept,
and a language model keeps three numbers (summed loss, right tokens, tokens), since the logits of one evaluation of a
128k vocabulary would not fit anywhere. Everything stays on the device until `.result()`, which waits for it once.

The conventions (binary or macro F1, AUROC, entities) are described in `scores.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from automodel.config.errors import UserError
from automodel.metrics import scores
from automodel.metrics.scores import IGNORE

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["single_label_classification", "multi_label_classification", "regression", "tags", "tokens"]
"""What is scored: documents with a class, with several classes or with numbers; words with a tag; tokens of a language
model."""

SMALLER_IS_BETTER = ("loss", "mse", "rmse", "mae", "perplexity")

ALSO_CALLED = {
    "matthews_correlation": "mcc",
    "roc_auc": "auroc",
    "pearsonr": "pearson",
    "spearmanr": "spearman",
    "mean_squared_error": "mse",
    "mean_absolute_error": "mae",
    "root_mean_squared_error": "rmse",
    "r_squared": "r2",
}  # by `evaluate` and scikit-learn

_NAMES: dict[Kind, tuple[str, ...]] = {
    "single_label_classification": ("loss", "accuracy", "f1", "precision", "recall", "mcc", "auroc"),
    "multi_label_classification": ("loss", "accuracy", "f1_micro", "f1_macro", "auroc"),
    "regression": ("loss", "mse", "rmse", "mae", "pearson", "spearman", "r2"),
    "tags": ("loss", "accuracy", "token_f1", "entity_f1", "entity_precision", "entity_recall"),
    "tokens": ("loss", "perplexity", "accuracy"),
}


@dataclass(frozen=True)
class EvalMetrics:
    """What an evaluation found."""

    values: dict[str, float]
    """Metric name to value; see `metric_names`. What is not defined on the data (AUROC of one class) is absent."""
    confusion_matrix: list[list[int]] | None = None
    """Counts, true classes as rows; single-label classification and tags only."""


def metric_names(kind: Kind) -> tuple[str, ...]:
    """The metrics an evaluation of this kind can report, e.g. for `checkpoint.best_metric`."""
    return _NAMES[kind]


def metric_called(name: str) -> str:
    """A metric's name here, for one in Trainer's words (`eval_loss`) or in `evaluate`'s (`matthews_correlation`)."""
    plain = name.removeprefix("eval_")
    return ALSO_CALLED.get(plain, plain)


def is_known(metric_name: str) -> bool:
    """Whether evaluations of some kind measure it."""
    return any(metric_name in names for names in _NAMES.values())


def better(metric_name: str) -> Literal["min", "max"]:
    """Whether smaller or larger values of a built-in metric are better."""
    known = sorted({name for names in _NAMES.values() for name in names})
    if metric_name not in known:
        close = difflib.get_close_matches(metric_name, known, n=1)
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        raise UserError(f"unknown metric '{metric_name}'{hint}; known metrics: {', '.join(known)}")
    return "min" if metric_name in SMALLER_IS_BETTER else "max"


def compute_metrics(
    kind: Kind,
    logits: np.ndarray,
    labels: np.ndarray,
    label_names: Sequence[str] | None = None,
) -> EvalMetrics:
    """Metrics of a whole evaluation. Labels of IGNORE (-100) are left out, and NaN among decimals.

    Shapes: logits (N, C) with labels (N,) or, for multi-label and regression, (N, C); tags and tokens (N, S, C) with
    labels (N, S), already aligned (the causal shift is done where the labels are made).
    """
    if kind == "tags":
        documents = np.broadcast_to(np.arange(len(labels)).reshape(-1, *[1] * (labels.ndim - 1)), labels.shape)
        if labels.ndim == 1:
            documents = np.zeros(len(labels), dtype=np.int64)
        return _token_metrics(logits.argmax(-1), labels, documents, logits.shape[-1], label_names)
    if kind == "tokens":
        flat_NV, labels_N = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        flat_NV, labels_N = flat_NV[labels_N != IGNORE], labels_N[labels_N != IGNORE]
        _require_some(len(labels_N))
        loss_sum = scores.negative_log_likelihood(flat_NV, labels_N)
        correct = float((flat_NV.argmax(-1) == labels_N).sum())
        values = {"loss": loss_sum / len(labels_N)}
        return EvalMetrics(values | scores.language_model_scores(loss_sum, correct, len(labels_N)))
    return _sequence_metrics(kind, logits, labels)


class EvalAccumulator:
    """Collects an evaluation batch by batch.

    >>> accumulator = EvalAccumulator("single_label_classification", ["neg", "pos"])
    >>> accumulator.update(logits, labels, loss_sum, count)   # for each batch; no device sync
    >>> accumulator.result().values["accuracy"]
    """

    def __init__(self, kind: Kind, label_names: Sequence[str] | None = None):
        self.kind = kind
        self.label_names = label_names
        self._loss_sum: Tensor | float = 0.0
        self._count = 0
        self._correct: Tensor | float | None = None
        self._num_classes = 0
        self._logits: list[Tensor] = []  # logits, or predictions for tags
        self._labels: list[Tensor] = []
        self._documents: list[Tensor] = []
        self._next_document = 0
        self._indices: list[int] = []

    def update(
        self,
        logits: Tensor | None,
        labels: Tensor,
        loss_sum: Tensor | float,
        count: float,
        indices: Sequence[int] = (),
        documents: Tensor | None = None,
        right: Tensor | None = None,
    ) -> None:
        """Add a batch: logits aligned with labels, the loss summed over its `count` labels, and its dataset rows.

        `documents` gives the document number (from 0, in this batch) of each label of a packed batch, so that entities
        end with their document; rows of a rectangle are documents of their own. A language model may pass
        `logits=None` where the loss never made them, with the number of `right` tokens, if that was counted: else token
        accuracy is left out.
        """
        self._loss_sum = self._loss_sum + _float64(loss_sum)
        self._count += count
        self._indices.extend(indices)
        if self.kind == "tokens":
            self._count_right_tokens(logits, labels, right)
            return
        if logits is None:
            raise ValueError(f"{self.kind} metrics need the logits")
        self._num_classes = logits.shape[-1]
        if self.kind == "tags":
            self._keep_tokens(logits, labels, documents)
            return
        # Copied: with captured steps the same buffers are written again by the next batch.
        self._logits.append(logits.detach().float().clone())
        self._labels.append(labels.detach().clone())

    @property
    def indices(self) -> tuple[int, ...]:
        """Dataset rows seen so far, in order."""
        return tuple(self._indices)

    def result(self) -> EvalMetrics:
        """The metrics of everything seen; the only place that waits for the device."""
        if not self._count and any(bool((labels != IGNORE).any()) for labels in self._labels):
            raise UserError(
                "validation_dataset: every example is of a class whose weight in loss_fn.class_weights is 0, so there "
                "is no loss to measure. Give one of its classes a weight, or remove loss_fn.class_weights."
            )
        _require_some(self._count)
        loss_sum = float(self._loss_sum)
        values = {"loss": loss_sum / self._count}
        if self.kind == "tokens":
            correct = None if self._correct is None else float(self._correct)
            return EvalMetrics(values | scores.language_model_scores(loss_sum, correct, self._count))
        outputs, labels = _joined(self._logits), _joined(self._labels)
        if self.kind == "tags":
            found = _token_metrics(outputs, labels, _joined(self._documents), self._num_classes, self.label_names)
        else:
            found = _sequence_metrics(self.kind, outputs, labels)
        return EvalMetrics(values | found.values, found.confusion_matrix)

    def sums(self) -> list[float]:
        """Of a language model: loss, labels and right tokens so far, which ranks can add up. Waits for the device."""
        return [float(self._loss_sum), float(self._count), float(self._correct or 0.0)]

    def take_sums(self, sums: Sequence[float]) -> None:
        """Goes on with sums that were added up elsewhere."""
        self._loss_sum, self._count = sums[0], int(sums[1])
        self._correct = None if self._correct is None else sums[2]

    def _count_right_tokens(self, logits: Tensor | None, labels: Tensor, right: Tensor | None) -> None:
        if logits is not None:
            right = ((logits.detach().argmax(-1) == labels) & (labels != IGNORE)).sum()
        if right is None:
            return
        self._correct = right if self._correct is None else self._correct + right

    def _keep_tokens(self, logits: Tensor, labels: Tensor, documents: Tensor | None) -> None:
        import torch

        if documents is None:
            rows = labels.shape[0] if labels.dim() == 2 else 1
            documents = torch.arange(rows, device=labels.device).reshape(-1, *[1] * (labels.dim() - 1))
            documents = documents.expand(labels.shape)
            documents_used = rows
        else:
            documents_used = documents.numel()  # an upper bound that needs no device sync; only order matters
        self._documents.append((documents + self._next_document).reshape(-1))
        self._next_document += documents_used
        self._logits.append(logits.detach().argmax(-1).reshape(-1))
        self._labels.append(labels.detach().clone().reshape(-1))


def _sequence_metrics(kind: Kind, logits: np.ndarray, labels: np.ndarray) -> EvalMetrics:
    """One label, or one vector of labels, for each row of logits."""
    flat = labels.reshape(len(labels), -1)
    kept = (~np.isnan(flat) if flat.dtype.kind == "f" else flat != IGNORE).any(-1)  # -100.0 may be a real target
    logits, labels = logits[kept], labels[kept]
    _require_some(len(labels))
    if kind == "regression":
        return EvalMetrics(scores.regression_scores(logits, labels))
    if kind == "multi_label_classification":
        return EvalMetrics(scores.multi_label_scores(logits, labels))
    labels_N = labels.reshape(-1).astype(np.int64)
    matrix = scores.confusion(logits.argmax(-1), labels_N, logits.shape[-1])
    return EvalMetrics(scores.single_label_scores(logits, labels_N), matrix)


def _token_metrics(
    predictions: np.ndarray,
    labels: np.ndarray,
    documents: np.ndarray,
    num_classes: int,
    label_names: Sequence[str] | None,
) -> EvalMetrics:
    predictions_N, labels_N, documents_N = predictions.reshape(-1), labels.reshape(-1), documents.reshape(-1)
    kept_N = labels_N != IGNORE
    predictions_N, labels_N, documents_N = predictions_N[kept_N], labels_N[kept_N], documents_N[kept_N]
    _require_some(len(labels_N))
    values = scores.token_scores(predictions_N, labels_N, documents_N, label_names)
    return EvalMetrics(values, scores.confusion(predictions_N, labels_N, num_classes))


def _require_some(count: float) -> None:
    if count == 0:
        raise UserError(
            "validation_dataset: there is no labelled example to evaluate; check its split and label column"
        )


def _float64(value: Tensor | float) -> Tensor | float:
    """Sums of many batches are kept in double precision; a tensor stays where it is."""
    return value if isinstance(value, int | float) else value.detach().double()


def _joined(tensors: list[Tensor]) -> np.ndarray:
    import torch

    return torch.cat(tensors).cpu().numpy()
