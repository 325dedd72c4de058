"""Triton's interpreter as a fixture: the same kernels on CPU tensors, where Triton is installed and no GPU is.

Triton decides when it is first imported whether its functions are interpreted, so the fixture must come first.
"""

import importlib.util
import sys

import pytest
import torch

_first_import_was_ours = False


@pytest.fixture
def interpreter(monkeypatch):
    global _first_import_was_ours
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed (the CPU wheel of torch comes without it)")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: tests/gpu/test_kernels_gpu.py runs the kernels themselves")
    if "triton" in sys.modules and not _first_import_was_ours:
        pytest.skip("Triton was imported without its interpreter; run tests/unit/kernels in a process of its own")
    _first_import_was_ours = True
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(params=["reference", "interpreter"])
def path(request):
    """Both forms of every operation: torch always, the Triton kernels where they can run."""
    if request.param == "interpreter":
        request.getfixturevalue("interpreter")
    return request.param
