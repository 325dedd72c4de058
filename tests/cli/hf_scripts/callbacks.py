import sys

from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

folder = sys.argv[1]


class StopWhenTold(TrainerCallback):
    def on_epoch_end(self, args, state, control, **kwargs):
        print("epoch", state.epoch, "step", state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 14:
            control.should_training_stop = True
        if state.global_step % 5 == 0:
            control.should_log = True
        return control


tokenizer = AutoTokenizer.from_pretrained(f"{folder}/bert")
data = load_dataset("json", data_files={"train": f"{folder}/train.jsonl", "test": f"{folder}/test.jsonl"})
data = data.map(lambda e: tokenizer(e["text"], truncation=True), batched=True)
trainer = Trainer(
    model=AutoModelForSequenceClassification.from_pretrained(f"{folder}/bert"),
    args=TrainingArguments(
        output_dir=f"{folder}/out",
        num_train_epochs=10,
        per_device_train_batch_size=8,
        learning_rate=5e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=0.1,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        load_best_model_at_end=True,
        logging_steps=100,
        logging_first_step=True,
        report_to="none",
        train_sampling_strategy="group_by_length",
    ),
    train_dataset=data["train"],
    eval_dataset=data["test"],
    data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
    callbacks=[StopWhenTold, EarlyStoppingCallback(early_stopping_patience=3, early_stopping_threshold=0.0)],
)
trainer.train()
