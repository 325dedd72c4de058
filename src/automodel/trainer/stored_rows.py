"""A tokenised dataset and a collator that only pads, as flat arrays: what the engine trains on.

Trainer asks the dataset for eight rows, the collator pads them, and the model is handed a rectangle that is half
padding. Where the collator is one of transformers' own that only pads, all of this is known beforehand: the rows are
read once, column by column, without their padding, and a batch is a few slices (`data/collate.py`). Which rows a batch
has is still Trainer's own choice, through its own sampler.

The rows mean what the rectangle means, or they are not stored: `NotStored` says why, and the caller takes the ordinary
way. A dataset that computes its rows (a torch `Dataset`, a transform) may give others the next time, so it is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from automodel.config.errors import UserError
from automodel.data.batch import IGNORE, PackedBatch
from automodel.data.collate import PackedCollator
from automodel.data.store import TokenStore
from automodel.models.families import family_of
from automodel.tasks.task import Task
from automodel.trainer.sft_packing import FlatCollator

UNDERSTOOD = ("input_ids", "attention_mask", "token_type_ids", "labels", "label", "label_ids")
LABELS = ("labels", "label", "label_ids")
ROWS_AT_ONCE = 10_000
MOST_TOKENS = 2_000_000_000  # 8 GB, and some ten seconds to read
MOST_FOR_A_PART = 200_000_000  # where a run will not even see every row once


class NotStored(Exception):
    """The rows cannot be kept as flat arrays; the message says why."""


@dataclass(frozen=True)
class Padding:
    """What a known collator does to rows besides making a rectangle of them."""

    from_ids: bool = False
    """Labels are the tokens themselves, except pad tokens (language models)."""
    pad_token_id: int | None = None
    to_longest: bool = True
    """Rows of a batch may differ in length."""
    width: int | None = None
    """Every batch is this wide."""
    multiple: int = 1
    """Widths are rounded up to a multiple."""
    flat: bool = False
    """Rows hold several documents (`seq_lengths`), and a batch is one line of them all."""

    def width_of(self, lengths: np.ndarray) -> int:
        width = max(self.width or 0, int(lengths.max()))
        return -(-width // self.multiple) * self.multiple


@dataclass(frozen=True)
class Held:
    """A batch on its way through accelerate's loader, which moves whatever has a `to` to the device: too early."""

    batch: PackedBatch
    rows: int
    width: int
    """Of the rectangle that the collator would have made."""


class StoredRows:
    """A dataset whose rows are their own numbers; `collate` makes batches of them."""

    def __init__(self, store: TokenStore, widths: np.ndarray, padding: Padding, documents: np.ndarray | None = None):
        self.store, self.widths, self.padding = store, widths, padding
        self.firsts = None if documents is None else np.concatenate([[0], np.cumsum(documents)])
        """Where rows hold several documents: the number of each row's first one, and of all."""
        self.collator: PackedCollator | None = None
        self.evaluated_at_once = 1
        self.origin: Any = None
        """The dataset that the rows were read from, which samplers may ask for lengths."""
        self.again: Callable[[], StoredRows | None] | None = None
        """Where the script can change them (a list, a class of its own): other rows, if they are others now."""
        self.counts_first = False
        """Whether the loss of a language model is divided by all labels, although nothing predicts a row's first token:
        what Trainer does for classes that are not called `…ForCausalLM` (GPT-2)."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "again": None}  # a loader's workers, which may be new processes, only collate

    def __len__(self) -> int:
        return len(self.widths)

    def follow(self) -> None:
        """Takes other rows where the script's dataset gives others in this epoch."""
        try:
            new = None if self.again is None else self.again()
            if new is None:
                return
            assert self.collator is not None
            if len(new) != len(self) or new.store.lengths.max() > self.collator.max_seqlen:
                raise NotStored("it changed its length, or has longer rows than before training began")
        except NotStored as obstacle:
            raise UserError(
                f"the training dataset changed, and cannot be followed: {obstacle}. Give its rows as a class with a "
                "`set_epoch` method, and they are read along the way, by Trainer's own steps."
            ) from obstacle
        self.store, self.widths, self.firsts = new.store, new.widths, new.firsts
        self.collator = dataclasses.replace(self.collator, store=new.store)

    def most_documents(self, rows: int) -> int:
        """How many documents so many rows can have."""
        return rows if self.firsts is None else int(np.sort(np.diff(self.firsts))[-rows:].sum())

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices

    def collate(self, indices: list[int]) -> Held:
        assert self.collator is not None
        if self.firsts is not None:
            documents = [d for row in indices for d in range(self.firsts[row], self.firsts[row + 1])]
            return Held(self.collator(documents), 1, int(self.widths[indices].sum()))
        batch = self.collator(indices)
        if self.counts_first:
            assert self.store.token_labels is not None
            first = self.store.token_labels[self.store.offsets[indices]] != IGNORE
            batch = dataclasses.replace(batch, num_labels=batch.num_labels + int(first.sum()))
        return Held(batch, len(indices), self.padding.width_of(self.widths[indices]))


