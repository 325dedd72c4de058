"""Rows that are tokenised already (`input_ids`, and `labels` where the task needs them): taken as they are.

Padding that was stored with them (`attention_mask` 0) is left out again, since batches are packed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from automodel.data.batch import IGNORE
from automodel.data.classify import named
from automodel.data.labels import BadLabel, LabelMap
from automodel.data.samples import SampleWriter


@dataclass(frozen=True)
class ReadyRows:
    """Already tokenised rows of any task."""

    task: str
    vocabulary: int
    max_length: int
    max_target_length: int
    token_types: bool
    label: str | None
    """Column of labels: a class (text classification), or a list beside the tokens (the other tasks)."""
    labels: LabelMap | None
    mask: bool
    """The rows have an `attention_mask`."""
    class_names: tuple[str, ...] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        optional = [
            (self.mask, "attention_mask"),
            (self.token_types, "token_type_ids"),
            (self.label is not None, self.label or ""),
        ]
        return ("input_ids", *(name for wanted, name in optional if wanted))

    def encode(self, rows: dict[str, list], first: int, out: SampleWriter) -> None:
        for i in range(len(rows["input_ids"])):
            try:
                self._one({name: rows[name][i] for name in self.columns}, first + i, out)
            except BadLabel as error:
                out.reject(first + i, str(error))

    def _one(self, row: dict[str, Any], number: int, out: SampleWriter) -> None:
        ids, types, labels = row["input_ids"], row.get("token_type_ids"), self._beside(row)
        if not ids:
            raise BadLabel("input_ids is empty")
        mask = row["attention_mask"] if self.mask else None
        for name, beside in (("labels", labels), ("attention_mask", mask), ("token_type_ids", types)):
            if beside is not None and len(beside) != len(ids):
                raise BadLabel(f"the row has {len(ids)} input_ids but {len(beside)} {name}")
        if mask is not None:
            keep = [k for k, m in enumerate(mask) if m]
            ids = [ids[k] for k in keep]
            types = None if types is None else [types[k] for k in keep]
            labels = None if labels is None else [labels[k] for k in keep]
        self._check_tokens(ids, "token")
        limit = self.max_length
        parts: dict[str, Any] = {"token_types": types[:limit] if types is not None else None}
        if self.task == "text-classification":
            assert self.labels is not None
            assert self.label is not None
            parts["label"] = self.labels(named(row[self.label], self.class_names))
        elif self.task == "seq2seq":
            target = [t for t in row[self.label or "labels"] or () if t != IGNORE]
            if not target:
                raise BadLabel("labels is empty")
            self._check_tokens(target, "label")
            parts["target_ids"] = target[: self.max_target_length]
        else:
            parts["token_labels"] = self._supervised(ids if labels is None else labels)[:limit]
            shifted = parts["token_labels"][1:] if self.task == "causal-lm" else parts["token_labels"]
            if all(label == IGNORE for label in shifted):
                raise BadLabel("no token of the row carries a label")
        out.truncated += len(ids) > limit
        out.add(number, ids[:limit], **parts)

    def _check_tokens(self, tokens: list, what: str) -> None:
        outside = next((t for t in tokens if t is None or not 0 <= t < self.vocabulary), 0)
        if outside is None:
            raise BadLabel(f"a {what} is missing (null)")
        if outside:
            raise BadLabel(f"{what} {outside} is outside the tokenizer's vocabulary of {self.vocabulary:,}")

    def _beside(self, row: dict[str, Any]) -> list | None:
        """Labels that stand beside the tokens."""
        if self.task not in ("causal-lm", "token-classification") or self.label is None:
            return None
        if row[self.label] is None:
            raise BadLabel(f"{self.label} is missing")
        return row[self.label]

    def _supervised(self, labels: list) -> list[int]:
        if self.task == "causal-lm":
            self._check_tokens([label for label in labels if label != IGNORE], "label")
            return labels
        assert self.labels is not None
        return [IGNORE if tag == IGNORE else self.labels.class_id(named(tag, self.class_names)) for tag in labels]
