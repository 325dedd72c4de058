"""Rows of a dataset for supervised tuning as tokens and labels: the formats that TRL's SFTTrainer takes.

    {"text": …}                                      everything is learned, an end-of-text token after it
    {"messages": [{"role": …, "content": …}]}        the tokenizer's chat template; with `assistant_only_loss` the
                                                     answers alone are learned (`sft_answers.py`)
    {"prompt": …, "completion": …}                   texts or lists of messages; the completion alone is learned, unless
                                                     `completion_only_loss=False`
    {"input_ids": …[, "labels" | "completion_mask" | "assistant_masks"]}    tokenised already

Rows of which nothing is learned (a prompt that fills `max_length` by itself) are left out, and counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from automodel.config.errors import UserError, WrongTypeError
from automodel.data.batch import IGNORE
from automodel.data.chat import ChatTemplate
from automodel.data.messages import ROLES
from automodel.trainer.sft_answers import Answers


@dataclass(frozen=True)
class RowFormat:
    """How rows become tokens."""

    tokenizer: Any
    text_field: str
    max_length: int | None
    completion_only: bool | None
    assistant_only: bool
    formatting: Callable[[dict[str, Any]], Any] | None = None
    apart: bool = False
    """Tokenised rows say where their documents end (`seq_lengths`)."""

    def __call__(self, row: dict[str, Any]) -> dict[str, list[int]]:
        """One row as `input_ids`, `attention_mask` and `labels`, perhaps with `seq_lengths`."""
        made = self._made(row)
        if self.apart and row.get("seq_lengths") is not None:
            made["seq_lengths"] = _within(row["seq_lengths"], len(made["input_ids"]))
        return made

    def _made(self, row: dict[str, Any]) -> dict[str, list[int]]:
        if self.formatting is not None and "input_ids" not in row:
            row = {self.text_field: self._formatted(row)}
        if row.get("labels") is not None and "input_ids" in row:
            return self._labelled(list(row["input_ids"]), list(row["labels"]))
        if "input_ids" in row:
            ids, learned = self._tokenised(row)
        elif "prompt" in row and "completion" in row:
            ids, learned = self._completion(row)
        elif "messages" in row or "conversations" in row:
            ids, learned = self._chat(row.get("messages") or row.get("conversations"), _of_the_template(row))
        elif self.text_field in row:
            self._answers_are_marked()
            if not isinstance(row[self.text_field], str):
                raise UserError(f"SFTTrainer: `{self.text_field}` of a row is {row[self.text_field]!r}, and no text.")
            ids = self._ended(self._ids(row[self.text_field]))
            learned = [True] * len(ids)
        else:
            raise UserError(
                f"SFTTrainer: a row has the columns {', '.join(row)}; expected one of `{self.text_field}`, `messages`, "
                "`prompt` and `completion`, or `input_ids`. Name the column of texts with dataset_text_field."
            )
        return self._labelled(ids, [token if wanted else IGNORE for token, wanted in zip(ids, learned)])

    def _labelled(self, ids: list[int], labels: list[int]) -> dict[str, list[int]]:
        if len(ids) != len(labels):
            raise UserError(f"SFTTrainer: a row has {len(ids)} input_ids and {len(labels)} labels; each needs one.")
        cut = slice(0, self.max_length)
        return {"input_ids": ids[cut], "attention_mask": [1] * len(ids[cut]), "labels": labels[cut]}

    def _formatted(self, row: dict[str, Any]) -> str:
        assert self.formatting is not None
        text = self.formatting(row)
        if not isinstance(text, str):
            raise UserError(
                f"SFTTrainer: formatting_func returned a {type(text).__name__}. It is called with one row, and returns "
                "its text; one that walks over a batch of rows, as TRL's did before 0.12, would walk over letters here."
            )
        return text

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
        if self._finds_answers(options):
            return self._answers(options)([_turn(message) for message in messages])
        made = self._templated(messages, **options)
        return list(made["input_ids"]), self._marked(made)

    def _finds_answers(self, options: dict[str, Any]) -> bool:
        """Whether answers alone are learned and the template does not mark them."""
        self._check_template()
        if not self.assistant_only:
            return False
        template = self.tokenizer.get_chat_template(None, options.get("tools"))
        return not ChatTemplate(self.tokenizer, template).marks_answers

    def _answers(self, options: dict[str, Any]) -> Answers:
        keywords = {name: value for name, value in options.items() if name != "tools"}
        return Answers(self.tokenizer, options.get("tools"), keywords)

    def _marked(self, made: Any) -> list[bool]:
        """What the assistant says, where that alone is learned."""
        if not self.assistant_only:
            return [True] * len(made["input_ids"])
        return [bool(mark) for mark in made["assistant_masks"]]

    def _check_template(self) -> None:
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError("SFTTrainer: rows are conversations, but the tokenizer has no chat_template. Set one.")

    def _templated(self, messages: Any, **options: Any) -> Any:
        self._check_template()
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
            if self._finds_answers(options):
                begin = self._answers(options).prompt([_turn(message) for message in prompt])
            else:
                begin = list(self._templated(prompt, add_generation_prompt=True, **options)["input_ids"])
            ids, learned = self._chat([*prompt, *completion], options)
        else:
            self._answers_are_marked()
            begin, ids = self._ids(prompt), self._ended(self._ids(prompt + completion))
            learned = [True] * len(ids)
        if self.completion_only is False:
            return ids, learned
        same = next((place for place, pair in enumerate(zip(begin, ids)) if pair[0] != pair[1]), len(begin))
        if same < len(begin):
            _say_once(
                "automodel: SFTTrainer: the tokens of a prompt are not the beginning of prompt and completion: "
                f"{self.tokenizer.decode(begin[same:])!r} at its end is something else there, where the completion is "
                "taken to begin. Spaces between the two belong to the completion; a chat template should write a "
                "prompt alone as it does before an answer."
            )
        return ids, [wanted and place >= same for place, wanted in enumerate(learned)]


def _within(lengths: list[int], size: int) -> list[int]:
    """Lengths of documents in a row of which `size` tokens are left."""
    ends = [min(end, size) for end in accumulate(lengths)]
    return [end - start for start, end in pairwise([0, *ends]) if end > start]


_said: list[str] = []


def _say_once(text: str) -> None:
    """The first of its kind; the others would fill the screen."""
    if not _said:
        _said.append(text)
        print(text, file=sys.stderr)


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    """A message by its usual names; `from` and `value` are ShareGPT's."""
    if "from" not in message or "value" not in message:
        return message
    return {"role": ROLES.get(message["from"], message["from"]), "content": message["value"]}


