import sys

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(f"{folder}/distilbert")
data = load_dataset("json", data_files={"train": f"{folder}/train.jsonl", "test": f"{folder}/test.jsonl"})
data = data.map(lambda e: tokenizer(e["text"], truncation=True), batched=True).rename_column("label", "labels")
data.set_format("torch", columns=["input_ids", "attention_mask", "labels"])


def compute_metrics(eval_pred):
    predictions, labels = eval_pred
    f1_parts = [np.sum((predictions == c) & (labels == c)) for c in (0, 1)]
    return {"accuracy": (predictions == labels).mean(), "hits": int(sum(f1_parts))}


trainer = Trainer(
    model=AutoModelForSequenceClassification.from_pretrained(f"{folder}/distilbert", num_labels=2),
    args=TrainingArguments(
        output_dir=f"{folder}/out",
        eval_strategy="epoch",
        save_strategy="epoch",
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        num_train_epochs=3,
        learning_rate=1e-3,
        metric_for_best_model="accuracy",
        greater_is_better=True,
        load_best_model_at_end=True,
        save_total_limit=1,
        logging_strategy="epoch",
        report_to="none",
    ),
    train_dataset=data["train"],
    eval_dataset=data["test"],
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=compute_metrics,
    preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
)
trainer.train()
predictions = trainer.predict(data["test"])
print(predictions.metrics)
