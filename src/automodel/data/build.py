"""Filling a token store: the rows of one dataset, or of several that make a mixture, one after another.

All datasets of a mixture share one store. They are laid out first (columns, labels: cheap), so that everything wrong
with any of them is said before a single row is tokenised; the classes are those of the first one. Rows that cannot be
used are collected over all of them and reported together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from automodel.config.errors import UserError
from automodel.data.config import DatasetConfig
from automodel.data.encode import ROWS_PER_CHUNK, encode_rows
from automodel.data.fingerprint import rows_digest
from automodel.data.layouts import Layout, Request, choose_layout, is_ready
from automodel.data.numbers import with_numbers
from automodel.data.problems import Problems
from automodel.data.samples import Samples
from automodel.data.sources import Source
from automodel.data.special_tokens import special_ids
from automodel.data.stats import Counter, DataStats

WORTH_A_NOTE = 0.1  # share of the rows whose end is not learned


@dataclass(frozen=True)
class Part:
    """One dataset on its way into a store."""

    source: Source
    request: Request
    room: int | None
    """The model's own limit, where `max_length` is only our default."""
    content: str
    rows: Any = None
    """Loaded already, where the content could not be known without it."""

    def load(self) -> Any:
        rows = self.source.load() if self.rows is None else self.rows
        if self.request.row_format.labels != "document" or not self.source.only_text:
            return rows
        return with_numbers(rows, besides=(self.request.cfg.text_column, self.request.cfg.text_pair_column))


@dataclass(frozen=True)
class LaidOut:
    """A dataset whose columns and labels are known to fit."""

    rows: Any
    request: Request
    layout: Layout
    ready: bool
    """The rows were tokenised by somebody else."""


def part_of(source: Source, request: Request, room: int | None) -> Part:
    content, rows = source.content_key(), None
    if content is None:
        rows = source.load()
        content = rows_digest(rows)
    return Part(source, request, room, content, rows)


def lay_out(parts: Sequence[Part], problems: Problems) -> list[LaidOut]:
    """Rows, columns and labels of every dataset; what is wrong with any of them is collected."""
    laid: list[LaidOut] = []
    labels = parts[0].request.labels if parts else None
    for part in parts:
        with problems.collecting():
            rows, request = part.load(), replace(part.request, labels=labels)
            if len(rows) == 0:
                raise UserError(
                    f"{request.section}: the data has no rows (after split and num_samples_limit). Take more of them."
                )
            ready = is_ready(request.cfg, rows.features) and part.room is not None
            if ready:
                # Whoever tokenised the rows chose their length; only the model's own limit still cuts them.
                request = replace(request, max_length=part.room)
            layout = choose_layout(rows, request)
            labels = labels or layout.labels
            laid.append(LaidOut(rows, request, layout, ready))
            if layout.fault is not None:
                raise layout.fault
    return laid


def look_ahead(parts: Sequence[Part], problems: Problems) -> None:
    """Something is wrong already. Is there more, in the columns or in the first rows? Nothing is stored."""
    _look_at_rows(lay_out(parts, problems), problems)


def _look_at_rows(laid: Sequence[LaidOut], problems: Problems) -> None:
    for part in laid:
        with problems.collecting():
            first = part.rows.select(range(min(len(part.rows), ROWS_PER_CHUNK)))
            counter = _counter(part.request, len(first))
            counter.partial = len(first) < len(part.rows)
            for _ in counter.watching(encode_rows(first, part.layout.encoder, 1)):
                pass
            counter.check(part.request.section, skip=part.request.cfg.on_bad_row == "skip")


def build(
    parts: Sequence[Part], names: Sequence[str], key: str
) -> tuple[Iterable[Samples], Callable[[], dict[str, Any]]]:
    """Chunks to store, and the description to store with them once they were all seen."""
    problems = Problems()
    laid = lay_out(parts, problems)
    if len(problems):
        _look_at_rows(laid, problems)
    problems.raise_if_any()
    counters = [_counter(part.request, len(part.rows)) for part in laid]

    def describe() -> dict[str, Any]:
        for part, counter in zip(laid, counters):
            with problems.collecting():
                counter.check(part.request.section, skip=part.request.cfg.on_bad_row == "skip")
        problems.raise_if_any()
        labels = laid[0].layout.labels
        counted = labels.num_labels if labels and labels.problem_type != "regression" else None
        limits = [c.longest() if p.ready else p.request.max_length for p, c in zip(laid, counters)]
        targets = max(p.request.cfg.target_length for p in laid) if laid[0].request.row_format.labels == "target" else 0
        joined = Counter.joined(counters, names)
        stats = joined.stats(max(limits), labels.names if labels else None, counted, targets)
        notes = [note for part in laid for note in part.layout.notes]
        return {
            "key": key,
            "stats": stats.to_json(),
            "labels": labels.to_json() if labels else None,
            "description": "; ".join(dict.fromkeys(_in_words(part.layout) for part in laid)),
            "splits": any(getattr(part.layout.encoder, "split", False) for part in laid),
            "notes": [*dict.fromkeys(notes), *warnings(stats, laid[0].request)],
            "kinds": [
                {"rows": part.layout.description, "keys": sorted(part.layout.used or part.request.row_format.keys)}
                for part in laid
            ],
            "layout": getattr(laid[0].layout.encoder, "record", None),
            "chat_template": next((p.layout.chat_template for p in laid if p.layout.chat_template), None),
            "parts": [
                {"name": name, "samples": c.samples, "rows": c.rows, "supervised": c.supervised}
                for name, c in zip(names, counters)
            ],
        }

    return _chunks(laid, counters), describe


