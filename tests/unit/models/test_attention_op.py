"""The opaque attention operation against the reference it stands for, and its promises to torch.compile."""

import pytest
import torch

from automodel.models.attention_op import attend
from automodel.models.packed_attention import packed_attention_reference

BOUNDARIES = [0, 4, 8, 15, 16, 16]


def inputs(kv_heads=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16, n, 8, generator=generator, dtype=dtype).requires_grad_() for n in (4, kv_heads, kv_heads)]


def arguments(tensors, causal=False, window=None, dropout=0.0):
    return (*tensors, torch.tensor(BOUNDARIES, dtype=torch.int32), 7, causal, window, 0.3, dropout)


@pytest.mark.parametrize(("causal", "window", "kv_heads"), [(False, None, 4), (True, None, 1), (False, 3, 2)])
def test_forward_and_backward_equal_the_reference(causal, window, kv_heads):
    tensors = inputs(kv_heads)
    ours = attend(*arguments(tensors, causal, window))[0]
    rows = [t.transpose(0, 1)[None] for t in tensors]
    theirs = packed_attention_reference(*rows, BOUNDARIES, causal, window, 0.3, 0.0)[0]
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(1))
    mine, expected = (torch.autograd.grad(x, tensors, upstream) for x in (ours, theirs))
    torch.testing.assert_close(mine, expected)


def test_the_backward_pass_draws_the_same_dropout_as_the_forward():
    """Attention is linear in its values: what they get back must be exactly what they gave, dropped where dropped."""
    q, k, v = inputs()
    torch.manual_seed(3)
    first = attend(*arguments((q, k, v), dropout=0.5))[0]
    after = torch.get_rng_state()
    second = attend(*arguments((q, k, v), dropout=0.5))[0]
    assert not torch.equal(first, second), "a new mask each time"
    torch.manual_seed(3)
    again = attend(*arguments((q, k, v), dropout=0.5))[0]
    torch.testing.assert_close(first, again)
    assert torch.equal(torch.get_rng_state(), after), "the stream of others advances by one draw, whatever is dropped"
    upstream = torch.randn_like(first)
    (grad,) = torch.autograd.grad(first, v, upstream)
    torch.testing.assert_close((grad * v).sum(), (upstream * first).sum())


def test_torch_finds_nothing_to_complain_about():
    """Schema, shape rules (with symbolic sizes) and autograd registration, by torch's own checks."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(attend, arguments(inputs(dtype=torch.float32)), test_utils=tests)
