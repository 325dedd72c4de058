"""Every kind of source gives the rows it should, sliced as `datasets` slices."""

from __future__ import annotations

import errno
import glob
import gzip
import json
import os

import datasets
import pytest

from automodel.config.errors import UserError
from automodel.data.config import DatasetConfig
from automodel.data.numbers import with_numbers
from automodel.data.sources import find_source, load_rows

ROWS = [{"text": f"review number {i}", "label": i % 2} for i in range(20)]


@pytest.fixture
def load(tmp_path):
    """Load with the caches inside the test's folder."""

    def load_with(path=None, *, role="train", resolved_target=None, tokenizer=None, **settings):
        cfg = DatasetConfig(path=None if path is None else str(path), cache_dir=str(tmp_path / "cache"), **settings)
        return load_rows(cfg, role=role, resolved_target=resolved_target, tokenizer=tokenizer)

    return load_with


def write(path, rows=ROWS, gz=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = datasets.Dataset.from_list(rows)
    name = path.name.removesuffix(".gz")
    if name.endswith(".jsonl"):
        data = "".join(json.dumps(row) + "\n" for row in rows)
    elif name.endswith(".json"):
        data = json.dumps(rows)
    elif name.endswith((".csv", ".tsv")):
        data = table.to_pandas().to_csv(index=False, sep="," if name.endswith(".csv") else "\t")
    elif name.endswith(".parquet"):
        table.to_parquet(path)
        return path
    else:
        table.to_pandas().to_feather(path)
        return path
    with gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w") as file:
        file.write(data)
    return path


@pytest.mark.parametrize(
    "name",
    [
        "a.csv", "a.tsv", "a.json", "a.jsonl", "a.parquet", "a.csv.gz", "a.jsonl.gz", "a.json.gz", "a.tsv.gz",
    ],
)  # fmt: skip
def test_files_of_every_format(load, tmp_path, name):
    rows = load(write(tmp_path / name))
    cells = name.split(".")[1] in ("csv", "tsv")  # which cannot say what is a number
    assert rows.to_list() == ([{**row, "label": str(row["label"])} for row in ROWS] if cells else ROWS)
    assert not cells or with_numbers(rows).to_list() == ROWS


def test_arrow_files(load, tmp_path):
    path = tmp_path / "a.arrow"
    with datasets.arrow_writer.ArrowWriter(path=str(path)) as writer:
        for row in ROWS:
            writer.write(row)
        writer.finalize()
    assert load(path).to_list() == ROWS


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", range(20)),
        ("train[:5]", range(5)),
        ("train[10%:20%]", range(2, 4)),
        ("train[-3:]", range(17, 20)),
        ("train[5:7]+train[:1]", [5, 6, 0]),
        ("train[:100]", range(20)),
    ],
)
def test_slices(load, tmp_path, split, expected):
    rows = load(write(tmp_path / "a.jsonl"), split=split)
    assert rows["text"][:] == [f"review number {i}" for i in expected]


def test_limit_comes_after_the_slice(load, tmp_path):
    rows = load(write(tmp_path / "a.jsonl"), split="train[5:]", num_samples_limit=2)
    assert rows["text"][:] == ["review number 5", "review number 6"]


def test_a_single_file_is_the_data_whatever_it_is_called(load, tmp_path):
    path = write(tmp_path / "reviews-test.jsonl")
    for settings in ({}, {"split": "train"}, {"split": "test"}, {"role": "validation"}):
        assert len(load(path, **settings)) == 20


@pytest.mark.parametrize("layout", ["{}.jsonl", "{}-00000-of-00001.jsonl", "{}/part.jsonl", "data/{}/x.jsonl"])
def test_folder_with_splits(load, tmp_path, layout):
    for split, count in (("train", 12), ("valid", 5), ("test", 3)):
        write(tmp_path / "d" / layout.format(split), ROWS[:count])
    assert len(load(tmp_path / "d")) == 12
    assert len(load(tmp_path / "d", split="test")) == 3
    assert len(load(tmp_path / "d", role="validation")) == 5
    assert len(load(tmp_path / "d", split="train+test[:1]")) == 13


def test_several_files_without_split_names_are_joined_in_order(load, tmp_path):
    write(tmp_path / "d" / "b.jsonl", ROWS[10:])
    write(tmp_path / "d" / "a.jsonl", ROWS[:10])
    (tmp_path / "d" / "README.md").write_text("about")
    (tmp_path / "d" / ".hidden.jsonl").write_text("{")
    assert load(tmp_path / "d").to_list() == ROWS


