"""200 data files, each with one thing wrong in it.

Three tables make them: faults of the rows of every layout (classes, tags, chats, questions, plain texts, pairs, token
ids), faults of the files of every format, and faults of where the data is and how several files fit together.
"""

# ruff: noqa: E501 - a case is one line

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from bad_input.case import BERT, LLAMA, SEED, T5, Case, lines_of

COUNT = 200
ROWS = 12

Rows = list[dict[str, Any]]


def classes() -> Rows:
    return [{"text": f"{'good' if i % 2 else 'bad'} film {'very ' * (i % 3)}", "label": i % 2} for i in range(ROWS)]


def tags() -> Rows:
    return [{"tokens": ["good", "film", "story"][: 2 + i % 2], "ner_tags": [0, 1, 0][: 2 + i % 2]} for i in range(ROWS)]


def chats() -> Rows:
    return [{"messages": [{"role": "user", "content": "what is good ?"}, {"role": "assistant", "content": f"the {w}"}]}
            for w in ("film", "plot", "actor", "scene") * 3]  # fmt: skip


def questions() -> Rows:
    return [{"question": "what is good ?", "answer": f"the {w}"} for w in ("film", "plot", "actor", "scene") * 3]


def texts() -> Rows:
    return [{"text": f"the {w} is very good"} for w in ("film", "plot", "actor", "scene") * 3]


def pairs() -> Rows:
    return [{"source": f"the {w}", "target": f"a {w}"} for w in ("film", "plot", "actor", "scene") * 3]


def ids() -> Rows:
    return [{"input_ids": [2, 5 + i, 6, 3], "labels": [-100, 5 + i, 6, 3]} for i in range(ROWS)]


LAYOUTS: dict[str, tuple[Callable[[], Rows], str, str]] = {
    "classes": (classes, BERT, "text-classification"),
    "tags": (tags, BERT, "token-classification"),
    "chats": (chats, LLAMA, "causal-lm"),
    "questions": (questions, LLAMA, "causal-lm"),
    "texts": (texts, LLAMA, "causal-lm"),
    "pairs": (pairs, T5, "seq2seq"),
    "ids": (ids, LLAMA, "causal-lm"),
}
"""Rows, model and task of each layout."""


def cases() -> list[Case]:
    """All of them, in the same order every time. Where there are more, a seed chooses; nothing is left out that stands
    for itself."""
    rows, files, places = list(_bad_rows()), list(_bad_files()), list(_bad_places())
    spare = len(rows) + len(files) + len(places) - COUNT
    assert spare >= 0, f"{-spare} cases are lacking"
    left_out = set(random.Random(SEED).sample(range(len(files)), spare))
    return rows + [case for i, case in enumerate(files) if i not in left_out] + places


def run_of(layout: str, path: str, **dataset: Any) -> bytes:
    """A config that trains on rows of a layout in a file."""
    _, model, task = LAYOUTS[layout]
    config = {
        "model": model,
        "task": task,
        "dataset": {"path": path, **dataset},
        "step_scheduler": {"max_steps": 1},
        "checkpoint": {"checkpoint_dir": "out"},
    }
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode()


COMMAND = ("finetune", "llm", "-c", "run.yaml")


# --- rows ------------------------------------------------------------------------------------------------------------


def _row(place: int, **changes: Any) -> Callable[[Rows], Rows]:
    """One row changed; a key whose value is `...` is left out."""

    def change(rows: Rows) -> Rows:
        rows[place] = {key: value for key, value in {**rows[place], **changes}.items() if value is not ...}
        return rows

    return change


def _all(**changes: Any) -> Callable[[Rows], Rows]:
    """Every row changed."""
    return lambda rows: [{key: value for key, value in {**row, **changes}.items() if value is not ...} for row in rows]


def _renamed(old: str, new: str) -> Callable[[Rows], Rows]:
    return lambda rows: [{new if key == old else key: value for key, value in row.items()} for row in rows]


def _said(*messages: Any) -> Callable[[Rows], Rows]:
    return _row(5, messages=list(messages))


_USER, _ASSISTANT = {"role": "user", "content": "what ?"}, {"role": "assistant", "content": "the film"}
ROW_5 = r"row 5\b"

