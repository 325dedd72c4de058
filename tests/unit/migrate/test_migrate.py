"""Scripts, saved arguments and other tools' YAML become configs, or lists of lines that stand in the way."""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from pathlib import Path

import pytest
import yaml

from automodel.config.errors import UserError
from automodel.migrate.document import Document
from automodel.migrate.old_names import modern_arguments
from automodel.migrate.training_arguments import carry_over
from automodel.migrate.verb import read_source, write_config
from automodel.plan.check import load_run_config

REFERENCE = Path(__file__).resolve().parents[4] / "shared" / "reference"

SCRIPT = """
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, EarlyStoppingCallback, Trainer
from transformers import AdamW, TrainingArguments

NAME = "distilbert-base-uncased"
BATCH = 4 * 4
tokenizer = AutoTokenizer.from_pretrained(NAME)
model = AutoModelForSequenceClassification.from_pretrained(NAME, num_labels=2)
raw = load_dataset("csv", data_files={"train": "train.csv", "test": "test.csv"})


def preprocess(examples):
    return tokenizer(examples["review"], truncation=True, max_length=128)


data = raw.map(preprocess, batched=True).rename_column("sentiment", "labels")
options = {"weight_decay": 0.01, "fp16": True}
args = TrainingArguments(
    "out", evaluation_strategy="steps", eval_steps=20, per_device_train_batch_size=BATCH, warmup_ratio=0.1,
    learning_rate=3e-5, num_train_epochs=2, lr_scheduler_type="cosine", seed=7, adam_beta2=0.98, **options,
)
trainer = Trainer(
    model, args, train_dataset=data["train"].shuffle(seed=1).select(range(500)), eval_dataset=data["test"],
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
)
trainer.train()
"""


def migrated(tmp_path: Path, text: str, name: str = "train.py") -> dict:
    (tmp_path / name).write_text(text)
    document = read_source(tmp_path / name)
    write_config(document, tmp_path / "run.yaml", overwrite=True)
    return yaml.safe_load((tmp_path / "run.yaml").read_text())


def test_a_script_as_a_config(tmp_path):
    assert migrated(tmp_path, SCRIPT) == {
        "model": {"pretrained_model_name_or_path": "distilbert-base-uncased", "num_labels": 2},
        "task": "text-classification",
        "dataset": {
            "path": "train.csv", "num_samples_limit": 500, "text_column": "review", "max_length": 128,
            "label_column": "sentiment",
        },
        "validation_dataset": {"path": "test.csv"},
        "step_scheduler": {"num_epochs": 2, "val_every_steps": 20},
        "dataloader": {"batch_size": 16},
        "optimizer": {"lr": 3e-5, "betas": [0.9, 0.98], "weight_decay": 0.01},
        "lr_scheduler": {"name": "cosine", "warmup_steps": 0.1},
        "training_optimizations": {"precision": "fp16"},
        "checkpoint": {"keep_best": False, "checkpoint_dir": "out"},
        "early_stopping": {"patience": 2},
        "seed": 7,
    }  # fmt: skip
    text = (tmp_path / "run.yaml").read_text()
    assert "evaluation_strategy is now eval_strategy" in text


LORA = """
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, DataCollatorForLanguageModeling
from transformers import Trainer, TrainingArguments

bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
base = "meta-llama/Llama-3.2-1B"
tokenizer = AutoTokenizer.from_pretrained(base)
model = AutoModelForCausalLM.from_pretrained(base, quantization_config=bnb, device_map="auto")
model = prepare_model_for_kbit_training(model)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], bias="none",
                                         lora_dropout=0.05, task_type="CAUSAL_LM"))
data = load_dataset("json", data_files="data.jsonl", split="train").train_test_split(test_size=0.1)
data = data.map(lambda e: tokenizer(e["text"], truncation=True, max_length=512))
trainer = Trainer(
    model=model, train_dataset=data["train"], eval_dataset=data["test"],
    args=TrainingArguments(output_dir="lora", max_steps=100, bf16=True, optim="paged_adamw_8bit", report_to="wandb"),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
"""


