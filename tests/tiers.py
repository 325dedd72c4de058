"""Which parametrisations of a test belong to the quick tier: the others prove the same thing once more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """The values, all but the chosen ones marked slow."""
    values = list(values)
    assert set(chosen) <= set(values), chosen
    return [value if value in chosen else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
