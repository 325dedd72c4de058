"""What the rows of a task are: which keys describe them, how they become samples, where their labels stand.

A task of `automodel/tasks/` makes one of these; the data room is handed it and never sees the task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from automodel.data.columns import Columns
    from automodel.data.layouts import Layout, Request

LabelPlace = Literal["document", "token", "next_token", "target"]
"""Where the labels of a sample stand. `document`: one label, or a vector, for the whole. `token`: beside its own token.
`next_token`: each token is the label of the token before it. `target`: a text of its own."""


@dataclass(frozen=True)
class RowFormat:
    """The rows of a task."""

    task: str
    """The task's name, for messages and for the name of the token store."""
    labels: LabelPlace
    keys: tuple[str, ...]
    """Keys of `dataset:` that say what such a row is."""
    max_length: int
    """Longest sample in tokens where the config gives none."""
    lay_out: Callable[[Any, Columns, Request], Layout]
    """From rows, their columns and the request to the encoder that fits them."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Roles of `column_mapping`, each with the key that names the same column; empty where a role has no such key."""