def test_data_files_choose_among_formats(load, tmp_path):
    write(tmp_path / "d" / "a.csv", ROWS[:4])
    write(tmp_path / "d" / "a.jsonl", ROWS[:6])
    assert len(load(tmp_path / "d", data_files="*.csv")) == 4
    assert len(load(tmp_path / "d" / "*.jsonl")) == 6


def test_builder_name_with_data_files(load, tmp_path, monkeypatch):
    write(tmp_path / "d" / "odd.ext.jsonl", ROWS[:6])
    monkeypatch.chdir(tmp_path)
    assert len(load("json", data_files="d/*.jsonl")) == 6


def test_data_files_may_lie_anywhere(load, tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "test" / "there"
    write(here / "a.jsonl", ROWS[:2])
    write(there / "train" / "b.jsonl", ROWS[:3])
    write(there / "validation" / "b.jsonl", ROWS[:4])
    monkeypatch.chdir(here)
    for path in ("json", ".", here):
        assert len(load(path, data_files=str(there / "train" / "b.jsonl"))) == 3
        assert len(load(path, data_files=("a.jsonl", str(there / "train" / "b.jsonl")))) == 5
        assert len(load(path, data_files=str(there / "*" / "b.jsonl"))) == 3
        assert len(load(path, role="validation", data_files=str(there / "*" / "b.jsonl"))) == 4


def test_only_an_empty_cell_is_a_missing_value(load, tmp_path):
    (tmp_path / "a.csv").write_text("text,label\nNA,null\nNone,x\n,y\n")
    assert load(tmp_path / "a.csv").to_list() == [
        {"text": "NA", "label": "null"},
        {"text": "None", "label": "x"},
        {"text": None, "label": "y"},
    ]


def test_stray_quotes_in_tab_separated_text(load, tmp_path):
    (tmp_path / "a.tsv").write_text('text\tlabel\nan "unfinished quote\t0\nthe next line\t1\n')
    assert load(tmp_path / "a.tsv")["text"][:] == ['an "unfinished quote', "the next line"]
    (tmp_path / "b.tsv").write_text('text\tlabel\n"with a\ttab"\t0\nplain\t1\n')
    assert load(tmp_path / "b.tsv")["text"][:] == ["with a\ttab", "plain"]


def test_text_folder_of_classes(load, tmp_path):
    for split in ("train", "test"):
        for name in ("pos", "neg"):
            for i in range(3):
                path = tmp_path / "d" / split / name / f"{i}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{split} {name} {i}\nsecond line")
    rows = load(tmp_path / "d", split="test")
    assert rows.features["label"].names == ["neg", "pos"]
    assert rows[0] == {"text": "test neg 0\nsecond line", "label": 0}
    assert rows["label"][:] == [0, 0, 0, 1, 1, 1]


def test_text_files(load, tmp_path):
    (tmp_path / "lines.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "paragraphs.txt").write_text("one\ntwo\n\n \nthree\n\n")
    assert load(tmp_path / "lines.txt")["text"][:] == ["one", "two", "three"]
    assert load(tmp_path / "paragraphs.txt")["text"][:] == ["one\ntwo", "three"]
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "a.txt").write_text("book a\n\nend")
    (folder / "b.txt").write_text("book b")
    assert load(folder)["text"][:] == ["book a\n\nend", "book b"]


def test_save_to_disk(load, tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=table, test=table.select(range(3))).save_to_disk(tmp_path / "two")
    assert load(tmp_path / "one").to_list() == ROWS
    assert len(load(tmp_path / "two")) == 20
    assert len(load(tmp_path / "two", split="test[:2]")) == 2
    assert len(load(tmp_path / "two", role="validation")) == 3


def test_squad_in_its_official_layout(load, tmp_path):
    question = {"id": "q1", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}]}
    content = {"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": "Ada did.", "qas": [question]}]}]}
    (tmp_path / "dev.json").write_text(json.dumps(content))
    assert load(tmp_path / "dev.json").to_list() == [
        {
            "id": "q1",
            "title": "t",
            "context": "Ada did.",
            "question": "Who?",
            "answers": {"answer_start": [0], "text": ["Ada"]},
        }
    ]


def test_json_object_that_keeps_its_rows_under_a_key(load, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"version": 2, "rows": ROWS}, indent=1))
    assert load(tmp_path / "a.json").to_list() == ROWS


