"""Keys of `dataset:` that say nothing: refused where they are another task's, noted where they are other rows'."""

from __future__ import annotations

from dataclasses import fields

import pytest

from automodel.config.errors import UserError
from automodel.data.config import DatasetConfig, MixtureEntry
from automodel.data.inheritance import NOT_INHERITED
from automodel.data.keys import OF_ROWS, check_keys, keys_set, unused
from automodel.data.prepare import NOT_IN_THE_KEY
from automodel.tasks.registry import CAUSAL_LM, ROW_FORMATS, task_named
from automodel.tasks.text_classification_dataset import TextClassificationDataset

EVERY_TASK = {"max_length", "on_long", "on_bad_row", "streaming", "num_proc", "cache_dir"}


def test_every_key_is_for_every_task_or_for_some():
    """A new key has to be sorted in."""
    assert {key for rows in ROW_FORMATS for key in rows.keys} == OF_ROWS
    assert {f.name for f in fields(DatasetConfig)} == OF_ROWS | EVERY_TASK | NOT_INHERITED | NOT_IN_THE_KEY
    assert {f.name for f in fields(MixtureEntry)} <= OF_ROWS | EVERY_TASK | NOT_INHERITED | {"weight"}


FOREIGN = [
    ("causal-lm", {"source_prefix": "summarize: "}, "set `task: seq2seq`."),
    ("causal-lm", {"label_column": "label"}, "set `task:` to text-classification or token-classification."),
    ("text-classification", {"answer_only_loss": False}, "set `task: causal-lm`."),
    ("text-classification", {"tokens_column": "words"}, "set `task: token-classification`."),
    ("token-classification", {"text_column": "words"}, "set `task:` to text-classification or causal-lm."),
    ("seq2seq", {"prompt_template": "{a}"}, "set `task: causal-lm`."),
]


@pytest.mark.parametrize(("task", "settings", "instead"), FOREIGN)
def test_a_key_of_another_task_is_refused(task, settings, instead):
    [key] = settings
    with pytest.raises(UserError) as error:
        check_keys(task_named(task).rows, ROW_FORMATS, DatasetConfig(path="a.csv", **settings), "dataset")
    first = task_named(task).rows.keys[0]
    assert str(error.value).startswith(f"dataset.{key}: {task} has no use for it; its keys are {first}, ")
    assert str(error.value).endswith(f"Remove it, or {instead}")


def test_all_of_them_are_named_with_their_places():
    mixture = (MixtureEntry(path="a.jsonl"), MixtureEntry(path="b.jsonl", tokens_column="words"))
    dataset = DatasetConfig(mixture=mixture, max_target_length=64)
    with pytest.raises(UserError) as error:
        check_keys(CAUSAL_LM.rows, ROW_FORMATS, dataset, "validation_dataset")
    for key in ("validation_dataset.max_target_length", "validation_dataset.mixture.1.tokens_column"):
        assert f"{key}: causal-lm has no use" in str(error.value)


def test_what_a_maker_of_the_users_asks_for_is_its_own():
    def make(path, source_prefix):
        return []

    section = DatasetConfig(path="a.jsonl", source_prefix="film ", label_column="b")
    with pytest.raises(UserError) as error:
        check_keys(CAUSAL_LM.rows, ROW_FORMATS, section, "dataset", make)
    assert "label_column" in str(error.value)
    assert "source_prefix" not in str(error.value)


def test_defaults_that_earlier_versions_wrote_down_are_no_keys():
    old = {"answer_only_loss": True, "max_target_length": 128, "source_prefix": ""}
    assert keys_set(DatasetConfig(path="a.csv", **old)) == []
    assert keys_set(DatasetConfig(path="a.csv", answer_only_loss=False)) == ["answer_only_loss"]


