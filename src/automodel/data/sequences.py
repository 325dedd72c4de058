"""Seq2seq: a source text and a target text, tokenised apart (summarisation, translation)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from automodel.config.errors import UserError
from automodel.data.classify import text_problem
from automodel.data.python_tokenizers import was_cut
from automodel.data.samples import SampleWriter


def require_language(tokenizer: Any) -> None:
    """Multilingual tokenizers write the code of a language into every target; unasked, that of the sources."""
    if getattr(tokenizer, "tgt_lang", "") is None:
        raise UserError(
            "dataset.target_lang: the tokenizer writes the code of a language into every target, and nobody says which "
            f"one. Name it, and dataset.source_lang, which is '{tokenizer.src_lang}' otherwise."
        )


@dataclass(frozen=True)
class SourceTarget:
    """Source and target columns, or the two languages of a `translation` record."""

    tokenizer: Any
    source: str
    target: str
    record: str | None
    """Column that holds both as a record (`{"en": …, "de": …}`)."""
    prefix: str
    max_length: int
    max_target_length: int

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.record,) if self.record else (self.source, self.target)

    def encode(self, rows: dict[str, list], first: int, out: SampleWriter) -> None:
        if self.record:
            records = [record or {} for record in rows[self.record]]
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
            out.add(first + i, inputs["input_ids"][position], target_ids=labels["input_ids"][position])
            source_cut = was_cut(inputs, position, self.max_length, self.tokenizer, f"{self.prefix}{sources[i]}")
            room = self.max_target_length
            out.truncated += source_cut or was_cut(labels, position, room, self.tokenizer, text_target=targets[i])
