import sys
from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)

folder = sys.argv[1]
set_seed(7)
tokenizer = AutoTokenizer.from_pretrained(f"{folder}/llama")
model = AutoModelForCausalLM.from_pretrained(f"{folder}/llama")
dataset = load_dataset("text", data_files={"train": f"{folder}/words.txt"})
block_size = 16


def group_texts(examples):
    joined = {k: list(chain(*examples[k])) for k in examples}
    total = len(joined["input_ids"]) // block_size * block_size
    result = {k: [t[i : i + block_size] for i in range(0, total, block_size)] for k, t in joined.items()}
    result["labels"] = result["input_ids"].copy()
    return result


tokenized = dataset.map(lambda e: tokenizer(e["text"]), batched=True, remove_columns=["text"])
lm = tokenized.map(group_texts, batched=True)["train"].train_test_split(test_size=0.2, seed=1)
training_args = TrainingArguments(
    output_dir=f"{folder}/out",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=3,
    num_train_epochs=2,
    learning_rate=2e-3,
    warmup_steps=2,
    lr_scheduler_type="cosine",
    logging_steps=1,
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=lm["train"].remove_columns("labels"),
    eval_dataset=lm["test"].remove_columns("labels"),
    data_collator=DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False),
)
result = trainer.train()
trainer.log_metrics("train", result.metrics)
trainer.save_model()
