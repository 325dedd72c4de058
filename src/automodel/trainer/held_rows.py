"""A Trainer's training rows as flat arrays, whatever it was given them as."""

from __future__ import annotations

from typing import Any

from automodel.tasks.task import Task
from automodel.trainer.read_once import Listed, ReadOnce, samples_taken
from automodel.trainer.stored_rows import MOST_FOR_A_PART, MOST_TOKENS, StoredRows, known_padding, store_rows


def held_rows(trainer: Any, task: Task) -> StoredRows:
    """Raises `NotStored` where they cannot be held."""
    dataset, args, read = trainer.train_dataset, trainer.args, None
    if hasattr(dataset, "remove_columns") and hasattr(dataset, "column_names") and hasattr(dataset, "format"):
        dataset = trainer._remove_unused_columns(dataset, description="training")
    else:
        known_padding(trainer.data_collator, trainer.processing_class)  # before anything is read
        read = Listed(dataset) if type(dataset) is list else ReadOnce(dataset, samples_taken(args, dataset))
        dataset = _used_columns(trainer, read.rows)
    whole = hasattr(dataset, "__len__") and samples_taken(args, dataset) >= len(dataset)
    most = MOST_TOKENS if whole else MOST_FOR_A_PART
    form = (trainer.data_collator, task, trainer.model.config, trainer.processing_class, most)
    rows = store_rows(dataset, *form)
    rows.origin = dataset
    if read is not None and not args.dataloader_persistent_workers:  # those have a copy that nobody changes
        rows.again = lambda: store_rows(_used_columns(trainer, read.rows), *form) if read.again() else None
    return rows


def _used_columns(trainer: Any, rows: list[Any]) -> list[Any]:
    """Rows in a list without what the model does not take."""
    if not trainer.args.remove_unused_columns:
        return rows
    trainer._set_signature_columns_if_needed()
    used = set(trainer._signature_columns or ())
    return [{k: v for k, v in row.items() if k in used} if type(row) is dict else row for row in rows]
