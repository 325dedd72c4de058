"""Datasets of texts that nobody tokenised: stock Trainer stops at them with an error, here they are tokenised first.

    Trainer(model, args, train_dataset=load_dataset("imdb", split="train"), processing_class=tokenizer)

It happens where there is a tokenizer, the collator is one that only pads, and rows have no `input_ids` but a column of
texts by one of its usual names (`text`, `sentence1` and `sentence2`, `tokens` with `ner_tags`, `messages`, …). Texts
are cut at what the model can take. It is said on stderr. Anything else is left as it is, to fail as in stock Trainer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from automodel.data.batch import IGNORE
from automodel.data.classify import for_words
from automodel.data.columns import MESSAGES, TAGS, TEXT, TEXT_PAIRS, TOKENS
from automodel.data.python_tokenizers import word_numbers
from automodel.tasks.task import Task
from automodel.trainer.read_once import draws, nothing_drawn
from automodel.trainer.sft_rows import RowFormat
from automodel.trainer.stored_rows import NotStored, known_padding

TOKENISED = ("input_ids", "inputs_embeds")
LONGEST = 100_000  # tokenizers without a limit have a very large number


@dataclass(frozen=True)
class Classified:
    """Texts, or pairs of them."""

    tokenizer: Any
    columns: tuple[str, ...]
    longest: int | None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        texts = [row[column] for column in self.columns]
        return dict(self.tokenizer(*texts, truncation=self.longest is not None, max_length=self.longest))


@dataclass(frozen=True)
class Tagged:
    """Lists of words with a tag each; the first token of a word carries it."""

    tokenizer: Any
    words: str
    tags: str
    longest: int | None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        words = row[self.words]
        encoded = self.tokenizer(
            [words], is_split_into_words=True, truncation=self.longest is not None, max_length=self.longest
        )
        places = word_numbers(encoded, 0, self.tokenizer, words)
        made = {name: values[0] for name, values in encoded.items()}
        first = [word is not None and word != before for word, before in zip(places, [None, *places[:-1]])]
        labels = [row[self.tags][word] if new else IGNORE for word, new in zip(places, first)]
        return {**made, "labels": labels}


@dataclass(frozen=True)
class WithoutLabels:
    """For a collator that makes labels of the tokens, and cannot pad others."""

    form: RowFormat

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {name: values for name, values in self.form(row).items() if name != "labels"}


class TokenisedRows(torch.utils.data.Dataset):
    """A dataset of the script's own, row by row."""

    def __init__(self, dataset: Any, form: Callable[[dict[str, Any]], dict[str, Any]]):
        self.dataset, self.form = dataset, form

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self.dataset[index])
        return {**row, **self.form(row)}


def tokenise_datasets(trainer: Any, task: Task | None) -> None:
    """Puts tokenised datasets in the place of those that are not."""
    trainer.train_dataset = tokenised(trainer, trainer.train_dataset, task, "training")
    given = trainer.eval_dataset
    if isinstance(given, dict):
        parts = {name: tokenised(trainer, part, task, name) for name, part in given.items()}
        if any(parts[name] is not part for name, part in given.items()):
            trainer.eval_dataset = parts
    else:
        trainer.eval_dataset = tokenised(trainer, given, task, "evaluation")


def evaluated(trainer: Any, dataset: Any, task: Task | None) -> Any:
    """What is handed over for one evaluation; names of datasets, and those that the constructor saw, as they are."""
    own = trainer.eval_dataset
    seen = own.values() if isinstance(own, dict) else [own]
    if isinstance(dataset, str | dict) or any(dataset is part for part in seen):
        return dataset
    return tokenised(trainer, dataset, task, "evaluation")


def tokenised(trainer: Any, dataset: Any, task: Task | None, what: str) -> Any:
    """The dataset with tokens; itself where it has some, or where it cannot be told what to tokenise."""
    words = trainer.processing_class
    if (
        dataset is None
        or isinstance(dataset, dict)
        or task is None
        or not isinstance(words, PreTrainedTokenizerBase)
        or not _pads(trainer)
    ):
        return dataset
    row = _first_row(dataset)
    if row is None or any(name in row for name in TOKENISED):
        return dataset
    form = _form(row, task, words, trainer.model.config)
    if form is None:
        return dataset
    if isinstance(form, Tagged):
        trainer.processing_class = form.tokenizer  # which is saved with the model
    if isinstance(form, RowFormat) and type(trainer.data_collator) is transformers.DataCollatorForLanguageModeling:
        form = WithoutLabels(form)
    if task.rows.labels == "next_token" and type(trainer.data_collator) is transformers.DataCollatorWithPadding:
        trainer.data_collator = transformers.DataCollatorForSeq2Seq(words)
    print(f"automodel: the rows of the {what} dataset have no tokens, so they are tokenised", file=sys.stderr)
    if hasattr(dataset, "map") and hasattr(dataset, "column_names"):
        removed = [name for name in row if name in MESSAGES] if task.rows.labels == "next_token" else []
        return dataset.map(form, remove_columns=removed or None)
    if type(dataset) is list:
        return [{**entry, **form(entry)} for entry in dataset]
    return TokenisedRows(dataset, form)


def _pads(trainer: Any) -> bool:
    try:
        return known_padding(trainer.data_collator, trainer.processing_class).to_longest
    except NotStored:
        return False


def _first_row(dataset: Any) -> dict[str, Any] | None:
    """A row to look at; None where reading one is not known to be harmless."""
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list) and any(name in names for name in TOKENISED):
        return dict.fromkeys(names)
    if hasattr(dataset, "map") and hasattr(dataset, "column_names"):
        computed = getattr(dataset, "format", {"type": None})["type"] == "custom"
        if computed or (hasattr(dataset, "__len__") and not len(dataset)):
            return None
        return dict(next(iter(dataset)))
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__getitem__"):
        return None
    if type(dataset) is not list and draws(dataset):
        return None
    try:
        with nothing_drawn():
            row = dataset[0] if len(dataset) else None
    except Exception:  # whatever is wrong with it shows itself where it is used
        return None
    return dict(row) if isinstance(row, dict) else None


def _form(
    row: dict[str, Any], task: Task, words: Any, config: Any
) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    positions = getattr(config, "max_position_embeddings", None)
    limits = [n for n in (words.model_max_length, positions) if isinstance(n, int) and 0 < n < LONGEST]
    longest = min(limits, default=None)
    texts = {name for name, value in row.items() if isinstance(value, str)}
    if task.rows.labels == "token":
        lists = [name for name in (*TOKENS, *TAGS) if isinstance(row.get(name), list)]
        found = [next((n for n in names if n in lists), None) for names in (TOKENS, TAGS)]
        return Tagged(for_words(words), found[0], found[1], longest) if found[0] and found[1] else None
    single = next((name for name in TEXT if name in texts), None)
    if task.rows.labels == "document":
        pair = next((pair for pair in TEXT_PAIRS if set(pair) <= texts), None)
        columns = pair or ((single,) if single else None)
        return Classified(words, columns, longest) if columns else None
    talks = any(name in row for name in ("messages", "conversations")) or {"prompt", "completion"} <= set(row)
    return RowFormat(words, single or "text", longest, None, False) if talks or single else None
