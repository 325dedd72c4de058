"""CSV and TSV files without a header."""

from __future__ import annotations

import json
import re

import pytest

from automodel.config.errors import UserError
from automodel.data.config import DatasetConfig, MixtureEntry
from automodel.data.inheritance import inherit, members_of
from automodel.data.sources import load_rows

LINES = [("a good film", "pos"), ("a bad film", "neg"), ("the film is good", "pos"), ("the film is bad", "neg")]
NAMES = ("text", "label")


@pytest.fixture
def load(tmp_path):
    def load_lines(lines, name="a.csv", **settings):
        separator = "," if name.endswith("csv") else "\t"
        (tmp_path / name).write_text("".join(separator.join(line) + "\n" for line in lines))
        return load_rows(DatasetConfig(path=str(tmp_path / name), cache_dir=str(tmp_path / "cache"), **settings))

    return load_lines


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_columns_get_the_names_that_the_config_gives(load, name):
    rows = load(LINES, name, column_names=NAMES)
    assert rows.to_list() == [dict(zip(NAMES, line)) for line in LINES]


def test_several_files_without_a_header(tmp_path):
    for number, (text, label) in enumerate(LINES):
        (tmp_path / f"{number}.csv").write_text(f"{text},{label}\n")
    cfg = DatasetConfig(path=f"{tmp_path}/*.csv", column_names=NAMES, cache_dir=str(tmp_path / "cache"))
    assert load_rows(cfg).to_list() == [dict(zip(NAMES, line)) for line in LINES]


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (LINES, "all columns in their order, e.g. dataset.column_names: [text, label]"),
        (
            [(text, "1" if label == "pos" else "0") for text, label in LINES],
            "all columns in their order, e.g. dataset.column_names: [text, label]",
        ),
        (
            [(f"a film of {words}, as long as any",) for words in ("love", "war", "peace")],
            "its column, e.g. dataset.column_names: [text]",
        ),
        (
            [("how are you today ?", "wie geht es dir ?"), ("i am very well", "mir geht es gut")],
            "all columns in their order, e.g. dataset.column_names: [text, label]",
        ),
        (
            [("3.5", "2", "1", "4"), ("2.5", "1", "0", "4")],
            "all columns in their order, e.g. dataset.column_names: [text, label, column_3, column_4]",
        ),
    ],
)
@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_first_row_that_looks_like_data_is_no_header(load, name, lines, names):
    lines = [[cell.replace(",", "") for cell in line] for line in lines]
    says = (
        r"row 1 of '.*' \(.*\) was taken for the header, and looks like data. If the file has no header, name "
        + re.escape(names)
    )
    with pytest.raises(UserError, match=says):
        load(lines, name)


@pytest.mark.parametrize(
    ("header", "settings"),
    [
        (("text", "label"), {}),
        (("text", "1"), {}),
        (("comment", "toxic"), {}),
        (("1", "2"), {"text_column": "1", "label_column": "2"}),
        (("pos", "neg"), {"column_mapping": {"question": "pos", "answer": "neg"}}),
        (("what did you see in it", "what was in it for you"), {"prompt_template": "{what did you see in it}"}),
        (("first thing", "second thing"), {}),
    ],
)
def test_a_header_is_one(load, header, settings):
    rows = load([header, *LINES], **settings)
    assert (rows.column_names, len(rows)) == (list(header), len(LINES))


@pytest.mark.parametrize(
    ("lines", "names", "words"),
    [
        (LINES, ("text",), r"dataset.column_names has 1 names, but the rows of '.*a.csv' have 2 cells"),
        (LINES, ("text", "label", "more"), r"has 3 names, but the rows of '.*a.csv' have 2 cells"),
        ([NAMES, *LINES], NAMES, "the first row of '.*a.csv' has these names already, so it is a header. Remove"),
        (LINES, ("text", "text"), "dataset.column_names has 'text' twice"),
        ([*LINES, ("bad", "film", "neg")], NAMES, "line 5 has 3 cells, but column_names has 2"),
    ],
)
def test_names_that_do_not_fit(load, lines, names, words):
    with pytest.raises(UserError, match=words):
        load(lines, column_names=names)


def test_names_are_for_tables_alone(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "good", "label": 1}) + "\n")
    for path in (str(tmp_path / "a.jsonl"), "someone/reviews"):
        with pytest.raises(UserError, match="dataset.column_names is for CSV and TSV files"):
            load_rows(DatasetConfig(path=path, column_names=NAMES, cache_dir=str(tmp_path / "cache")))


def test_another_file_has_names_of_its_own():
    train = DatasetConfig(path="a.csv", column_names=NAMES)
    assert inherit(train, DatasetConfig(path="b.csv")).column_names is None
    assert inherit(train, DatasetConfig(split="test")).column_names == NAMES
    mixture = DatasetConfig(mixture=(MixtureEntry(path="a.csv", column_names=NAMES), MixtureEntry(path="b.csv")))
    assert [cfg.column_names for _, cfg in members_of(mixture)] == [NAMES, None]
