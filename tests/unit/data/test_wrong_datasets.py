"""What a person reads when their data is wrong. The messages are the product: read them as prose.

Each case is a file (or no file), settings, and the whole message. `{tmp}` stands for the test's folder.
"""

# ruff: noqa: ISC004 - a message is the last item of its case, over as many lines as it needs

from __future__ import annotations

import json

import pytest

from automodel.config.errors import UserError
from automodel.data.config import DatasetConfig
from automodel.data.prepare import prepare
from automodel.tasks.registry import TEXT_CLASSIFICATION, task_named

GOOD = [{"text": f"good film {i}", "label": i % 2} for i in range(6)]
TAGGED = [{"tokens": ["good", "film"], "ner_tags": [0, 1]}]
QA = [{"question": "Why?", "answer": "Because."}]


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


CASES = [
    # --- where the data is ---------------------------------------------------------------------------------------
    (
        "no path at all", {}, {},
        "dataset.path is missing. Give a hub name (path: imdb), a file (path: reviews.csv) or a folder of files.",
    ),
    (
        "a misspelt file", {"reviews.csv": "text,label\n"}, {"path": "{tmp}/revews.csv"},
        "dataset.path: there is no file or folder '{tmp}/revews.csv'. Did you mean 'reviews.csv'?",
    ),
    (
        "an address", {}, {"path": "https://example.org/data.csv"},
        "dataset.path: 'https://example.org/data.csv' is an address; files are read from disks, and the hub's datasets "
        "by name. Download it and give its path; or write `path: csv`, put the address into data_files, and add "
        "--allow-remote-data to the command line.",
    ),
    (
        "a folder that is not there", {}, {"path": "{tmp}/no/such/data.json"},
        "dataset.path: there is no file or folder '{tmp}/no/such/data.json'. The folder '{tmp}/no/such' does not exist "
        "either. Correct the path.",
    ),
    (
        "an unreadable format", {"reviews.xlsx": "PK"}, {"path": "{tmp}/reviews.xlsx"},
        "dataset.path: '{tmp}/reviews.xlsx' is of a format that cannot be read. Readable are CSV, TSV, JSON, JSONL, "
        "Parquet, Arrow and text (.txt) files, each also as .gz, .bz2, .xz, .zst or .zip.",
    ),
    (
        "a folder without data", {"d/README.md": "hello"}, {"path": "{tmp}/d"},
        "dataset.path: the folder '{tmp}/d' holds no data files. Readable are CSV, TSV, JSON, JSONL, Parquet, Arrow "
        "and text (.txt) files, each also as .gz, .bz2, .xz, .zst or .zip, and folders written by save_to_disk.",
    ),
    (
        "a folder of several formats", {"d/a.csv": "text,label\n", "d/b.jsonl": lines(GOOD)}, {"path": "{tmp}/d"},
        "dataset.path: '{tmp}/d' holds files of several formats (a.csv, b.jsonl). Say which are meant with "
        'dataset.data_files, e.g. data_files: "*.csv".',
    ),
    (
        "files that match nothing", {"d/a.csv": "text,label\n"}, {"path": "{tmp}/d", "data_files": "*.parquet"},
        "dataset.data_files: nothing in '{tmp}/d' matches '*.parquet'. Correct the pattern.",
    ),
    (
        "a broken line of JSON", {"a.jsonl": lines(GOOD[:2]) + '{"text": "oops\n'}, {"path": "{tmp}/a.jsonl"},
        "dataset.path: '{tmp}/a.jsonl' is not valid JSON lines: line 3, column 10: Unterminated string starting at. "
        "Put it right, or take the line out.",
    ),
    (
        "several broken lines of JSON",
        {"a.jsonl": '{"text" 1}\n' + lines(GOOD[:2]) + '{"text": "oops\n7\n{"text": "a", "label": 1, "text": "b"}\n'},
        {"path": "{tmp}/a.jsonl"},
        "dataset.path: '{tmp}/a.jsonl' is not valid JSON lines: line 1, column 9: Expecting ':' delimiter; line 4, "
        "column 10: Unterminated string starting at; line 5 is int and not an object of columns; line 6 has the key "
        "'text' twice. Put them right, or take the lines out.",
    ),
    (
        "more broken lines of JSON than anybody wants to read", {"a.jsonl": lines(GOOD[:1]) + "oops\n" * 9},
        {"path": "{tmp}/a.jsonl"},
        "dataset.path: '{tmp}/a.jsonl' is not valid JSON lines: line 2, column 1: Expecting value; line 3, column 1: "
        "Expecting value; line 4, column 1: Expecting value; line 5, column 1: Expecting value; line 6, column 1: "
        "Expecting value; and 4 more. Put them right, or take the lines out.",
    ),
    (
        "half of a letter", {"a.jsonl": lines(GOOD[:2]) + '{"text": "\\ud83d", "label": 1}\n'},
        {"path": "{tmp}/a.jsonl"},
        "dataset.path: '{tmp}/a.jsonl' is not valid JSON lines: line 3 holds half of a letter that is written as two "
        "(\\ud83d). Put it right, or take the line out.",
    ),
    (
        "a key twice in an array",
        {"a.json": '[{"text": "fine", "label": 1}, {"text": "good", "label": 0, "text": "bad"}]'},
        {"path": "{tmp}/a.json"},
        "dataset.path: '{tmp}/a.json': row 1 has the key 'text' twice, and only one of the values would be learned. "
        "Keep the right one.",
    ),
    (
        "a key twice under a key", {"a.json": '{"data": [{"text": "a", "label": 1, "label": 0}]}'},
        {"path": "{tmp}/a.json"},
        "dataset.path: '{tmp}/a.json': row 0 has the key 'label' twice, and only one of the values would be learned. "
        "Keep the right one.",
    ),
    (
        "a key twice in lines of several types",
        {"a.jsonl": '{"id": 1, "text": "a", "label": 1}\n{"id": "x", "text": "b", "text": "c", "label": 1}\n'},
        {"path": "{tmp}/a.jsonl"},
        "dataset.path: '{tmp}/a.jsonl': row 1 has the key 'text' twice, and only one of the values would be learned. "
        "Keep the right one.",
    ),
    (
        "a parquet file that is none", {"a.parquet": "not parquet"}, {"path": "{tmp}/a.parquet"},
        "dataset.path: '{tmp}/a.parquet' cannot be read as PARQUET: Parquet magic bytes not found in footer. Either "
        "the file is corrupted or this is not a parquet file. Write it again, or name another file.",
    ),
    (
        "a file with a header only", {"a.csv": "text,label\n"}, {"path": "{tmp}/a.csv"},
        "dataset.path: '{tmp}/a.csv' has no rows. Name a file that has some.",
    ),
    (
        "commas without quotes", {"a.csv": "text,label\nA good film, and long,1\nA bad film, and dull,0\n"},
        {"path": "{tmp}/a.csv"},
        "dataset.path: '{tmp}/a.csv': line 2 has 3 cells, but the header has 2 (text, label). A text with a comma in "
        'it must stand in double quotes: "so, like this".',
    ),
    (
        "semicolons, and commas in the texts", {"a.csv": "text;label\nA good film, and long;1\n"},
        {"path": "{tmp}/a.csv"},
        "dataset.path: '{tmp}/a.csv': line 2 has 2 cells, but the header has 1 (text;label). Its cells seem to be "
        "separated by ';': save it with commas, or with tabs as .tsv.",
    ),
    (
        "semicolons alone", {"a.csv": "question;answer\nWhy?;Because.\nWho?;Goethe\n"}, {"path": "{tmp}/a.csv"},
        "dataset.path: '{tmp}/a.csv' has one column, called 'question;answer'. Its cells seem to be separated by ';': "
        "save it with commas, or with tabs as .tsv.",
    ),
    (
        "tabs that are commas", {"a.tsv": "text,label\nfine,1\n"}, {"path": "{tmp}/a.tsv"},
        "dataset.path: '{tmp}/a.tsv' has one column, called 'text,label'. Its cells seem to be separated by ',': name "
        "it .csv.",
    ),
    (
        "one comma without quotes", {"a.csv": "text,label\nA good film,1\nA bad film, and dull,0\n"},
        {"path": "{tmp}/a.csv"},
        "dataset.path: '{tmp}/a.csv' cannot be read as CSV: line 3 has 3 cells, but the header has 2 (text, label). "
        'A text with a comma in it must stand in double quotes: "so, like this".',
    ),
    (
        "a comma at some ends, one without quotes", {"a.csv": "text,label\n\nfine,1,\nA bad film, and dull,0\n"},
        {"path": "{tmp}/a.csv"},
        "dataset.path: '{tmp}/a.csv': line 4 has 3 cells, but the header has 2 (text, label). A text with a comma in "
        'it must stand in double quotes: "so, like this".',
    ),
    (
        "not packed", {"a.jsonl.gz": lines(GOOD)}, {"path": "{tmp}/a.jsonl.gz"},
        "dataset.path: '{tmp}/a.jsonl.gz' cannot be read: Not a gzipped file (b'{\"'). Copy it again, or give it "
        "the name of what it is.",
    ),
    (
        "a quote that never ends", {"a.csv": 'text,label\nfine,1\n"bad film,0\nfine,1\n'}, {"path": "{tmp}/a.csv"},
        "dataset.path: '{tmp}/a.csv' cannot be read as CSV: the double quote that opens near line 3 is never closed. "
        'Close it; inside a quoted text, " is written "".',
    ),
    (
        "no header", {"a.csv": "A good film,1\nA bad film,0\n"}, {"path": "{tmp}/a.csv"},
        "dataset.path: row 1 of '{tmp}/a.csv' (A good film, 1) was taken for the header, and looks like data. If the "
        "file has no header, name all columns in their order, e.g. dataset.column_names: [text, label]. If these are "
        "names, say which column is which, e.g. dataset.text_column.",
    ),
    (
        "UTF-16 without a mark", {"a.csv": "text,label\nfine,1\n".encode("utf-16-le")}, {"path": "{tmp}/a.csv"},
        "dataset.path: '{tmp}/a.csv' is UTF-16, not UTF-8. Save it as UTF-8, e.g. `iconv -f UTF-16LE -t UTF-8 "
        "{tmp}/a.csv > utf8-a.csv`.",
    ),
    (
        "UTF-16 of another writing", {"a.csv": "text,label\n好的电影,1\n坏的电影,0\n".encode("utf-16-be")},
        {"path": "{tmp}/a.csv"},
        "dataset.path: '{tmp}/a.csv' is UTF-16, not UTF-8. Save it as UTF-8, e.g. `iconv -f UTF-16BE -t UTF-8 "
        "{tmp}/a.csv > utf8-a.csv`.",
    ),
    (
        "an old encoding", {"a.jsonl": lines(GOOD).encode() + b'{"text": "caf\xe9", "label": 1}\n'},
        {"path": "{tmp}/a.jsonl"},
        "dataset.path: '{tmp}/a.jsonl' is not UTF-8: line 7 holds the byte 0xe9. Save it as UTF-8, e.g. `iconv -f "
        "WINDOWS-1252 -t UTF-8 {tmp}/a.jsonl > utf8-a.jsonl`.",
    ),
    (
        "a spreadsheet's encoding", {"a.csv": "text,label\nfine,1\n".encode("utf-16")}, {"path": "{tmp}/a.csv"},
        "dataset.path: '{tmp}/a.csv' is UTF-16, not UTF-8. Save it as UTF-8, e.g. `iconv -f UTF-16 -t UTF-8 "
        "{tmp}/a.csv > utf8-a.csv`.",
    ),
    # --- which part of it ----------------------------------------------------------------------------------------
    (
        "a split that is not there",
        {"d/train.jsonl": lines(GOOD), "d/test.jsonl": lines(GOOD)}, {"path": "{tmp}/d", "split": "tests[:10]"},
        "dataset.split: the data has no split 'tests'. It has: test, train. Did you mean 'test'?",
    ),
    (
        "a slice that is none", {"a.jsonl": lines(GOOD)}, {"path": "{tmp}/a.jsonl", "split": "train[first 10]"},
        "dataset.split: 'train[first 10]' is not understood. Write train, train[:1000], train[10%:20%] or "
        "train+validation.",
    ),
    (
        "an empty slice", {"a.jsonl": lines(GOOD)}, {"path": "{tmp}/a.jsonl", "split": "train[100:]"},
        "dataset: the data has no rows (after split and num_samples_limit). Take more of them.",
    ),
    (
        "no validation data in a folder",
        {"d/train-1.jsonl": lines(GOOD), "d/train-2.jsonl": lines(GOOD)}, {"path": "{tmp}/d", "role": "validation"},
        "validation_dataset.split: the data has no validation split. It has: train. Say which one to use, e.g. "
        "validation_dataset.split: train[:10%].",
    ),
    (
        "a limit of nothing", {"a.jsonl": lines(GOOD)}, {"path": "{tmp}/a.jsonl", "num_samples_limit": 0},
        "dataset.num_samples_limit must be at least 1; got 0.",
    ),
    # --- columns -------------------------------------------------------------------------------------------------
    (
        "a misspelt column", {"a.jsonl": lines(GOOD)}, {"path": "{tmp}/a.jsonl", "text_column": "txt"},
        "dataset.text_column: the data has no column 'txt'. It has: text (text), label (integers). Did you mean "
        "'text'?",
    ),
    (
        "a text column of numbers", {"a.jsonl": lines(GOOD)}, {"path": "{tmp}/a.jsonl", "text_column": "label"},
        "dataset.text_column: column 'label' holds integers, not text. Columns of text here: text.",
    ),
    (
        "text that is not always text", {"a.jsonl": lines([*GOOD, {"text": 5, "label": 1}])}, {"path": "{tmp}/a.jsonl"},
        "dataset.text_column: column 'text' holds values of different kinds: text in some rows, numbers or lists in "
        "others. Write text in every row.",
    ),
    (
        "labels of two kinds", {"a.jsonl": lines([*GOOD, {"text": "fine", "label": "good"}])},
        {"path": "{tmp}/a.jsonl"},
        "dataset.label_column: column 'label' holds values of different kinds: row 0 has 0, row 6 has 'good' (rows are "
        "counted from 0). Write all labels in one way.",
    ),
    (
        "no label column", {"a.jsonl": lines([{"text": "a", "answer": 1}] * 3)}, {"path": "{tmp}/a.jsonl"},
        "dataset.label_column: no column of the data is known to hold the label. It has: text (text), answer "
        "(integers). Name the right one: dataset.label_column: <column>.",
    ),
    (
        "two columns that could be the text", {"a.jsonl": lines([{"x": "a", "y": "b", "label": 1}] * 3)},
        {"path": "{tmp}/a.jsonl"},
        "dataset.text_column: no column of the data is known to hold the text. It has: x (text), y (text), label "
        "(integers). Name the right one: dataset.text_column: <column>.",
    ),
    (
        "text instead of words", {"a.jsonl": lines([{"tokens": "good film", "tags": ["A", "B"]}])},
        {"path": "{tmp}/a.jsonl", "task": "token-classification"},
        "dataset.tokens_column: column 'tokens' holds text, but token classification needs lists of words (one tag for "
        "each word). Split the text into words first.",
    ),
    (
        "a column twice", {"a.csv": "text,label,label\ngood,0,1\nbad,1,0\n"}, {"path": "{tmp}/a.csv"},
        "dataset.path: '{tmp}/a.csv' has two columns called 'label'. Rename one of them, or take it out.",
    ),
    (
        "an unknown role", {"a.jsonl": lines(GOOD)}, {"path": "{tmp}/a.jsonl", "column_mapping": {"labl": "label"}},
        "dataset.column_mapping: 'labl' is no column of text-classification; its columns are text, text_pair, label. "
        "Did you mean 'label'?",
    ),
    (
        "a mapping without an answer", {"a.jsonl": lines(QA)},
        {"path": "{tmp}/a.jsonl", "task": "causal-lm", "column_mapping": {"question": "question"}},
        "dataset.column_mapping must name one column to learn, as answer or answers or completion or output or "
        "response or target; got question.",
    ),
    (
        "an answer that stands in its prompt", {"a.jsonl": lines(QA)},
        {"path": "{tmp}/a.jsonl", "task": "causal-lm", "column_mapping": {"question": "question", "answer": "answer"},
         "prompt_template": "Say {answer}: "},
        "dataset: the column 'answer' is in the prompt and is to be learned as its answer, which could be copied. Name "
        "another one (column_mapping, prompt_template).",
    ),
    (
        "a column that is asked and answers", {"a.jsonl": lines(QA)},
        {"path": "{tmp}/a.jsonl", "task": "causal-lm", "column_mapping": {"input": "question", "answer": "question"}},
        "dataset: the column 'question' is in the prompt and is to be learned as its answer, which could be copied. "
        "Name another one (column_mapping, prompt_template).",
    ),
    (
        "a template without a place, and a mapping", {"a.jsonl": lines(QA)},
        {"path": "{tmp}/a.jsonl", "task": "causal-lm", "column_mapping": {"question": "question", "answer": "answer"},
         "prompt_template": "no places"},
        "dataset.prompt_template has no place for a column, such as {question}.",
    ),
    (
        "several misspelt places", {"a.jsonl": lines(QA)},
        {"path": "{tmp}/a.jsonl", "task": "causal-lm", "prompt_template": "Q: {qestion} {answr}"},
        "2 problems with the data\n"
        "- dataset.prompt_template: the data has no column 'qestion'. It has: question (text), answer (text). Did you "
        "mean 'question'?\n"
        "- dataset.prompt_template: the data has no column 'answr'. It has: question (text), answer (text). Did you "
        "mean 'answer'?",
    ),
    (
        "a template with an unknown place", {"a.jsonl": lines(QA)},
        {"path": "{tmp}/a.jsonl", "task": "causal-lm", "prompt_template": "Q: {qestion}"},
        "dataset.prompt_template: the data has no column 'qestion'. It has: question (text), answer (text). Did you "
        "mean 'question'?",
    ),
    (
        "nothing to translate from", {"a.jsonl": lines([{"translation": {"en": "a", "de": "b"}}])},
        {"path": "{tmp}/a.jsonl", "task": "seq2seq", "source_column": "fr"},
        "dataset.source_column: the column 'translation' has no 'fr'. It has: en, de.",
    ),
    # --- labels --------------------------------------------------------------------------------------------------
    (
        "identifiers as labels", {"a.jsonl": lines([{"text": "x", "label": f"id-{i}"} for i in range(40)])},
        {"path": "{tmp}/a.jsonl"},
        "dataset.label_column: column 'label' has 40 different values in 40 rows, so it looks like an identifier and "
        "not like a class. Name the column of the class; if it is this one, dataset.label_column: label. Columns: text "
        "(text), label (text).",
    ),
    (
        "one class only", {"a.jsonl": lines([{"text": "x", "label": 0}] * 5)}, {"path": "{tmp}/a.jsonl"},
        "dataset.label_column: every row has the same label 0, so there is nothing to tell apart. Data sorted by label "
        "and then cut (split: train[:1000], num_samples_limit) looks like this: take more rows, or shuffle the file.",
    ),
    (
        "more classes than the model has", {"a.jsonl": lines([{"text": "x", "label": c} for c in "abcabc"])},
        {"path": "{tmp}/a.jsonl", "num_labels": 2},
        "model.num_labels is 2, but the labels of dataset have 3 classes: a, b, c. Remove model.num_labels or set it "
        "to 3.",
    ),
    (
        "labels outside the model's classes", {"a.jsonl": lines([{"text": "x", "label": c} for c in (0, 1, 2, -1)])},
        {"path": "{tmp}/a.jsonl", "num_labels": 2},
        "dataset: 2 of 4 rows cannot be used (rows are counted from 0):\n"
        "  row 2: label 2 is outside 0..1\n"
        "  row 3: the label is -1, which public datasets use for 'no label' (if it is a class, list it and all others "
        "in dataset.labels)\n"
        "Put them right, or leave them out with dataset.on_bad_row: skip.",
    ),
    (
        "text as a regression target", {"a.jsonl": lines([{"text": "x", "label": "high"}] * 3)},
        {"path": "{tmp}/a.jsonl", "problem_type": "regression"},
        "dataset.label_column: regression needs numbers, but column 'label' holds text.",
    ),
    (
        "a label that is not listed", {"a.jsonl": lines([{"text": "x", "label": c} for c in "aba"])},
        {"path": "{tmp}/a.jsonl", "labels": ("a", "c")},
        "dataset: 1 of 3 rows cannot be used (rows are counted from 0):\n"
        "  row 1: label 'b' does not occur in dataset.labels\n"
        "Put it right, or leave it out with dataset.on_bad_row: skip.",
    ),
    (
        "tags of different kinds", {"a.jsonl": lines([*TAGGED, {"tokens": ["bad", "film"], "ner_tags": ["O", "O"]}])},
        {"path": "{tmp}/a.jsonl", "task": "token-classification"},
        "dataset.label_column: column 'ner_tags' holds tags of different kinds: row 0 has 0, row 1 has 'O' (rows are "
        "counted from 0). Write all tags in one way.",
    ),
    (
        "tokens that are fractions", {"a.jsonl": lines([{"input_ids": [1.5, 2.0], "label": i} for i in range(2)])},
        {"path": "{tmp}/a.jsonl"},
        "dataset: 2 of 2 rows cannot be used (rows are counted from 0):\n"
        "  row 0: token 1.5 is no whole number\n"
        "  row 1: token 1.5 is no whole number\n"
        "Put them right, or leave them out with dataset.on_bad_row: skip.",
    ),
    (
        "JSON that is deeper than its parsers",
        {"a.jsonl": lines(GOOD[:1]) + '{"a": ' * 9999 + "1" + "}" * 9999 + "\n"},
        {"path": "{tmp}/a.jsonl"},
        "dataset.path: '{tmp}/a.jsonl': line 2: objects and lists lie inside each other more than 60 times. Take it "
        "out, or write it as a text.",
    ),
    (
        "SQuAD that lacks its questions", {"a.json": '{"data": [{"paragraphs": [{"context": "b"}]}]}'},
        {"path": "{tmp}/a.json", "task": "causal-lm"},
        "dataset.path: '{tmp}/a.json' looks like SQuAD, but some part of it has no 'qas': an article has 'paragraphs', "
        "each with 'context' and 'qas', each of those with 'question' and 'answers'. Put it right, or save the rows as "
        "JSON lines.",
    ),
    (
        "thousands of columns", {"a.csv": ",".join(f"c{i}" for i in range(1500)) + "\n" + ",".join("1" * 1500) + "\n"},
        {"path": "{tmp}/a.csv"},
        "dataset.label_column: no column of the data is known to hold the label. It has: "
        + ", ".join(f"c{i} (integers)" for i in range(20))
        + ", … (1480 more). Name the right one: dataset.label_column: <column>.",
    ),
    # --- rows ----------------------------------------------------------------------------------------------------
    (
        "empty and missing texts and labels",
        {"a.jsonl": lines(GOOD + [{"text": t, "label": c} for t, c in ((" ", 0), (None, 1), ("x", None))])},
        {"path": "{tmp}/a.jsonl"},
        "dataset: 3 of 9 rows cannot be used (rows are counted from 0):\n"
        "  row 6: the text is empty\n"
        "  row 7: the text is missing\n"
        "  row 8: the label is missing\n"
        "Put them right, or leave them out with dataset.on_bad_row: skip.",
    ),
    (
        "many bad rows", {"a.jsonl": lines([*GOOD, *[{"text": "", "label": 0}] * 1500])}, {"path": "{tmp}/a.jsonl"},
        "dataset: 1,500 of 1,506 rows cannot be used (rows are counted from 0):\n"
        + "".join(f"  row {i}: the text is empty\n" for i in range(6, 26))
        + "  … and 1,480 more\n"
        "Put them right, or leave them out with dataset.on_bad_row: skip.",
    ),
    (
        "nothing but empty texts, and one label", {"a.jsonl": lines([{"text": " ", "label": 1} for i in range(4)])},
        {"path": "{tmp}/a.jsonl", "on_bad_row": "skip"},
        "dataset.text_column: column 'text' is empty in all 4 rows. Name the column that holds the texts; the data "
        "has: text (text), label (integers).",
    ),
    (
        "nothing left after skipping",
        {"a.jsonl": lines([{"text": "x" if i else "", "label": i % 2 if i == 0 else None} for i in range(4)])},
        {"path": "{tmp}/a.jsonl", "on_bad_row": "skip", "labels": ("a", "b")},
        "dataset: all 4 rows were skipped, so nothing is left to work with. The first one, row 0: the text is empty.",
    ),
    (
        "targets that are not numbers", {"a.csv": "text,label\nx,0.5\ny,nan\nz,inf\n"}, {"path": "{tmp}/a.csv"},
        "dataset: 2 of 3 rows cannot be used (rows are counted from 0):\n"
        "  row 1: the label is missing\n"
        "  row 2: the target is not a finite number\n"
        "Put them right, or leave them out with dataset.on_bad_row: skip.",
    ),
    (
        "an answer that is cut away", {"a.jsonl": lines([{"prompt": "p" * 50, "completion": "c"}])},
        {"path": "{tmp}/a.jsonl", "task": "causal-lm", "max_length": 16},
        "dataset: 1 of 1 rows cannot be used (rows are counted from 0):\n"
        "  row 0: nothing of the answer is left: the prompt has 50 tokens and max_length is 16\n"
        "Put it right, raise dataset.max_length, or leave it out with dataset.on_bad_row: skip.",
    ),
    (
        "tokens of another tokenizer", {"a.jsonl": lines([{"input_ids": [1, 50000], "label": i} for i in range(2)])},
        {"path": "{tmp}/a.jsonl"},
        "dataset: 2 of 2 rows cannot be used (rows are counted from 0):\n"
        "  row 0: token 50000 is outside the tokenizer's vocabulary of 80\n"
        "  row 1: token 50000 is outside the tokenizer's vocabulary of 80\n"
        "Put them right, or leave them out with dataset.on_bad_row: skip.",
    ),
    (
        "a row of a slice", {"a.jsonl": lines([*GOOD, {"text": "", "label": 0}])},
        {"path": "{tmp}/a.jsonl", "split": "train[3:]"},
        "dataset: 1 of 4 rows cannot be used (rows are counted from 0, within train[3:]):\n"
        "  row 3: the text is empty\n"
        "Put it right, or leave it out with dataset.on_bad_row: skip.",
    ),
    # --- lengths -------------------------------------------------------------------------------------------------
    (
        "longer than the model", {"a.jsonl": lines(GOOD)}, {"path": "{tmp}/a.jsonl", "max_length": 1024},
        "dataset.max_length is 1,024, but the model has only 512 positions. Set max_length to 512 or less, or leave it "
        "out.",
    ),
    (
        "too short for anything", {"a.jsonl": lines(GOOD)}, {"path": "{tmp}/a.jsonl", "max_length": 1},
        "dataset.max_length must be at least 4; got 1.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "settings", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_message(tmp_path, bert_like, gpt_like, files, settings, message):
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    settings = {k: v.replace("{tmp}", str(tmp_path)) if k == "path" else v for k, v in settings.items()}
    options = {key: settings.pop(key) for key in ("role", "num_labels", "problem_type") if key in settings}
    task = settings.pop("task", "text-classification")
    tokenizer = bert_like if task.endswith("classification") else gpt_like
    cfg = DatasetConfig(cache_dir=str(tmp_path / "cache"), **settings)
    with pytest.raises(UserError) as caught:
        prepare(
            cfg, row_format=task_named(task).rows, tokenizer=tokenizer, max_positions=512, type_vocab_size=2, **options
        )
    assert str(caught.value) == message.replace("{tmp}", str(tmp_path))


def test_nothing_is_stored_of_wrong_data(tmp_path, bert_like):
    (tmp_path / "a.jsonl").write_text(lines([*GOOD, {"text": "", "label": 0}]))
    cfg = DatasetConfig(path=str(tmp_path / "a.jsonl"), cache_dir=str(tmp_path / "cache"))
    for _ in range(2):
        with pytest.raises(UserError, match="row 6: the text is empty"):
            prepare(cfg, row_format=TEXT_CLASSIFICATION.rows, tokenizer=bert_like, max_positions=512, type_vocab_size=2)
    left = [p.name for p in (tmp_path / "cache").iterdir()]
    assert left == ["tables"]