def _of_the_template(row: dict[str, Any]) -> dict[str, Any]:
    """What a row says to the chat template: the tools of the conversation, and keywords of its own."""
    given = row.get("tools")
    tools = {"tools": json.loads(given) if isinstance(given, str) else given} if given is not None else {}
    return {**tools, **(row.get("chat_template_kwargs") or {})}


def columns_of(dataset: Any) -> list[str]:
    """Names of columns; of a stream that does not know them, those of its first row."""
    return getattr(dataset, "column_names", None) or list(next(iter(dataset)))


def prepared(dataset: Any, form: RowFormat, processes: int | None, what: str) -> Any:
    """The dataset with tokens and labels and nothing else."""
    if not hasattr(dataset, "map") or not hasattr(dataset, "column_names"):
        raise WrongTypeError(f"SFTTrainer: the {what} dataset is a {type(dataset).__name__}; give a datasets.Dataset.")
    if (getattr(dataset, "format", None) or {}).get("type") == "custom":
        raise UserError(
            f"SFTTrainer: the {what} dataset computes its rows with a transform (set_transform) each time "
            "they are read, and here they are read once. Write them with dataset.map first, or have the transform make "
            'tokens and labels and set dataset_kwargs={"skip_prepare_dataset": True}.'
        )
    streams = not hasattr(dataset, "__len__")
    columns = columns_of(dataset)
    options: dict[str, Any] = {} if streams else {"num_proc": processes, "desc": f"Tokenising the {what} dataset"}
    kept = {"input_ids", "labels"} | ({"seq_lengths"} if form.apart else set())
    made = dataset.map(form, remove_columns=[c for c in columns if c not in kept], **options)
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
