"""Names that a script gives its classes come along, or are listed with their line: models answered LABEL_0 instead."""

from __future__ import annotations

import pytest
import yaml

from automodel.migrate.verb import read_source, write_config
from automodel.models.load import load_hf_config
from automodel.models.task_head import POOLED
from automodel.plan.check import load_run_config

SCRIPT = """from datasets import load_dataset
from transformers import AutoTokenizer, AutoModelForSequenceClassification, Trainer, TrainingArguments
tok = AutoTokenizer.from_pretrained("bert")
ds = load_dataset("csv", data_files={{"train": "train.csv", "validation": "val.csv"}})
ds = ds.map(lambda b: tok(b["text"], truncation=True), batched=True)
{before}
model = AutoModelForSequenceClassification.from_pretrained("bert", num_labels=2{given})
{after}
args = TrainingArguments(output_dir="out", num_train_epochs=1, per_device_train_batch_size=8, learning_rate=5e-4)
Trainer(model=model, args=args, train_dataset=ds["train"], eval_dataset=ds["validation"], processing_class=tok).train()
"""
NAMES = {0: "NEGATIVE", 1: "POSITIVE"}
LITERAL = 'id2label={0: "NEGATIVE", 1: "POSITIVE"}, label2id={"NEGATIVE": 0, "POSITIVE": 1}'


def migrated(tmp_path, before="", given="", after="", script=SCRIPT):
    given = f", {given}" if given else ""
    (tmp_path / "train.py").write_text(script.format(before=before or "pass", given=given, after=after or "pass"))
    document = read_source(tmp_path / "train.py")
    write_config(document, tmp_path / "run.yaml", overwrite=True)
    return document, yaml.safe_load((tmp_path / "run.yaml").read_text())["model"].get("id2label")


@pytest.mark.parametrize(
    ("before", "given"),
    [
        ("", LITERAL),
        ("", 'label2id={"NEGATIVE": 0, "POSITIVE": 1}'),
        ("", 'id2label={"0": "NEGATIVE", "1": "POSITIVE"}'),
        ('id2label = {0: "NEGATIVE", 1: "POSITIVE"}', "id2label=id2label"),
        ('names = ["NEGATIVE", "POSITIVE"]', "id2label={i: n for i, n in enumerate(names)}"),
        ('names = ["NEGATIVE", "POSITIVE"]', "id2label={i: names[i] for i in range(len(names))}"),
        ('names = ["NEGATIVE", "POSITIVE"]', "label2id={n: str(i) for i, n in enumerate(names)}"),
        ('names = ["NEGATIVE", "POSITIVE"]', "id2label=dict(enumerate(names))"),
        ('l2i = {"NEGATIVE": 0, "POSITIVE": 1}', "id2label={v: k for k, v in l2i.items()}, label2id=l2i"),
        ('more = {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}, "device_map": make()}', "**more"),
    ],
)
def test_names_that_are_constants_come_along(before, given, tmp_path):
    document, found = migrated(tmp_path, before, given)
    assert found == NAMES
    assert not any("label" in note.text for note in (*document.left_out, *document.differs))


@pytest.mark.parametrize(
    ("given", "after"),
    [
        ("", 'model.config.id2label = {0: "NEGATIVE", 1: "POSITIVE"}'),
        ("", 'model.config.label2id = {"NEGATIVE": 0, "POSITIVE": 1}'),
        ('id2label={0: "a", 1: "b"}', 'model.config.id2label = {0: "NEGATIVE", 1: "POSITIVE"}'),
        ("", 'setattr(model.config, "id2label", {0: "NEGATIVE", 1: "POSITIVE"})'),
        ("", 'model.config.id2label, x = {0: "NEGATIVE", 1: "POSITIVE"}, 1'),
    ],
)
def test_names_that_are_set_after_loading_come_along(given, after, tmp_path):
    assert migrated(tmp_path, "", given, after)[1] == NAMES


def test_the_config_takes_the_names_and_the_model_has_them(tmp_path):
    from transformers import BertConfig

    BertConfig().save_pretrained(tmp_path / "bert")
    migrated(
        tmp_path, "", LITERAL, script=SCRIPT.replace('from_pretrained("bert"', f'from_pretrained("{tmp_path}/bert"')
    )
    assert "  id2label: {0: NEGATIVE, 1: POSITIVE}  # line 7\n" in (tmp_path / "run.yaml").read_text()
    model = load_run_config([tmp_path / "run.yaml"]).model
    assert {int(number): name for number, name in model.extra["id2label"].items()} == NAMES  # keys of YAML are text
    assert load_hf_config(model, POOLED).id2label == NAMES


