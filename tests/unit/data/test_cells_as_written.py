"""What a CSV or JSON file says is what is learned: no cell is rewritten, no column or row lost on the way."""

from __future__ import annotations

import json

import pytest

from automodel.config.errors import UserError
from automodel.data.batch import IGNORE
from automodel.data.config import DatasetConfig
from automodel.data.numbers import with_numbers
from automodel.data.sources import as_rows, load_rows

ANSWERS = ["72", "0.5", "00501", "1.50", "1e5", "1999", "True", "NA", "12345678901234567890123", "none at all"]


@pytest.fixture
def learned(prepare_rows, gpt_like):
    """The answers of a file, as a model learns them."""

    def read(path, **settings) -> list[str]:
        data = prepare_rows(None, gpt_like, "causal-lm", path=str(path), **settings).store
        bounds = zip(data.offsets[:-1], data.offsets[1:])
        labels = [[t for t in data.token_labels[a:b].tolist() if t != IGNORE] for a, b in bounds]
        return [gpt_like.decode(found).removesuffix("<|end|>").strip() for found in labels]

    return read


@pytest.fixture
def rows_of(tmp_path):
    def read(path):
        return load_rows(DatasetConfig(path=str(path), cache_dir=str(tmp_path / "cache")))

    return read


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "d"
    path.mkdir()
    return path


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_answers_of_a_csv_are_learned_letter_by_letter(learned, tmp_path, suffix):
    path, gap = tmp_path / f"a.{suffix}", "," if suffix == "csv" else "\t"
    path.write_text(f"question{gap}answer\n" + "".join(f"q{gap}{answer}\n" for answer in ANSWERS))
    assert learned(path) == ANSWERS


def test_an_empty_cell_changes_no_other(learned, tmp_path):
    (tmp_path / "a.csv").write_text("question,answer\nq,12\nq,\nq,7\n")
    assert learned(tmp_path / "a.csv", on_bad_row="skip") == ["12", "7"]


def test_a_column_is_one_kind_however_long_it_is(learned, tmp_path):
    """pandas reads in blocks, and guessed for each."""
    answers = [str(i % 10) for i in range(12_000)] + ["none at all"]
    (tmp_path / "a.csv").write_text("question,answer\n" + "".join(f"q,{answer}\n" for answer in answers))
    assert learned(tmp_path / "a.csv") == answers


def test_whole_numbers_of_a_json_column_with_decimals_are_whole(learned, tmp_path):
    rows = [{"question": "q", "answer": answer} for answer in (72, 0.5, -3, 10**20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert learned(tmp_path / "a.jsonl") == ["72", "0.5", "-3", str(10**20)]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["0", "1", "+1", "-2"], [0, 1, 1, -2]),
        (["0", "1", "3.5"], [0.0, 1.0, 3.5]),
        (["1", "NA", "", "nan"], [1, None, None, None]),
        (["0.5", "inf", "1e-3"], [0.5, float("inf"), 0.001]),
        (["True", "false", ""], [True, False, None]),
        (["01", "02"], ["01", "02"]),  # names
        (["1", "two"], ["1", "two"]),
        (["12345678901234567890123", "1"], ["12345678901234567890123", "1"]),  # more digits than a number keeps
        (["NA", "none"], ["NA", "none"]),
        ([" 1", "2 "], [1, 2]),
    ],
)
def test_columns_of_numbers_where_labels_are_looked_for(rows_of, tmp_path, cells, expected):
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"x,{cell}\n" for cell in cells))
    rows = rows_of(tmp_path / "a.csv")
    assert rows["label"][:] == [cell or None for cell in cells]
    numbers = with_numbers(rows)
    assert (numbers["label"][:], numbers.column_names) == (expected, ["text", "label"])
    assert [type(value) for value in numbers["label"]] == [type(value) for value in expected]
    assert with_numbers(rows, besides=("label",))["label"][:] == rows["label"][:]


def test_names_that_look_like_numbers_are_the_classes_that_are_listed(prepare_rows, bert_like, tmp_path):
    (tmp_path / "a.csv").write_text("text,label\ngood film,01\nbad film,02\n")
    data = prepare_rows(None, bert_like, path=str(tmp_path / "a.csv"), labels=("01", "02"))
    assert data.store.labels.tolist() == [0, 1]


def test_labels_of_a_late_block_may_be_decimals(prepare_rows, bert_like, tmp_path):
    cells = [str(i % 5) for i in range(11_000)] + ["3.5"]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"good,{cell}\n" for cell in cells))
    data = prepare_rows(None, bert_like, path=str(tmp_path / "a.csv"))
    assert data.problem_type == "regression"
    assert data.store.labels[-1].tolist() in (3.5, [3.5])


def test_each_tsv_file_is_read_with_the_quotes_it_has(rows_of, folder):
    (folder / "a.tsv").write_text("text\tlabel\ngood\t1\nbad\t0\n")
    (folder / "b.tsv").write_text('text\tlabel\n"hello there\t0\nmiddle row\t1\nanother\t0\nthe "end\t1\n')
    (folder / "c.tsv").write_text('text\tlabel\n"two\nlines"\t1\n')
    texts = rows_of(folder)["text"][:]
    assert texts == ["good", "bad", '"hello there', "middle row", "another", 'the "end', "two\nlines"]


