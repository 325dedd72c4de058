"""Held-out data as an exam: a language model answers the prompts itself, and its answers are compared with the right
ones (`metrics/answers.py`).

Prompts are the columns that training would put before the answer, written as the model was asked in training; of a
conversation, everything before its last assistant turn. Rows that training could not use are not asked. Answers are
greedy, so that the same model gets the same marks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from automodel.config.errors import UserError
from automodel.config.gate import REMOTE_DATA
from automodel.data.config import DatasetConfig
from automodel.data.language import Chats, Instructions, every_answer
from automodel.data.layouts import Request, choose_layout, is_ready
from automodel.data.messages import left_out
from automodel.data.prepare import PreparedData
from automodel.data.sources import load_rows
from automodel.engine.predict import Predictor
from automodel.engine.read_data import custom_target
from automodel.engine.saved import SavedModel
from automodel.metrics.answers import answer_scores


@dataclass(frozen=True)
class Generating:
    """That answers are to be generated and compared with the right ones."""

    max_samples: int | None = None
    """The first so many rows; all where it is None."""
    max_new_tokens: int = 64
    batch_size: int = 32


@dataclass(frozen=True)
class Questions:
    """What is asked, and what would be right."""

    prompts: list[Any]
    answers: list[list[str]]


def questions_of(
    saved: SavedModel, section: DatasetConfig, data: PreparedData, how: Generating, trust: Sequence[str]
) -> Questions:
    """Prompts and right answers of the rows that `data` was made of."""
    if section.mixture is not None:
        raise UserError("--generate asks one dataset; name it with --dataset, e.g. one of the mixture.")
    target = custom_target(section, trust)
    given: Any = {"resolved_target": target, "tokenizer": saved.tokenizer, "remote": REMOTE_DATA in trust}
    rows = load_rows(section, role="validation", **given)
    request = Request(section, saved.task.rows, saved.tokenizer, data.max_length, False, "validation_dataset")
    encoder = None
    if not is_ready(section, rows.features):
        encoder = choose_layout(rows, request).encoder
    if not isinstance(encoder, Instructions | Chats):
        raise UserError(
            f"--generate needs prompts with answers, or conversations; the data is {data.description}. Leave "
            "--generate out: loss and perplexity are measured without."
        )
    used = sorted({int(row) for row in data.store.rows})[: how.max_samples]
    chosen = [rows[row] for row in used]
    if isinstance(encoder, Chats):
        pairs = [_last_turn(row, encoder) for row in chosen]
    else:
        pairs = [
            ({role: row[column] for role, column in encoder.prompt.items()}, every_answer(row[encoder.answer]))
            for row in chosen
        ]
    pairs = [(prompt, right) for prompt, right in pairs if right]
    if not pairs:
        raise UserError("--generate: no row of the data ends with an answer to compare with.")
    return Questions([prompt for prompt, _ in pairs], [right for _, right in pairs])


def _last_turn(row: dict[str, Any], encoder: Chats) -> tuple[dict[str, Any], list[str]]:
    turns = encoder.chat.turns(row[encoder.messages], row[encoder.system] if encoder.system else None)
    if encoder.completion:
        turns = [*turns, *encoder.chat.turns(row[encoder.completion])]
    last = turns[-1]
    asked = last["role"] == "assistant" and not left_out(last, len(turns) - 1)
    right = [last["content"]] if asked and last.get("content") else []
    return {"messages": turns, "tools": row[encoder.tools] if encoder.tools else None}, right


def answer(
    saved: SavedModel,
    asked: Questions,
    how: Generating,
    device: str,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, float], int]:
    """`exact_match` and `f1` of generated answers, and how many prompts got none (they are too long for the model).
    Those count as wrong."""
    predictor = Predictor(
        saved.folder, batch_size=how.batch_size, on_bad_row="skip", device=device, on_progress=on_progress, saved=saved
    )
    found = predictor.generate(asked.prompts, max_new_tokens=how.max_new_tokens)
    scores = answer_scores(["" if made is None else made.prediction for made in found], asked.answers)
    return scores, sum(made is None for made in found)
