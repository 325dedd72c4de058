import sys

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(f"{folder}/bert")
model = AutoModelForSequenceClassification.from_pretrained(f"{folder}/bert", num_labels=2)
data = load_dataset("json", data_files={"train": f"{folder}/train.jsonl", "test": f"{folder}/test.jsonl"})


def tokenize(batch):
    return tokenizer(batch["text"], truncation=True, padding="max_length", max_length=32)


data = data.map(tokenize, batched=True)
args = TrainingArguments(
    output_dir=f"{folder}/out",
    num_train_epochs=1,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=16,
    learning_rate=1e-3,
    logging_steps=2,
    eval_strategy="steps",
    eval_steps=3,
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(model=model, args=args, train_dataset=data["train"], eval_dataset=data["test"])
trainer.train()
print(trainer.evaluate())
