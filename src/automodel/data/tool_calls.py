"""Tool calls in chat messages.

They come in several spellings. Arguments are records for nearly every template and JSON text for a few, and text in
OpenAI's files: they are read, given as records, and as the text they were where a template refuses that or prints them
as they are. Parquet and Arrow files hold a column's records with the keys of all of them, None where a row has none: a
key without a value is left out, or a model would learn to call `add(city=null, a=1, b=2)`. A call that a template does
not write is a bad row.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from automodel.config.json_text import parse_json


class BadChat(Exception):
    """A conversation cannot be used; the message says why."""


class Arguments(dict):
    """Arguments of a call, which remember the JSON that they were."""

    def __init__(self, values: dict, text: str | None = None):
        super().__init__(values)
        self.text = json.dumps(values, ensure_ascii=False) if text is None else text


def read_calls(calls: Any, number: int) -> list[dict]:
    """Tool calls as records, with their arguments as records."""
    calls = _from_json(calls, f"the tool calls of message {number}")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadChat(f"the tool calls of message {number} are not a list of records")
    read = []
    for call in calls:
        function = dict(function_of(call))
        if "arguments" in function:
            what = f"the arguments of the call of '{function.get('name')}' in message {number}"
            given = function["arguments"] or {}
            read_in = _from_json(given, what)
            written = given if isinstance(given, str) else getattr(given, "text", None)
            function["arguments"] = Arguments(read_in, written) if isinstance(read_in, dict) else read_in
        read.append({**call, "function": function} if "function" in call else function)
    return read


def old_call(call: Any) -> list[dict]:
    """OpenAI's `function_call`, which was one call and no list, as calls are written now."""
    call = _from_json(call, "the function_call")
    return [{"type": "function", "function": call}] if call else []


def with_either_arguments(render: Callable[[list[dict]], Any], messages: list[dict]) -> Any:
    """What a template makes of the messages, with the arguments of calls as records; or as text where it refuses them,
    or prints them as they are, which makes Python's words of a record."""
    try:
        made = render(messages)
    except Exception as error:  # whatever a template author chose to raise
        if any(message.get("tool_calls") for message in messages):
            with contextlib.suppress(Exception):
                return render([_with_text_arguments(message) for message in messages])
        raise BadChat(f"the chat template refuses the messages: {error}") from error
    written = made if isinstance(made, str) else "".join(made[0])
    said = "".join(str(message.get("content")) for message in messages)  # which may be about Python
    if any(given and written.count(str(dict(given))) > said.count(str(dict(given))) for given in _arguments(messages)):
        return render([_with_text_arguments(message) for message in messages])
    return made


def _arguments(messages: list[dict]) -> Iterator[Arguments]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            given = function_of(call).get("arguments")
            if isinstance(given, Arguments):
                yield given


def _with_text_arguments(message: dict) -> dict:
    """The same message with the arguments of its calls as JSON text."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = dict(function_of(call))
        given = function.get("arguments", "")
        if isinstance(given, Arguments):
            function["arguments"] = given.text
        elif not isinstance(given, str):
            function["arguments"] = json.dumps(given, ensure_ascii=False)
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls} if calls else message


def function_of(call: dict) -> dict:
    """Name and arguments of a call, which lie under `function` or in the call itself."""
    inner = call.get("function")
    return inner if isinstance(inner, dict) else call


def without_gaps(value: Any) -> Any:
    """The value with every key left out that has none; arguments that were read already have what JSON said."""
    if isinstance(value, dict) and not isinstance(value, Arguments):
        return {key: without_gaps(inner) for key, inner in value.items() if inner is not None}
    return [without_gaps(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def called(text: Any) -> list[dict] | None:
    """The calls that a text is, if it is nothing else."""
    try:
        read = parse_json(text)
    except (TypeError, ValueError):
        return None
    calls = read if isinstance(read, list) else [read]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        return None
    return [{"type": "function", "function": call} for call in calls]


def _from_json(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise BadChat(f"{what} are not valid JSON: {error}") from error


def parsed_tools(value: Any) -> Any:
    """Tool descriptions of a row, given as a list or as JSON text."""
    if isinstance(value, str) and value:
        return _from_json(value, "the tools") or None  # what JSON says is null is meant
    return without_gaps(value) or None


def in_wrappers(tools: Any) -> Any:
    """Descriptions of functions in OpenAI's form, which says that they are functions."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return tools
    return [{"type": "function", "function": tool} if "name" in tool else tool for tool in tools]
