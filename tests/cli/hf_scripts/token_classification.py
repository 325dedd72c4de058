import sys

import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
)

folder = sys.argv[1]
label_names = ["O", "B-GOOD", "B-BAD"]
good, bad = {"good", "great", "fine"}, {"bad", "awful", "poor"}
texts = [line.split() for line in open(f"{folder}/words.txt")]  # noqa: SIM115
raw = Dataset.from_dict(
    {"tokens": texts, "tags": [[1 if w in good else 2 if w in bad else 0 for w in t] for t in texts]}
)
tokenizer = AutoTokenizer.from_pretrained(f"{folder}/bert")


def tokenize_and_align_labels(examples):
    tokenized = tokenizer(examples["tokens"], truncation=True, is_split_into_words=True)
    labels = []
    for i, tags in enumerate(examples["tags"]):
        words = tokenized.word_ids(batch_index=i)
        labels.append([-100 if word is None else tags[word] for word in words])
    tokenized["labels"] = labels
    return tokenized


data = raw.map(tokenize_and_align_labels, batched=True, remove_columns=raw.column_names).train_test_split(0.25, seed=0)
model = AutoModelForTokenClassification.from_pretrained(
    f"{folder}/bert",
    id2label=dict(enumerate(label_names)),
    label2id={name: i for i, name in enumerate(label_names)},
)


def compute_metrics(p):
    predictions, labels = p
    predictions = np.argmax(predictions, axis=2)
    kept = labels != -100
    return {"accuracy": float((predictions[kept] == labels[kept]).mean())}


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        f"{folder}/out",
        eval_strategy="epoch",
        save_strategy="epoch",
        learning_rate=1e-3,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        weight_decay=0.01,
        logging_steps=3,
        load_best_model_at_end=True,
        report_to=[],
    ),
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tokenizer,
    data_collator=DataCollatorForTokenClassification(tokenizer),
    compute_metrics=compute_metrics,
)
trainer.train()