@pytest.mark.parametrize("settings", [{"source_prefix": "x "}, {"messages_column": "m"}, {"answer_only_loss": False}])
def test_python_refuses_them_too(settings, tmp_path, bert_like):
    with pytest.raises(
        UserError, match=f"TextClassificationDataset.{next(iter(settings))}: text-classification has no use for it"
    ):
        TextClassificationDataset(str(tmp_path / "a.csv"), tokenizer=bert_like, **settings)


@pytest.mark.parametrize("rows", ROW_FORMATS, ids=lambda rows: rows.task)
def test_a_tasks_own_keys_and_defaults_are_not(rows):
    given = {
        "column_mapping": {"a": "b"}, "label_columns": ("a",), "labels": ("a",), "answer_only_loss": False,
        "max_target_length": 3,
    }  # fmt: skip
    settings = {key: given.get(key, "a") for key in rows.keys}
    section = DatasetConfig(path="a.csv", max_length=9, on_long="cut", **settings)
    assert set(keys_set(section)) == set(settings)
    check_keys(rows, ROW_FORMATS, section, "dataset")
    check_keys(rows, ROW_FORMATS, None, "validation_dataset")


ROWS = {
    "chats": [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}], "text": "ab"}],
    "instructions": [{"q": "ab", "a": "cd", "messages": "no"}],
    "plain": [{"text": "some words"}],
}
NOT_USED = [
    ("chats", {"prompt_template": "{q}", "messages_column": "messages"}, ["prompt_template"]),
    ("chats", {"text_column": "text", "messages_column": "messages"}, ["text_column"]),
    ("chats", {"answer_only_loss": False, "chat_template": "plain"}, []),
    ("instructions", {"column_mapping": {"question": "q", "answer": "a"}, "text_column": "q"}, ["text_column"]),
    (
        "instructions",
        {"column_mapping": {"question": "q", "answer": "a"}, "messages_column": "messages"},
        ["messages_column"],
    ),
    (
        "instructions",
        {"prompt_template": "{q}", "target_column": "a", "chat_template": "plain"},
        ["chat_template"],
    ),
    ("instructions", {"column_mapping": {"question": "q", "answer": "a"}, "answer_only_loss": True}, []),
    ("plain", {"answer_only_loss": False, "text_column": "text"}, ["answer_only_loss"]),
    ("plain", {}, []),
]


@pytest.mark.parametrize(("kind", "settings", "expected"), NOT_USED)
def test_a_key_of_other_rows_is_noted(prepare_rows, gpt_like, kind, settings, expected):
    settings = {"chat_template": "plain"} | settings if kind == "chats" else settings
    for _ in range(2):  # from the cache as well
        data = prepare_rows(ROWS[kind], gpt_like, task="causal-lm", types=0, positions=2048, **settings)
        noted = [note.partition(" is not used: these rows are ")[0] for note in data.notes if "is not used" in note]
        assert noted == [f"dataset.{key}" for key in expected]


def test_in_a_mixture_one_that_uses_a_key_is_enough():
    entries = (MixtureEntry(path="a", messages_column="m"), MixtureEntry(path="b", text_column="t"))
    section = DatasetConfig(mixture=entries, chat_template="plain", prompt_template="{q}")
    kinds = [
        {"rows": "chats", "keys": ["messages_column", "chat_template"]},
        {"rows": "chats as well", "keys": ["messages_column"]},
    ]
    assert list(unused("dataset", section, kinds, ())) == [
        "dataset.prompt_template is not used: these rows are chats; chats as well",
        "dataset.mixture.1.text_column is not used: these rows are chats as well",
    ]
    assert next(unused("dataset", section, kinds, {"prompt_template"})).startswith("dataset.mixture.1")
    assert list(unused("dataset", section, [], ())) == []  # a store of an earlier release


def test_tokenised_rows_take_a_mapped_label(prepare_rows, bert_like):
    rows = [{"input_ids": [5, 6, 7], "y": i % 2} for i in range(4)]
    assert prepare_rows(rows, bert_like, column_mapping={"label": "y"}).notes == ()
