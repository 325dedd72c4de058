"""SQuAD's nested answers in every file that can hold them, CSV included: the first answer is learned, and nothing of
the notation."""

from __future__ import annotations

import json

import pytest

from automodel.data.batch import IGNORE
from automodel.data.language import answer_text, every_answer
from automodel.data.written_answers import read_answer

ANSWERS = [["in 1973", "1973"], ["the [old] \"town\"", "it's (old)"]]  # fmt: skip


def rows() -> list[dict]:
    return [
        {"context": "C", "question": "Q", "answers": {"text": texts, "answer_start": list(range(len(texts)))}}
        for texts in ANSWERS
    ]


def written(kind: str, folder) -> str:
    import pyarrow as pa
    import pyarrow.parquet as parquet
    from datasets import Dataset

    path, table = folder / f"squad.{kind}", Dataset.from_list(rows())
    if kind == "csv":
        table.to_csv(path)
    elif kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows()), path)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, pa.table(rows_by_column()).schema) as writer:
            writer.write_table(pa.table(rows_by_column()))
    elif kind == "saved":
        table.save_to_disk(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return str(path)


def rows_by_column() -> dict[str, list]:
    return {name: [row[name] for row in rows()] for name in rows()[0]}


@pytest.mark.parametrize("mapped", [False, True], ids=["found", "mapped"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "saved", "csv"])
def test_the_first_answer_is_learned_from_every_file(prepare_rows, gpt_like, tmp_path, kind, mapped):
    mapping = {"column_mapping": {"context": "context", "question": "question", "answer": "answers"}} if mapped else {}
    data = prepare_rows(None, gpt_like, "causal-lm", path=written(kind, tmp_path), **mapping)
    store = data.store
    for index, texts in enumerate(ANSWERS):
        labels = store.token_labels[store.offsets[index] : store.offsets[index + 1]].tolist()
        assert gpt_like.decode([label for label in labels if label != IGNORE]) == f" {texts[0]}<|end|>"


@pytest.mark.parametrize("write", [json.dumps, repr], ids=["json", "python"])
def test_every_answer_of_a_written_record_counts(write):
    cell = write(rows()[1]["answers"])
    assert answer_text(cell) == ANSWERS[1][0]
    assert every_answer(cell) == ANSWERS[1]


@pytest.mark.parametrize(
    "cell", ['{"text": "hello"}', "plain", "", "{answer_start", '{"answer_start": [1]}', "the answer_start key"]
)
def test_other_texts_are_answers_as_they_are(cell):
    assert read_answer(cell) == cell
