"""Scripts as people write them, with values that only a run knows: a list of lines, and never a wrong YAML.

Each case is what stands between loading the model and training; its title says which of its lines is named, and how.
"""

from __future__ import annotations

import re

import pytest
import yaml

from automodel.config.errors import UserError
from automodel.migrate.verb import read_source, write_config

HEAD = """from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, EarlyStoppingCallback
from transformers import Trainer, TrainingArguments
import argparse, os, torch
tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
data = load_dataset("imdb")
def tokenize(batch):
    return tokenizer(batch["text"], truncation=True, max_length=256)
data = data.map(tokenize, batched=True)
model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2)
"""
TAIL = """
trainer = Trainer(model=model, args=args, train_dataset=data["train"], eval_dataset=data["test"])
trainer.train()
"""
ARGS = 'args = TrainingArguments("out", learning_rate=1e-4)\n'

CASES = """
== a branch | 4 | learning_rate: `lr` is set in a branch or loop (line 13)
lr = 1e-4
if len(data) > 9:
    lr = 1e-5
args = TrainingArguments('o', learning_rate=lr)
== try | 5 | lr
try:
    lr = 1
except OSError:
    lr = 2
args = TrainingArguments('o', learning_rate=lr)
== in place | 3 | like +=
size = 8
size *= 2
args = TrainingArguments('o', per_device_train_batch_size=size)
== an argument | 3 | `lr` is an argument of make()
lr = 5
def make(lr=1e-4):
    return TrainingArguments('o', learning_rate=lr)
args = make()
== attribute | 2 | learning_rate is set after the arguments were made
args = TrainingArguments("out", learning_rate=1e-4)
args.learning_rate = 1e-5
== setattr | 2 | learning_rate is set after
args = TrainingArguments("out", learning_rate=1e-4)
setattr(args, 'learning_rate', 1e-5)
== set_training | 2 | set_training(…) changes the arguments
args = TrainingArguments("out", learning_rate=1e-4)
args = args.set_training(batch_size=4)
== item | 3 | item by item
kw = {'learning_rate': 1}
kw['learning_rate'] = 2
args = TrainingArguments('o', **kw)
== update | 3 | changed by .update()
kw = {'seed': 1}
kw.update(seed=2)
args = TrainingArguments('o', **kw)
== starred | 2 | arguments without a name
given = ['o']
args = TrainingArguments(*given)
== argparse | 3 | `a.lr` is only known when the script runs
parser = argparse.ArgumentParser()
a = parser.parse_args()
args = TrainingArguments('o', learning_rate=a.lr)
== environment | 1 | only known when
args = TrainingArguments('o', seed=int(os.environ['SEED']))
== formatted | 2 | a formatted text
n = 3
args = TrainingArguments('o', lr_scheduler_type=f'{n:>3}')
== class | 4 | C.lr
class C:
    lr = 1
C.lr = 2
args = TrainingArguments('o', learning_rate=C.lr)
== loop | 2 | this stands in a loop
for seed in range(3):
    args = TrainingArguments('o', seed=seed)
== frozen | 2 | parameters are frozen
for p in model.bert.parameters():
    p.requires_grad = False
args = TrainingArguments("out", learning_rate=1e-4)
== frozen by a function | 3 | what it does to the model
def freeze(m):
    pass
freeze(model)
args = TrainingArguments("out", learning_rate=1e-4)
== a new head | 1 | model.classifier is changed
model.classifier = torch.nn.Linear(768, 2)
args = TrainingArguments("out", learning_rate=1e-4)
== its config | 1 | hidden_dropout_prob is changed
model.config.hidden_dropout_prob = 0.3
args = TrainingArguments("out", learning_rate=1e-4)
== new tokens | 1 | changes the vocabulary
tokenizer.add_tokens(['x'])
model.resize_token_embeddings(9)
args = TrainingArguments("out", learning_rate=1e-4)
== another model | 5 | a branch
if 1:
    model = AutoModelForSequenceClassification.from_pretrained('x')
args = TrainingArguments("out", learning_rate=1e-4)
== model keywords | 1 | from_pretrained(hidden_dropout_prob=…) changes the model
model = AutoModelForSequenceClassification.from_pretrained('x', hidden_dropout_prob=0.3)
args = TrainingArguments("out", learning_rate=1e-4)
== other rows | 1 | which only the script can make
data = data.filter(len)
args = TrainingArguments("out", learning_rate=1e-4)
== labels | 3 | what it does to rows is not understood
def more(b):
    x = tokenizer(b['text'])
    x['labels'] = [1 - y for y in b['label']]
    return x
data = load_dataset('imdb').map(more)
args = TrainingArguments("out", learning_rate=1e-4)
== texts | 2 | what it does to rows is not understood
def more(b):
    b['text'] = [t.lower() for t in b['text']]
    return tokenizer(b['text'])
data = load_dataset('imdb').map(more)
args = TrainingArguments("out", learning_rate=1e-4)
== labels of a lambda | 1 | what it does to rows is not understood
data = load_dataset('imdb').map(lambda row: {**tokenizer(row["text"]), "labels": 1 - row["label"]})
args = TrainingArguments("out", learning_rate=1e-4)
== another Trainer | 4 | it comes from lightning
from lightning import Trainer
args = TrainingArguments("out", learning_rate=1e-4)
"""


