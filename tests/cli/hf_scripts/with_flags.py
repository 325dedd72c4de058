import sys
from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class DataArguments:
    folder: str = field(metadata={"help": "where everything lies"})


def main():
    parser = HfArgumentParser((DataArguments, TrainingArguments))
    data_args, training_args = parser.parse_args_into_dataclasses()
    folder = data_args.folder
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/bert")
    data = load_dataset("json", data_files={"train": f"{folder}/train.jsonl", "test": f"{folder}/test.jsonl"})
    data = data.map(lambda e: tokenizer(e["text"], truncation=True), batched=True)
    trainer = Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(f"{folder}/bert"),
        args=training_args,
        train_dataset=data["train"] if training_args.do_train else None,
        eval_dataset=data["test"] if training_args.do_eval else None,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    if training_args.do_train:
        trainer.train()


if __name__ == "__main__":
    sys.exit(main())