def known_padding(collator: Any, tokenizer: Any) -> Padding:
    """What a collator of transformers does; raises `NotStored` for any other."""
    import transformers
    from transformers.data import data_collator as own

    if collator in (own.default_data_collator, own.torch_default_data_collator) or (
        type(collator) is transformers.DefaultDataCollator and collator.return_tensors == "pt"
    ):
        return Padding(to_longest=False)
    if type(collator) is FlatCollator:
        return Padding(flat=True)
    plain = (
        transformers.DataCollatorWithPadding,
        transformers.DataCollatorForTokenClassification,
        transformers.DataCollatorForSeq2Seq,
        transformers.DataCollatorForLanguageModeling,
    )
    if type(collator) not in plain:
        raise NotStored(f"{_name(collator)} may do anything with a batch")
    words: Any = collator.tokenizer
    if getattr(words, "padding_side", "right") != "right":
        raise NotStored("the tokenizer pads on the left")
    if "attention_mask" not in words.model_input_names:
        raise NotStored("the tokenizer makes no attention mask")
    if collator.return_tensors != "pt":
        raise NotStored(f"the collator returns {collator.return_tensors}")
    if getattr(collator, "label_pad_token_id", IGNORE) != IGNORE:
        raise NotStored(f"the collator pads labels with {collator.label_pad_token_id}")
    multiple = collator.pad_to_multiple_of or 1
    if type(collator) is transformers.DataCollatorForLanguageModeling:
        if collator.mlm:
            raise NotStored("words are masked at random")
        return Padding(from_ids=True, pad_token_id=words.pad_token_id, multiple=multiple)
    width = collator.max_length if collator.padding == "max_length" else None
    return Padding(to_longest=collator.padding not in (False, "do_not_pad"), width=width, multiple=multiple)


def _name(collator: Any) -> str:
    return getattr(collator, "__name__", type(collator).__name__)


def store_rows(
    dataset: Any, collator: Any, task: Task, config: Any, tokenizer: Any, most_tokens: int = MOST_TOKENS
) -> StoredRows:
    """The dataset, whose unused columns are gone, as flat arrays. Raises `NotStored`."""
    padding = known_padding(collator, tokenizer)
    parts: list[_Part] = []
    tokens = 0
    for columns in _chunks(dataset, padding.flat):
        parts.append(_Part(columns, task, padding))
        tokens += len(parts[-1].input_ids)
        if tokens > most_tokens:
            raise NotStored(f"the rows have more than {most_tokens:,} tokens, too many to hold for this run")
    if not parts:
        raise NotStored("the dataset is empty")
    lengths = np.concatenate([part.lengths for part in parts])
    widths = np.concatenate([part.widths for part in parts])
    documents = np.concatenate([part.documents for part in parts]) if padding.flat else None
    if not padding.to_longest and len(set(widths.tolist())) > 1:
        raise NotStored("rows differ in length, and the collator does not pad")
    arrays: dict[str, np.ndarray] = {
        "input_ids": np.concatenate([part.input_ids for part in parts]),
        "offsets": np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)]),
        "rows": np.arange(len(lengths), dtype=np.int64),
    }
    for name in ("token_types", "token_labels", "labels"):
        pieces = [getattr(part, name) for part in parts]
        if pieces[0] is not None:
            arrays[name] = np.concatenate(pieces)
    _check_meaning(arrays, lengths, task, config)
    return StoredRows(TokenStore(arrays, {}), widths, padding, documents)


