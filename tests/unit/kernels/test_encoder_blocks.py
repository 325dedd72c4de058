"""Whole fused encoders with their Triton kernels, in the interpreter and in fp32: loss and gradients of a training step
against stock transformers. All families run on the kernels' references in `tests/parity/test_fused_encoders.py`."""

import pytest

from parity.test_fused_encoders import assert_a_step_learns_the_same


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["distilbert", "roberta", "electra", "modernbert"])
def test_kernels_and_all(interpreter, kind):
    assert_a_step_learns_the_same(kind)
