"""`prepare`: from a `dataset:` section to tokenised data that is known to be good.

Whatever can be wrong with the data is found here, before any weights are loaded: missing files and columns, bad rows,
labels that do not fit. All bad rows are reported together. The result lies in the token store, so the next start with
the same data, tokenizer and settings only maps it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from automodel.config.errors import UserError
from automodel.data.build import Part, build, look_ahead, names_of, part_of
from automodel.data.chat import PLAIN_TEMPLATE, template_text
from automodel.data.config import SHORTEST, SHORTEST_TARGET, DatasetConfig
from automodel.data.fingerprint import ENCODERS, digest, tokenizer_digest
from automodel.data.inheritance import members_of
from automodel.data.keys import keys_taken, unused
from automodel.data.labels import LabelMap
from automodel.data.layouts import Request
from automodel.data.mixture import Mixture
from automodel.data.problems import Problems
from automodel.data.row_format import RowFormat
from automodel.data.sources import find_source
from automodel.data.stats import DataStats
from automodel.data.store import TokenStore, open_or_build

DEFAULT_CACHE = "~/.cache/automodel/tokens"
LOOKED_AT = 100_000  # samples that are looked at where a few would tell: files of any size lie behind them

# These change nothing about the samples.
NOT_IN_THE_KEY = {"path", "mixture", "cache_dir", "num_proc", "target", "streaming", "extra"}


@dataclass(frozen=True)
class PreparedData:
    """Tokenised data, and what is known about it."""

    store: TokenStore
    row_format: RowFormat
    problem_type: str | None
    label_names: list[str] | None
    num_labels: int | None
    stats: DataStats
    max_length: int
    description: str = ""
    """What the rows are, in a few words."""
    splits: bool = False
    """Whether texts longer than `max_length` go on in further samples."""
    notes: tuple[str, ...] = ()
    """Things a person should know, for the plan."""
    label_map: LabelMap | None = None
    chat_template: str | None = None
    """Template to save with the tokenizer, where it had none and the data are chats."""
    layout: dict[str, Any] | None = None
    """How the model is asked: the record of its encoder, of a mixture's first dataset."""
    from_cache: bool = False
    """Nothing was tokenised this time."""
    mixture: Mixture | None = None
    """Where the data are several datasets with weights."""
    split: str | None = None
    """The split that was taken, of data that has several; none for a mixture."""

    @property
    def learned_share(self) -> float:
        """Share of an epoch's tokens that is learned: of a mixture, each dataset counts as often as it is read."""
        if self.mixture is None:
            return self.stats.supervised_share
        drawn = zip(self.store.meta["parts"], self.mixture.counts)
        learned = sum(part["supervised"] * count / max(1, part["samples"]) for part, count in drawn)
        return min(1.0, learned / max(1.0, self.mixture.mean_tokens(self.store.lengths)))


def prepare(
    cfg: DatasetConfig,
    *,
    row_format: RowFormat,
    tokenizer: Any,
    max_positions: int | None,
    type_vocab_size: int,
    role: Literal["train", "validation"] = "train",
    like: PreparedData | None = None,
    num_labels: int | None = None,
    problem_type: str | None = None,
    known_labels: tuple[str, ...] | None = None,
    resolved_target: Callable[..., Any] | None = None,
    remote: bool = False,
    written: DatasetConfig | None = None,
) -> PreparedData:
    """Tokenised data for one section. `like` is the training data, whose classes the validation data must have;
    `known_labels` are names that the model has for its classes already, in their order; `written` is the section
    without what it has from another one; `remote`: whether the command line allows addresses in `data_files`."""
    section = "dataset" if role == "train" else "validation_dataset"
    problems, written = Problems(), written or cfg
    cfg = cfg.with_defaults()  # said or not, the samples are the same
    cfg = within_limits(cfg, row_format, max_positions, section, problems)
    max_length, capped = choose_max_length(cfg, row_format, max_positions, section)
    members = members_of(cfg, section)
    parts: list[Part] = []
    for where, member in members:
        template = PLAIN_TEMPLATE  # where the one that is named is not there, the rows are still looked at
        with problems.collecting():
            template = template_text(member.chat_template, where)
        with problems.collecting():
            # Its text is part of the key, not the name of its file.
            member = replace(member, chat_template=template)
            place: Any = {"resolved_target": resolved_target, "memory": cache_root(cfg), "tokenizer": tokenizer}
            source = find_source(member, role=role, section=where, remote=remote, **place)
            request = Request(
                cfg=member,
                row_format=row_format,
                tokenizer=tokenizer,
                max_length=max_length,
                token_types=type_vocab_size > 1,
                section=where,
                num_labels=num_labels,
                problem_type=problem_type,
                labels=like.label_map if like is not None else None,
                known_labels=known_labels,
            )
            parts.append(part_of(source, request, max_positions if capped else None))
    if len(problems):
        look_ahead(parts, problems)
    problems.raise_if_any()
    keys = [store_key(part.content, part.request, part.room) for part in parts]
    key = keys[0] if cfg.mixture is None else digest("mixture", keys)
    names = names_of([member for _, member in members])
    store, cached = open_or_build(cache_root(cfg) / key, lambda: build(parts, names, key), vocabulary=len(tokenizer))
    data = _described(store, cfg, row_format, section, cached)
    not_used = unused(section, written, store.meta.get("kinds", []), keys_taken(resolved_target))
    choice = parts[0].source.choice(parts[0].rows) if cfg.mixture is None else None
    notes = (*data.notes, *not_used, *_begun_twice(store, tokenizer))
    return replace(data, notes=notes, split=choice.taken if choice else None)


