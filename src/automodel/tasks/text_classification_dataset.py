"""`TextClassificationDataset`: tokenised, labelled texts as an ordinary map-style torch dataset.

For use from Python, with any trainer. In a YAML file its name as `_target_` simply means the built-in path of
`dataset:`, which reads the same keys and never pads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from automodel.config.errors import UserError
from automodel.data.config import DatasetConfig
from automodel.data.keys import check_keys
from automodel.data.prepare import prepare
from automodel.tasks.registry import ROW_FORMATS, TEXT_CLASSIFICATION


class TextClassificationDataset(Dataset):
    """Items are `{"input_ids", "attention_mask", "labels"}` (and `token_type_ids` for pairs), unpadded; `collate_fn`
    pads a list of them.

        data = TextClassificationDataset("imdb", split="train[:1000]", tokenizer="distilbert-base-uncased")
    """

    def __init__(
        self,
        dataset_name: str,
        split: str | None = None,
        *,
        tokenizer: Any,
        max_length: int | None = None,
        text_column: str | None = None,
        label_column: str | None = None,
        num_samples_limit: int | None = None,
        **settings: Any,
    ):
        """`tokenizer` is a tokenizer or its name; `settings` are further keys of `dataset:`."""
        if isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            loaded: Any = AutoTokenizer.from_pretrained(tokenizer)
            tokenizer = loaded
        try:
            cfg = DatasetConfig(
                path=dataset_name,
                split=split,
                max_length=max_length,
                text_column=text_column,
                label_column=label_column,
                num_samples_limit=num_samples_limit,
                **settings,
            )
        except TypeError as error:
            raise UserError(f"TextClassificationDataset: {str(error).split('__init__() ')[-1]}.") from error
        check_keys(TEXT_CLASSIFICATION.rows, ROW_FORMATS, cfg, "TextClassificationDataset")
        pairs = "token_type_ids" in tokenizer.model_input_names
        self.tokenizer = tokenizer
        self.prepared = prepare(
            cfg,
            row_format=TEXT_CLASSIFICATION.rows,
            tokenizer=tokenizer,
            max_positions=None,
            type_vocab_size=2 if pairs else 0,
        )

    @property
    def label_names(self) -> list[str] | None:
        return self.prepared.label_names

    @property
    def num_labels(self) -> int:
        assert self.prepared.num_labels is not None
        return self.prepared.num_labels

    def __len__(self) -> int:
        return len(self.prepared.store)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        store = self.prepared.store
        index, part = store.place(index)
        ids = torch.tensor(store.input_ids[part].astype("int64"))
        assert store.labels is not None
        item = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(store.labels[index])}
        if store.token_types is not None:
            item["token_type_ids"] = torch.tensor(store.token_types[part].astype("int64"))
        return item

    def collate_fn(self, items: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """A padded batch, as a `DataLoader` wants it."""
        pad = self.tokenizer.pad_token_id or 0
        fillers = {"input_ids": pad, "attention_mask": 0, "token_type_ids": 0}
        return {
            name: torch.nn.utils.rnn.pad_sequence(
                [i[name] for i in items], batch_first=True, padding_value=fillers[name]
            )
            if name in fillers
            else torch.stack([item[name] for item in items])
            for name in items[0]
        }
