"""`prepare`: from a `dataset:` section to tokenised data that is known to be good.

Whatever can be wrong with the data is found here, before any weights are loaded: missing files and columns, bad rows,
labels that do not fit. All bad rows are reported together. The result lies in the token store, so the next start with
the same data, tokenizer and settings only maps it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from automodel.config.errors import UserError
from automodel.data.config import DatasetConfig
from automodel.data.encode import encode_rows
from automodel.data.fingerprint import ENCODERS, digest, rows_digest, tokenizer_digest
from automodel.data.labels import LabelMap
from automodel.data.layouts import Request, choose_layout, is_ready
from automodel.data.mixture import Mixture
from automodel.data.samples import Samples
from automodel.data.sources import find_source
from automodel.data.stats import Counter, DataStats
from automodel.data.store import TokenStore, open_or_build

DEFAULT_CACHE = "~/.cache/automodel/tokens"
DEFAULT_LIMITS = {"text-classification": 512, "token-classification": 512, "causal-lm": 2048, "seq2seq": 512}
SHORTEST = 4  # a sample needs room for special tokens and at least one real one

# Where the data lies and how it is processed; everything else in a section says what the columns are.
NOT_INHERITED = {
    "path", "target", "name", "split", "data_files", "revision", "num_samples_limit", "on_bad_row", "extra",
}  # fmt: skip
NOT_IN_THE_KEY = {"path", "cache_dir", "num_proc", "target", "extra"}  # these change nothing about the samples


@dataclass(frozen=True)
class PreparedData:
    """Tokenised data, and what is known about it."""

    store: TokenStore
    task: str
    problem_type: str | None
    label_names: list[str] | None
    num_labels: int | None
    stats: DataStats
    max_length: int
    description: str = ""
    """What the rows are, in a few words."""
    notes: tuple[str, ...] = ()
    """Things a person should know, for the plan."""
    label_map: LabelMap | None = None
    chat_template: str | None = None
    """Template to save with the tokenizer, where it had none and the data are chats."""
    from_cache: bool = False
    """Nothing was tokenised this time."""
    mixture: Mixture | None = None
    """Where the data are several datasets with weights."""


def inherit(train: DatasetConfig, validation: DatasetConfig) -> DatasetConfig:
    """The validation section with everything it leaves open about columns and lengths taken from the training one."""
    changes = {}
    for f in fields(DatasetConfig):
        if f.name not in NOT_INHERITED and getattr(validation, f.name) == f.default:
            changes[f.name] = getattr(train, f.name)
    if validation.path is None and validation.target is None:
        places = ("path", "target", "name", "data_files", "revision", "extra")
        changes.update({name: getattr(train, name) for name in places if not getattr(validation, name)})
    return replace(validation, **changes)


def prepare(
    cfg: DatasetConfig,
    *,
    task: str,
    tokenizer: Any,
    max_positions: int | None,
    type_vocab_size: int,
    role: Literal["train", "validation"] = "train",
    like: PreparedData | None = None,
    num_labels: int | None = None,
    problem_type: str | None = None,
    resolved_target: Callable[..., Any] | None = None,
) -> PreparedData:
    """Tokenised data for one section. `like` is the training data, whose classes the validation data must have."""
    section = "dataset" if role == "train" else "validation_dataset"
    check_limits(cfg, section)
    max_length, capped = choose_max_length(cfg, task, max_positions, section)
    source = find_source(
        cfg, role=role, section=section, resolved_target=resolved_target, memory=cache_root(cfg), tokenizer=tokenizer
    )
    content = source.content_key()
    rows = None
    if content is None:
        rows = source.load()
        content = rows_digest(rows)
    request = Request(
        cfg=cfg,
        task=task,
        tokenizer=tokenizer,
        max_length=max_length,
        token_types=type_vocab_size > 1,
        section=section,
        num_labels=num_labels,
        problem_type=problem_type,
        labels=like.label_map if like is not None else None,
    )
    room = max_positions if capped else None
    key = store_key(content, request, room)

    def build() -> tuple[Iterable[Samples], Callable[[], dict[str, Any]]]:
        return _build(source.load() if rows is None else rows, request, key, room)

    store, cached = open_or_build(cache_root(cfg) / key, build, vocabulary=len(tokenizer))
    return _described(store, task, cached)


def check_limits(cfg: DatasetConfig, section: str) -> None:
    for name, least in (("num_samples_limit", 1), ("max_length", SHORTEST), ("max_target_length", 2), ("num_proc", 1)):
        value = getattr(cfg, name)
        if value is not None and value < least:
            raise UserError(f"{section}.{name} must be at least {least}; got {value}.")


def choose_max_length(
    cfg: DatasetConfig, task: str, max_positions: int | None, section: str = "dataset"
) -> tuple[int, bool]:
    """Longest sample in tokens, and whether that is only our default."""
    if cfg.max_length is not None:
        if max_positions is not None and cfg.max_length > max_positions:
            raise UserError(
                f"{section}.max_length is {cfg.max_length:,}, but the model has only {max_positions:,} positions. "
                f"Set max_length to {max_positions:,} or less, or leave it out."
            )
        return cfg.max_length, False
    default = DEFAULT_LIMITS[task]
    return (min(default, max_positions) if max_positions else default), True


def cache_root(cfg: DatasetConfig) -> Path:
    chosen = cfg.cache_dir or os.environ.get("AUTOMODEL_CACHE") or DEFAULT_CACHE
    return Path(chosen).expanduser()


def store_key(content: str, request: Request, room: int | None) -> str:
    settings = {k: v for k, v in asdict(request.cfg).items() if k not in NOT_IN_THE_KEY}
    return digest(
        ENCODERS,
        content,
        tokenizer_digest(request.tokenizer),
        settings,
        request.task,
        request.max_length,
        room,
        request.token_types,
        request.section,
        request.num_labels,
        request.problem_type,
        None if request.labels is None else request.labels.to_json(),
    )


def _build(
    rows: Any, request: Request, key: str, room: int | None
) -> tuple[Iterable[Samples], Callable[[], dict[str, Any]]]:
    """Chunks to store, and the description to store with them once they were all seen."""
    if len(rows) == 0:
        raise UserError(f"{request.section}: the data has no rows (after split and num_samples_limit).")
    ready = is_ready(request.cfg, rows.features) and room is not None
    if ready:
        # Whoever tokenised the rows chose their length; only the model's own limit still cuts them.
        request = replace(request, max_length=room)
    layout = choose_layout(rows, request)
    counter = Counter()
    chunks = encode_rows(rows, layout.encoder, request.cfg.num_proc)

    def describe() -> dict[str, Any]:
        counter.check(len(rows), request.section, skip=request.cfg.on_bad_row == "skip")
        labels = layout.labels
        names = labels.names if labels else None
        counted = labels.num_labels if labels and labels.problem_type != "regression" else None
        max_length = counter.longest() if ready else request.max_length
        stats = counter.stats(len(rows), max_length, names, counted)
        return {
            "key": key,
            "stats": stats.to_json(),
            "labels": labels.to_json() if labels else None,
            "description": layout.description,
            "notes": [*layout.notes, *_warnings(stats)],
            "chat_template": layout.chat_template,
        }

    return counter.watching(chunks, token_labels=request.task == "token-classification"), describe


def _warnings(stats: DataStats) -> list[str]:
    """Things that are allowed but rarely meant."""
    notes = []
    present = [i for i, count in enumerate(stats.label_counts or ()) if count]
    if stats.label_counts and len(stats.label_counts) > 1 and len(present) == 1:
        name = stats.label_names[present[0]] if stats.label_names else present[0]
        notes.append(f"every row has the label {name}; data sorted by label and then cut looks like this")
    if stats.truncated > stats.used / 2:
        notes.append(f"{stats.truncated:,} of {stats.used:,} samples are cut at max_length {stats.max_length:,}")
    return notes


def _described(store: TokenStore, task: str, cached: bool) -> PreparedData:
    meta = store.meta
    labels = LabelMap.from_json(meta["labels"]) if meta["labels"] else None
    stats = DataStats.from_json(meta["stats"])
    return PreparedData(
        store=store,
        task=task,
        problem_type=labels.problem_type if labels and task == "text-classification" else None,
        label_names=list(labels.names) if labels and labels.names else None,
        num_labels=labels.num_labels if labels else None,
        stats=stats,
        max_length=stats.max_length,
        description=meta["description"],
        notes=tuple(meta["notes"]),
        label_map=labels,
        chat_template=meta["chat_template"],
        from_cache=cached,
    )