@pytest.mark.parametrize("indent", [None, 1])
def test_json_object_with_splits(load, tmp_path, indent):
    splits = {"train": ROWS[:10], "dev": ROWS[10:14], "test": ROWS[14:]}
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"version": 2, **splits}, indent=indent))
    assert load(file).to_list() == ROWS[:10]
    assert load(file, role="validation").to_list() == ROWS[10:14]
    assert load(file, split="test[:2]").to_list() == ROWS[14:16]
    assert load(file, split="train+test").to_list() == ROWS[:10] + ROWS[14:]
    with pytest.raises(UserError, match=r"has no split 'exam'. It has: train, validation, test"):
        load(file, split="exam")
    with gzip.open(tmp_path / "b.json.gz", "wt") as packed:
        packed.write(file.read_text())
    assert load(tmp_path / "b.json.gz", split="test").to_list() == ROWS[14:]


def test_splits_in_json_have_tokens_of_their_own(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"train": ROWS[:10], "test": ROWS[10:]}))
    keys = set()
    for split in ("train", "test"):
        cfg = DatasetConfig(path=str(file), split=split)
        place = {"role": "train", "section": "dataset", "resolved_target": None, "memory": tmp_path / "cache"}
        keys.add(find_source(cfg, **place).content_key())
    assert len(keys) == 2


def test_splits_in_json_that_cannot_be_read(load, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.json").write_text(json.dumps({"train": ROWS, "test": []}))
    with pytest.raises(UserError, match=r"dataset.split: '.*a.json' has no rows under 'test'"):
        load(tmp_path / "d" / "a.json", split="test")
    (tmp_path / "d" / "b.json").write_text(json.dumps({"train": ROWS}))
    with pytest.raises(UserError, match=r"a.json' holds splits of its own \(train, test\), which are read where it is"):
        load(tmp_path / "d")


def test_json_lines_with_a_key_like_a_split_are_lines(load, tmp_path):
    rows = [{"train": [{"a": 1}], "text": "b"}] * 3
    (tmp_path / "a.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load(tmp_path / "a.json").to_list() == rows


def test_pretty_printed_json_array(load, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=2))
    assert load(tmp_path / "a.json").to_list() == ROWS


def maker(path, split=None, shout=False, tokenizer=None):
    assert path == "somewhere"
    return [{"text": "A" if shout else "a", "split": split, "tokenizer": tokenizer}] * 3


class MapStyle:
    def __init__(self, size: int):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return {"text": str(i)}


def test_a_target_of_the_users_gets_what_it_asks_for(load):
    rows = load(
        "somewhere", target="mine.maker", resolved_target=maker, split="x", extra={"shout": True}, tokenizer="tok"
    )
    assert rows[0] == {"text": "A", "split": "x", "tokenizer": "tok"}
    rows = load(target="mine.MapStyle", resolved_target=MapStyle, extra={"size": 5}, num_samples_limit=4)
    assert rows["text"][:] == ["0", "1", "2", "3"]


def test_keys_that_a_target_of_the_users_cannot_take_are_refused_together(load):
    def make(size=2):
        return [{"text": "a", "label": 0}] * size

    with pytest.raises(UserError) as caught:
        load("somewhere", target="mine.make", resolved_target=make, name="en", revision="v2")
    for key in ("path", "name", "revision"):
        assert f"dataset.{key}: mine.make makes the rows itself, and has no parameter for it" in str(caught.value)
    assert len(load(target="mine.make", resolved_target=make, split="train")) == 2


def test_a_target_that_takes_everything_gets_where_the_rows_are(load):
    seen = {}

    def make(name, **rest):
        seen.update(rest, name=name)
        return [{"text": "a", "label": 0}]

    load("somewhere", target="mine.make", resolved_target=make, name="en", extra={"shout": True}, num_samples_limit=1)
    assert seen == {"path": "somewhere", "name": "en", "shout": True}


def test_a_target_that_returns_splits(load):
    def make():
        return datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS[:2]))

    assert len(load(target="mine.make", resolved_target=make, role="validation")) == 2


def test_a_target_that_fails_says_how(load):
    def make():
        raise OSError("disk on fire")

    with pytest.raises(UserError, match=r"dataset\._target_: mine\.make failed with OSError: disk on fire\."):
        load(target="mine.make", resolved_target=make)


def test_load_dataset_as_a_target_is_the_built_in_way(load, tmp_path):
    path = write(tmp_path / "a.jsonl")
    assert len(load(path, target="datasets.load_dataset", resolved_target=datasets.load_dataset)) == 20


def test_content_decides_and_not_the_date(tmp_path):
    def key(path, **settings):
        cfg = DatasetConfig(path=str(path), **settings)
        return find_source(cfg, role="train", section="dataset", resolved_target=None, memory=tmp_path).content_key()

    path = write(tmp_path / "a.jsonl")
    first = key(path)
    os.utime(path, (1, 1))
    assert key(path) == first
    copy = tmp_path / "elsewhere" / "b.jsonl"
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    assert key(copy) == first
    path.write_text(path.read_text().replace("number 7", "number 8"))
    os.utime(path, (1, 1))
    assert key(path) != first


