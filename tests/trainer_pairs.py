"""The same small training by our Trainer and by stock's, and what has to be equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset

from automodel import TrainingArguments
from tiny_models import tiny
from tiny_runs import make_tokenizer

TOKENIZER = make_tokenizer()


def rows(count=20, label="class", name="label", pair=False, plain=False, end=(), seed=0):
    draw, made = np.random.default_rng(seed), []
    for _ in range(count):
        ids = [*draw.integers(5, 40, int(draw.integers(4, 20))).tolist(), *end]
        row = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        if pair:
            row["token_type_ids"] = [0] * 2 + [1] * (len(ids) - 2)
        values = {"class": ids[0] % 3, "number": ids[0] / 10, "several": [float(ids[0] % 2), float(ids[1] % 2), 0.0]}
        row[name] = values[label]
        made.append(row)
    return made if plain else Dataset.from_list(made)


def trainer_of(kind, folder, family="bert", data=None, config=None, options=None, **given):
    def model():
        return tiny(family, "text-classification", **{"pad_token_id": 0, "num_labels": 3, **(config or {})})[1]

    settings = {
        "max_steps": 5, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1, "use_cpu": True,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "eval_strategy": "steps", "eval_steps": 2,
    }  # fmt: skip
    made = {"model_init": model} if given.pop("by_init", False) else {"model": model()}
    held_out = given.pop("eval_dataset", None) or rows(6, seed=1, **(data or {}))
    return kind(
        args=TrainingArguments(str(folder), **settings | (options or {})), train_dataset=rows(**(data or {})),
        eval_dataset=held_out, data_collator=transformers.DataCollatorWithPadding(TOKENIZER),
        processing_class=TOKENIZER, **made, **given,
    )  # fmt: skip


def same(ours, stock):
    assert ours.acceleration.path == "packed", ours.acceleration
    assert ours.model.config.problem_type == stock.model.config.problem_type
    assert [sorted(e) for e in ours.state.log_history] == [sorted(e) for e in stock.state.log_history]
    for mine, theirs in zip(ours.state.log_history, stock.state.log_history):
        for key in theirs:
            if not any(word in key for word in ("runtime", "per_second", "preparation")):
                assert mine[key] == pytest.approx(theirs[key], abs=1e-4, rel=1e-4), key


class LookedUp(torch.utils.data.Dataset):
    """As in many tutorials."""

    def __init__(self, made):
        self.encodings = {key: [row[key] for row in made] for key in ("input_ids", "attention_mask")}
        self.labels = [row["label"] for row in made]

    def __getitem__(self, index):
        item = {key: torch.tensor(values[index]) for key, values in self.encodings.items()}
        item["labels"] = torch.tensor(self.labels[index])
        return item

    def __len__(self):
        return len(self.labels)
