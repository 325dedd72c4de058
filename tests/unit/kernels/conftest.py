"""Triton's interpreter as a fixture: the same kernels on CPU tensors, where Triton is installed and no GPU is.

Triton decides when it is first imported whether its own functions are interpreted, and torch imports it on all kinds of
occasions, so it is imported here, before any test.
"""

import importlib.util
import sys

import pytest
import torch

INSTALLED = importlib.util.find_spec("triton") is not None


def _import_interpreted() -> bool:
    if not INSTALLED or torch.cuda.is_available() or "triton" in sys.modules:
        return False
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("triton.language")
    return True


INTERPRETED = _import_interpreted()


@pytest.fixture
def interpreter(monkeypatch):
    if not INSTALLED:
        pytest.skip("Triton is not installed (the CPU wheel of torch comes without it)")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: tests/gpu/test_kernels_gpu.py runs the kernels themselves")
    if not INTERPRETED:
        pytest.skip("Triton was imported without its interpreter; run tests/unit/kernels in a process of its own")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(params=["reference", "interpreter"])
def path(request):
    """Both forms of every operation: torch always, the Triton kernels where they can run."""
    if request.param == "interpreter":
        request.getfixturevalue("interpreter")
    return request.param
