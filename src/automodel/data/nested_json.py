"""JSON files that are one object: SQuAD's official layout, or rows under some key, or under the name of each split."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from automodel.config.errors import UserError
from automodel.config.json_text import parse_json
from automodel.data.cells import open_text
from automodel.data.json_faults import in_rows, with_repeats
from automodel.data.packed import PackedError, plain_name

ROW_KEYS = ("data", "rows", "examples", "instances", "records", "items")  # where a JSON object keeps its rows
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
    "test": "test",
    "testing": "test",
}
HEAD = 65536  # characters in which the first split begins
_A_SPLIT = re.compile(rf'"(?:{"|".join(SPLIT_WORDS)})"\s*:\s*\[\s*[{{\]]', re.IGNORECASE)


def splits_inside(path: Path) -> dict[str, str]:
    """The splits of a JSON file like `{"train": [...], "test": [...]}`, each with the key it has there; empty for all
    other files, and for those that cannot be read."""
    content = None
    if _is_json(path):
        with suppress(OSError, PackedError), open_text(path) as file:
            head = file.read(HEAD)
            if head.lstrip().startswith("{") and _A_SPLIT.search(head):
                content = _one_object(head + file.read())
    keys = _split_keys(content or {})
    names = [SPLIT_WORDS.get(key.lower(), key) for key in keys]
    # `dev` and `eval` in one file are two splits, and keep their names.
    return {name if names.count(name) == 1 else key: key for name, key in zip(names, keys)}


def _split_keys(content: dict[str, Any]) -> list[str]:
    """Keys that rows stand under, where one of them is the name of a split."""
    keys = [key for key, value in content.items() if _are_rows(value)]
    return keys if any(key.lower() in SPLIT_WORDS for key in keys) else []


def _are_rows(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _one_object(text: str) -> dict[str, Any] | None:
    """The object that a file is; None for lines, lists, and what is no JSON."""
    try:
        found = parse_json(text, object_pairs_hook=with_repeats)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def nested_rows(files: list[Path], section: str, key: str | None = None) -> list[dict] | None:
    """Rows of JSON files that are one object and not an array or lines: SQuAD's official layout, or an object that
    keeps its rows under some key, or under `key`. None where `datasets` can read the files itself."""
    if not all(map(_is_json, files)):
        return None
    rows: list[dict] = []
    for path in files:
        with open_text(path) as file:
            head = file.read(HEAD).lstrip()
            if not head.startswith("{"):
                return None
            if key is None and _is_lines(head):
                return None
            content = _one_object(head + file.read())
            if content is None:
                return None  # datasets will say what is wrong with it
        under = content.get(key) if key else next((content[k] for k in ROW_KEYS if _are_rows(content.get(k))), None)
        if not under:
            if key is not None:
                raise UserError(f"{section}.split: '{path}' has no rows under '{key}'. Choose another split.")
            if keys := _split_keys(content):
                raise UserError(
                    f"{section}.path: '{path}' holds splits of its own ({', '.join(keys)}), which are read where it is "
                    "the only file. Name it alone, or save each split as a file."
                )
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


def _is_json(path: Path) -> bool:
    """By its name; a `.jsonl` file is never one object."""
    return ".json" in (suffix.lower() for suffix in Path(plain_name(path)).suffixes)


def _is_lines(head: str) -> bool:
    """Whether a file's first line is an object, with others after it."""
    try:
        parse_json(head.split("\n", 1)[0])
    except ValueError:
        return False
    return "\n" in head.strip()


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
