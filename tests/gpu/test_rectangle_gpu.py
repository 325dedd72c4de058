"""Documents of one length as a batch for cuDNN, against variable-length flash attention over the same stream."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def attend_both_ways(heads: int, keys: int, dim: int):
    from automodel.kernels.attention import Attention, varlen_flash
    from automodel.models.fused_decoder_attention import Documents, attend, is_rectangle

    documents, length = 2, 1536
    torch.manual_seed(0)
    how = Attention(heads=heads, key_heads=keys, head_dim=dim, scale=dim**-0.5, causal=True)
    tokens = documents * length
    inputs = [torch.randn(tokens, n, dim, device="cuda", dtype=torch.bfloat16) for n in (heads, keys, keys)]
    boundaries = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
    stream = Documents(boundaries, length, torch.arange(tokens, device="cuda") % length)
    upstream = torch.randn(tokens, heads * dim, device="cuda", dtype=torch.bfloat16)
    assert is_rectangle(inputs[0], stream, how)
    results = []
    for ours in (True, False):
        q, k, v = (t.clone().requires_grad_() for t in inputs)
        if ours:
            out = attend(q, k, v, stream, how)
        else:
            out = varlen_flash(q, k, v, (boundaries, boundaries), (length, length), how).flatten(1)
        out.backward(upstream)
        results.append([t.float() for t in (out.detach(), q.grad, k.grad, v.grad)])
    return results


@pytest.mark.parametrize(("heads", "keys", "dim"), [(32, 8, 64), (8, 8, 128), (16, 4, 128)])
def test_the_rectangle_equals_flash_attention(heads, keys, dim):
    for ours, theirs in zip(*attend_both_ways(heads, keys, dim)):
        assert (ours - theirs).norm() < 0.01 * theirs.norm()