def cases():
    for case in CASES.split("== ")[1:]:
        title, _, lines = case.partition("\n")
        yield pytest.param(lines, *title.split(" | ")[1:], id=title.split(" | ")[0])


@pytest.mark.parametrize(("middle", "line", "said"), list(cases()))
def test_lines_are_named_and_nothing_is_written(middle, line, said, tmp_path):
    (tmp_path / "train.py").write_text(HEAD + middle + TAIL)
    with pytest.raises(UserError) as caught:
        write_config(read_source(tmp_path / "train.py"), tmp_path / "run.yaml")
    where = f"line {HEAD.count(chr(10)) + int(line)}:"
    assert any(where in text and said in text for text in str(caught.value).splitlines()), str(caught.value)
    assert not (tmp_path / "run.yaml").exists()


def migrated(tmp_path, text):
    (tmp_path / "train.py").write_text(text)
    document = read_source(tmp_path / "train.py")
    write_config(document, tmp_path / "run.yaml", overwrite=True)
    return document, yaml.safe_load((tmp_path / "run.yaml").read_text())


def test_what_is_done_to_a_trainer(tmp_path):
    for text in (TAIL.replace("trainer.train", "trainer.compute_loss = len\ntrainer.train"),
                 TAIL.replace(")\ntrainer.train", ", **more())\ntrainer.train")):  # fmt: skip
        (tmp_path / "train.py").write_text(HEAD + ARGS + text)
        with pytest.raises(UserError, match=r"line \d+: (trainer.compute_loss is replaced|`\*\*more\(\)`)"):
            read_source(tmp_path / "train.py")
    later = TAIL.replace("trainer.train()", "trainer.add_callback(EarlyStoppingCallback(4))\ntrainer.train()")
    assert migrated(tmp_path, HEAD + ARGS + later)[1]["early_stopping"] == {"patience": 4}


def test_values_that_can_be_read_without_running(tmp_path):
    text = (
        HEAD
        + """
class CFG:
    lr = 2e-5
STEPS = 10 * 5
def main():
    n = 3
    name = f"run-{n}"
    args = TrainingArguments(f"out/{name}", learning_rate=CFG.lr, max_steps=STEPS, fp16=torch.cuda.is_available())
    print(model)
    model.config.use_cache = False
    small = data["train"].shuffle(seed=1).select(range(100))
    trainer = Trainer(model=model, args=args, train_dataset=small)
    trainer.train()
if __name__ == "__main__":
    main()
"""
    )
    document, found = migrated(tmp_path, text)
    assert found["optimizer"] == {"lr": 2e-5}
    assert found["step_scheduler"] == {"max_steps": 50}
    assert found["checkpoint"] == {"keep_best": False, "checkpoint_dir": "out/run-3"}
    assert found["dataset"]["num_samples_limit"] == 100
    noted = " ".join(str(note) for note in document.differs)
    assert re.search(r"line \d+: torch.cuda.is_available\(\) is taken to be true", noted)
    assert "not a random draw" in noted


