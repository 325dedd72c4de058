"""Which variable-length kernel a GPU gets; the GPU is a stand-in, the choice is the real one."""

from types import SimpleNamespace

import pytest
import torch

from automodel.models.packed_attention import varlen_kernel

AMPERE, TURING = (8, 0), (7, 5)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "window", "expected"),
    [
        (AMPERE, torch.bfloat16, 64, None, "flash"),
        (AMPERE, torch.float16, 64, 32, "flash"),
        (AMPERE, torch.float32, 64, None, "efficient"),
        (AMPERE, torch.float32, 64, 32, None),
        (AMPERE, torch.bfloat16, 12, None, None),
        (TURING, torch.float16, 64, None, "efficient"),
        (TURING, torch.float16, 64, 512, "efficient"),  # a window wider than any document is none
        (TURING, torch.float16, 64, 32, None),
        (TURING, torch.float32, 64, None, "efficient"),
    ],
)
def test_the_kernel_a_gpu_has(monkeypatch, capability, dtype, head_dim, window, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    size = torch.empty((), dtype=dtype).element_size()
    query = SimpleNamespace(
        shape=(1, 4, 100, head_dim), is_cuda=True, dtype=dtype, device="cuda:0", element_size=lambda: size
    )
    assert varlen_kernel(query, window, 128) == expected


def test_a_processor_has_none():
    assert varlen_kernel(torch.zeros(1, 4, 10, 64), None, 10) is None
