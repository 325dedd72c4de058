import sys

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(f"{folder}/bert")
data = load_dataset("json", data_files=f"{folder}/train.jsonl", split="train")
data = data.map(lambda e: tokenizer(e["text"], truncation=True), batched=True)
model = AutoModelForSequenceClassification.from_pretrained(f"{folder}/bert")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=10)
trainer = Trainer(
    model=model,
    args=TrainingArguments(f"{folder}/out", max_steps=10, logging_steps=2, save_strategy="no", report_to="none"),
    train_dataset=data,
    data_collator=DataCollatorWithPadding(tokenizer),
    optimizers=(optimizer, scheduler),
)
trainer.train()
