"""`prompt_template`: a text with `{column}` places.

A place is a column's plain name. Python's format has more (`{text:>80}`, `{text!r}`, `{text.lower}`), which is refused:
a width alone, `{text:>9999999999}`, would ask for gigabytes for each row.
"""

from __future__ import annotations

import string


def places_of(template: str) -> list[str]:
    """What stands in braces, in the order of the text. Raises `ValueError` where the text is no template."""
    if fault := fault_of(template):
        raise ValueError(fault)
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


def fault_of(template: str) -> str | None:
    """What is wrong with a template, as a sentence; None where nothing is."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        return f"is no valid template: {error}. A brace of the text itself is written twice: `{{{{`."
    for _, name, width, conversion in parts:
        if name is None:
            continue
        if width or conversion:
            return f"`{{{_typed(name, width, conversion)}}}` is more than a column's name. Write `{{{name}}}`."
        if not name or name.isdigit():
            return f"`{{{name}}}` names no column. Write its name in the braces, such as `{{question}}`."
        if set(name) & set(".[]{}"):
            return f"`{{{name}}}` is not the plain name of a column. Rename the column, without `.`, `[` or `{{`."
    return None


def _typed(name: str, width: str | None, conversion: str | None) -> str:
    whole = name + (f"!{conversion}" if conversion else "") + (f":{width}" if width else "")
    return whole if len(whole) <= 60 else f"{whole[:57]}…"