BAD_ROWS: list[tuple[str, str, str, str, Callable[[Rows], Rows]]] = [
    ("classes", "text-null", "a text that is missing", ROW_5, _row(5, text=None)),
    ("classes", "text-empty", "an empty text", ROW_5, _row(5, text="")),
    ("classes", "text-spaces", "a text of spaces", ROW_5, _row(5, text=" \t \n ")),
    ("classes", "text-all-empty", "no row has a text", "text", _all(text="")),
    ("classes", "text-left-out", "a row without the column", ROW_5, _row(5, text=...)),
    ("classes", "text-nowhere", "no text column", "text_column|text", _all(text=...)),
    ("classes", "text-a-list", "lists for texts", "text", _all(text=["good", "film"])),
    ("classes", "text-a-number", "numbers for texts", "text", _all(text=3.5)),
    ("classes", "label-null", "a label that is missing", ROW_5, _row(5, label=None)),
    ("classes", "label-left-out", "a row without a label", ROW_5, _row(5, label=...)),
    ("classes", "label-nowhere", "no label column", "label", _all(label=...)),
    ("classes", "label-all-null", "every label is missing", "label", _all(label=None)),
    ("classes", "label-always-one", "one class alone", "label", _all(label=1)),
    ("classes", "label-mixed", "a name among numbers", "label|row 5", _row(5, label="good")),
    ("classes", "label-one-record", "a record among classes", "label|row 5", _row(5, label={"stars": 3})),
    ("classes", "label-a-record", "records for labels", "label", _all(label={"stars": 3})),
    ("classes", "label-of-everybody", "a label for each row", "label",
     lambda rows: [{**row, "label": f"id-{i}-{j}"} for j in range(4) for i, row in enumerate(rows)]),
    ("classes", "label-two-columns", "two columns that may be labels", "label_column|label",
     lambda rows: [{"text": row["text"], "a": i % 2, "b": i % 3} for i, row in enumerate(rows)]),
    ("classes", "label-lists-of-lists", "lists of lists for labels", "label", _all(label=[[0], [1]])),
    ("classes", "label-deep-list", "lists a hundred deep", "inside each other",
     _all(label=json.loads("[" * 80 + "1" + "]" * 80))),
    ("classes", "label-negative", "a negative class", "label", _row(5, label=-3)),
    ("classes", "label-nested-none", "a list of nothing among classes", "label|row 5", _row(5, label=[None])),
    ("tags", "tags-short", "fewer tags than words", ROW_5, _row(5, ner_tags=[0])),
    ("tags", "tags-long", "more tags than words", ROW_5, _row(5, ner_tags=[0, 1, 0, 1, 0])),
    ("tags", "tags-null", "tags that are missing", ROW_5, _row(5, ner_tags=None)),
    ("tags", "tags-nowhere", "no column of tags", "label_column|tags|ner_tags", _all(ner_tags=...)),
    ("tags", "tags-a-text", "tags as a text", "ner_tags|tags", _all(ner_tags="O O")),
    ("tags", "tags-a-number", "one tag for a row", "ner_tags|tags", _all(ner_tags=1)),
    ("tags", "tags-mixed", "names among numbers", "ner_tags|row 5|tags", _row(5, ner_tags=["O", "O", "O"])),
    ("tags", "tokens-empty", "a row without words", ROW_5, _row(5, tokens=[], ner_tags=[])),
    ("tags", "tokens-null", "words that are missing", ROW_5, _row(5, tokens=None)),
    ("tags", "tokens-nowhere", "no column of words", "tokens", _all(tokens=...)),
    ("tags", "tokens-a-text", "words as a text", "tokens", _all(tokens="good film")),
    ("tags", "tokens-numbers", "numbers for words", "tokens", _all(tokens=[1, 2], ner_tags=[0, 1])),
    ("tags", "tokens-a-hole", "a word that is missing", ROW_5, _row(5, tokens=["good", None, "film"], ner_tags=[0, 1, 0])),
    ("tags", "tokens-nested", "lists for words", "tokens", _all(tokens=[["good"], ["film"]], ner_tags=[0, 1])),
    ("chats", "chat-empty", "a conversation of nothing", ROW_5, _said()),
    ("chats", "chat-null", "a conversation that is missing", ROW_5, _row(5, messages=None)),
    ("chats", "chat-silent", "no answer", ROW_5, _said(_USER)),
    ("chats", "chat-role", "a role that is misspelt", ROW_5,
     _said(_USER, {"role": "asistant", "content": "the film"}, _USER, _ASSISTANT)),
    ("chats", "chat-no-role", "a message without a role", ROW_5, _said({"content": "what ?"}, _ASSISTANT)),
    ("chats", "chat-role-number", "a number for a role", "row|role|messages", _row(5, messages=[{"role": 3, "content": "what ?"}, _ASSISTANT])),
    ("chats", "chat-no-content", "an answer that is missing", ROW_5, _said(_USER, {"role": "assistant", "content": None})),
    ("chats", "chat-empty-content", "an empty answer", ROW_5, _said(_USER, {"role": "assistant", "content": ""})),
    ("chats", "chat-of-texts", "texts for messages", "messages|row", _all(messages=["what ?", "the film"])),
    ("chats", "chat-a-text", "one text for a conversation", "row 0|messages", _all(messages="[{'role': 'user', 'content': 'what ?'}, {'role'")),
    ("chats", "chat-a-number", "a number for a conversation", "messages|columns", _all(messages=7)),
    ("chats", "chat-a-record", "a record for a conversation", "messages|columns|row", _all(messages={"user": "what ?"})),
    ("chats", "chat-hole", "a message that is missing", ROW_5, _said(_USER, None)),
    ("chats", "chat-all-silent", "no conversation has an answer", "row 0|assistant", _all(messages=[_USER])),
    ("chats", "chat-bad-calls", "arguments that are no JSON", ROW_5,
     _said(_USER, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{oops"}}]})),
    ("chats", "chat-deep-calls", "arguments a thousand deep", ROW_5,
     _said(_USER, {"role": "assistant", "content": None,
                   "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a":' * 3000 + "1" + "}" * 3000}}]})),
    ("questions", "answer-null", "an answer that is missing", ROW_5, _row(5, answer=None)),
    ("questions", "answer-empty", "an empty answer", ROW_5, _row(5, answer="")),
    ("questions", "answer-left-out", "a row without an answer", ROW_5, _row(5, answer=...)),
    ("questions", "answer-a-record", "records for answers", "answer|row", _all(answer={"a": {"b": 1}})),
    ("questions", "question-null", "a question that is missing", ROW_5, _row(5, question=None)),
    ("questions", "question-empty", "an empty question", ROW_5, _row(5, question=" ")),
    ("questions", "question-a-record", "records for questions", "question|row", _all(question={"a": 1})),
    ("questions", "answers-of-nothing", "SQuAD rows without an answer", ROW_5, lambda rows: _row(5, answers={"text": [], "answer_start": []})(
        [{"context": "the film", "question": row["question"], "answers": {"text": [row["answer"]], "answer_start": [0]}} for row in rows])),
    ("questions", "columns-of-nobody", "columns that mean nothing here", "columns|column", _all(question=..., answer=..., height=3, width=4)),
    ("texts", "plain-null", "a text that is missing", ROW_5, _row(5, text=None)),
    ("texts", "plain-empty", "an empty text", ROW_5, _row(5, text="")),
    ("texts", "plain-all-empty", "no text at all", "text", _all(text="")),
    ("texts", "plain-numbers", "numbers alone", "column|text", _all(text=..., value=3)),
    ("texts", "plain-misspelt", "two columns that may be texts", "text_column|column",
     lambda rows: [{"a": row["text"], "b": row["text"]} for row in rows]),
    ("texts", "plain-lists", "lists of texts", "text|column", _all(text=["the film", "the plot"])),
    ("pairs", "target-null", "a target that is missing", ROW_5, _row(5, target=None)),
    ("pairs", "target-empty", "an empty target", ROW_5, _row(5, target="")),
    ("pairs", "target-nowhere", "no target", "target", _all(target=...)),
    ("pairs", "target-a-number", "numbers for targets", "target", _all(target=7)),
    ("pairs", "source-null", "a source that is missing", ROW_5, _row(5, source=None)),
    ("pairs", "source-empty", "an empty source", ROW_5, _row(5, source=" ")),
    ("pairs", "source-nowhere", "no source", "source", _all(source=...)),
    ("pairs", "pairs-of-nobody", "columns that mean nothing here", "source|column", _all(source=..., target=..., height=3)),
    ("ids", "ids-beyond", "a token that the vocabulary does not have", ROW_5, _row(5, input_ids=[2, 5000000, 6, 3])),
    ("ids", "ids-negative", "a negative token", ROW_5, _row(5, input_ids=[2, -7, 6, 3])),
    ("ids", "ids-empty", "no token", ROW_5, _row(5, input_ids=[], labels=[])),
    ("ids", "ids-null", "tokens that are missing", ROW_5, _row(5, input_ids=None)),
    ("ids", "ids-texts", "words for tokens", "row 0", _all(input_ids=["the", "film", "is", "good"])),
    ("ids", "ids-fractions", "fractions for tokens", "row 0", _all(input_ids=[1.5, 2.5, 3.5, 4.5])),
    ("ids", "ids-labels-short", "fewer labels than tokens", ROW_5, _row(5, labels=[1, 2])),
    ("ids", "ids-labels-masked", "nothing to learn", ROW_5, _row(5, labels=[-100] * 4)),
    ("ids", "ids-labels-beyond", "a label beyond the vocabulary", ROW_5, _row(5, labels=[-100, 5000000, 6, 3])),
    ("ids", "ids-nested", "lists of lists", "input_ids", _all(input_ids=[[1, 2], [3, 4]])),
]  # fmt: skip


def _bad_rows() -> Iterator[Case]:
    for layout, name, fault, names, change in BAD_ROWS:
        rows = change(LAYOUTS[layout][0]())
        files = {"run.yaml": run_of(layout, "rows.jsonl"), "rows.jsonl": lines_of([json.dumps(row) for row in rows])}
        yield Case(f"rows-{name}", fault, names, COMMAND, files)


# --- files -----------------------------------------------------------------------------------------------------------


def _csv(rows: Rows, separator: str = ",") -> bytes:
    return lines_of([separator.join(["text", "label"]), *(separator.join([r["text"], str(r["label"])]) for r in rows)])


def _jsonl(rows: Rows) -> bytes:
    return lines_of([json.dumps(row) for row in rows])


def _parquet(rows: Rows) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


def _arrow(rows: Rows) -> bytes:
    import pyarrow as pa

    out, table = io.BytesIO(), pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def _packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


WRITERS: dict[str, Callable[[Rows], bytes]] = {
    "csv": _csv,
    "tsv": lambda rows: _csv(rows, "\t"),
    "jsonl": _jsonl,
    "json": lambda rows: json.dumps(rows, indent=1).encode(),
    "parquet": _parquet,
    "arrow": _arrow,
}
_TEXTS = ("csv", "tsv", "jsonl", "json")

EVERY_FORMAT: list[tuple[str, str, Callable[[bytes], bytes]]] = [
    ("nothing", "an empty file", lambda content: b""),
    ("noise", "bytes of chance", lambda content: random.Random(SEED).randbytes(2000)),
    ("cut", "a file that breaks off", lambda content: content[: len(content) * 2 // 3]),
]
EVERY_TEXT: list[tuple[str, str, Callable[[bytes], bytes]]] = [
    ("latin", "letters of an old encoding", lambda content: content.replace(b"good", b"g\xf6\xf6d", 1)),
    ("spaces", "nothing but spaces", lambda content: b"  \n \n\t\n"),
]
EVERY_PACKED: list[tuple[str, str, Callable[[bytes], bytes]]] = [
    ("gz-cut", "compressed data that breaks off", lambda content: _packed(content)[:-20]),
    ("gz-none", "a name that says compressed, and text", lambda content: content),
    ("gz-spoilt", "compressed data with a wrong byte", lambda content: _spoilt(_packed(content * 40))),
    ("gz-nothing", "an empty file", lambda content: b""),
]
CUT_IS_FINE = ("csv", "tsv")
"""Formats whose files may end anywhere: nothing tells that a row is missing. They are cut inside of a quote below."""


def _spoilt(content: bytes) -> bytes:
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 0xFF]) * 3 + content[half + 3 :]


def _zip(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return out.getvalue()


_BOMB = bz2.compress(bytes(2**24)) * 128
"""2 GiB of nothing in a few kilobytes."""
_ROWS = classes()
_GOOD_LINES = _jsonl(_ROWS)
_DEEP = 20_000

OTHER_FILES: list[tuple[str, str, str, bytes, str]] = [
    ("csv-ragged", "a row with a cell too many", r"line 14|cells", _csv(_ROWS) + b"good film, and long,1\n", "csv"),
    ("csv-all-ragged", "commas without quotes", r"line 2|cells", b"text,label\n" + b"good film, and long,1\nbad film, and dull,0\n" * 4, "csv"),
    ("csv-short-row", "a row with a cell too few", r"row 12", _csv(_ROWS) + b"good film\n", "csv"),
    ("csv-header-only", "a header alone", r"rows\.csv", b"text,label\n", "csv"),
    ("csv-open-quote", "a quote that is never closed", r"rows\.csv", _csv(_ROWS) + b'"good film,1\nbad film,0\n', "csv"),
    ("csv-twice", "two columns of one name", "text", b"text,label,text\ngood,1,bad\nbad,0,good\n", "csv"),
    ("csv-semicolons", "semicolons for commas", r"rows\.csv", _csv(_ROWS, ";"), "csv"),
    ("csv-tabs", "tabs for commas", r"rows\.csv", _csv(_ROWS, "\t"), "csv"),
    ("csv-nul", "NUL bytes between cells", "label_column", b"text,label\n" + b"\0\0\0\0,\0\n" * 6, "csv"),
    ("csv-one-column", "texts without labels", "label", b"text\n" + b"good film\nbad film\n" * 4, "csv"),
    ("csv-empty-cells", "cells with nothing in them", r"text|row 0", b"text,label\n" + b",\n" * 6, "csv"),
    ("csv-huge-cell", "a cell of megabytes, and no label", "label|row 0", b"text,label\n" + b"good " * 600_000 + b",\nbad,0\n", "csv"),
    ("csv-many-columns", "thousands of columns, and no text", "column",
     lines_of([",".join(f"c{i}" for i in range(2000)), ",".join("1" * 2000)]), "csv"),
    ("csv-is-a-zip", "a spreadsheet by the name of a table", r"rows\.csv", b"PK\x03\x04" + bytes(range(256)) * 20, "csv"),
    ("csv-no-header", "rows from the first line on", "row 1|column_names", _csv(_ROWS).partition(b"\n")[2], "csv"),
    ("csv-wide", "UTF-16 without a mark", r"rows\.csv.*UTF-16LE", _csv(_ROWS).decode().encode("utf-16-le"), "csv"),
    ("zip-several", "an archive of two files", r"rows\.zip.*train\.csv", _zip({"train.csv": _csv(_ROWS), "test.csv": _csv(_ROWS)}), "zip"),
    ("zip-of-nothing", "an archive without a file", r"rows\.zip", _zip({}), "zip"),
    ("zip-bomb", "2 GiB in a few kilobytes", r"rows\.csv\.bz2.*250 times", _BOMB, "csv.bz2"),
    ("xz-cut", "compressed data that breaks off", r"rows\.csv\.xz", lzma.compress(_csv(_ROWS))[:-20], "csv.xz"),
    ("zst-none", "a name that says compressed, and text", r"rows\.jsonl\.zst", _GOOD_LINES, "jsonl.zst"),
    ("csv-is-html", "a page that says no", "text|column|line", b"<html>\n<body>\n<p>404, not found</p>\n</body>\n</html>\n", "csv"),
    ("tsv-commas", "commas for tabs", r"rows\.tsv", _csv(_ROWS), "tsv"),
    ("tsv-ragged", "a row with a cell too many", r"line 14|cells", _csv(_ROWS, "\t") + b"good film\t1\tx\n", "tsv"),
    ("jsonl-broken", "a line that is no JSON", "line 13", _GOOD_LINES + b'{"text": "good, "label"\n', "jsonl"),
    ("jsonl-a-number", "a number for a row", "line 13", _GOOD_LINES + b"7\n", "jsonl"),
    ("jsonl-a-list", "a list for a row", "line 13", _GOOD_LINES + b'["good", 1]\n', "jsonl"),
    ("jsonl-twice", "a key twice in a row", "line 13|row 12", _GOOD_LINES + b'{"text": "a", "label": 1, "text": "b"}\n', "jsonl"),
    ("jsonl-comma", "commas at the end of lines", "line 1", _GOOD_LINES.replace(b"\n", b",\n"), "jsonl"),
    ("jsonl-half-letter", "half of a letter", "line 13", _GOOD_LINES + b'{"text": "\\ud83d", "label": 1}\n', "jsonl"),
    ("jsonl-control", "a bare control character", "line 13", _GOOD_LINES + b'{"text": "good \x01 film", "label": 1}\n', "jsonl"),
    ("jsonl-single-quotes", "Python's quotes", "line 1", _GOOD_LINES.replace(b'"', b"'"), "jsonl"),
    ("jsonl-deep", "lists 20,000 deep", "line 13|inside each other",
     _GOOD_LINES + b'{"text": "a", "label": ' + b"[" * _DEEP + b"]" * _DEEP + b"}\n", "jsonl"),
    ("jsonl-deep-first", "objects 20,000 deep", "line 1|inside each other", b'{"a": ' * _DEEP + b"1" + b"}" * _DEEP + b"\n", "jsonl"),
    ("jsonl-deep-some", "objects 500 deep in every row", "inside each other",
     (b'{"text": "good", "label": 1, "more": ' + b'{"a": ' * 500 + b"1" + b"}" * 501 + b"\n") * 4, "jsonl"),
    ("jsonl-open", "brackets that are never closed", r"line 1|inside each other", b"[" * 100_000, "jsonl"),
    ("jsonl-digits", "a label of 5,000 digits", "line 13|label|row 12", _GOOD_LINES + b'{"text": "a", "label": ' + b"9" * 5000 + b"}\n", "jsonl"),
    ("jsonl-nan", "labels that are no numbers", "label|row", _jsonl([{**row, "label": float("nan")} for row in _ROWS]), "jsonl"),
    ("jsonl-empty-rows", "objects with nothing in them", "column|row|rows", b"{}\n" * 6, "jsonl"),
    ("json-scalar", "a number", r"rows\.json", b"42", "json"),
    ("json-empty-list", "a list of nothing", r"rows\.json|rows", b"[]", "json"),
    ("json-list-of-numbers", "a list of numbers", "label_column", b"[1, 2, 3]", "json"),
    ("json-list-of-lists", "a list of lists", r"rows\.json|column|text", b'[["good", 1], ["bad", 0]]', "json"),
    ("json-twice", "a key twice in a row", "row 1", b'[{"text": "a", "label": 1}, {"text": "b", "label": 0, "text": "c"}]', "json"),
    ("json-no-rows", "an object without rows", r"rows\.json|column|text|label", b'{"version": "1.0", "authors": ["a", "b"]}', "json"),
    ("json-deep", "lists 20,000 deep", "inside each other", b'{"data": ' + b"[" * _DEEP + b"]" * _DEEP + b"}", "json"),
    ("json-squad-cut", "SQuAD without its answers", r"rows\.json|context|question|column",
     b'{"data": [{"title": "a", "paragraphs": [{"context": "b"}]}]}', "json"),
    ("json-comma", "a comma too many", r"rows\.json", b'[{"text": "good", "label": 1}, {"text": "bad", "label": 0},]', "json"),
    ("parquet-no-rows", "a table without rows", r"rows\.parquet|rows", b"", "parquet-no-rows"),
    ("parquet-bytes", "bytes for texts", "text", b"", "parquet-bytes"),
    ("parquet-magic", "the right ends, and noise between", r"rows\.parquet", b"PAR1" + bytes(200) + b"\x10\x00\x00\x00PAR1", "parquet"),
    ("arrow-magic", "the right beginning, and noise after it", r"rows\.arrow", b"ARROW1\0\0" + bytes(300), "arrow"),
    ("txt-latin", "letters of an old encoding", "line 2", b"the film\nth\xe9 plot\n", "txt"),
    ("txt-nothing", "an empty file", r"rows\.txt|rows", b"", "txt"),
    ("txt-spaces", "nothing but spaces", r"rows\.txt|rows|text", b"   \n \n", "txt"),
    ("txt-for-classes", "texts without labels", "label", b"good film\nbad film\n", "txt-classes"),
]  # fmt: skip


def _bad_files() -> Iterator[Case]:
    for format, write in WRITERS.items():
        content = write(classes())
        for name, fault, spoil in (*EVERY_FORMAT, *(EVERY_TEXT if format in _TEXTS else ())):
            if name == "cut" and format in CUT_IS_FINE:
                continue
            yield _file_case(f"{format}-{name}", fault, rf"rows\.{format}", spoil(content), format)
        for name, fault, spoil in EVERY_PACKED if format in _TEXTS else ():
            yield _file_case(f"{format}-{name}", fault, rf"rows\.{format}\.gz", spoil(content), f"{format}.gz")
    for name, fault, names, content, format in OTHER_FILES:
        if format.startswith("parquet-"):
            content, format = _odd_parquet(format), "parquet"
        layout = "texts" if format == "txt" else "classes"
        yield _file_case(name, fault, names, content, format.partition("-")[0], layout)


def _odd_parquet(kind: str) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    values = {"text": pa.array([], pa.string()), "label": pa.array([], pa.int64())}
    if kind == "parquet-bytes":
        values = {"text": pa.array([b"\xff\x00", b"\xfe"] * 3, pa.binary()), "label": pa.array([0, 1] * 3, pa.int64())}
    pq.write_table(pa.table(values), out)
    return out.getvalue()


def _file_case(name: str, fault: str, names: str, content: bytes, suffix: str, layout: str = "classes") -> Case:
    file = f"rows.{suffix}"
    return Case(f"file-{name}", fault, names, COMMAND, {"run.yaml": run_of(layout, file), file: content})


# --- places, and several files ---------------------------------------------------------------------------------------


def _saved(**changes: bytes) -> dict[str, bytes]:
    """A folder of `save_to_disk`; `changes` by the stem of a file's name."""
    info = {"features": {"text": {"dtype": "string", "_type": "Value"}, "label": {"dtype": "int64", "_type": "Value"}}}
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "a", "_format_columns": None,
             "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": None}  # fmt: skip
    files = {"data": _arrow(classes()), "state": json.dumps(state).encode(), "dataset_info": json.dumps(info).encode()}
    names = {"data": "data-00000-of-00001.arrow", "state": "state.json", "dataset_info": "dataset_info.json"}
    return {f"rows/{names[key]}": content for key, content in (files | changes).items() if content != b"-"}


def _two(train: Rows, test: Rows, layout: str = "classes", **files: bytes) -> dict[str, bytes]:
    config = yaml.safe_load(run_of(layout, "train.jsonl")) | {"validation_dataset": {"path": "test.jsonl"}}
    return {
        "run.yaml": yaml.safe_dump(config, sort_keys=False).encode(),
        "train.jsonl": _jsonl(train),
        "test.jsonl": _jsonl(test),
        **files,
    }


def _folder(layout: str = "classes", **files: bytes) -> dict[str, bytes]:
    return {"run.yaml": run_of(layout, "rows"), **{f"rows/{name}": content for name, content in files.items()}}


_DEEP_JSON = b'{"a": ' * _DEEP + b"1" + b"}" * _DEEP
PLACES: list[tuple[str, str, str, dict[str, bytes], dict[str, str]]] = [
    ("nowhere", "a file that is not there", "dataset.path", {"run.yaml": run_of("classes", "./nowhere.jsonl")}, {}),
    ("misspelt", "a file by another name", "dataset.path", {"run.yaml": run_of("classes", "row.jsonl"), "rows.jsonl": _GOOD_LINES}, {}),
    ("empty-folder", "a folder without files", "dataset.path", {"run.yaml": run_of("classes", "rows"), "rows/": b""}, {}),
    ("folder-of-notes", "a folder without data", "dataset.path", _folder(**{"README.md": b"hello"}), {}),
    ("two-formats", "files of two formats", "dataset.path", _folder(**{"a.csv": _csv(_ROWS), "b.jsonl": _GOOD_LINES}), {}),
    ("two-columns", "files with different columns", "column|row", _folder(**{"a.jsonl": _GOOD_LINES, "b.jsonl": b'{"review": "good", "stars": 1}\n' * 4}), {}),
    ("one-broken", "one broken file of two", r"b\.jsonl", _folder(**{"a.jsonl": _GOOD_LINES, "b.jsonl": b'{"text": "oops\n'}), {}),
    ("spreadsheet", "a format that cannot be read", "dataset.path", {"run.yaml": run_of("classes", "rows.xlsx"), "rows.xlsx": b"PK\x03\x04"}, {}),
    ("no-suffix", "a file without a format", "dataset.path", {"run.yaml": run_of("classes", "./rows"), "rows": _GOOD_LINES}, {}),
    ("link-to-nothing", "a link that leads nowhere", "dataset.path", {"run.yaml": run_of("classes", "./rows.jsonl")}, {"rows.jsonl": "gone.jsonl"}),
    ("link-in-a-circle", "a link to itself", "dataset.path", {"run.yaml": run_of("classes", "./rows.jsonl")}, {"rows.jsonl": "rows.jsonl"}),
    ("a-device", "a device", "dataset.path", {"run.yaml": run_of("classes", "/dev/zero")}, {}),
    ("an-address", "an address", "dataset.path", {"run.yaml": run_of("classes", "https://example.org/rows.csv")}, {}),
    ("a-pattern", "a pattern that nothing matches", "dataset.path", {"run.yaml": run_of("classes", "rows/*.csv")}, {}),
    ("files-of-nothing", "a choice of files that nothing matches", "dataset.data_files",
     {"run.yaml": run_of("classes", "rows", data_files="*.csv"), "rows/a.jsonl": _GOOD_LINES}, {}),
    ("saved-no-rows", "a saved dataset without its rows", "rows|dataset.path", {"run.yaml": run_of("classes", "rows"), **_saved(data=b"-")}, {}),
    ("saved-cut", "a saved dataset that breaks off", "dataset.path", {"run.yaml": run_of("classes", "rows"), **_saved(data=_arrow(_ROWS)[:150])}, {}),
    ("saved-no-state", "a state that is no JSON", "dataset.path", {"run.yaml": run_of("classes", "rows"), **_saved(state=b"oops")}, {}),
    ("saved-deep-state", "a state that is 20,000 deep", "dataset.path", {"run.yaml": run_of("classes", "rows"), **_saved(state=_DEEP_JSON)}, {}),
    ("saved-elsewhere", "a state that names another folder", "state.json",
     {"run.yaml": run_of("classes", "rows"), **_saved(state=b'{"_data_files": [{"filename": "../../../x.arrow"}]}')}, {}),
    ("saved-no-list", "a state without files", "dataset.path", {"run.yaml": run_of("classes", "rows"), **_saved(state=b'{"_data_files": 3}')}, {}),
    ("saved-info", "a description that is no JSON", "dataset.path", {"run.yaml": run_of("classes", "rows"), **_saved(dataset_info=b"{oops")}, {}),
    ("saved-splits", "splits that are no list", "dataset.path", {"run.yaml": run_of("classes", "rows"), "rows/dataset_dict.json": b'{"splits": 3}'}, {}),
    ("saved-deep-splits", "splits that are 20,000 deep", "dataset.path", {"run.yaml": run_of("classes", "rows"), "rows/dataset_dict.json": _DEEP_JSON}, {}),
    ("held-out-classes", "a class that training never saw", "validation_dataset", _two(classes(), _row(5, label=2)(classes())), {}),
    ("held-out-shifted", "classes counted from 1 and not from 0", "validation_dataset.label_column.*take 1 from",
     _two(classes(), [{**row, "label": row["label"] + 1} for row in classes()]), {}),
    ("held-out-columns", "held-out data with other columns", "validation_dataset", _two(classes(), _renamed("text", "height")(_all(text=3)(classes()))), {}),
    ("held-out-empty", "held-out data without rows", "validation_dataset|test.jsonl", _two(classes(), []), {}),
    ("held-out-bad-row", "an empty text in held-out data", "validation_dataset", _two(classes(), _row(5, text="")(classes())), {}),
    ("held-out-names", "names where training has numbers", "validation_dataset", _two(classes(), [{**r, "label": "good"} for r in classes()]), {}),
    ("held-out-chats", "chats for a classifier", "validation_dataset", _two(classes(), chats()), {}),
    ("held-out-silent", "conversations without an answer", "validation_dataset", _two(chats(), _all(messages=[_USER])(chats()), "chats"), {}),
    ("both-bad", "bad rows in both", "dataset", _two(_row(5, text="")(classes()), _row(5, text="")(classes())), {}),
    ("template-broken", "a chat template that is no template", "chat_template",
     {"run.yaml": run_of("chats", "rows.jsonl", chat_template="own.jinja"), "rows.jsonl": _jsonl(chats()), "own.jinja": b"{% for m in messages %}{{ m.role"}, {}),
    ("template-of-nobody", "a chat template that raises an error", "chat_template|row",
     {"run.yaml": run_of("chats", "rows.jsonl", chat_template="own.jinja"), "rows.jsonl": _jsonl(chats()),
      "own.jinja": b"{{ raise_exception('roles must alternate') }}"}, {}),
]  # fmt: skip


def _bad_places() -> Iterator[Case]:
    for name, fault, names, files, links in PLACES:
        yield Case(f"place-{name}", fault, names, COMMAND, files, links)
