"""JSON from outside ends in an error that callers expect, however deep it is."""

from __future__ import annotations

import json

import pytest

from automodel.config.json_text import MOST_LEVELS, TOO_DEEP, parse_json


@pytest.mark.parametrize("levels", [MOST_LEVELS + 1, 900, 100_000])
@pytest.mark.parametrize("kind", [str, str.encode])
def test_too_deep(levels, kind):
    for text in ("[" * levels + "]" * levels, '{"a":' * levels + "1" + "}" * levels, "[" * levels):
        with pytest.raises(json.JSONDecodeError) as caught:
            parse_json(kind(text))
        assert levels < 1000 or TOO_DEEP in str(caught.value)


def test_brackets_in_texts_and_beside_each_other_are_not_deep():
    value = {"text": "[" * 5000, "rows": [[{"a": []}]] * 5000}
    assert parse_json(json.dumps(value)) == value
    deepest = "[" * MOST_LEVELS + "]" * MOST_LEVELS
    assert parse_json(deepest) == json.loads(deepest)
