"""JSON files that are one object: SQuAD's official layout, or rows under some key."""

from __future__ import annotations

from pathlib import Path

from automodel.config.errors import UserError
from automodel.config.json_text import parse_json
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
                parse_json(first_line)
                if "\n" in head.strip():
                    return None  # JSON lines
            except ValueError:
                pass
            file.seek(0)
            try:
                content = parse_json(file.read(), object_pairs_hook=with_repeats)
            except ValueError:
                return None  # datasets will say what is wrong with it
        under = next((content[key] for key in ROW_KEYS if isinstance(content.get(key), list)), None)
        if not under or not all(isinstance(row, dict) for row in under):
            return None
        if (fault := in_rows(under)) is not None:
            raise UserError(f"{section}.path: '{path}': {fault}")
        if "paragraphs" not in under[0]:
            rows.extend(under)
            continue
        try:
            rows.extend(_squad_rows(under))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"has no {error}" if isinstance(error, KeyError) else f"is not as it should be ({error})"
            raise UserError(
                f"{section}.path: '{path}' looks like SQuAD, but some part of it {what}: an article has 'paragraphs', "
                "each with 'context' and 'qas', each of those with 'question' and 'answers'. Put it right, or save the "
                "rows as JSON lines."
            ) from error
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
