"""Text and token classification: what labels become, in every form that public datasets have."""

from __future__ import annotations

from dataclasses import replace

import datasets
import pytest

from automodel.config.errors import UserError
from automodel.data.batch import IGNORE
from automodel.data.config import DatasetConfig, MixtureEntry
from automodel.data.inheritance import inherit, members_of

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
TEXTS = ["good film", "bad film", "the film", "good", "bad", "the good film"]


def rows_with(labels, **more):
    return [{"text": text, "label": label, **more} for text, label in zip(TEXTS, labels)]


def sample(data, index: int) -> list[int]:
    store = data.store
    return store.input_ids[store.offsets[index] : store.offsets[index + 1]].tolist()


@pytest.mark.parametrize(
    ("labels", "settings", "problem", "names", "stored"),
    [
        ([0, 1, 1, 0, 2, 0], {}, SINGLE, None, [0, 1, 1, 0, 2, 0]),
        (["pos", "neg", "pos", "neg", "neg", "pos"], {}, SINGLE, ["neg", "pos"], [1, 0, 1, 0, 0, 1]),
        (["b", "a", "b", "a", "a", "b"], {"labels": ("b", "a", "c")}, SINGLE, ["b", "a", "c"], [0, 1, 0, 1, 1, 0]),
        ([0, 1, 0, 1, 1, 0], {"labels": ("no", "yes")}, SINGLE, ["no", "yes"], [0, 1, 0, 1, 1, 0]),
        ([True, False, True, True, False, True], {}, SINGLE, None, [1, 0, 1, 1, 0, 1]),
        ([1, 5, 3, 5, 1, 3], {}, SINGLE, ["1", "3", "5"], [0, 2, 1, 2, 0, 1]),
        ([0, 1, 1, 0, 2, 0], {"num_labels": 5}, SINGLE, None, [0, 1, 1, 0, 2, 0]),
        ([0.5, 1.25, -2.0, 0.0, 3.0, 1.0], {}, REGRESSION, None, [[0.5], [1.25], [-2.0], [0.0], [3.0], [1.0]]),
        ([1, 2, 3, 4, 5, 1], {"problem_type": REGRESSION}, REGRESSION, None, [[1], [2], [3], [4], [5], [1]]),
        ([1, 2, 3, 4, 5, 1], {"num_labels": 1}, REGRESSION, None, [[1], [2], [3], [4], [5], [1]]),
        (
            [["a", "b"], ["b"], [], ["c"], ["a", "c"], ["b"]], {}, MULTI, ["a", "b", "c"],
            [[1, 1, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 1], [0, 1, 0]],
        ),
        (
            [[0, 2], [1], [0], [2], [1, 2], [0]], {}, MULTI, None,
            [[1, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 1], [1, 0, 0]],
        ),
        (
            [[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 1]], {}, MULTI, None,
            [[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 1]],
        ),
        (
            [[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], {}, MULTI, None,
            [[0, 1], [1, 1], [0, 0], [1, 0], [0, 1], [1, 1]],
        ),
        (
            [[1, 0], [0, 1], [0, 1], [1, 0], [1, 0], [0, 1]], {}, MULTI, None,
            [[1, 0], [0, 1], [0, 1], [1, 0], [1, 0], [0, 1]],
        ),
        (
            [[1, 0], [2, 9], [0, 1], [1, 0], [1, 0], [0, 1]], {"problem_type": REGRESSION}, REGRESSION, None,
            [[1, 0], [2, 9], [0, 1], [1, 0], [1, 0], [0, 1]],
        ),
        (
            [[0.5, 0.25], [1, 0], [0, 1], [1, 0], [1, 0], [0, 1]], {"problem_type": MULTI}, MULTI, None,
            [[0.5, 0.25], [1, 0], [0, 1], [1, 0], [1, 0], [0, 1]],
        ),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_labels_in_every_form(prepare_rows, bert_like, labels, settings, problem, names, stored):
    data = prepare_rows(rows_with(labels), bert_like, **settings)
    assert data.problem_type == problem
    assert data.label_names == names
    assert data.store.labels.tolist() == stored
    width = (
        len(stored[0])
        if isinstance(stored[0], list)
        else len(names or ()) or settings.get("num_labels") or max(stored) + 1
    )
    assert data.num_labels == width


def test_label_columns(prepare_rows, bert_like):
    rows = [{"text": t, "toxic": i % 2, "rude": int(i > 3)} for i, t in enumerate(TEXTS)]
    data = prepare_rows(rows, bert_like, label_columns=("toxic", "rude"))
    assert (data.problem_type, data.label_names, data.num_labels) == (MULTI, ["toxic", "rude"], 2)
    assert data.store.labels.tolist() == [[i % 2, float(i > 3)] for i in range(6)]
    assert data.stats.label_counts == (3, 2)
    written = [row | {"rude": str(row["rude"])} for row in rows]  # as some files have them
    assert prepare_rows(written, bert_like, label_columns=("toxic", "rude")).stats.label_counts == (3, 2)


def test_label_columns_of_numbers(prepare_rows, bert_like):
    """Decimals are targets of a regression, and so is whatever `problem_type` says; not classes, true or not."""
    rows = [{"text": t, "joy": i / 4, "anger": 1 - i} for i, t in enumerate(TEXTS)]
    stored = [[i / 4, 1 - i] for i in range(6)]
    data = prepare_rows(rows, bert_like, label_columns=("joy", "anger"))
    assert (data.problem_type, data.label_names, data.num_labels) == (REGRESSION, ["joy", "anger"], 2)
    assert data.store.labels.tolist() == stored
    asked = {"label_columns": ("anger", "joy"), "problem_type": REGRESSION}
    whole = [{"text": t, "joy": i % 2, "anger": int(i > 3)} for i, t in enumerate(TEXTS)]
    assert prepare_rows(whole, bert_like, **asked).problem_type == REGRESSION
    soft = [{"text": t, "joy": i / 8, "anger": 1} for i, t in enumerate(TEXTS)]
    data = prepare_rows(soft, bert_like, label_columns=("joy", "anger"), problem_type=MULTI)
    assert data.problem_type == MULTI
    assert data.store.labels.tolist() == [[i / 8, 1.0] for i in range(6)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label_columns": ("joy", "note")}, "dataset.label_columns: column 'note' holds text, but each of these"),
        ({"label_columns": ("joy",), "problem_type": SINGLE}, "one class a row, but dataset.label_columns names 1"),
        ({"label_column": "both", "problem_type": SINGLE}, "column 'both' of dataset holds a list in every row"),
        ({"label_column": "words", "problem_type": REGRESSION}, "regression needs numbers, but column 'words' holds"),
        ({"label_columns": ("joy", "joy")}, "dataset.label_columns names a column twice: joy, joy."),
        ({"label_columns": ("joy",), "labels": ("a",)}, "dataset.labels: the classes of label_columns have the"),
        ({"label_column": "share", "labels": ("a", "b")}, "dataset.labels names classes, but the labels are numbers"),
        ({"label_column": "hot", "labels": ("a", "b")}, "names 2 classes, but column 'hot' holds vectors of 3"),
    ],
)
def test_labels_that_cannot_be_what_the_model_is_asked_for(prepare_rows, bert_like, settings, message):
    more = {"both": [0, 1], "words": ["a", "b"], "note": "yes", "share": 0.5, "hot": [0, 1, 0]}
    rows = [{"text": t, "joy": i % 2, **more} for i, t in enumerate(TEXTS)]
    with pytest.raises(UserError) as raised:
        prepare_rows(rows, bert_like, **settings)
    assert message in str(raised.value)


@pytest.mark.parametrize("said", [{"label_column": "label"}, {"num_labels": 40}, {"problem_type": SINGLE}], ids=str)
def test_many_classes_can_be_asked_for(prepare_rows, bert_like, said):
    rows = [{"text": "good film", "label": f"class {i:02}"} for i in range(40)]
    with pytest.raises(
        UserError, match=r"looks like an identifier .* if it is this one, dataset\.label_column: label\."
    ):
        prepare_rows(rows, bert_like)
    data = prepare_rows(rows, bert_like, **said)
    assert (data.num_labels, data.store.labels.tolist()) == (40, list(range(40)))


def test_missing_labels_do_not_turn_classes_into_regression(prepare_rows, bert_like, tmp_path):
    (tmp_path / "a.csv").write_text("text,label\ngood film,1\nbad film,0\nfilm,\nthe film,0\n")
    data = prepare_rows(None, bert_like, path=str(tmp_path / "a.csv"), on_bad_row="skip")
    assert data.problem_type == SINGLE
    assert data.store.labels.tolist() == [1, 0, 0]
    assert data.store.rows.tolist() == [0, 1, 3]
    assert data.stats.skipped_rows == ({"row": 2, "reason": "the label is missing"},)


def test_class_names_of_the_dataset(prepare_rows, bert_like, tmp_path):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    table = datasets.Dataset.from_list(rows_with([0, 1, 1, 0, 0, 1]), features=features)
    table.save_to_disk(tmp_path / "d")
    train = prepare_rows(None, bert_like, path=str(tmp_path / "d"))
    assert train.label_names == ["neg", "pos"]
    # Validation data with the same names in another order: names decide, not numbers.
    features["label"] = datasets.ClassLabel(names=["pos", "neg"])
    datasets.Dataset.from_list(rows_with([0, 1, 1, 0, 0, 1]), features=features).save_to_disk(tmp_path / "v")
    validation = prepare_rows(None, bert_like, path=str(tmp_path / "v"), role="validation", like=train)
    assert validation.store.labels.tolist() == [1, 0, 0, 1, 1, 0]
    assert validation.label_names == ["neg", "pos"]
    # So it is where a trained head has them in another order, and where they are listed in another one.
    for order in ({"known_labels": ("pos", "neg")}, {"labels": ("pos", "neg")}):
        turned = prepare_rows(None, bert_like, path=str(tmp_path / "d"), **order)
        assert turned.store.labels.tolist() == [1, 0, 0, 1, 1, 0]
        assert turned.label_names == ["pos", "neg"]


def test_validation_uses_the_training_classes(prepare_rows, bert_like):
    train = prepare_rows(rows_with(["c", "a", "b", "a", "c", "b"]), bert_like)
    validation = prepare_rows(rows_with(["c", "c"]), bert_like, name="v.jsonl", role="validation", like=train)
    assert validation.store.labels.tolist() == [2, 2]
    assert validation.num_labels == 3
    with pytest.raises(UserError) as caught:
        prepare_rows(rows_with(["c", "d", "d"]), bert_like, name="w.jsonl", role="validation", like=train)
    assert str(caught.value) == (
        "validation_dataset: 2 of 3 rows cannot be used (rows are counted from 0):\n"
        "  row 1: label 'd' does not occur in the training data\n"
        "  row 2: label 'd' does not occur in the training data\n"
        "Put them right, or leave them out with validation_dataset.on_bad_row: skip."
    )


def test_validation_inherits_columns_but_not_its_place():
    train = DatasetConfig(path="a.csv", split="train[:10]", text_column="review", max_length=99, num_samples_limit=5)
    both = inherit(train, DatasetConfig(path="b.csv", max_length=50))
    assert (both.path, both.split, both.text_column, both.max_length, both.num_samples_limit) == (
        "b.csv", None, "review", 50, None,
    )  # fmt: skip
    same_place = inherit(train, DatasetConfig(split="test"))
    assert (same_place.path, same_place.split, same_place.text_column) == ("a.csv", "test", "review")


INSTRUCTIONS = DatasetConfig(
    path="a.jsonl", column_mapping={"question": "q", "answer": "a"}, prompt_template="{q} =>", answer_only_loss=False
)


@pytest.mark.parametrize(
    ("own", "inherited"),
    [
        ({}, {"column_mapping": INSTRUCTIONS.column_mapping, "prompt_template": "{q} =>"}),
        ({"text_column": "text"}, {"column_mapping": None, "prompt_template": None}),
        ({"messages_column": "chats"}, {"column_mapping": None, "prompt_template": None}),
        ({"column_mapping": {"question": "x", "answer": "y"}}, {"prompt_template": "{q} =>", "text_column": None}),
        ({"prompt_template": "{q}: "}, {"column_mapping": INSTRUCTIONS.column_mapping}),
    ],
    ids=["nothing said", "plain text", "chats", "other columns", "another template"],
)
def test_rows_of_another_kind_do_not_get_the_columns_of_instructions(own, inherited):
    both = inherit(INSTRUCTIONS, DatasetConfig(path="b.jsonl", **own))
    mixed = replace(INSTRUCTIONS, path=None, mixture=(MixtureEntry(path="b.jsonl", **own),))
    ((_, member),) = members_of(mixed)
    for found in (both, member):
        assert {key: getattr(found, key) for key in inherited} == inherited
        assert {key: getattr(found, key) for key in own} == own


def test_what_validation_data_say_of_their_answers_holds():
    """Learning every word and measuring answers is a usual way; what is said may be what would hold by default."""
    assert inherit(INSTRUCTIONS, DatasetConfig(path="b.jsonl", answer_only_loss=True)).answers_only
    assert not inherit(INSTRUCTIONS, DatasetConfig(path="b.jsonl")).answers_only
    assert DatasetConfig(path="b.jsonl").answers_only


def test_columns_of_a_classifier_are_inherited_one_by_one():
    train = DatasetConfig(path="a.csv", column_mapping={"text": "review", "label": "stars"})
    part = inherit(train, DatasetConfig(path="b.csv", text_column="t"))
    assert (part.column_mapping, part.text_column) == ({"label": "stars"}, "t")
    both = inherit(train, DatasetConfig(path="b.csv", text_column="t", label_columns=("a", "b")))
    assert (both.column_mapping, both.label_columns) == (None, ("a", "b"))
    keys = DatasetConfig(path="a.csv", text_column="review", label_column="stars")
    mapped = inherit(keys, DatasetConfig(path="b.csv", column_mapping={"text": "t"}))
    assert (mapped.column_mapping, mapped.text_column, mapped.label_column) == ({"text": "t"}, None, "stars")
    mixture = (MixtureEntry(path="b.csv"), MixtureEntry(path="c.csv", text_column="t"))
    members = members_of(DatasetConfig(mixture=mixture, column_mapping=train.column_mapping))
    assert [m.column_mapping for _, m in members] == [train.column_mapping, {"label": "stars"}]


def test_what_is_said_of_labels_comes_first_by_whichever_key():
    several = DatasetConfig(path="a.csv", label_columns=("a", "b"))
    for own in ({"label_column": "y"}, {"column_mapping": {"label": "y"}}):
        part = inherit(several, DatasetConfig(path="b.csv", **own))
        assert (part.label_columns, {key: getattr(part, key) for key in own}) == (None, own)
        ((_, member),) = members_of(replace(several, path=None, mixture=(MixtureEntry(path="b.csv", **own),)))
        assert member.label_columns is None
    one = DatasetConfig(path="a.csv", label_column="y")
    part = inherit(one, DatasetConfig(path="b.csv", label_columns=("a", "b")))
    assert (part.label_column, part.label_columns) == (None, ("a", "b"))
    assert inherit(several, DatasetConfig(path="b.csv")).label_columns == ("a", "b")
    assert inherit(one, DatasetConfig(path="b.csv")).label_column == "y"


def test_a_class_that_is_listed_twice_is_refused(prepare_rows, bert_like):
    rows = rows_with([0, 1, 2, 1])
    with pytest.raises(UserError, match=r"^dataset\.labels names 'b' more than once"):
        prepare_rows(rows, bert_like, labels=("a", "b", "b"))
    train = prepare_rows(rows, bert_like, labels=("a", "b", "c"))
    with pytest.raises(UserError, match=r"^validation_dataset\.labels names 'a' more than once"):
        prepare_rows(rows, bert_like, labels=("a", "a", "c"), role="validation", like=train)
    tagged = [{"tokens": ["good", "film"], "tags": [0, 1]}] * 4
    with pytest.raises(UserError, match=r"^dataset\.labels names 'O' more than once"):
        prepare_rows(tagged, bert_like, task="token-classification", labels=("O", "O"))


def test_numbers_of_targets_are_inherited_unless_said():
    train = DatasetConfig(path="a.csv", source_prefix="film ", max_target_length=2)
    said = inherit(train, DatasetConfig(path="b.csv", source_prefix="", max_target_length=128))
    assert (said.prefix, said.target_length) == ("", 128)
    left_open = inherit(train, DatasetConfig(path="b.csv"))
    assert (left_open.prefix, left_open.target_length) == ("film ", 2)
    assert (DatasetConfig().prefix, DatasetConfig().target_length) == ("", 128)


def test_a_column_that_is_named_twice_is_refused(prepare_rows, bert_like):
    rows = [{"text": "good film", "body": "bad film", "label": i % 2} for i in range(4)]
    with pytest.raises(UserError, match=r"dataset\.column_mapping says that the text is in 'body', and dataset\.t"):
        prepare_rows(rows, bert_like, text_column="text", column_mapping={"text": "body"})
    data = prepare_rows(rows, bert_like, text_column="body", column_mapping={"text": "body"})
    assert bert_like.decode(sample(data, 0)) == "[CLS] bad film [SEP]"


def test_held_out_numbers_in_another_order(prepare_rows, bert_like):
    """`labels` of validation data says what its numbers stand for."""
    rows = [{"text": "good film", "label": i % 2} for i in range(4)]
    train = prepare_rows(rows, bert_like, labels=("neg", "pos"))
    held_out = {"role": "validation", "like": train}
    assert prepare_rows(rows, bert_like, labels=("pos", "neg"), **held_out).store.labels.tolist() == [1, 0, 1, 0]
    assert prepare_rows(rows, bert_like, labels=("neg", "pos"), **held_out).store.labels.tolist() == [0, 1, 0, 1]
    with pytest.raises(UserError, match="label 'good' does not occur in dataset.labels"):
        prepare_rows(rows, bert_like, labels=("neg", "good"), **held_out)
    tokens = [{"tokens": ["good", "film"], "tags": [0, 1]}] * 4
    tagged = prepare_rows(tokens, bert_like, task="token-classification", labels=("O", "B"))
    other = {"role": "validation", "like": tagged, "task": "token-classification"}
    turned = prepare_rows(tokens, bert_like, labels=("B", "O"), **other)
    assert [i for i in turned.store.token_labels[:4].tolist() if i >= 0] == [1, 0]
    [note] = prepare_rows(tokens, bert_like, **other).notes
    assert note == "validation_dataset: its labels are numbers, read as classes by their place: 0 = O, 1 = B"


def test_vectors_have_one_order(prepare_rows, bert_like):
    rows = [{"text": "good film", "label": [i % 2, 1]} for i in range(4)]
    train = prepare_rows(rows, bert_like, labels=("a", "b"))
    with pytest.raises(UserError, match=r"dataset\.labels: the values of 'label' are 0 or 1 for each class"):
        prepare_rows(rows, bert_like, labels=("b", "a"), role="validation", like=train)


def test_a_text_that_is_the_label_is_refused(prepare_rows, bert_like):
    rows = [{"text": "good film", "label": ["bad", "good"][i % 2]} for i in range(4)]
    with pytest.raises(UserError, match="the model reads what it has to find out. Name another column as text_column"):
        prepare_rows(rows, bert_like, text_column="label")
    with pytest.raises(UserError, match="the model reads what it has to find out"):
        prepare_rows(rows, bert_like, text_pair_column="label")


def test_pairs_have_segments(prepare_rows, bert_like):
    rows = [{"premise": "good film", "hypothesis": "the film", "label": i % 2} for i in range(4)]
    data = prepare_rows(rows, bert_like)
    assert data.description == "premise + hypothesis → label"
    assert bert_like.decode(sample(data, 0)) == "[CLS] good film [SEP] the film [SEP]"
    assert data.store.token_types[: data.store.lengths[0]].tolist() == [0, 0, 0, 0, 1, 1, 1]
    one_segment = prepare_rows(rows, bert_like, types=1)
    assert one_segment.store.token_types is None


@pytest.mark.parametrize("column", ["text", "sentence", "review", "weird name"])
def test_text_columns_are_found(prepare_rows, bert_like, column):
    data = prepare_rows([{column: t, "label": i % 2, "number": 3} for i, t in enumerate(TEXTS)], bert_like)
    assert bert_like.decode(sample(data, 1)) == "[CLS] bad film [SEP]"


def test_column_mapping_names_columns_too(prepare_rows, bert_like):
    rows = [{"a": "good", "b": "bad", "c": i % 2} for i in range(4)]
    data = prepare_rows(rows, bert_like, column_mapping={"text": "b", "label": "c"})
    assert bert_like.decode(sample(data, 0)) == "[CLS] bad [SEP]"


def test_long_texts_are_cut_and_counted(prepare_rows, bert_like):
    data = prepare_rows(rows_with([0, 1, 0, 1, 0, 1]), bert_like, max_length=4)
    assert data.store.lengths.max() == 4
    assert data.stats.truncated == 1  # "the good film" alone has five tokens
    assert bert_like.decode(sample(data, 5)) == "[CLS] the good [SEP]"


def test_stats(prepare_rows, bert_like):
    data = prepare_rows(rows_with(["a", "b", "b", "b", "b", "b"]), bert_like)
    stats = data.stats.to_json()
    assert {k: stats[k] for k in ("rows", "used", "skipped", "truncated", "tokens", "max_length")} == {
        "rows": 6, "used": 6, "skipped": 0, "truncated": 0, "tokens": 23, "max_length": 512,
    }  # fmt: skip
    assert stats["label_names"] == ["a", "b"]
    assert stats["label_counts"] == [1, 5]
    histogram = stats["length_histogram"]
    assert sum(histogram["counts"]) == 6
    assert len(histogram["edges"]) == len(histogram["counts"]) + 1
    assert histogram["counts"][histogram["edges"].index(4)] == 3


def test_one_sided_data_is_noted(prepare_rows, bert_like):
    data = prepare_rows(rows_with([0] * 6), bert_like, labels=("neg", "pos"))
    expected = (
        "every row has the label neg, so there is nothing to learn; data sorted by label and then cut looks like this: "
        "shuffle it, or take a part around the middle (split: train[40%:60%])"
    )
    assert data.notes == (expected,)


@pytest.mark.parametrize(
    ("tags", "names"),
    [
        ([["O", "B-PER"], ["O", "O"]], ["B-PER", "O"]),
        ([[1, 0], [1, 1]], None),
    ],
)
def test_a_word_is_labelled_on_its_first_piece(prepare_rows, bert_like, tags, names):
    rows = [{"tokens": ["good", "xyz"], "ner_tags": tags[0]}, {"tokens": ["qq", "bad"], "ner_tags": tags[1]}]
    data = prepare_rows(rows, bert_like, task="token-classification")
    assert (data.label_names, data.num_labels, data.problem_type) == (names, 2, None)
    store = data.store
    assert bert_like.convert_ids_to_tokens(sample(data, 0)) == ["[CLS]", "good", "x", "##y", "##z", "[SEP]"]
    assert store.token_labels[: store.offsets[1]].tolist() == [IGNORE, 1, 0, IGNORE, IGNORE, IGNORE]
    assert data.stats.label_counts == (1, 3)


def test_words_without_a_token_are_counted(prepare_rows, bert_like):
    """An empty word, or one of characters that a tokenizer drops, takes its tag with it."""
    words, tags = ["good", "", "film", " "], ["A", "B", "A", "B"]
    data = prepare_rows([{"tokens": words, "tags": tags}] * 3, bert_like, task="token-classification")
    assert (data.stats.label_counts, data.stats.lost_tags) == ((6, 0), 6)
    told = "words with tags have no token, being empty or nothing the tokenizer keeps: their tags are not learned"
    assert f"6 {told}" in data.notes
    settings = {"task": "token-classification", "max_length": 4}
    cut = prepare_rows([{"tokens": [*words, "bad"], "tags": [*tags, "A"]}], bert_like, name="c.jsonl", **settings)
    assert (cut.stats.truncated, cut.stats.lost_tags) == (1, 1)  # the other is behind the cut
    whole = prepare_rows([{"tokens": ["good", "film"], "tags": ["A", "B"]}], bert_like, name="w.jsonl", **settings)
    assert (whole.stats.lost_tags, whole.notes) == (0, ())


def test_token_classification_bad_rows(prepare_rows, bert_like):
    rows = [
        {"tokens": ["good", "film"], "tags": ["A", "B"]},
        {"tokens": ["good"], "tags": ["A", "B"]},
        {"tokens": [], "tags": []},
        {"tokens": ["good"], "tags": None},
    ]
    data = prepare_rows(rows, bert_like, task="token-classification", on_bad_row="skip")
    assert [b["reason"] for b in data.stats.skipped_rows] == [
        "the row has 1 words but 2 tags", "the row has no words", "the tags are missing",
    ]  # fmt: skip


def test_byte_level_tokenizers_take_words(prepare_rows, shared_data):
    from transformers import AutoTokenizer

    gpt2 = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "gpt2")
    rows = [{"tokens": ["Hello", "world"], "tags": [0, 1]}, {"tokens": ["world"], "tags": [1]}]
    data = prepare_rows(rows, gpt2, task="token-classification", types=0)
    assert gpt2.decode(sample(data, 0)) == " Hello world"
    assert data.store.token_labels.tolist() == [0, 1, 1]


@pytest.mark.parametrize("task", ["text-classification", "causal-lm", "token-classification", "seq2seq"])
def test_already_tokenised_rows_are_taken_as_they_are(prepare_rows, bert_like, task):
    labels = {"text-classification": [0, 1], "seq2seq": [[9, 3], [8, IGNORE]]}.get(task, [[IGNORE, 6, 1], [IGNORE, 0]])
    rows = [
        {"input_ids": [2, 5, 3], "attention_mask": [1, 1, 1], "labels": labels[0], "text": "ignored"},
        {"input_ids": [2, 7], "attention_mask": [1, 1], "labels": labels[1], "text": "ignored"},
    ]
    data = prepare_rows(rows, bert_like, task=task)
    assert data.description == "already tokenised rows"
    assert [sample(data, i) for i in range(2)] == [[2, 5, 3], [2, 7]]
    if task == "text-classification":
        assert data.store.labels.tolist() == [0, 1]
    elif task == "seq2seq":
        assert data.store.target_ids.tolist() == [9, 3, 8]
    else:
        assert data.store.token_labels.tolist() == [IGNORE, 6, 1, IGNORE, 0]


def test_stored_padding_is_left_out_again(prepare_rows, bert_like):
    rows = [{"input_ids": [2, 5, 3, 0, 0], "attention_mask": [1, 1, 1, 0, 0], "label": i % 2} for i in range(4)]
    data = prepare_rows(rows, bert_like)
    assert sample(data, 0) == [2, 5, 3]


def test_seq2seq(prepare_rows, gpt_like):
    rows = [{"article": "a long story", "highlights": "short"}, {"article": "another", "highlights": "end"}]
    data = prepare_rows(rows, gpt_like, task="seq2seq", source_prefix="summarize: ", max_target_length=4)
    assert gpt_like.decode(sample(data, 0)) == "summarize: a long story"
    assert gpt_like.decode(data.store.target_ids.tolist()) == "shor" + "end"
    assert (data.stats.truncated, data.stats.truncated_targets) == (0, 1)


def test_translation_records(prepare_rows, gpt_like):
    rows = [{"translation": {"en": "house", "de": "Haus"}}]
    data = prepare_rows(rows, gpt_like, task="seq2seq", source_column="de", target_column="en")
    assert gpt_like.decode(sample(data, 0)) == "Haus"
    assert gpt_like.decode(data.store.target_ids.tolist()) == "house"
    assert prepare_rows(rows, gpt_like, task="seq2seq").description == "en → de"
