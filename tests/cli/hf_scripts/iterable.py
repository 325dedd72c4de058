import sys

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(f"{folder}/llama")
stream = load_dataset("text", data_files=f"{folder}/words.txt", split="train", streaming=True)
stream = stream.shuffle(seed=42, buffer_size=16)
stream = stream.map(lambda e: tokenizer(e["text"], truncation=True, max_length=20), remove_columns=["text"])
trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained(f"{folder}/llama"),
    args=TrainingArguments(
        f"{folder}/out",
        max_steps=12,
        per_device_train_batch_size=8,
        logging_steps=3,
        learning_rate=1e-3,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=stream,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
