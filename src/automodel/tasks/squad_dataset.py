"""`make_squad_dataset`: SQuAD-like questions for a causal language model, as a map-style torch dataset.

For use from Python. In a YAML file its name as `_target_` means the built-in path of `dataset:`, whose column detection
knows SQuAD's layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from automodel.data.config import DatasetConfig
from automodel.data.keys import check_keys
from automodel.data.prepare import PreparedData, prepare
from automodel.data.sources import SQUAD
from automodel.tasks.registry import CAUSAL_LM, ROW_FORMATS


class SupervisedTexts(Dataset):
    """Items are `{"input_ids", "attention_mask", "labels"}`; labels are -100 on the prompt and not shifted, as
    transformers' language models expect."""

    def __init__(self, prepared: PreparedData):
        self.prepared = prepared

    def __len__(self) -> int:
        return len(self.prepared.store)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        store = self.prepared.store
        _, part = store.place(index)
        ids = torch.tensor(store.input_ids[part].astype("int64"))
        assert store.token_labels is not None
        labels = torch.tensor(store.token_labels[part].astype("int64"))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def make_squad_dataset(
    tokenizer: Any,
    dataset_name: str = SQUAD,
    split: str | None = "train",
    *,
    max_length: int | None = None,
    num_samples_limit: int | None = None,
    limit_dataset_samples: int | None = None,
    **settings: Any,
) -> SupervisedTexts:
    """Context and question as the prompt, the first answer as what is learned. `settings` are further keys of
    `dataset:`."""
    cfg = DatasetConfig(
        path=dataset_name,
        split=split,
        max_length=max_length,
        num_samples_limit=num_samples_limit or limit_dataset_samples,
        **settings,
    )
    check_keys(CAUSAL_LM.rows, ROW_FORMATS, cfg, "make_squad_dataset")
    return SupervisedTexts(
        prepare(cfg, row_format=CAUSAL_LM.rows, tokenizer=tokenizer, max_positions=None, type_vocab_size=0)
    )
