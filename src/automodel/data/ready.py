"""Rows that are tokenised already (`input_ids`, and `labels` where the task needs them): taken as they are.

Padding that was stored with them (`attention_mask` 0) is left out again, since batches are packed here. Rows of a
language model that somebody packed, and that say so (`seq_lengths`, or `position_ids` that begin anew), are taken
apart: documents never see each other. What is learned may be said by a mask beside the tokens instead of labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from automodel.config.errors import UserError
from automodel.data.batch import IGNORE
from automodel.data.classify import named
from automodel.data.columns import Columns
from automodel.data.labels import BadLabel, LabelMap
from automodel.data.row_format import LabelPlace
from automodel.data.samples import SampleWriter

LEARNED = ("completion_mask", "assistant_masks")  # 1 beside a token that is learned: TRL's and transformers' names
DOCUMENTS = ("seq_lengths", "position_ids")


@dataclass(frozen=True)
class ReadyRows:
    """Already tokenised rows of any task."""

    place: LabelPlace
    vocabulary: int
    max_length: int
    max_target_length: int
    token_types: bool
    label: str | None
    """Column of labels: a class of the document, or a list beside the tokens."""
    labels: LabelMap | None
    mask: bool
    """The rows have an `attention_mask`."""
    class_names: tuple[str, ...] | None = None
    learned: tuple[str, ...] = ()
    """Columns of `LEARNED` that a language model's rows have."""
    documents: str | None = None
    """That of `DOCUMENTS`."""

    @property
    def columns(self) -> tuple[str, ...]:
        optional = [
            (self.mask, "attention_mask"),
            (self.token_types, "token_type_ids"),
            (self.label is not None, self.label or ""),
        ]
        own = (*self.learned, *([self.documents] if self.documents else ()))
        return ("input_ids", *(name for wanted, name in optional if wanted), *own)

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
        others = {name: row[name] for name in (*self.learned, "position_ids") if name in row}
        for name, beside in {"labels": labels, "attention_mask": mask, "token_type_ids": types, **others}.items():
            if beside is not None and len(beside) != len(ids):
                raise BadLabel(f"the row has {len(ids)} input_ids but {len(beside)} {name}")
        if mask is not None:
            keep = [k for k, m in enumerate(mask) if m]
            ids = [ids[k] for k in keep]
            types = None if types is None else [types[k] for k in keep]
            labels = None if labels is None else [labels[k] for k in keep]
            row = {**row, **{name: [beside[k] for k in keep] for name, beside in others.items() if beside is not None}}
        self._check_tokens(ids, "token")
        if self.place == "next_token":
            self._language(row, number, ids, labels, types, out)
            return
        limit = self.max_length
        parts: dict[str, Any] = {"token_types": types[:limit] if types is not None else None}
        if self.place == "document":
            assert self.labels is not None
            assert self.label is not None
            parts["label"] = self.labels(named(row[self.label], self.class_names))
        elif self.place == "target":
            target = [t for t in row[self.label or "labels"] or () if t != IGNORE]
            if not target:
                raise BadLabel("labels is empty")
            self._check_tokens(target, "label")
            parts |= {"target_ids": target[: self.max_target_length], "whole_target": len(target)}
        else:
            parts["token_labels"] = self._supervised(ids if labels is None else labels)[:limit]
            if all(label == IGNORE for label in parts["token_labels"]):
                raise BadLabel("no token of the row carries a label")
        out.add(number, ids[:limit], whole=len(ids), **parts)

    def _language(
        self, row: dict[str, Any], number: int, ids: list, labels: list | None, types: list | None, out: SampleWriter
    ) -> None:
        if labels is not None and _of_the_next(ids, labels):
            raise BadLabel(
                "each label is that of the next token already; here, as in transformers, it stands beside its own token"
            )
        labels = self._supervised(ids if labels is None else labels)
        for name in self.learned:
            if row[name] is None:
                raise BadLabel(f"{name} is missing")
            labels = [label if wanted else IGNORE for label, wanted in zip(labels, row[name], strict=True)]
        limit = self.max_length
        learned = [(start, end) for start, end in self._spans(row, len(ids)) if _teaches(labels[start:end])]
        if not learned:
            raise BadLabel("no token of the row carries a label")
        lost = [end - start for start, end in learned if not _teaches(labels[start:end][:limit])]
        if lost:
            raise BadLabel(f"no label of a document of {lost[0]:,} tokens lies within its first {limit:,} (max_length)")
        for start, end in learned:
            segments = None if types is None else types[start:end][:limit]
            own = labels[start:end][:limit]
            out.add(number, ids[start:end][:limit], token_labels=own, token_types=segments, whole=end - start)

    def _spans(self, row: dict[str, Any], length: int) -> list[tuple[int, int]]:
        """Where each document of a row begins and ends."""
        said = row[self.documents] if self.documents else None
        if said is None:
            return [(0, length)]
        if self.documents == "seq_lengths":
            ends = [sum(said[: number + 1]) for number in range(len(said))]
            if ends[-1:] != [length]:
                raise BadLabel(f"the row has {length} input_ids, but its seq_lengths sum up to {sum(said)}")
            return list(zip([0, *ends], ends))
        starts = [0, *(place for place, position in enumerate(said) if place and position == 0)]
        return list(zip(starts, [*starts[1:], length]))

    def _check_tokens(self, tokens: list, what: str) -> None:
        if any(type(t) is not int for t in tokens):
            if None in tokens:
                raise BadLabel(f"a {what} is missing (null)")
            other = next((t for t in tokens if not isinstance(t, int) and not _is_whole(t)), None)
            if other is not None:
                raise BadLabel(f"{what} {str(other)[:40]} is no whole number")
        outside = next((t for t in tokens if not 0 <= t < self.vocabulary), 0)
        if outside:
            raise BadLabel(f"{what} {outside} is outside the tokenizer's vocabulary of {self.vocabulary:,}")

    def _beside(self, row: dict[str, Any]) -> list | None:
        """Labels that stand beside the tokens."""
        if self.place not in ("next_token", "token") or self.label is None:
            return None
        if row[self.label] is None:
            raise BadLabel(f"{self.label} is missing")
        return row[self.label]

    def _supervised(self, labels: list) -> list[int]:
        if self.place == "next_token":
            self._check_tokens([label for label in labels if label != IGNORE], "label")
            return labels
        assert self.labels is not None
        return [IGNORE if tag == IGNORE else self.labels.class_id(named(tag, self.class_names)) for tag in labels]


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def _teaches(labels: list[int]) -> bool:
    """Whether a document with these labels has something to learn: nothing predicts its first token."""
    return any(label != IGNORE for label in labels[1:])


def of_language(columns: Columns) -> dict[str, Any]:
    """What a language model's rows have beside tokens and labels."""
    if "loss_mask" in columns:
        raise UserError(
            f"{columns.section}: the column 'loss_mask' says which tokens are learned, and libraries do not agree on "
            "whether it stands beside a token or beside the one before. Write it into 'labels' (-100 where nothing is "
            "learned) and remove it."
        )
    return {
        "learned": tuple(name for name in LEARNED if name in columns),
        "documents": next((name for name in DOCUMENTS if name in columns), None),
    }


def _of_the_next(ids: list, labels: list) -> bool:
    """Whether labels are shifted, as Megatron's and NeMo's are: every one is the token behind its own."""
    count, differ = 0, False
    for own, behind, label in zip(ids, ids[1:], labels):
        if label == IGNORE:
            continue
        if label != behind:  # at the first learned token, where labels are as they should be
            return False
        count, differ = count + 1, differ or own != behind
    return count > 1 and differ
