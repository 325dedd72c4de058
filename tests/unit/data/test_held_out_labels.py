"""Validation data that write the classes of the training data in another way."""

from __future__ import annotations

import pytest

from automodel.config.errors import UserError
from automodel.data.labels import LabelMap

TEXTS = ["good film", "bad film", "the film", "good", "bad"]
LISTS = [["alpha"], ["beta", "gamma"], [], ["gamma"], ["alpha", "beta", "gamma"]]
VECTORS = [[1, 0, 0], [0, 1, 1], [0, 0, 0], [0, 0, 1], [1, 1, 1]]
PLACES = "by their place: 0 = alpha, 1 = beta, 2 = gamma"


def rows_of(labels):
    return [{"text": text, "label": label} for text, label in zip(TEXTS, labels)]


@pytest.fixture
def held_out(prepare_rows, bert_like):
    """`prepare` for training data and then for validation data with these rows."""

    def prepared(train, validation, own=None, **settings):
        known = prepare_rows(train, bert_like, name="t.jsonl", **settings)
        return prepare_rows(validation, bert_like, name="v.jsonl", role="validation", like=known, **(own or {}))

    return prepared


def test_vectors_for_classes_with_names_are_read_by_their_place(held_out):
    data = held_out(rows_of(LISTS), rows_of(VECTORS))
    assert data.store.labels.tolist() == VECTORS
    assert data.notes == (f"validation_dataset: its labels are a 0 or 1 for each class, read {PLACES}",)


def test_ids_for_classes_with_names_are_read_by_their_place(held_out):
    ids = [[0], [1, 2], [], [2], [0, 1, 2]]
    note = f"validation_dataset: its labels are numbers, read as classes {PLACES}"
    data = held_out(rows_of(LISTS), rows_of(ids))
    assert (data.store.labels.tolist(), data.notes) == (VECTORS, (note,))
    single = held_out(rows_of(["alpha", "beta", "gamma", "beta"]), rows_of([2, 1, 0]))
    assert (single.store.labels.tolist(), single.notes) == ([2, 1, 0], (note,))


def test_label_columns_for_classes_of_lists_go_by_their_names(held_out):
    rows = [{"text": text, "gamma": v[2], "alpha": v[0], "beta": v[1]} for text, v in zip(TEXTS, VECTORS)]
    data = held_out(rows_of(LISTS), rows, {"label_columns": ("gamma", "alpha", "beta")})
    assert (data.store.labels.tolist(), data.notes) == (VECTORS, ())
    renamed = [{"text": row["text"], "x": row["alpha"], "y": row["beta"], "z": row["gamma"]} for row in rows]
    data = held_out(rows_of(LISTS), renamed, {"label_columns": ("x", "y", "z")})
    assert data.store.labels.tolist() == VECTORS
    [note] = data.notes
    assert note.endswith("label columns are read as classes by their place: x = alpha, y = beta, z = gamma")


def test_lists_of_names_for_classes_of_label_columns(held_out):
    rows = [{"text": t, "alpha": v[0], "beta": v[1], "gamma": v[2]} for t, v in zip(TEXTS, VECTORS)]
    train = {"label_columns": ("alpha", "beta", "gamma")}
    data = held_out(rows, rows_of(LISTS), **train)
    assert (data.store.labels.tolist(), data.notes) == (VECTORS, ())
    data = held_out(rows, rows_of(VECTORS), **train)
    assert (data.store.labels.tolist(), len(data.notes)) == (VECTORS, 1)


@pytest.mark.parametrize("wrong", [[1, 0], [0, 2, 0], [1, 0, 0, 0]], ids=str)
def test_one_wrong_vector_does_not_make_ids_of_the_others(held_out, wrong):
    for train in (VECTORS, LISTS):
        with pytest.raises(UserError, match=r"1 of 5 rows cannot be used .*\n  row 3: ") as caught:
            held_out(rows_of(train), rows_of([*VECTORS[:3], wrong, VECTORS[4]]))
        assert "label values, not 3" in str(caught.value) or "must be 0 or 1" in str(caught.value)


def test_unknown_names_in_lists_are_bad_rows(held_out):
    with pytest.raises(UserError, match="row 1: label 'epsilon' does not occur in the training data"):
        held_out(rows_of(LISTS), rows_of([["alpha"], ["epsilon"]]))
    data = held_out(rows_of(LISTS), rows_of([["alpha"], ["epsilon"]]), {"on_bad_row": "skip"})
    assert data.store.labels.tolist() == [[1, 0, 0]]


