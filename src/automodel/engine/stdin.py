"""Texts that are piped into a command: one on each line."""

from __future__ import annotations

import sys

from automodel.config.errors import UserError


def lines_of_stdin() -> list[str]:
    lines = [line.rstrip("\r\n") for line in sys.stdin]  # not splitlines: texts may hold U+2028 and form feeds
    if not lines:
        raise UserError("stdin is empty; one text is read from each of its lines.")
    return lines
