"""Chat messages as they come in files, and as one kind of record.

Lists, or text that holds a list: JSON, or what Python prints of it, which is how a CSV file gets them. Roles and
contents are spelt in two ways, contents may be in parts, and tool calls have an old name (OpenAI's `function_call`).
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from automodel.data.columns import is_list, is_mixed, is_string
from automodel.data.tool_calls import BadChat, called, old_call, read_calls, without_gaps

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "observation": "tool",
    "function": "tool",
    "tool": "tool",
}

TURN_KEYS = ("role", "from", "content", "value")
MARKS = ("weight", "train")  # whether a message is learned; nothing that it says
_RECORDS = re.compile(r"""\s*\[\s*\{\s*(?=['"]\w+['"]\s*:).*?(['"])(role|from)\1\s*:""", re.DOTALL)


def holds_chats(rows: Any, column: str, feature: Any) -> bool:
    """Whether a column has conversations: lists, or lists written as text (its first row tells, where there are rows to
    look at), also where they cannot be read: the rows are named then, and not learned as they stand."""
    if is_list(feature) or is_mixed(feature):
        return True
    known = is_string(feature) and hasattr(rows, "__getitem__") and len(rows) > 0
    return known and _RECORDS.match(rows[0][column] or "") is not None


def _list_in(text: str) -> Any:
    """The list that a text holds, as JSON or in Python's notation; any other text as it is."""
    for read in (json.loads, ast.literal_eval) if text.lstrip().startswith("[") else ():
        try:
            return read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return text


def normalised(messages: Any, system: str | None = None, calls: bool = False) -> list[dict]:
    """Messages as `role`/`content` records, whichever of the two usual spellings they came in. `calls`: turns that are
    a tool call in JSON (ShareGPT's `function_call`) become calls, for templates that have a form for them."""
    if not messages:
        raise BadChat("the conversation is empty")
    messages = _list_in(messages) if isinstance(messages, str) else messages
    if not isinstance(messages, (list, tuple)):
        kind = "text" if isinstance(messages, str) else f"a {type(messages).__name__}"
        written = isinstance(messages, str) and _RECORDS.match(messages)
        how = " (it is neither JSON nor what Python prints of a list; write the data as JSON lines)" if written else ""
        raise BadChat(f"the conversation is {kind} and not a list of messages{how}")
    result: list[dict] = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadChat(f"message {number} is {str(message)[:40]!r} and not a record with 'role' and 'content'")
        said = message.get("role") or message.get("from")
        if said is None:
            raise BadChat(f"message {number} has neither 'role' nor 'from'")
        if not isinstance(said, str):
            raise BadChat(f"the role of message {number} is {str(said)[:40]} and not text")
        given = message.get("content")
        content = _as_text(message.get("value") if given is None else given, number)
        extras = {k: without_gaps(v) for k, v in message.items() if k not in TURN_KEYS and v is not None}
        if calls and str(said).lower() == "function_call" and (found := called(content)) is not None:
            content, extras["tool_calls"] = None, found
        if not extras.get("tool_calls") and "function_call" in extras:
            extras["tool_calls"] = old_call(extras.pop("function_call"))
        if "tool_calls" in extras:  # an empty list of them is none: templates ask whether there is one
            made = read_calls(extras.pop("tool_calls") or [], number)
            extras |= {"tool_calls": made} if made else {}
        if content is None and not extras.keys() - set(MARKS):
            raise BadChat(f"message {number} has no content")
        result.append({"role": ROLES.get(str(said).lower(), str(said)), "content": content or "", **extras})
    return result if not system else _with_system(result, system)


def _with_system(messages: list[dict], system: Any) -> list[dict]:
    """The messages behind the system prompt that stands beside them, where it is not their first one already."""
    if not isinstance(system, str):
        raise BadChat(f"the system prompt is {type(system).__name__} and not text")
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if first["content"].strip() == system.strip():
        return messages
    raise BadChat("the conversation begins with a system message and another one stands beside it; keep one of them")


def left_out(message: dict, number: int) -> bool:
    """Whether the data say that an answer is not to be learned: `weight: 0`, as OpenAI writes it, or `train: false`."""
    for key in MARKS:
        if message.get(key) not in (None, 0, 1):  # true and false are these numbers
            raise BadChat(f"message {number} has {key} {message[key]!r}; 1 (learned) and 0 (only read) are possible")
    return any(message.get(key) == 0 for key in MARKS)


def _as_text(content: Any, number: int) -> Any:
    """Content given in parts (`[{"type": "text", "text": …}]`), as one text."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise BadChat(f"the content of message {number} is {str(content)[:40]} and not text")
    kinds = {str(part.get("type", "text")) if isinstance(part, dict) else type(part).__name__ for part in content}
    if kinds - {"text"}:
        others = ", ".join(sorted(kinds - {"text"}))
        raise BadChat(f"message {number} has parts that are not text ({others})")
    if any(not isinstance(part.get("text"), str) for part in content):
        raise BadChat(f"message {number} has a part without 'text'")
    return "".join(part["text"] for part in content)