def test_a_changed_file_with_an_old_date_is_read_anew(load, tmp_path):
    path = write(tmp_path / "a.jsonl")
    os.utime(path, (1, 1))
    load(path)
    write(path, [{"text": "changed", "label": 1}])
    os.utime(path, (1, 1))
    assert load(path).to_list() == [{"text": "changed", "label": 1}]


FILMS = [{"text": "good film", "label": "1"}, {"text": "bad film", "label": "0"}]


def test_a_comma_at_the_end_of_each_line_shifts_nothing(load, tmp_path):
    (tmp_path / "a.csv").write_text("text,label\ngood film,1,\nbad film,0,\n")
    assert load(tmp_path / "a.csv").to_list() == FILMS


def test_empty_lines_around_the_header_are_no_rows(load, tmp_path):
    (tmp_path / "a.csv").write_text("\ntext,label\n  \ngood film,1\n\nbad film,0\n")
    assert load(tmp_path / "a.csv").to_list() == FILMS


def test_letters_on_the_border_of_two_chunks_are_whole(tmp_path, monkeypatch):
    from automodel.data import cells

    monkeypatch.setattr(cells, "CHUNK", 4)
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("abc\u20ac\nd\u20ac\u20ac", encoding="utf-8")
    cells.check_encoding(good, "dataset")
    bad.write_bytes("abc\u20ac\nd\u20ac\n".encode() + b"ab\xff")
    with pytest.raises(UserError, match="line 3 holds the byte 0xff"):
        cells.check_encoding(bad, "dataset")


def test_files_are_chosen_only_where_there_are_several(load, tmp_path):
    """The key was dropped, even where there was no such file."""
    write(tmp_path / "folder" / "a.csv")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    for path, what in (
        (tmp_path / "folder" / "a.csv", "is a file"),
        (tmp_path / "saved", "was written by save_to_disk"),
        (tmp_path / "folder" / "*.csv", "is a pattern of files"),
    ):
        with pytest.raises(UserError) as caught:
            load(path, role="validation", data_files="missing.csv")
        assert str(caught.value) == (
            f"validation_dataset.data_files chooses files of a folder, but '{path}' {what}. Remove it, or name the "
            "folder in validation_dataset.path."
        )
    assert len(load(tmp_path / "folder", data_files="a.csv")) == len(ROWS)


def test_a_folder_has_no_configurations(load, tmp_path):
    write(tmp_path / "folder" / "a.csv")
    with pytest.raises(UserError, match=r"dataset.name: 'mrpc' would be a configuration on the hub, but '.*folder' is"):
        load(tmp_path / "folder", name="mrpc")
    assert len(load(tmp_path / "folder" / "a.csv", name="mrpc")) == len(ROWS), "a shared file may have it: see the plan"


@pytest.mark.parametrize(
    "name", ["a[1].csv", "a?.csv", "a*.csv", "a[1].jsonl.gz", "d[1]/a.csv", "b::a.csv", "d::e/a.csv"]
)
def test_the_file_that_is_named_is_the_one_that_is_read(load, tmp_path, monkeypatch, name):
    """`datasets` takes such names for patterns and addresses: `a[1].csv` for `a1.csv`."""
    write(tmp_path / name, ROWS[:3])
    for other in ("a1.csv", "ab.csv", "a1.jsonl", "d1/a.csv"):
        write(tmp_path / other, ROWS)
    monkeypatch.chdir(tmp_path)
    for path in (name, tmp_path / name):
        assert load(path)["text"][:] == [row["text"] for row in ROWS[:3]]
    monkeypatch.chdir((tmp_path / name).parent)
    here = (tmp_path / name).name
    assert len(load("csv" if here.endswith("csv") else ".", data_files=glob.escape(here))) == 3


def test_a_machine_without_more_files_is_no_fault_of_the_data(tmp_path, monkeypatch):
    """The message would send people to write a good dataset again, or to look at their connection."""

    def no_more_files(*_args, **_options):
        raise OSError(errno.EMFILE, "Too many open files")

    datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}).save_to_disk(tmp_path / "saved")
    monkeypatch.setattr(datasets, "load_from_disk", no_more_files)
    monkeypatch.setattr(datasets, "load_dataset_builder", no_more_files)
    for path in (str(tmp_path / "saved"), "owner/of-the-hub"):
        with pytest.raises(OSError, match="Too many open files"):
            load_rows(DatasetConfig(path=path))
