"""JSON files that are one object: SQuAD's official layout, or rows under some key."""

from __future__ import annotations

import json
from pathlib import Path

from automodel.config.errors import UserError
from automodel.data.cells import open_text
from automodel.data.json_faults import in_rows, with_repeats

ROW_KEYS = ("data", "rows", "examples", "instances", "records", "items")  # where a JSON object keeps its rows


def nested_rows(files: list[Path], section: str) -> list[dict] | None:
    """Rows of JSON files that are one object and not an array or lines: SQuAD's official layout, or an object that
    keeps its rows under some key. None where `datasets` can read the files itself."""
    if any(".json" not in (s.lower() for s in path.suffixes) for path in files):
        return None  # .jsonl is never one object
    rows: list[dict] = []
    for path in files:
        with open_text(path) as file:
            head = file.read(65536).lstrip()
            if not head.startswith("{"):
                return None
            try:
                first_line = head.split("\n", 1)[0]
                json.loads(first_line)
                if "\n" in head.strip():
                    return None  # JSON lines
            except ValueError:
                pass
            file.seek(0)
            try:
                content = json.load(file, object_pairs_hook=with_repeats)
            except ValueError:
                return None  # datasets will say what is wrong with it
        under = next((content[key] for key in ROW_KEYS if isinstance(content.get(key), list)), None)
        if not under or not all(isinstance(row, dict) for row in under):
            return None
        if (fault := in_rows(under)) is not None:
            raise UserError(f"{section}.path: '{path}': {fault}")
        rows.extend(_squad_rows(under) if "paragraphs" in under[0] else under)
    return rows


def _squad_rows(articles: list[dict]) -> list[dict]:
    """`data/paragraphs/qas` flattened to one row for each question, as on the hub."""
    return [
        {
            "id": str(question.get("id", "")),
            "title": article.get("title", ""),
            "context": paragraph["context"],
            "question": question["question"],
            "answers": {
                "text": [answer["text"] for answer in question.get("answers", ())],
                "answer_start": [int(answer.get("answer_start", -1)) for answer in question.get("answers", ())],
            },
        }
        for article in articles
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]
