"""What a `prompt_template` may hold, in a config and in the note of a saved run."""

from __future__ import annotations

import pytest

from automodel.config.errors import UserError
from automodel.data.language import encoder_of
from automodel.data.prompt_template import fault_of, places_of


def test_places_are_names_of_columns():
    assert places_of("Q: {question} in {{braces}}\n{the context}: ") == ["question", "the context"]


@pytest.mark.parametrize("text", ["{a:>9999999999}", "{a:{b}}", "{a!r}", "{a.b}", "{a[0]}", "{}", "{0}", "{a", "a}"])
def test_anything_else_in_braces_is_refused(text):
    assert fault_of(text)
    with pytest.raises(ValueError):
        places_of(text)


def test_a_saved_run_may_not_ask_for_gigabytes_either(gpt_like):
    record = {
        "kind": "instructions", "prompt": {"text": "text"}, "answer": "answer", "chat_template": False,
        "prompt_template": "{text:>9999999999}",
    }  # fmt: skip
    with pytest.raises(UserError, match=r"run/layout.json: prompt_template `\{text:>9999999999\}` is more than"):
        encoder_of(record, gpt_like)
