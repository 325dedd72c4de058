"""Label columns of every type: lists written as text, types that hold no labels, and numbers below 0."""

from __future__ import annotations

import csv
import datetime
import re

import pandas as pd
import pytest
import yaml

from automodel.config.errors import UserError

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
TEXTS = ["good film", "bad film", "the film", "good", "bad", "the good film"]
JSON_LISTS = ['["a b", "ç"]', '["ç"]', "[]", '["it\'s"]', ' ["a b"] ', '["\\u00e7", "it\'s"]']
PYTHON_LISTS = ["['a b', 'ç']", "['ç']", "[]", '["it\'s"]', "['a b']", "['ç', \"it's\",]"]
STORED = [[1, 1, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0], [0, 1, 1]]
NAMES = ["a b", "ç", "it's"]


@pytest.fixture
def prepare_csv(prepare_rows, bert_like, tmp_path):
    """`prepare` on a CSV file with these labels, one a row."""

    def prepared(cells, name="a.csv", **settings):
        with open(tmp_path / name, "w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *zip(TEXTS, cells)])
        return prepare_rows(None, bert_like, path=str(tmp_path / name), **settings)

    return prepared


def refused(prepare, *args, **settings) -> str:
    with pytest.raises(UserError) as raised:
        prepare(*args, **settings)
    return str(raised.value)


@pytest.mark.parametrize("problem", [None, MULTI])
@pytest.mark.parametrize("labels", [JSON_LISTS, PYTHON_LISTS], ids=["json", "repr"])
def test_label_lists_written_as_text(prepare_csv, labels, problem):
    data = prepare_csv(labels, problem_type=problem)
    assert (data.problem_type, data.num_labels) == (MULTI, 3)
    assert data.label_names == sorted(NAMES)
    order = [NAMES.index(name) for name in sorted(NAMES)]
    assert data.store.labels.tolist() == [[row[i] for i in order] for row in STORED]


def test_label_lists_written_as_text_in_the_order_of_dataset_labels(prepare_csv):
    data = prepare_csv(JSON_LISTS, labels=tuple(NAMES))
    assert data.label_names == NAMES
    assert data.store.labels.tolist() == STORED


def test_label_lists_of_numbers_written_as_text_are_those_of_a_jsonl_file(prepare_csv):
    data = prepare_csv(["[0, 2]", "[1]", "[0]", "[2]", "[1, 2]", "[0]"])
    assert (data.problem_type, data.label_names, data.num_labels) == (MULTI, None, 3)
    assert data.store.labels.tolist()[:2] == [[1, 0, 1], [0, 1, 0]]
    data = prepare_csv(["[0, 1, 1]", "[1, 0, 0]"], "vectors.csv")
    assert data.store.labels.tolist() == [[0, 1, 1], [1, 0, 0]]
    data = prepare_csv(["[0.5, 2]", "[1, 0.25]"], "targets.csv")
    assert (data.problem_type, data.store.labels.tolist()) == (REGRESSION, [[0.5, 2], [1, 0.25]])


def test_missing_label_lists_written_as_text(prepare_csv):
    data = prepare_csv(['["a"]', "", '["b"]', "   "], on_bad_row="skip")
    assert (data.label_names, data.store.rows.tolist()) == (["a", "b"], [0, 2])
    assert [row["reason"] for row in data.stats.skipped_rows] == ["the label is missing", "the label is empty"]


def test_validation_label_lists_written_as_text(prepare_rows, prepare_csv, bert_like):
    """Lists in the training data, text in the validation data: what cannot be read is a bad row there."""
    rows = [{"text": t, "label": names} for t, names in zip(TEXTS, (["a"], ["a", "b"], ["b"]))]
    train = prepare_rows(rows, bert_like)
    data = prepare_csv(['["b"]', "['a', 'b']", "[]"], role="validation", like=train)
    assert data.store.labels.tolist() == [[0, 1], [1, 1], [0, 0]]
    message = refused(prepare_csv, ['["b"]', "[b]"], "bad.csv", role="validation", like=train)
    assert "row 1: the label [b] cannot be read as a list" in message
    rows = [{"text": t, "label": vector} for t, vector in zip(TEXTS, ([0, 1, 1], [1, 0, 0]))]
    train = prepare_rows(rows, bert_like, name="vectors.jsonl")
    message = refused(prepare_csv, ['["b", "a", "c"]'], "names.csv", role="validation", like=train)
    assert "row 0: multi-label values must be 0 or 1; got ['b', 'a', 'c']" in message


@pytest.mark.parametrize("unreadable", ["[a, b]", "['a' 'b']", "['a'\n 'b']", "['a', b]", "[f(1)]", "[[]", "[0 1]"])
def test_a_label_list_that_cannot_be_read_is_named_with_its_row(prepare_csv, unreadable):
    message = refused(prepare_csv, ['["a"]', "['b']", unreadable])
    assert message.startswith("dataset.label_column: column 'label' holds lists written as text, but row 2 ")
    assert unreadable in message
    assert '["a", "b"]' in message


def test_a_label_list_of_names_and_numbers_is_named_with_its_row(prepare_csv):
    assert "row 1 (['b', 1]) mixes names and numbers" in refused(prepare_csv, ['["a"]', "['b', 1]"])
    assert "row 1 ([1]) mixes names and numbers" in refused(prepare_csv, ['["a"]', "[1]"])


@pytest.mark.parametrize("settings", [{"problem_type": SINGLE}, {"labels": ("[NEG]", "[POS]")}])
def test_label_names_in_brackets_can_be_asked_for(prepare_csv, settings):
    assert f"model.problem_type: {SINGLE}" in refused(prepare_csv, ["[NEG]", "[POS]", "[NEG]"])
    data = prepare_csv(["[NEG]", "[POS]", "[NEG]"], **settings)
    assert (data.problem_type, data.label_names) == (SINGLE, ["[NEG]", "[POS]"])
    assert data.store.labels.tolist() == [0, 1, 0]


def test_one_label_a_row_as_text_is_no_multi_label_data(prepare_csv):
    for labels in (["a", "b", "a"], ['["a"]', "b", '["a"]'], ["a, b", "b", "a"]):
        message = refused(prepare_csv, labels, problem_type=MULTI)
        assert f"model.problem_type is {MULTI}, but column 'label' of dataset holds text" in message
        assert all(way in message for way in ("JSONL", "Parquet", '["a", "b"]', "dataset.label_columns"))


DATE = datetime.datetime(2024, 5, 1, 12)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([DATE, DATE, None], "dates"),
        ([DATE.date()] * 3, "dates"),
        ([DATE.time()] * 3, "times of day"),
        ([datetime.timedelta(1)] * 3, "durations"),
        ([b"a", b"b", b"a"], "bytes"),
        ([{"name": "a"}] * 3, "records"),
        ([[{"name": "a"}]] * 3, "lists of records"),
        ([[["a"], ["b"]]] * 3, "lists of lists"),
        ([[DATE]] * 3, "lists of dates"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("settings", [{}, {"labels": ("a", "b")}, {"problem_type": REGRESSION}], ids=str)
def test_label_columns_of_types_that_hold_no_labels(prepare_rows, bert_like, tmp_path, values, word, settings):
    pd.DataFrame({"text": TEXTS[:3], "label": values}).to_parquet(tmp_path / "a.parquet")
    message = refused(prepare_rows, None, bert_like, path=str(tmp_path / "a.parquet"), **settings)
    assert message.startswith(f"dataset.label_column: column 'label' holds {word}; labels are names, numbers, or lists")


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([{"name": "a"}, {"name": "b"}], "records"),
        ([[{"name": "a"}], [{"name": "b"}]], "lists of records"),
        ([["a", 1], [1]], "lists of values of different kinds"),
        (["[['a'], ['b']]", "[['a']]"], "lists of lists"),
        (['[{"name": "a"}]', "[]"], "lists of records"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_label_columns_of_json_files_that_hold_no_labels(prepare_rows, bert_like, values, word):
    message = refused(prepare_rows, [{"text": t, "label": v} for t, v in zip(TEXTS, values)], bert_like)
    assert message.startswith(f"dataset.label_column: column 'label' holds {word}; labels are names, numbers, or lists")


@pytest.mark.parametrize(
    ("labels", "names", "stored"),
    [
        ([-2, -1, 0, 1, 2, -2], ["-2", "-1", "0", "1", "2"], [0, 1, 2, 3, 4, 0]),
        ([-3, -2, -1, -3, -2, -1], ["-3", "-2", "-1"], [0, 1, 2, 0, 1, 2]),
        ([10, -2, 9, 10, -2, 9], ["-2", "9", "10"], [2, 0, 1, 2, 0, 1]),
        ([[-2, 0], [1], [0], [1], [-2], [0]], ["-2", "0", "1"], None),
    ],
    ids=str,
)
def test_the_line_for_labels_below_0_works(prepare_rows, bert_like, labels, names, stored):
    rows = [{"text": t, "label": v} for t, v in zip(TEXTS, labels)]
    message = refused(prepare_rows, rows, bert_like)
    assert message.startswith(f"dataset.label_column: column 'label' holds {names[0]}, and labels below 0 are no class")
    line = re.search(r"dataset\.(labels: \[.*?\])", message)
    assert line is not None
    given = yaml.safe_load(line[1])["labels"]
    assert given == names
    data = prepare_rows(rows, bert_like, labels=tuple(given))
    assert data.label_names == names
    if stored is None:
        assert data.store.labels.tolist() == [[1, 1, 0], [0, 0, 1], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]]
    else:
        assert data.store.labels.tolist() == stored


def test_labels_below_0_that_dataset_labels_leaves_out(prepare_rows, bert_like):
    rows = [{"text": t, "label": v} for t, v in zip(TEXTS, [-2, 0, 2, -2])]
    assert 'dataset.labels: ["-2", "0", "2"]' in refused(prepare_rows, rows, bert_like, labels=("-1", "0", "1"))


def test_labels_below_0_with_gaps_and_with_a_number_of_classes(prepare_csv):
    assert 'dataset.labels: ["-2", "1"]' in refused(prepare_csv, ["-2", "", "1", "-2"])
    assert 'dataset.labels: ["-2", "1"]' in refused(prepare_csv, ["-2", "1", "1"], num_labels=2)


def test_many_labels_below_0_are_rather_targets(prepare_rows, bert_like):
    rows = [{"text": "good", "label": v} for v in range(-30, 30)]
    message = refused(prepare_rows, rows, bert_like)
    assert "labels below 0 are no class ids" in message
    assert "model.problem_type: regression" in message
    assert "dataset.labels: [" not in message
    assert prepare_rows(rows, bert_like, problem_type=REGRESSION).problem_type == REGRESSION


def test_validation_labels_below_0_say_what_to_do(prepare_rows, bert_like):
    train = prepare_rows([{"text": t, "label": v} for t, v in zip(TEXTS, [0, 1, 0])], bert_like)
    rows = [{"text": t, "label": v} for t, v in zip(TEXTS, [0, -2])]
    message = refused(prepare_rows, rows, bert_like, name="v.jsonl", role="validation", like=train)
    assert "row 1: label -2 is outside 0..1 (labels below 0 are no class ids; if it is a class, list it" in message


def test_a_broken_list_does_not_make_names_of_the_others(prepare_rows, bert_like):
    rows = [{"text": "good film", "label": label} for label in ('["a", "b"]', '["a"]', '["c"')]
    with pytest.raises(UserError, match=r'lists written as text, but row 2 cannot be read as one: \["c"'):
        prepare_rows(rows, bert_like)


def test_rows_with_labels_below_0_may_be_skipped(prepare_rows, bert_like):
    rows = [{"text": "good film", "label": label} for label in (0, 1, -100, 0, 1, -100)]
    with pytest.raises(UserError, match="labels below 0 are no class ids"):
        prepare_rows(rows, bert_like)
    assert len(prepare_rows(rows, bert_like, on_bad_row="skip").store) == 4