SFT = """from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
chats = load_dataset("me/chats", split="train")
trainer = SFTTrainer("Qwen/Qwen3-0.6B", train_dataset=chats, args=SFTConfig("o"{more}))
"""


def test_supervised_tuning_keeps_what_is_learned_and_its_own_defaults(tmp_path):
    found = migrated(tmp_path, SFT.format(more=", assistant_only_loss=True, packing=True"))[1]
    assert found["dataset"] == {
        "path": "me/chats", "split": "train", "on_long": "cut", "answer_only_loss": True, "max_length": 1024,
    }  # fmt: skip
    assert found["packed_sequence"] == {"packed_sequence_size": 1024}  # batch sizes count rows that are filled
    assert found["optimizer"]["lr"] == 2e-5
    assert found["training_optimizations"]["precision"] == "bf16"
    assert migrated(tmp_path, SFT.format(more=", dataset_text_field='story'"))[1]["dataset"]["text_column"] == "story"
    for more, said in (("", "learns whole conversations"), (", loss_type='dft'", "loss_type has no counterpart")):
        (tmp_path / "train.py").write_text(SFT.format(more=more))
        with pytest.raises(UserError, match=rf"line 4: .*{said}"):
            read_source(tmp_path / "train.py")


@pytest.mark.parametrize(
    ("more", "size", "on_long"),
    [
        (", packing=True, max_length=64", 64, "cut"),
        (", packing=True, max_length=64, packing_strategy='wrapped'", 64, "split"),  # nothing is left out there
        (", packing=False, packing_strategy='wrapped'", None, "cut"),
        ("), packing=(True", 1024, "cut"),  # of the trainer, as TRL had it before 0.13
    ],
)
def test_rows_that_are_filled_are_what_batch_sizes_count(more, size, on_long, tmp_path):
    found = migrated(tmp_path, SFT.format(more=f", dataset_text_field='story'{more}"))[1]
    assert found.get("packed_sequence") == ({"packed_sequence_size": size} if size else None)
    assert found["dataset"]["on_long"] == on_long


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("completion_only_loss=True", ['prompt_template: "{prompt}"', "answer_only_loss: false"]),
        ("completion_only_loss=False", ['prompt_template: "{prompt}"']),
        ("assistant_only_loss=True", ["the newline that ChatML and others write behind an answer's end"]),
        (
            "assistant_only_loss=True, completion_only_loss=False",
            ["the newline", "learns answers inside it"],
        ),
        ("completion_only_loss=False, dataset_text_field='story'", []),
    ],
)
def test_what_depends_on_the_kind_of_rows_is_said(more, said, tmp_path):
    noted = [
        str(note) for note in migrated(tmp_path, SFT.format(more=f", {more}"))[0].differs if "_only_loss" in str(note)
    ]
    assert len(noted) == len(said)
    assert all(part in note for part, note in zip(said, noted))


def test_texts_that_a_tokenizer_gets_by_name(tmp_path):
    text = HEAD.replace('batch["text"]', 'text=batch["review"], text_pair=batch["title"]') + ARGS + TAIL
    found = migrated(tmp_path, text)[1]["dataset"]
    assert (found["text_column"], found["text_pair_column"]) == ("review", "title")


def test_sources_and_targets_of_a_summary(tmp_path):
    text = """from datasets import load_dataset
from transformers import (AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, Seq2SeqTrainer,
                          Seq2SeqTrainingArguments)
tokenizer = AutoTokenizer.from_pretrained("t5-small")
model = AutoModelForSeq2SeqLM.from_pretrained("t5-small")
prefix = "summarize: "
def preprocess(examples):
    inputs = [prefix + doc for doc in examples["document"]]
    model_inputs = tokenizer(inputs, max_length=512, truncation=True)
    labels = tokenizer(text_target=examples["summary"], max_length=64, truncation=True)
    model_inputs["labels"] = labels["input_ids"]
    return model_inputs
data = load_dataset("xsum").map(preprocess, batched=True)
trainer = Seq2SeqTrainer(model=model, args=Seq2SeqTrainingArguments("o"), train_dataset=data["train"],
                         data_collator=DataCollatorForSeq2Seq(tokenizer, model=model))
"""
    assert migrated(tmp_path, text)[1]["dataset"] == {
        "path": "xsum", "split": "train", "source_prefix": "summarize: ", "source_column": "document",
        "max_length": 512, "target_column": "summary", "max_target_length": 64,
    }  # fmt: skip


