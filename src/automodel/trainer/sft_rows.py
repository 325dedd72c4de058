"""Rows of a dataset for supervised tuning as tokens and labels: the formats that TRL's SFTTrainer takes.

    {"text": …}                                      everything is learned, an end-of-text token after it
    {"messages": [{"role": …, "content": …}]}        the tokenizer's chat template; with `assistant_only_loss` the
                                                     answers alone are learned (the template marks them)
    {"prompt": …, "completion": …}                   texts or lists of messages; the completion alone is learned, unless
                                                     `completion_only_loss=False`
    {"input_ids": …[, "labels" | "completion_mask" | "assistant_masks"]}    tokenised already

Rows of which nothing is learned (a prompt that fills `max_length` by itself) are left out, and counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from automodel.config.errors import UserError
from automodel.data.batch import IGNORE
from automodel.data.chat import ROLES


@dataclass(frozen=True)
class RowFormat:
    """How rows become tokens."""

    tokenizer: Any
    text_field: str
    max_length: int | None
    completion_only: bool | None
    assistant_only: bool
    formatting: Callable[[dict[str, Any]], Any] | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, list[int]]:
        """One row as `input_ids`, `attention_mask` and `labels`."""
        if self.formatting is not None:
            text = self.formatting(row)
            row = {self.text_field: text[0] if isinstance(text, list) else text}
        if "input_ids" in row:
            ids, learned = self._tokenised(row)
        elif "prompt" in row and "completion" in row:
            ids, learned = self._completion(row)
        elif "messages" in row or "conversations" in row:
            ids, learned = self._chat(row.get("messages") or row.get("conversations"), _of_the_template(row))
        elif self.text_field in row:
            self._answers_are_marked()
            ids = self._ended(self._ids(row[self.text_field]))
            learned = [True] * len(ids)
        else:
            raise UserError(
                f"SFTTrainer: a row has the columns {', '.join(row)}; expected one of `{self.text_field}`, `messages`, "
                "`prompt` and `completion`, or `input_ids`. Name the column of texts with dataset_text_field."
            )
        labels = [token if wanted else IGNORE for token, wanted in zip(ids, learned)]
        cut = slice(0, self.max_length)
        return {"input_ids": ids[cut], "attention_mask": [1] * len(ids[cut]), "labels": labels[cut]}

    def _answers_are_marked(self) -> None:
        if self.assistant_only:
            raise UserError("SFTTrainer: assistant_only_loss needs conversations (`messages`), not plain texts.")

    def _ids(self, text: str, special: bool = True) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def _ended(self, ids: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return ids if end is None or (ids and ids[-1] == end) else [*ids, end]

    def _tokenised(self, row: dict[str, Any]) -> tuple[list[int], list[bool]]:
        ids = list(row["input_ids"])
        if row.get("labels") is not None:
            return ids, [label != IGNORE for label in row["labels"]]
        learned = [True] * len(ids)
        masks = ["completion_mask"] if self.completion_only else []  # as TRL does: asked for, or left alone
        masks += ["assistant_masks"] if row.get("assistant_masks") is not None else []  # applied wherever it is
        if self.assistant_only and "assistant_masks" not in masks:
            raise UserError("SFTTrainer: assistant_only_loss needs `assistant_masks` beside input_ids.")
        for name in masks:
            if row.get(name) is not None:
                learned = [a and bool(b) for a, b in zip(learned, row[name])]
        return ids, learned

    def _chat(self, messages: Any, options: dict[str, Any]) -> tuple[list[int], list[bool]]:
        made = self._templated(messages, **options)
        ids = list(made["input_ids"])
        if not self.assistant_only:
            return ids, [True] * len(ids)
        marked = [bool(mark) for mark in made["assistant_masks"]]
        if not any(marked):
            raise UserError(
                "SFTTrainer: assistant_only_loss: the chat template marks no answers. It needs {% generation %} … "
                "{% endgeneration %} around what the assistant says."
            )
        return ids, marked

    def _templated(self, messages: Any, **options: Any) -> Any:
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError("SFTTrainer: rows are conversations, but the tokenizer has no chat_template. Set one.")
        return self.tokenizer.apply_chat_template(
            [_turn(message) for message in messages],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=self.assistant_only,
            **options,
        )

    def _completion(self, row: dict[str, Any]) -> tuple[list[int], list[bool]]:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, list):
            options = _of_the_template(row)
            begin = list(self._templated(prompt, add_generation_prompt=True, **options)["input_ids"])
            ids = list(self._templated([*prompt, *completion], **options)["input_ids"])
        else:
            self._answers_are_marked()
            begin, ids = self._ids(prompt), self._ended(self._ids(prompt + completion))
        if ids[: len(begin)] != begin:
            raise UserError(
                "SFTTrainer: the prompt's tokens are not the beginning of prompt and completion together, so where the "
                "completion begins cannot be told. End prompts with a space or a new line."
            )
        if self.completion_only is False:
            return ids, [True] * len(ids)
        return ids, [place >= len(begin) for place in range(len(ids))]


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    """A message by its usual names; `from` and `value` are ShareGPT's."""
    if "from" not in message or "value" not in message:
        return message
    return {"role": ROLES.get(message["from"], message["from"]), "content": message["value"]}


def _of_the_template(row: dict[str, Any]) -> dict[str, Any]:
    """What a row says to the chat template: the tools of the conversation, and keywords of its own."""
    tools = {"tools": row["tools"]} if row.get("tools") else {}
    return {**tools, **(row.get("chat_template_kwargs") or {})}


def prepared(dataset: Any, form: RowFormat, processes: int | None, what: str) -> Any:
    """The dataset with tokens and labels and nothing else."""
    if not hasattr(dataset, "map") or not hasattr(dataset, "column_names"):
        raise UserError(f"SFTTrainer: the {what} dataset is a {type(dataset).__name__}; give a datasets.Dataset.")
    streams = not hasattr(dataset, "__len__")
    columns = dataset.column_names or list(next(iter(dataset)))
    options: dict[str, Any] = {} if streams else {"num_proc": processes, "desc": f"Tokenising the {what} dataset"}
    made = dataset.map(form, remove_columns=[c for c in columns if c not in ("input_ids", "labels")], **options)
    return _with_something_to_learn(made, what, streams)


def _with_something_to_learn(rows: Any, what: str, streams: bool) -> Any:
    """Without rows that have no label; a row that teaches nothing would only dilute a batch."""

    def teaches(labels: list[int]) -> bool:
        return any(label != IGNORE for label in labels)

    if streams:
        return rows.filter(teaches, input_columns="labels")
    kept = [index for index, labels in enumerate(rows["labels"]) if teaches(labels)]
    dropped = len(rows) - len(kept)
    if not kept and dropped:
        raise UserError(
            f"SFTTrainer: nothing is learned from any of the {dropped:,} rows of the {what} dataset. Longer rows "
            "(max_length) may reach the completions, or completion_only_loss=False learns prompts as well."
        )
    if dropped:
        print(
            f"automodel: {dropped:,} rows of the {what} dataset have nothing to learn and are left out", file=sys.stderr
        )
    return rows.select(kept) if dropped else rows