def _check_meaning(arrays: dict[str, np.ndarray], lengths: np.ndarray, task: Task, config: Any) -> None:
    family, ids = family_of(config), arrays["input_ids"]
    if family.positions_after_padding and bool((ids == config.pad_token_id).any()):
        raise NotStored("rows have pad tokens among their words, and positions are counted by them")
    if "token_types" in arrays and not family.token_types:
        raise NotStored("token_type_ids go to a family without them")
    longest, positions = int(lengths.max()), getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and longest > positions:
        raise NotStored(f"a row has {longest} tokens, and the model {positions} positions")
    _check_range(ids, int(getattr(config, "vocab_size", 0) or 0), "token", arrays["offsets"])
    if "token_labels" in arrays:
        learned = arrays["token_labels"]
        classes = config.num_labels if task.head.has_classes else int(config.vocab_size)
        _check_range(np.where(learned == IGNORE, 0, learned), classes, "label", arrays["offsets"])
    elif "labels" in arrays and arrays["labels"].dtype.kind == "i" and config.num_labels > 1:
        if bool((arrays["labels"] == IGNORE).any()):
            raise NotStored(f"some rows have the label {IGNORE}, which counts nowhere")
        _check_range(arrays["labels"], config.num_labels, "label")
    elif "labels" in arrays and arrays["labels"].dtype.kind == "f" and bool(np.isnan(arrays["labels"]).any()):
        raise NotStored(f"row {int(np.argwhere(np.isnan(arrays['labels']))[0][0])} has a label that is no number")
    if task.rows.labels == "document":
        if family.pooling == "last" and config.pad_token_id is None:
            raise NotStored("the config has no pad token, by which a classifier finds the end of a row")
        if "labels" not in arrays:
            raise NotStored("rows have no label")
    elif "token_labels" not in arrays:
        raise NotStored("rows have no labels")


def _check_range(values: np.ndarray, count: int, what: str, offsets: np.ndarray | None = None) -> None:
    """On a GPU a number that is out of range would read somebody else's memory; Trainer's own steps say it in torch's
    words, and this line before them says where."""
    wrong = np.flatnonzero((values < 0) | (values >= count)) if count else np.empty(0, dtype=np.int64)
    if len(wrong):
        place = int(wrong[0]) if offsets is None else int(np.searchsorted(offsets, wrong[0], side="right")) - 1
        raise NotStored(f"row {place} has the {what} {int(values[wrong[0]])}, and the model knows 0 to {count - 1}")


def _chunks(dataset: Any, flat: bool = False) -> Iterator[dict[str, Any]]:
    """Columns of a few thousand rows at a time."""
    import datasets

    if isinstance(dataset, datasets.Dataset):
        if dataset.format["type"] == "custom":
            raise NotStored("the dataset has a transform of its own")
        names = list(dataset.format["columns"] or dataset.column_names)
        _check_columns(names, flat)
        plain = dataset.with_format("arrow", columns=names)
        for start in range(0, len(dataset), ROWS_AT_ONCE):
            table = plain[start : start + ROWS_AT_ONCE]
            yield {name: table.column(name) for name in names}
    elif type(dataset) is list and dataset and all(type(row) is dict for row in dataset):
        names = list(dataset[0])
        _check_columns(names, flat)
        if any(list(row) != names for row in dataset):
            raise NotStored("rows have different keys")
        for start in range(0, len(dataset), ROWS_AT_ONCE):
            rows = dataset[start : start + ROWS_AT_ONCE]
            yield {name: [row[name] for row in rows] for name in names}
    else:
        raise NotStored(f"{type(dataset).__name__} may compute its rows anew each time")


def _check_columns(names: list[str], flat: bool) -> None:
    unknown = [name for name in names if name not in UNDERSTOOD and not (flat and name == "seq_lengths")]
    if unknown:
        raise NotStored(f"the column {unknown[0]} goes to the model as well")
    if "input_ids" not in names:
        raise NotStored("rows have no input_ids")
    if sum(name in names for name in LABELS) > 1:
        raise NotStored("rows have more than one column of labels")