def test_an_adapter_over_quantised_weights(tmp_path):
    found = migrated(tmp_path, LORA)
    assert found["peft"] == {"dim": 16, "alpha": 32, "dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}
    assert found["quantization"] == {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16",
    }  # fmt: skip
    assert found["dataset"] == {
        "path": "data.jsonl", "split": "train[:90%]", "text_column": "text", "max_length": 512, "on_long": "cut",
    }  # fmt: skip
    assert found["validation_dataset"]["split"] == "train[90%:]"
    assert (found["optimizer"]["name"], found["wandb"], found["task"]) == ("paged_adamw_8bit", {}, "causal-lm")


BAD = {
    "loss": (
        "class Mine(Trainer):\n    def compute_loss(self, model, inputs):\n        return 0\n",
        "Mine(model=model, args=args, train_dataset=data['train'])",
        ["line 27: Mine.compute_loss is code of the script's own"],
    ),
    "collator": (
        "def collate(rows):\n    return rows\n",
        "Trainer(model=model, args=args, train_dataset=data['train'], data_collator=collate)",
        ["data_collator: collate may do anything"],
    ),
    "rows": ("", "Trainer(model=model, args=args, train_dataset=[{'a': 1}])", ["which only the script can make"]),
    "two": (
        "",
        "Trainer(model=model, args=args, train_dataset=data['train']), Trainer(model)",
        ["one of 2 trainers; a config is one training"],
    ),
    "optimizer": (
        "",
        "Trainer(model=model, args=args, train_dataset=data['train'], optimizers=(AdamW(model.parameters()), None))",
        ["optimizers: an optimizer of the script's own"],
    ),
    "masked": (
        "from transformers import DataCollatorForLanguageModeling\n",
        "Trainer(model, args, DataCollatorForLanguageModeling(tokenizer), data['train'])",
        ["masked language modelling"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_config_cannot_say_is_listed_with_its_line_and_nothing_is_written(tmp_path, name):
    before, call, expected = BAD[name]
    head = SCRIPT.split("trainer = Trainer(")[0]
    (tmp_path / "train.py").write_text(f"{head}\n\n\n{before}trainer = {call}\n")
    with pytest.raises(UserError) as caught:
        write_config(read_source(tmp_path / "train.py"), tmp_path / "run.yaml")
    for text in expected:
        assert text in str(caught.value)
    assert re.search(r"line \d+", str(caught.value))
    assert not (tmp_path / "run.yaml").exists()


def test_values_that_only_a_run_knows_and_code_that_is_none(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.replace("learning_rate=3e-5", "learning_rate=float(os.environ['LR'])"))
    with pytest.raises(UserError, match=r"line \d+: learning_rate: `float\(os.environ\['LR'\]\)` is only known when"):
        read_source(tmp_path / "train.py")
    (tmp_path / "train.py").write_text("def broken(:\n")
    with pytest.raises(UserError, match="line 1: this is not Python"):
        read_source(tmp_path / "train.py")


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="../shared/reference is not here")
def test_the_references_own_script(tmp_path):
    document = (REFERENCE / "text-classification-example.md").read_text()
    script = next(b for b in re.findall(r"```python\n(.*?)```", document, re.S) if "baseline_hf_training" in b)
    found = migrated(tmp_path, script)
    assert found["dataset"]["path"] == "imdb"
    assert found["dataset"]["split"] == "train[:1000]"
    assert found["step_scheduler"] == {"num_epochs": 1, "log_every_steps": 10, "val_every_steps": 50}
    assert found["training_optimizations"] == {"precision": "fp32"}


def test_saved_arguments_of_both_kinds_give_the_same_config(tmp_path):
    import torch

    from automodel.trainer.arguments import TrainingArguments

    args = TrainingArguments(
        str(tmp_path / "o"),
        learning_rate=1e-4,
        max_steps=50,
        use_cpu=True,
        bf16=True,
        optim="adafactor",
        report_to="none",
    )
    torch.save(args, tmp_path / "training_args.bin")
    (tmp_path / "training_args.json").write_text(args.to_json_string())
    configs = []
    for name in ("training_args.bin", "training_args.json"):
        document = read_source(tmp_path / name)
        write_config(document, tmp_path / f"{name}.yaml")
        configs.append(yaml.safe_load((tmp_path / f"{name}.yaml").read_text()))
        assert "`model` is not part of" in (tmp_path / f"{name}.yaml").read_text()
    assert configs[0] == configs[1]
    assert configs[0]["optimizer"] == {"name": "adafactor", "lr": 1e-4} or configs[0]["optimizer"]["lr"] == 1e-4
    assert configs[0]["step_scheduler"]["max_steps"] == 50
    assert configs[0]["training_optimizations"]["precision"] == "bf16"


class Harm:
    def __reduce__(self):
        return os.system, ("touch harmed",)


def test_a_pickle_that_would_run_something_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile(tmp_path / "training_args.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Harm()))
    with pytest.raises(UserError, match="asks for posix.system"):
        read_source(tmp_path / "training_args.bin")
    assert not (tmp_path / "harmed").exists()


def test_axolotl(tmp_path):
    found = migrated(
        tmp_path,
        yaml.safe_dump({
            "base_model": "NousResearch/Llama-3.2-1B",
            "datasets": [{"path": "teknium/GPT4-LLM-Cleaned", "type": "alpaca"}],
            "val_set_size": 0.1, "output_dir": "./outputs", "adapter": "lora", "sequence_len": 2048,
            "sample_packing": True,
            "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"],
            "gradient_accumulation_steps": 2, "micro_batch_size": 2, "num_epochs": 1, "optimizer": "adamw_8bit",
            "lr_scheduler": "cosine", "learning_rate": 0.0002, "bf16": "auto", "tf32": False, "warmup_steps": 10,
            "gradient_checkpointing": True, "flash_attention": True, "logging_steps": 1, "weight_decay": 0.0,
        }),
        "lora.yml",
    )  # fmt: skip
    assert found["peft"] == {"dim": 16, "alpha": 32, "dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}
    assert found["dataset"] == {"path": "teknium/GPT4-LLM-Cleaned", "max_length": 2048, "split": "train[:90%]"}
    assert found["packed_sequence"] == {"packed_sequence_size": 2048}
    assert found["dataloader"] == {"batch_size": 2}
    assert found["step_scheduler"] == {"grad_acc_steps": 2, "num_epochs": 1, "log_every_steps": 1}
    assert found["optimizer"] == {"name": "adamw_8bit", "lr": 0.0002}
    assert found["training_optimizations"]["precision"] == "bf16"
    assert found["training_optimizations"]["gradient_checkpointing"] is True


def test_llama_factory_finds_the_file_of_its_dataset(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"demo": {"file_name": "demo.json"}}))
    found = migrated(
        tmp_path,
        yaml.safe_dump({
            "model_name_or_path": "meta-llama/Llama-3.2-1B", "stage": "sft", "do_train": True,
            "finetuning_type": "lora",
            "lora_target": "all", "lora_rank": 8, "dataset": "demo", "template": "llama3", "cutoff_len": 1024,
            "neat_packing": True,
            "max_samples": 100, "output_dir": "saves", "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 8,
            "learning_rate": 1e-4, "num_train_epochs": 3.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1,
            "bf16": True, "overwrite_output_dir": True, "plot_loss": True, "val_size": 0.1, "eval_strategy": "steps",
            "eval_steps": 500,
        }),
        "sft.yaml",
    )  # fmt: skip
    assert found["packed_sequence"] == {"packed_sequence_size": 1024}
    assert found["dataset"]["path"] == str(tmp_path / "data" / "demo.json")
    assert found["peft"] == {"dim": 8, "alpha": 16, "target_modules": "all-linear"}
    assert found["lr_scheduler"] == {"name": "cosine", "warmup_steps": 0.1}
    assert found["step_scheduler"] == {"grad_acc_steps": 8, "val_every_steps": 500}


AXOLOTL = """base_model: NousResearch/Llama-3.2-1B
datasets:
  - path: me/chats
    type: chat_template
sequence_len: 2048
micro_batch_size: 2
num_epochs: 1
learning_rate: 0.0002
lr_scheduler: cosine
bf16: auto
wandb_entity: me
special_tokens:
  pad_token: "<|end_of_text|>"
"""
FACTORY = """model_name_or_path: meta-llama/Llama-3.2-1B
stage: sft
finetuning_type: lora
dataset: demo
template: llama3
learning_rate: 1.0e-4
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (AXOLOTL.replace("num_epochs: 1\n", ""), "num_epochs is not given"),
        (AXOLOTL.replace("bf16: auto\n", ""), "bf16 is not given"),
        (AXOLOTL + "chat_template: chatml\n", "line 2: chat_template: chatml: write it to a file"),
        (AXOLOTL + "tokens: ['<x>']\n", "line 14: tokens: words that are added"),
        (AXOLOTL + "unfrozen_parameters: ['.*head.*']\n", "line 14: unfrozen_parameters: "),
        (AXOLOTL + "rl: dpo\n", "line 14: rl: preference tuning"),
        (AXOLOTL + "optimizer: ao_adamw_fp8\n", "line 14: optim='ao_adamw_fp8'"),
        (
            AXOLOTL.replace("type: chat_template", "type: chat_template\n    roles_to_train: [user]"),
            "line 2: datasets.roles",
        ),
        (AXOLOTL + "s2_attention: true\n", "line 14: s2_attention"),
        (AXOLOTL + "plugins: [axolotl.integrations.kd.KDPlugin]\n", "line 14: plugins: axolotl.integrations.kd"),
        (FACTORY + "quantization_bit: 4\nquantization_method: hqq\n", "line 8: quantization_method: hqq"),
        (FACTORY + "mask_history: true\n", "line 7: mask_history: True: this key is not known here"),
        (FACTORY + "use_galore: true\n", "line 7: use_galore"),
        (FACTORY.replace("stage: sft", "stage: dpo"), "line 2: stage: dpo"),
        (FACTORY.replace("dataset: demo", "dataset: a,b"), "line 4: dataset: there are 2"),
        (FACTORY + "neftune_noise_alpha: 5\n", "line 7: neftune_noise_alpha"),
    ],
)
def test_other_tools_keys_that_make_another_training_are_named_with_their_line(tmp_path, text, said):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        read_source(tmp_path / "a.yaml")
    assert said in str(caught.value)


def test_llama_factorys_list_of_datasets_says_which_part_and_which_columns(tmp_path):
    """They were dropped, and whatever other columns a file had were learned."""
    chats = {"columns": {"messages": "talk", "system": "system"}, "tags": {"role_tag": "role", "user_tag": "user"}}
    listed = {
        "demo": {"hf_hub_url": "me/demo", "ms_hub_url": "other/demo", "subset": "en", "split": "test",
                 "columns": {"prompt": "q", "query": "context", "response": "a", "system": "sys"}},
        "chats": {"file_name": "chats.json", "formatting": "sharegpt", **chats},
        "drawn": {"file_name": "demo.json", "num_samples": 10, "columns": {"prompt": "q", "history": "before"}},
        "marked": {"file_name": "c.json", "formatting": "sharegpt", "tags": {"user_tag": "Q"}},
    }  # fmt: skip
    (tmp_path / "dataset_info.json").write_text(json.dumps(listed))
    mapping = {"instruction": "q", "output": "a", "input": "context", "system": "sys"}
    found = migrated(tmp_path, FACTORY, "a.yaml")["dataset"]
    assert found == {"path": "me/demo", "name": "en", "split": "test", "column_mapping": mapping, "max_length": 2048}
    found = migrated(tmp_path, FACTORY.replace("demo", "chats"), "b.yaml")["dataset"]
    assert found == {"path": str(tmp_path / "chats.json"), "messages_column": "talk", "max_length": 2048}
    (tmp_path / "c.yaml").write_text(FACTORY.replace("demo", "drawn"))
    with pytest.raises(UserError, match=r"(?s)line 4: drawn: .*history: 'before'.*line 4: drawn: .*num_samples: 10"):
        read_source(tmp_path / "c.yaml")
    (tmp_path / "d.yaml").write_text(FACTORY.replace("demo", "marked"))
    with pytest.raises(UserError, match=r"marked: dataset_info.json has user_tag: 'Q'"):
        read_source(tmp_path / "d.yaml")


def test_four_bits_are_those_of_the_other_tool(tmp_path):
    lora = "adapter: qlora\nload_in_4bit: true\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n"
    doubly = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    assert migrated(tmp_path, AXOLOTL + lora, "a.yml")["quantization"] == doubly
    four = FACTORY + "quantization_bit: 4\n"
    assert migrated(tmp_path, four, "b.yaml")["quantization"] == {**doubly, "bnb_4bit_quant_type": "nf4"}
    found = migrated(tmp_path, four + "quantization_type: fp4\ndouble_quantization: false\n", "c.yaml")["quantization"]
    assert found == {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}


def test_other_tools_keys_that_change_what_is_learned(tmp_path):
    assert migrated(tmp_path, AXOLOTL, "a.yml")["dataset"] == {"path": "me/chats", "max_length": 2048}
    found = migrated(
        tmp_path, FACTORY + "train_on_prompt: true\nuse_rslora: true\nadditional_target: embed_tokens\n", "b.yaml"
    )
    assert found["dataset"] == {"path": "demo", "max_length": 2048, "answer_only_loss": False}
    assert found["peft"]["use_rslora"] is True
    assert found["peft"]["modules_to_save"] == ["embed_tokens"]


def test_files_that_are_neither(tmp_path):
    (tmp_path / "a.yaml").write_text("hello: 1\n")
    with pytest.raises(UserError, match="is not recognised"):
        read_source(tmp_path / "a.yaml")
    with pytest.raises(UserError, match="there is no file"):
        read_source(tmp_path / "b.py")
    (tmp_path / "c.txt").write_text("")
    with pytest.raises(UserError, match="neither a script"):
        read_source(tmp_path / "c.txt")
    (tmp_path / "run.yaml").write_text("mine: 1\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    with pytest.raises(UserError, match="exists already"):
        write_config(read_source(tmp_path / "train.py"), tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"evaluation_strategy": "epoch"}, {"eval_strategy": "epoch"}),
        ({"no_cuda": True}, {"use_cpu": True}),
        ({"per_gpu_train_batch_size": 4}, {"per_device_train_batch_size": 4}),
        ({"group_by_length": True}, {"train_sampling_strategy": "group_by_length"}),
        ({"group_by_length": False}, {}),
        ({"warmup_ratio": 0.1}, {"warmup_steps": 0.1}),
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, {"warmup_steps": 5}),
        ({"adafactor": True}, {"optim": "adafactor"}),
        ({"overwrite_output_dir": True, "save_safetensors": True, "fp16_opt_level": "O1"}, {}),
        ({"fp16_backend": "apex", "half_precision_backend": "auto"}, {}),
        ({"include_inputs_for_metrics": True}, {"include_for_metrics": ["inputs"]}),
        (
            {"fsdp": "full_shard offload"},
            {"fsdp": True, "fsdp_config": {"reshard_after_forward": True, "cpu_offload": True}},
        ),
        ({"split_batches": True}, {"accelerator_config": {"split_batches": True}}),
        ({"past_index": -1, "use_ipex": False}, {}),
    ],
)
def test_old_names(old, new):
    assert modern_arguments(old)[0] == new


@pytest.mark.parametrize(
    "refused", [{"save_safetensors": False}, {"use_ipex": True}, {"sharded_ddp": "simple"}, {"past_index": 0},
                {"evaluation_strategy": "no", "eval_strategy": "steps"}, {"fp16_backend": "other"}],
)  # fmt: skip
def test_old_names_that_cannot_be_had_any_more_are_refused_by_name(refused):
    with pytest.raises(UserError, match=next(iter(refused)) if "fp16_backend" not in refused else "mixed-precision"):
        modern_arguments(refused)


def test_arguments_that_would_train_something_else_stand_in_the_way():
    document = Document("args")
    carry_over(
        {"neftune_noise_alpha": 5, "optim": "galore_adamw", "num_train_epochs": 1.5, "push_to_hub": True}, document
    )
    assert [note.text.split(":")[0].split("=")[0] for note in document.blocked] == [
        "neftune_noise_alpha", "optim", "num_train_epochs",
    ]  # fmt: skip
    assert [note.text.split(":")[0] for note in document.left_out] == ["push_to_hub"]
    with pytest.raises(UserError, match="nothing was written"):
        document.to_yaml()


@pytest.mark.parametrize("call", ['"pandas", data_files="b.pkl"', '"webdataset", data_files="b.tar"'])
def test_a_reader_that_is_not_used_is_named_with_its_line(tmp_path, call):
    text = SCRIPT.replace('"csv", data_files={"train": "train.csv", "test": "test.csv"}', call)
    with pytest.raises(UserError, match="line 10: dataset: .* is a reader of `datasets` that is not used here"):
        migrated(tmp_path, text)


def test_an_address_stays_one_and_says_what_it_needs(tmp_path):
    files = '{"train": "https://host/train.csv", "test": "test.csv"}'
    text = SCRIPT.replace('{"train": "train.csv", "test": "test.csv"}', files)
    (tmp_path / "train.py").write_text(text)
    document = read_source(tmp_path / "train.py")
    assert any("--allow-remote-data" in note.text for note in document.differs)
    dataset = migrated(tmp_path, text)["dataset"]
    assert (dataset["path"], dataset["data_files"]) == ("csv", "https://host/train.csv")


def test_names_for_files_without_a_header(tmp_path):
    files = 'data_files={"train": "train.csv", "test": "test.csv"}'
    named = f'{files}, column_names=["sentence", "label"]'
    config = migrated(tmp_path, SCRIPT.replace(files, named))
    sections = config["dataset"], config["validation_dataset"]
    assert [section["column_names"] for section in sections] == [["sentence", "label"]] * 2
    with pytest.raises(UserError, match="names in the place of those that the file has"):
        migrated(tmp_path, SCRIPT.replace(files, f"{named}, header=0"))


def test_no_text_of_the_source_becomes_a_key_of_the_config(tmp_path):
    """Neither in comments, which end with their line, nor as a reference to a variable of the environment."""
    hostile = "\nmodel: evil\u2028#"
    document = Document(f"a{hostile}.yaml")
    document.set("model.pretrained_model_name_or_path", f"x{hostile}", f"origin{hostile}")
    document.set("dataset.prompt_template", "${SECRET} {text}", "")
    document.drop(1, f"key{hostile}")
    document.note(2, f"note{hostile}")
    (tmp_path / "run.yaml").write_text(document.to_yaml())
    found = yaml.safe_load(document.to_yaml())
    assert found["model"] == {"pretrained_model_name_or_path": f"x{hostile}"}
    assert set(found) == {"model", "dataset"}
    cfg = load_run_config([tmp_path / "run.yaml"], ["dataset.path=x.csv"])
    assert cfg.dataset.prompt_template == "${SECRET} {text}"