def test_names_that_yaml_would_read_as_something_else_stay_text(tmp_path):
    assert migrated(tmp_path, "", 'id2label={0: "no", 1: ".5"}')[1] == {0: "no", 1: ".5"}
    assert migrated(tmp_path, "", 'id2label={0: "a, b: c", 1: "{1"}')[1] == {0: "a, b: c", 1: "{1"}


@pytest.mark.parametrize(
    ("before", "given", "after", "line", "said"),
    [
        ("", "id2label=make()", "", 7, "id2label: `make()` is only known when the script runs"),
        ("names = ds['train'].unique('label')", "id2label=dict(enumerate(names))", "", 7, "id2label: "),
        ("names = {'a', 'b'}", "id2label={i: n for i, n in enumerate(names)}", "", 7, "a set has no order"),
        ("n = {}\nn[0] = 'a'", "id2label=n", "", 8, "item by item"),
        ("", "id2label={1: 'a', 2: 'b'}", "", 7, "number different names from 0 on"),
        ("", "id2label={0: 'a', 1: 'b', 2: 'c'}", "", 7, "names 3 classes, but num_labels is 2"),
        (
            "", "id2label={0: 'a', 1: 'b'}, label2id={'b': 0, 'a': 1}", "", 7, "its order is not that of id2label",
        ),
        ("", "id2label={0: 'a', 1: 'b'}", "model.config.id2label[0] = 'c'", 8, "config.id2label is changed item"),
        ("", "", "if len(ds):\n    model.config.id2label = {0: 'a', 1: 'b'}", 9, "is set in a branch, a loop or"),
        ("", "id2label={0: 'a', 1: 'b'}", "model.config.id2label = make()", 8, "model.config.id2label: `make()`"),
        (
            "n = ds['train'].features['label'].names", "id2label={i: x.upper() for i, x in enumerate(n)}", "", 7,
            "only known when the script runs",
        ),
    ],
)  # fmt: skip
def test_names_that_nobody_can_know_are_listed_with_their_line(before, given, after, line, said, tmp_path):
    document, found = migrated(tmp_path, before, given, after)
    noted = [str(note) for note in document.left_out]
    assert any(text.startswith(f"line {line}: ") and said in text for text in noted), noted
    assert found == ({0: "a", 1: "b"} if "its order" in said else None)
    assert f"#   line {line}: " in (tmp_path / "run.yaml").read_text().partition("# Not carried over:")[2]


@pytest.mark.parametrize(
    ("before", "given", "after"),
    [
        ('n = ds["train"].features["label"].names', "id2label={i: x for i, x in enumerate(n)}", ""),
        ('f = ds["train"].features["label"]', "id2label={i: f.int2str(i) for i in range(f.num_classes)}", ""),
        ('n = ds["train"].features["tags"].feature.names', "id2label=dict(enumerate(n)), label2id=make()", ""),
        ('i2l = dict(enumerate(ds["train"].features["label"].names))', "label2id={v: k for k, v in i2l.items()}", ""),
        ('n = ds["train"].features["label"].names', "", "model.config.id2label = {i: x for i, x in enumerate(n)}"),
    ],
)
def test_names_of_the_data_are_read_from_the_data(before, given, after, tmp_path):
    document, found = migrated(tmp_path, before, given, after)
    assert found is None
    assert not document.left_out


def test_a_hub_dataset_may_have_names_of_its_own_and_that_is_said(tmp_path):
    hub = SCRIPT.replace('"csv", data_files={{"train": "train.csv", "validation": "val.csv"}}', '"imdb"')
    document, found = migrated(tmp_path, "", LITERAL, script=hub)
    assert found == NAMES
    assert any("line 7: id2label: a run refuses it where" in str(note) for note in document.differs)


def test_lengths_of_constant_lists_are_known(tmp_path):
    text = SCRIPT.replace("num_labels=2", "num_labels=len(names)")
    assert (
        migrated(tmp_path, 'names = ["NEGATIVE", "POSITIVE"]', "id2label=dict(enumerate(names))", script=text)[1]
        == NAMES
    )


def test_names_mean_nothing_for_a_language_model(tmp_path):
    text = SCRIPT.replace("SequenceClassification", "CausalLM").replace(", num_labels=2", "")
    document, found = migrated(tmp_path, "", LITERAL, script=text)
    assert found is None
    assert any("id2label" in str(note) for note in document.left_out)
