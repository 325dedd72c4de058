import sys

from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)

folder = sys.argv[1]
set_seed(3)
tokenizer = AutoTokenizer.from_pretrained(f"{folder}/llama")
model = AutoModelForCausalLM.from_pretrained(f"{folder}/llama")
config = LoraConfig(
    r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type=TaskType.CAUSAL_LM
)
model = get_peft_model(model, config)
model.print_trainable_parameters()
data = load_dataset("text", data_files=f"{folder}/words.txt", split="train")
data = data.map(lambda e: tokenizer(e["text"], truncation=True, max_length=24), remove_columns=["text"])
trainer = Trainer(
    model=model,
    train_dataset=data,
    args=TrainingArguments(
        output_dir=f"{folder}/out",
        per_device_train_batch_size=4,
        max_steps=6,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
model.config.use_cache = False
trainer.train()
model.save_pretrained(f"{folder}/out/adapter")