@pytest.mark.parametrize(
    "steps",
    [
        '.rename_column("target", "labels")',
        '.rename_column("target", "middle").rename_column("middle", "labels")',
        '.rename_columns({"target": "labels", "labels": "target"})',
        '.rename_column(new_column_name="labels", original_column_name="target")',
    ],
)
def test_columns_of_a_summary_have_the_names_of_the_data(tmp_path, steps):
    text = f"""from datasets import load_dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Seq2SeqTrainer, Seq2SeqTrainingArguments
tokenizer = AutoTokenizer.from_pretrained("t5-small")
model = AutoModelForSeq2SeqLM.from_pretrained("t5-small")
def preprocess(examples):
    return tokenizer(examples["source"], text_target=examples["labels"], truncation=True)
data = load_dataset("me/pairs"){steps}.map(preprocess, batched=True).rename_column("id", "number")
trainer = Seq2SeqTrainer(model=model, args=Seq2SeqTrainingArguments("o"), train_dataset=data["train"])
"""
    document, found = migrated(tmp_path, text)
    columns = {"source_column": "source", "target_column": "target"}
    assert found["dataset"] == {"path": "me/pairs", "split": "train", **columns}
    left_out = [note.text for note in document.left_out]
    assert "the column 'id' is not renamed to 'number': nothing is read from it" in left_out


def test_a_language_model_has_no_label_column(tmp_path):
    text = """from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling
from transformers import Trainer, TrainingArguments
tokenizer = AutoTokenizer.from_pretrained("gpt2")
model = AutoModelForCausalLM.from_pretrained("gpt2")
data = load_dataset("me/texts", split="train").rename_column("body", "text").rename_column("label", "labels")
data = data.map(lambda e: tokenizer(e["text"], truncation=True, max_length=64), batched=True)
trainer = Trainer(model=model, args=TrainingArguments("o"), train_dataset=data,
                  data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False))
"""
    document, found = migrated(tmp_path, text)
    assert found["dataset"] == {
        "path": "me/texts", "split": "train", "text_column": "body", "max_length": 64, "on_long": "cut",
    }  # fmt: skip
    assert "line 6: the column 'label' is not renamed to 'labels': nothing is read from it" in map(
        str, document.left_out
    )


@pytest.mark.parametrize(
    ("more", "key", "name"),
    [
        ("dataset_text_field='story'", "text_column", "story"),
        ("assistant_only_loss=True", "messages_column", "messages"),
    ],
)
def test_columns_that_supervised_tuning_finds_by_name(tmp_path, more, key, name):
    text = SFT.format(more=f", {more}").replace('split="train")', f'split="train").rename_column("mine", "{name}")')
    assert migrated(tmp_path, text)[1]["dataset"][key] == "mine"


def test_names_of_columns_that_only_a_run_knows(tmp_path):
    text = SFT.format(more=", assistant_only_loss=True").replace(
        'split="train")', 'split="train").rename_column(input(), "messages")'
    )
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(UserError, match="line 3: rows come from"):
        read_source(tmp_path / "train.py")


def test_tags_of_words_have_the_name_of_the_data(tmp_path):
    head = HEAD.replace("SequenceClassification", "TokenClassification").replace(
        'return tokenizer(batch["text"], truncation=True, max_length=256)',
        'out = tokenizer(batch["words"], is_split_into_words=True)\n'
        '    out["labels"] = [out.word_ids(i) and tags for i, tags in enumerate(batch["tags"])]\n    return out',
    )
    text = head.replace('load_dataset("imdb")', 'load_dataset("x").rename_columns({"ner": "tags", "tokens": "words"})')
    found = migrated(tmp_path, text + ARGS + TAIL)[1]["dataset"]
    assert (found["tokens_column"], found["label_column"]) == ("tokens", "ner")