def test_targets_in_a_list_are_read_by_their_place(held_out):
    rows = [{"text": t, "joy": i / 4, "anger": 1.5 - i} for i, t in enumerate(TEXTS)]
    lists = [[row["joy"], row["anger"]] for row in rows]
    data = held_out(rows, rows_of(lists), label_columns=("joy", "anger"))
    assert data.store.labels.tolist() == lists
    assert data.notes == ("validation_dataset: its targets are read by their place: 0 = joy, 1 = anger",)
    turned = held_out(rows, rows, {"label_columns": ("anger", "joy")}, label_columns=("joy", "anger"))
    assert (turned.store.labels.tolist(), turned.notes) == (lists, ())


def test_numbers_that_are_written_as_text(held_out):
    train = rows_of([0, 1, 2, 1, 0])
    data = held_out(train, rows_of(["2", "0", "1"]))
    assert (data.store.labels.tolist(), data.notes) == ([2, 0, 1], ())
    assert held_out(rows_of([True, False] * 2), rows_of(["True", "false"])).store.labels.tolist() == [1, 0]
    assert held_out(rows_of([[0], [1, 2]]), rows_of([["2"], ["0", "1"]])).store.labels.tolist() == [
        [0, 0, 1],
        [1, 1, 0],
    ]
    for label, why in (
        ("7", "label 7 is outside 0..2"),
        ("01", "label '01' does not"),
        ("True", "label 'True' does not"),
    ):
        with pytest.raises(UserError, match=f"row 1: {why}"):
            held_out(train, rows_of(["0", label]))
    assert held_out(rows_of(["0", "1", "2"]), rows_of([2, 0])).store.labels.tolist() == [2, 0]


def test_true_and_false_are_the_classes_of_these_names():
    """A saved model does not know whether its classes were written as numbers."""
    model = LabelMap("single_label_classification", 2, ("true", "false"))
    assert [model(True), model(False), model(1), model(0)] == [0, 1, 1, 0]
    assert LabelMap("single_label_classification", 2, ("no", "yes"))(True) == 1


STARS = [1, 2, 3, 4, 5]
SHIFTED = "counts its classes from 0 \\(0 to 4\\), and the training data from 1 \\(1 to 5\\).*add 1 to every label here"


@pytest.mark.parametrize("bad", ["error", "skip"])
@pytest.mark.parametrize(
    ("train", "validation", "words"),
    [
        (STARS, [0, 1, 2, 3, 4], SHIFTED),
        (STARS, ["0", "1", "2", "3", "4"], SHIFTED),
        (STARS, [0, 3, 4, 3, 3], "add 1 to"),
        ([0, 1, 2, 3, 4], STARS, "counts its classes from 1 .*, and the training data from 0 .*take 1 from every"),
        (["0", "1", "2", "0", "1"], [1, 2, 3, 1, 2], "take 1 from"),
        ([0, 1, 2, 0, 1], [-1, 0, 1, 0, 1], "counts its classes from -1"),
        (["bad", "good", "bad", "good", "bad"], [1, 2, 1, 2, 1], "take 1 from"),
        ([[0], [1, 2], [2, 3], [0, 3], [0]], [[1], [2, 3], [3, 4], [4, 1], [1]], "take 1 from"),
    ],
)
def test_classes_that_are_counted_from_another_number(held_out, train, validation, words, bad):
    with pytest.raises(UserError, match=f"validation_dataset.label_column: column 'label' .*{words}") as caught:
        held_out(rows_of(train), rows_of(validation), {"on_bad_row": bad})
    assert "skip" not in str(caught.value)


@pytest.mark.parametrize("bad", ["error", "skip"])
def test_tags_that_are_counted_from_another_number(prepare_rows, bert_like, bad):
    def tagged(shift):
        return [{"tokens": ["good", "film", "bad"], "ner_tags": [shift, 1 + shift, 2 + shift]}] * 3

    known = prepare_rows(tagged(0), bert_like, "token-classification", name="t.jsonl")
    options = {"name": "v.jsonl", "role": "validation", "like": known, "on_bad_row": bad}
    with pytest.raises(UserError, match="'ner_tags' counts its classes from 1 .*take 1 from every"):
        prepare_rows(tagged(1), bert_like, "token-classification", **options)


@pytest.mark.parametrize(
    ("train", "validation", "used"),
    [
        ([0, 1, 2, 0, 1], [-1, 0, 1, 2, 1], 4),  # -1 is 'no label'
        ([0, 1, 2, 3, 4], [4, 5, 4, 4, 4], 4),  # two classes of five tell nothing
        (STARS, [1, 2, 3, 9, 5], 4),
        (STARS, [1, 2, 3, 4, 4], 5),
    ],
)
def test_other_labels_are_judged_row_by_row(held_out, train, validation, used):
    data = held_out(rows_of(train), rows_of(validation), {"on_bad_row": "skip"})
    assert len(data.store) == used