def test_a_ragged_line_beside_stray_quotes_is_named(rows_of, tmp_path):
    (tmp_path / "a.tsv").write_text('text\tlabel\n"hello\t0\nmiddle\t1\nragged\t0\t7\nthe "end\t1\n')
    with pytest.raises(UserError, match=r"line 4 has 3 cells, but the header has 2 \(text, label\)"):
        rows_of(tmp_path / "a.tsv")


NESTED = [{"instruction": "one", "output": "1"}, {"instruction": "two", "input": "IMPORTANT", "output": "2"}]


def test_columns_that_the_first_row_lacks_are_there(rows_of, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"data": NESTED}))
    expected = [{**NESTED[0], "input": None}, NESTED[1]]
    assert rows_of(tmp_path / "a.json").to_list() == expected
    assert as_rows(list(NESTED), None, "train", "dataset", "mine").to_list() == expected


def test_nested_rows_of_different_kinds_are_what_they_are_in_an_array(rows_of, tmp_path):
    mixed = [{"text": "a", "label": 1}, {"text": 2, "label": 0}]
    (tmp_path / "a.json").write_text(json.dumps({"rows": mixed}))
    (tmp_path / "b.json").write_text(json.dumps(mixed))
    nested, array = rows_of(tmp_path / "a.json"), rows_of(tmp_path / "b.json")
    assert (nested.to_list(), nested.features) == (array.to_list(), array.features)


def test_files_with_different_columns_are_named_with_the_column(rows_of, folder):
    (folder / "a.jsonl").write_text('{"text": "x", "label": 0}\n')
    (folder / "b.jsonl").write_text('{"text": "x", "label": 0, "source": "web"}\n')
    with pytest.raises(UserError, match=r"b\.jsonl' has a column 'source' that '.*a\.jsonl' does not have"):
        rows_of(folder)


def test_semicolons_are_noticed_behind_a_text_with_a_comma(rows_of, tmp_path):
    (tmp_path / "a.csv").write_text("text;label\nfine;1\nlong, and good;1\n")
    with pytest.raises(UserError, match="cells seem to be separated by ';'"):
        rows_of(tmp_path / "a.csv")


def test_csv_files_with_different_columns_are_refused(rows_of, folder):
    (folder / "a.csv").write_text("text,label\nx,0\n")
    (folder / "b.csv").write_text("label,sentence\n1,y\n")
    with pytest.raises(UserError, match=r"b\.csv' has a column 'sentence' that '.*a\.csv' does not have"):
        rows_of(folder)
    (folder / "b.csv").write_text("label,text\n1,y\n")
    assert rows_of(folder).to_list() == [{"text": "x", "label": "0"}, {"text": "y", "label": "1"}]


def test_arrays_over_several_lines_with_different_kinds_are_refused_in_words(rows_of, folder):
    (folder / "a.json").write_text(json.dumps([{"text": "x", "label": 1}], indent=1))
    (folder / "b.json").write_text(json.dumps([{"text": "x", "label": {"a": [1]}}], indent=1))
    with pytest.raises(UserError, match="cannot be read as JSON"):
        rows_of(folder)


def test_dates_in_nested_json_stay_text_and_nothing_is_written(rows_of, tmp_path):
    rows = [{"prompt": "when?", "completion": f"2024-01-0{i}"} for i in range(1, 4)]
    (tmp_path / "a.json").write_text(json.dumps({"data": rows}))
    assert rows_of(tmp_path / "a.json").to_list() == rows
    assert not list((tmp_path / "cache").rglob("rows.jsonl"))


def test_quoted_cells_of_any_size_keep_their_line_breaks(rows_of, tmp_path):
    long = "word " * 40_000
    (tmp_path / "a.tsv").write_text(f'text\tlabel\n"two\nlines"\t1\n"{long}\nmore"\t0\n')
    assert rows_of(tmp_path / "a.tsv")["text"][:] == ["two\nlines", f"{long}\nmore"]


def test_a_file_of_one_column_of_numbers_is_no_crash(prepare_rows, bert_like, tmp_path):
    (tmp_path / "a.csv").write_text("label\n0\n1\n")
    with pytest.raises(UserError, match="text_column"):
        prepare_rows(None, bert_like, path=str(tmp_path / "a.csv"))


def test_a_column_that_begins_with_gaps_is_read_to_its_end(rows_of, tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "x,NA\n" * 300 + "x,1\n")
    assert with_numbers(rows_of(tmp_path / "a.csv"))["label"][-2:] == [None, 1]
    (tmp_path / "b.csv").write_text("text,label\n" + "x,1\n" * 300 + "x,one\n")
    assert with_numbers(rows_of(tmp_path / "b.csv"))["label"][-2:] == ["1", "one"]
