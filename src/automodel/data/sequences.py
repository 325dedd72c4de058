"""Seq2seq: a source text and a target text, tokenised apart (summarisation, translation)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from automodel.config.errors import UserError
from automodel.data.classify import text_problem
from automodel.data.columns import SOURCE_TARGET, Columns
from automodel.data.config import DatasetConfig
from automodel.data.python_tokenizers import whole_length
from automodel.data.samples import SampleWriter


def require_language(tokenizer: Any) -> None:
    """Multilingual tokenizers write the code of a language into every target; unasked, that of the sources."""
    if getattr(tokenizer, "tgt_lang", "") is None:
        raise UserError(
            "dataset.target_lang: the tokenizer writes the code of a language into every target, and nobody says which "
            f"one. Name it, and dataset.source_lang, which is '{tokenizer.src_lang}' otherwise."
        )


def source_and_target(columns: Columns, cfg: DatasetConfig) -> tuple[str, str, str | None]:
    """The two columns, or the two languages of a record and its column."""
    source, target = cfg.source_column, cfg.target_column
    records = [n for n, f in columns.features.items() if isinstance(f, dict) and len(f) >= 2 and n == "translation"]
    if records and (source is None or source not in columns):
        languages = list(columns.features[records[0]])
        for name, key in ((source, "source_column"), (target, "target_column")):
            if name is not None and name not in languages:
                raise UserError(
                    f"{columns.section}.{key}: the column 'translation' has no '{name}'. "
                    f"It has: {', '.join(languages)}."
                )
        source = source or next(name for name in languages if name != target)
        target = target or next(name for name in languages if name != source)
        return source, target, records[0]
    if source is None and target is None:
        for first, second in SOURCE_TARGET:
            if first in columns and second in columns:
                return first, second, None
    names = [first for first, _ in SOURCE_TARGET]
    source = source or columns.first_of((n for n in names if n != target), "source_column", "the source text")
    targets = [second for _, second in SOURCE_TARGET]
    target = target or columns.first_of((n for n in targets if n != source), "target_column", "the target text")
    for name, key in ((source, "source_column"), (target, "target_column")):
        columns.of_strings(columns.required(name, key), key)
    return source, target, None


@dataclass(frozen=True)
class SourceTarget:
    """Source and target columns, or the two languages of a `translation` record."""

    tokenizer: Any
    source: str
    target: str
    both: str | None
    """Column that holds both as a record (`{"en": …, "de": …}`)."""
    prefix: str
    max_length: int
    max_target_length: int

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.both,) if self.both else (self.source, self.target)

    @property
    def record(self) -> dict[str, Any]:
        """What a run notes of it, for whoever asks the model later."""
        return {"kind": "sources", "prefix": self.prefix, "target_length": self.max_target_length}

    def encode(self, rows: dict[str, list], first: int, out: SampleWriter) -> None:
        if self.both:
            records = [record or {} for record in rows[self.both]]
            sources = [record.get(self.source) for record in records]
            targets = [record.get(self.target) for record in records]
        else:
            sources, targets = rows[self.source], rows[self.target]
        kept = []
        for i, (source, target) in enumerate(zip(sources, targets)):
            problem = text_problem(source, f"source '{self.source}'") or text_problem(target, f"target '{self.target}'")
            if problem:
                out.reject(first + i, problem)
            else:
                kept.append(i)
        if not kept:
            return
        inputs = self.tokenizer(
            [f"{self.prefix}{sources[i]}" for i in kept],
            truncation=True,
            max_length=self.max_length,
            return_attention_mask=False,
        )
        labels = self.tokenizer(
            text_target=[targets[i] for i in kept],
            truncation=True,
            max_length=self.max_target_length,
            return_attention_mask=False,
        )
        for position, i in enumerate(kept):
            source, room = f"{self.prefix}{sources[i]}", self.max_target_length
            out.add(
                first + i,
                inputs["input_ids"][position],
                target_ids=labels["input_ids"][position],
                whole=whole_length(inputs, position, self.max_length, self.tokenizer, source),
                whole_target=whole_length(labels, position, room, self.tokenizer, text_target=targets[i]),
            )
