"""What a rank of a sharded model holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from automodel.optim.kinds import ADAMW
from automodel.plan.memory import Setting, estimate
from automodel.plan.scaling_table import LLAMA_8B

SETTING = Setting("bf16", False, False, ADAMW, "none", tokens=1024, rows=1024, device="cuda", stored_logits=False)


def test_parts_of_masters_gradients_and_moments():
    one, eight = (estimate(LLAMA_8B.shape, LLAMA_8B.parameters, replace(SETTING, shards=n)) for n in (1, 8))
    assert eight.states == pytest.approx(one.states / 8)
    assert eight.gradients == pytest.approx(one.gradients / 8)
    masters = 4 * LLAMA_8B.parameters / 8
    tables = 2 * 128_256 * 4096  # words and head
    assert 2 * tables < eight.weights - masters < 2 * masters  # gathered in bf16, with a few blocks
    assert eight.activations == one.activations


def test_gradients_are_whole_while_they_add_up():
    once, often = (
        estimate(LLAMA_8B.shape, LLAMA_8B.parameters, replace(SETTING, shards=8, accumulates=yes))
        for yes in (False, True)
    )
    assert often.gradients - once.gradients == 4 * LLAMA_8B.parameters
    alone = estimate(LLAMA_8B.shape, LLAMA_8B.parameters, replace(SETTING, accumulates=True))
    assert alone.gradients == 4 * LLAMA_8B.parameters
