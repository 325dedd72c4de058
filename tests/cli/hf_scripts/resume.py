import sys

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
data = load_dataset("json", data_files=f"{folder}/train.jsonl", split="train")
data = data.map(lambda e: tokenizer(e["text"], truncation=True), batched=True)


def make_trainer(epochs):
    return Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(f"{folder}/distilbert"),
        args=TrainingArguments(
            f"{folder}/out",
            num_train_epochs=epochs,
            per_device_train_batch_size=7,
            logging_steps=2,
            save_steps=4,
            lr_scheduler_type="constant",
            learning_rate=1e-3,
            report_to="none",
        ),
        train_dataset=data,
        data_collator=DataCollatorWithPadding(tokenizer),
    )


make_trainer(1).train()
trainer = make_trainer(3)
trainer.train(resume_from_checkpoint=True)
trainer.save_state()