class _Part:
    """Some rows as flat arrays, without their padding."""

    token_types: np.ndarray | None = None
    token_labels: np.ndarray | None = None
    labels: np.ndarray | None = None

    def __init__(self, columns: dict[str, Any], task: Task, padding: Padding):
        ids, self.widths = _flat(columns["input_ids"], "input_ids")
        if ids.dtype.kind != "i":
            raise NotStored("input_ids are not integers")
        self.keep, self.lengths = self._real_tokens(columns.get("attention_mask"))
        self.input_ids = self._kept(ids).astype(np.int32)
        if "token_type_ids" in columns:
            self.token_types = self._kept(self._beside(columns["token_type_ids"], "token_type_ids")).astype(np.uint8)
        column = next((columns[name] for name in LABELS if name in columns), None)
        if task.rows.labels == "document":
            self.labels = None if column is None else _labels(column)
            if padding.from_ids:
                raise NotStored("a collator of language models feeds a classifier")
        else:
            self._learn_tokens(ids, column, padding)
        self.documents = np.ones(len(self.widths), dtype=np.int64)
        if padding.flat:
            self._split(columns.get("seq_lengths"))

    def _split(self, column: Any) -> None:
        """Documents instead of rows; nothing predicts the first token of one."""
        if self.keep is not None or self.token_labels is None:
            raise NotStored("flat rows have padding, or no labels of tokens")
        if column is not None:
            self.lengths, self.documents = _flat(column, "seq_lengths")
            starts = np.concatenate([[0], np.cumsum(self.documents)[:-1]])
            if not np.array_equal(np.add.reduceat(self.lengths, starts), self.widths):
                raise NotStored("seq_lengths are not the lengths of the rows")
        self.token_labels[np.cumsum(self.lengths) - self.lengths] = IGNORE

    def _learn_tokens(self, ids: np.ndarray, column: Any, padding: Padding) -> None:
        if padding.from_ids:
            if column is not None:
                raise NotStored("the collator replaces the rows' own labels")
            labels = ids.astype(np.int32)
            if padding.pad_token_id is not None:
                labels = np.where(labels == padding.pad_token_id, IGNORE, labels)
        elif column is None:
            raise NotStored("rows have no labels")
        else:
            labels = self._beside(column, "labels")
            if labels.dtype.kind != "i":
                raise NotStored("labels of tokens are not integers")
        if self.keep is not None and bool((labels[~self.keep] != IGNORE).any()):
            raise NotStored("padding carries labels, which are learned too")
        self.token_labels = self._kept(labels).astype(np.int32)

    def _real_tokens(self, mask: Any) -> tuple[np.ndarray | None, np.ndarray]:
        """Which tokens are no padding (None: all), and how many of each row."""
        if mask is None:
            return None, self.widths
        flat = self._beside(mask, "attention_mask") != 0
        if bool(flat.all()):
            return None, self.widths
        starts = np.concatenate([[0], np.cumsum(self.widths)[:-1]])
        lengths = np.add.reduceat(flat, starts).astype(np.int64)
        columns = np.arange(len(flat)) - np.repeat(starts, self.widths)
        if bool((lengths == 0).any()) or not np.array_equal(flat, columns < np.repeat(lengths, self.widths)):
            raise NotStored("an attention mask has gaps, or padding on the left")
        return flat, lengths

    def _beside(self, column: Any, name: str) -> np.ndarray:
        flat, widths = _flat(column, name)
        if not np.array_equal(widths, self.widths):
            raise NotStored(f"{name} are not as long as input_ids")
        return flat

    def _kept(self, flat: np.ndarray) -> np.ndarray:
        return flat if self.keep is None else flat[self.keep]


def _flat(column: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A column of lists: all values one after another, and the lengths of the rows."""
    if isinstance(column, list):
        rows = [np.asarray(row) for row in column]
        if any(row.ndim != 1 or row.dtype.kind not in "iub" or not len(row) for row in rows):
            raise NotStored(f"{name} are not lists of numbers")
        return np.concatenate(rows), np.asarray([len(row) for row in rows], dtype=np.int64)
    import pyarrow as pa
    from pyarrow import compute

    pc: Any = compute  # its functions are made when it is imported

    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise NotStored(f"{name} are not lists")
    if column.null_count:
        raise NotStored(f"{name} are missing in some rows")
    flat = pc.list_flatten(column)
    if flat.null_count or not (pa.types.is_integer(flat.type) or pa.types.is_boolean(flat.type)):
        raise NotStored(f"{name} are not lists of numbers")
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
    if bool((lengths == 0).any()):
        raise NotStored(f"{name} are empty in some rows")
    return flat.to_numpy(), lengths


def _labels(column: Any) -> np.ndarray:
    """One label a row: a class, a number, or a list of them."""
    values = column if isinstance(column, list) else column.to_pylist()
    if any(value is None for value in values):
        raise NotStored("some rows have no label")
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.empty(0, dtype=object)
    if array.dtype.kind in "ib" and array.ndim == 1:
        return array.astype(np.int64)
    if array.dtype.kind == "f" and array.ndim in (1, 2):
        return array.astype(np.float32)
    raise NotStored("labels are neither classes nor numbers")
