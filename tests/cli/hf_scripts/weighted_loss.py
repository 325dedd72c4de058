import sys

import torch
from datasets import load_dataset
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

folder = sys.argv[1]


class CustomTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.get("logits")
        loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0], device=model.device))
        loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


tokenizer = AutoTokenizer.from_pretrained(f"{folder}/bert")
data = load_dataset("json", data_files={"train": f"{folder}/train.jsonl"}, split="train")
data = data.map(lambda e: tokenizer(e["text"], truncation=True), batched=True)
trainer = CustomTrainer(
    model=AutoModelForSequenceClassification.from_pretrained(f"{folder}/bert"),
    args=TrainingArguments(
        f"{folder}/out", max_steps=6, logging_steps=1, learning_rate=1e-3, save_strategy="no", report_to="none"
    ),
    train_dataset=data,
    processing_class=tokenizer,
)
trainer.train()
