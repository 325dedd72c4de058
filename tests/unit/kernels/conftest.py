"""Triton's interpreter as a fixture: the same kernels on CPU tensors, where Triton is installed and no GPU is."""

import pytest
import torch

from interpreted_triton import INSTALLED, INTERPRETED


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
