import json
import sys

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

folder = sys.argv[1]


class Reviews(Dataset):
    def __init__(self, path, tokenizer):
        self.rows = [json.loads(line) for line in open(path)]  # noqa: SIM115
        self.tokenizer = tokenizer

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        return {"ids": torch.tensor(self.tokenizer(row["text"])["input_ids"]), "target": row["label"]}


def collate(batch):
    ids = pad_sequence([b["ids"] for b in batch], batch_first=True, padding_value=0)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.tensor([b["target"] for b in batch]),
    }


tokenizer = AutoTokenizer.from_pretrained(f"{folder}/distilbert")
model = AutoModelForSequenceClassification.from_pretrained(f"{folder}/distilbert")
trainer = Trainer(
    model,
    TrainingArguments(
        f"{folder}/out",
        per_device_train_batch_size=6,
        max_steps=8,
        learning_rate=1e-3,
        logging_steps=2,
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
    ),
    data_collator=collate,
    train_dataset=Reviews(f"{folder}/train.jsonl", tokenizer),
    eval_dataset=Reviews(f"{folder}/test.jsonl", tokenizer),
)
trainer.train()
trainer.evaluate()