def _chunks(laid: Sequence[LaidOut], counters: Sequence[Counter]) -> Iterator[Samples]:
    types = any(getattr(part.layout.encoder, "token_types", False) for part in laid)
    before = 0
    for part, counter in zip(laid, counters):
        for chunk in counter.watching(encode_rows(part.rows, part.layout.encoder, part.request.cfg.num_proc)):
            if types and chunk.token_types is None:  # single texts beside another dataset's pairs
                chunk = replace(chunk, token_types=np.zeros(len(chunk.input_ids), dtype=np.uint8))
            yield replace(chunk, rows=chunk.rows + before) if before else chunk
        before += len(part.rows)


def _in_words(layout: Layout) -> str:
    """What rows are, and what of them is learned."""
    return ", ".join(filter(None, (layout.description, layout.learned)))


def _counter(request: Request, rows: int) -> Counter:
    counter = Counter(request.row_format.labels, end_tokens(request.tokenizer))
    counter.rows = rows
    counter.part = split if (split := request.cfg.split) and "[" in split else None
    return counter


def end_tokens(tokenizer: Any) -> frozenset[int]:
    """Tokens that can end a text: end-of-sequence, and the special ones that chat templates close a turn with."""
    never = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id} - {tokenizer.eos_token_id}
    return frozenset(special_ids(tokenizer) - never)


def names_of(members: Sequence[DatasetConfig]) -> list[str]:
    """Short names of datasets, for the plan: file names, or as much more of the path as keeps them apart."""
    paths = [member.path or member.target or "" for member in members]
    short = [Path(path).name for path in paths]
    if len(set(short)) == len(short):
        return short
    whole = [f"{path}:{member.split}" if member.split else path for path, member in zip(paths, members)]
    return whole if len(set(whole)) == len(whole) else [f"{name} ({i})" for i, name in enumerate(whole)]


def warnings(stats: DataStats, request: Request) -> list[str]:
    """Things that are allowed but rarely meant."""
    notes, section = [], request.section.split(".")[0]  # of a mixture, its first entry's
    learns = section == "dataset"
    where = "" if learns else f"{section}: "
    present = [i for i, count in enumerate(stats.label_counts or ()) if count]
    if stats.label_counts and len(stats.label_counts) > 1 and len(present) == 1:
        name = stats.label_names[present[0]] if stats.label_names else present[0]
        so = "there is nothing to learn" if learns else "its numbers say little"
        notes.append(
            f"{where}every row has the label {name}, so {so}; data sorted by label and then cut looks "
            "like this: shuffle it, or take a part around the middle (split: train[40%:60%])"
        )
    if stats.lost_tags:
        one = stats.lost_tags == 1
        what = "word with a tag has" if one else "words with tags have"
        so = f"{'its tag is' if one else 'their tags are'} not {'learned' if learns else 'measured'}"
        notes.append(f"{where}{stats.lost_tags:,} {what} no token, being empty or nothing the tokenizer keeps: {so}")
    rows = stats.rows - stats.skipped
    if stats.unsaid:
        what = "the chat template leaves out some of the assistant's words, reasoning or what stands beside a tool call"
        notes.append(f"{where}{what}, in {stats.unsaid:,} of {rows:,} rows: automodel data preview shows the texts")
    if stats.unended > WORTH_A_NOTE * rows:
        cut, key, limit = stats.truncated, "max_length", stats.max_length
        if request.row_format.labels == "target":
            cut, key, limit = stats.truncated_targets, "max_target_length", stats.max_target_length
        if cut >= stats.unended:
            why = f"they are cut at {key} {limit:,}; a larger one would keep it"
        else:
            why = f"no label there is {request.tokenizer.eos_token!r} or another token that ends a text"
        so = "learned" if learns else "measured"
        stop = ", so the model may not learn to stop" if learns else ""
        notes.append(f"{where}the end is not {so} in {stats.unended:,} of {rows:,} rows{stop}: {why}")
    return notes
