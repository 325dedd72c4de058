"""The job's tokens as `transformers.Trainer` wants them: a dataset of dictionaries and a collator.

Rows come from the same token store that this library trains from. `max_length` padding is stored with the rows, as a
`dataset.map(tokenize)` with `padding="max_length"` would; dynamic padding is the collator's. The collator also counts
real tokens on the host (the sum of the attention mask), which costs microseconds and no device time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, Sampler

from automodel.data.order import StepOrder
from automodel.data.row_format import LabelPlace
from automodel.data.store import TokenStore

IGNORE = -100
TOKENS = "num_tokens"  # key under which a batch carries its count; taken out before the model sees it


class StoreRows(Dataset):
    """Samples of a token store as dictionaries, padded to `pad_to` where it is given."""

    def __init__(self, store: TokenStore, place: LabelPlace, pad_token_id: int, pad_to: int | None):
        self.store = store
        self.place, self.pad_token_id, self.pad_to = place, pad_token_id, pad_to

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> dict[str, Any]:
        store = self.store
        begin, end = int(store.offsets[index]), int(store.offsets[index + 1])
        row: dict[str, Any] = {"input_ids": store.input_ids[begin:end].tolist(), "attention_mask": [1] * (end - begin)}
        if store.token_types is not None:
            row["token_type_ids"] = store.token_types[begin:end].tolist()
        if self.place == "document":
            assert store.labels is not None
            row["labels"] = store.labels[index].tolist()
        else:
            assert store.token_labels is not None
            row["labels"] = store.token_labels[begin:end].tolist()
        if self.place == "next_token":
            row["labels"][0] = IGNORE  # nothing predicts the first token; some releases of Trainer would count it
        return self._padded(row) if self.pad_to else row

    def _padded(self, row: dict[str, Any]) -> dict[str, Any]:
        assert self.pad_to is not None
        missing = self.pad_to - len(row["input_ids"])
        fill = {"input_ids": self.pad_token_id, "labels": IGNORE}
        return {k: v + [fill.get(k, 0)] * missing if isinstance(v, list) and _per_token(k, self.place) else v
                for k, v in row.items()}  # fmt: skip


def _per_token(key: str, place: LabelPlace) -> bool:
    return key != "labels" or place != "document"


class RowsInOrder(Sampler):
    """The rows of each epoch in the order in which the run reads them, micro-batch after micro-batch."""

    def __init__(self, order: StepOrder):
        self.order, self.epoch = order, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for step in range(self.order.steps_per_epoch):
            for rows in self.order.micro_batches(self.epoch, step):
                yield from rows.tolist()

    def __len__(self) -> int:
        whole = self.order.steps_per_epoch * self.order.samples_per_step
        return min(whole, self.order.samples_per_epoch)


class CountingCollator:
    """A collator that adds the batch's real tokens to it."""

    def __init__(self, collate: Any):
        self.collate = collate

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        batch = dict(self.collate(features))
        batch[TOKENS] = int(batch["attention_mask"].sum())
        return batch


def make_collator(tokenizer: Any, place: LabelPlace, padding: str, multiple: int | None) -> CountingCollator:
    """transformers' own collators: what a Trainer user takes."""
    from transformers import DataCollatorForTokenClassification, DataCollatorWithPadding, default_data_collator

    if padding == "max_length":
        return CountingCollator(default_data_collator)
    if place == "document":
        return CountingCollator(DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple))
    return CountingCollator(DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=multiple))
