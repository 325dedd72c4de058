"""One wrong input: what is wrong in it, the command that meets it, and what that has to say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MODELS = "../../models"
"""Where the tiny models lie, seen from the folder of a case; see `run_cases.py`."""
BERT, LLAMA, T5 = f"{MODELS}/bert", f"{MODELS}/llama", f"{MODELS}/t5"
SEED = 26


@dataclass(frozen=True)
class Case:
    """A command in a folder of its own, which must end with exit code 2 and change nothing."""

    name: str
    fault: str
    """What is wrong, for people who read the list."""
    names: str
    """A regular expression for the key, the row or the file that the message must name."""
    arguments: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Content by path, in the folder of the case. A path that ends in `/` is an empty folder."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Symbolic links, by path."""


def lines_of(rows: list[str]) -> bytes:
    return "".join(f"{row}\n" for row in rows).encode()