def _begun_twice(store: TokenStore, tokenizer: Any) -> list[str]:
    """Texts that were written for a model, with its first token in them, get another one from the tokenizer."""
    first, looked = tokenizer.bos_token_id, min(len(store), LOOKED_AT)
    if first is None:
        return []
    begins = store.offsets[:looked][store.lengths[:looked] > 1]
    twice = int(((store.input_ids[begins] == first) & (store.input_ids[begins + 1] == first)).sum())
    all_of_them = "" if looked == len(store) else "the first "
    found = f"{twice:,} of {all_of_them}{looked:,} samples begin with two {tokenizer.bos_token!r}"
    why = "the texts have one, and the tokenizer adds another. Models are trained with one: remove it from the texts"
    return [f"{found}: {why}"] if twice else []


def within_limits(
    cfg: DatasetConfig, row_format: RowFormat, max_positions: int | None, section: str, problems: Problems
) -> DatasetConfig:
    """The section with numbers that cannot be meant complained about and put aside, so that the rest can be checked."""
    aside: dict[str, Any] = {}
    for name, least in (
        ("num_samples_limit", 1),
        ("max_length", SHORTEST),
        ("max_target_length", SHORTEST_TARGET),
        ("num_proc", 1),
    ):
        value = getattr(cfg, name)
        if value is not None and value < least:
            aside[name] = None
            problems.found.append(UserError(f"{section}.{name} must be at least {least}; got {value}."))
    if "max_length" not in aside:
        with problems.collecting():
            choose_max_length(cfg, row_format, max_positions, section)
        if len(problems) and max_positions is not None and (cfg.max_length or 0) > max_positions:
            aside["max_length"] = None
    if row_format.labels == "target" and max_positions is not None and cfg.target_length > max_positions:
        problems.found.append(
            UserError(
                f"{section}.max_target_length is {cfg.target_length:,}, but the model has only {max_positions:,} "
                f"positions. Set max_target_length to {max_positions:,} or less."
            )
        )
    return replace(cfg, **aside)


def choose_max_length(
    cfg: DatasetConfig, row_format: RowFormat, max_positions: int | None, section: str = "dataset"
) -> tuple[int, bool]:
    """Longest sample in tokens, and whether that is only our default."""
    if cfg.max_length is not None:
        if max_positions is not None and cfg.max_length > max_positions:
            raise UserError(
                f"{section}.max_length is {cfg.max_length:,}, but the model has only {max_positions:,} positions. "
                f"Set max_length to {max_positions:,} or less, or leave it out."
            )
        return cfg.max_length, False
    default = row_format.max_length
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
        request.row_format.task,
        request.max_length,
        room,
        request.token_types,
        request.section,
        request.num_labels,
        request.problem_type,
        None if request.labels is None else request.labels.to_json(),
        request.known_labels,
    )


def _described(
    store: TokenStore, cfg: DatasetConfig, row_format: RowFormat, section: str, cached: bool
) -> PreparedData:
    meta = store.meta
    labels = LabelMap.from_json(meta["labels"]) if meta["labels"] else None
    stats = DataStats.from_json(meta["stats"])
    notes = list(meta["notes"])
    if stats.skipped:
        first = stats.skipped_rows[0]
        notes.append(
            f"{stats.skipped:,} of {stats.rows:,} rows are left out ({section}.on_bad_row: skip); "
            f"the first, row {first['row']}: {first['reason']}"
        )
    if cfg.streaming:
        notes.append(
            "streaming: the rows are read and tokenised in pieces, once, into memory-mapped files under "
            f"{cache_root(cfg)}; memory does not grow with the data, and shuffling and resuming stay exact"
        )
    mixture = None
    if cfg.mixture is not None:
        parts = meta["parts"]
        mixture = Mixture(
            names=tuple(part["name"] for part in parts),
            sizes=tuple(part["samples"] for part in parts),
            weights=tuple(entry.weight for entry in cfg.mixture),
        )
    return PreparedData(
        store=store,
        row_format=row_format,
        problem_type=labels.problem_type if labels and row_format.labels == "document" else None,
        label_names=list(labels.names) if labels and labels.names else None,
        num_labels=labels.num_labels if labels else None,
        stats=stats,
        max_length=stats.max_length,
        description=meta["description"],
        splits=meta.get("splits", False),
        notes=tuple(notes),
        label_map=labels,
        chat_template=meta["chat_template"],
        layout=meta.get("layout"),  # stores of earlier releases have none
        from_cache=cached,
        mixture=mixture,
    )
