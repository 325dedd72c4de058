"""When documents of a packed stream are an ordinary batch."""

from dataclasses import replace

import torch

from automodel.kernels.attention import Attention
from automodel.models.fused_decoder_attention import Documents, attend_rectangle, is_rectangle
from automodel.models.packed_attention import packed_attention_reference

HOW = Attention(heads=4, key_heads=2, head_dim=8, scale=0.3, causal=True)


def stream(*boundaries: int) -> Documents:
    return Documents(torch.tensor(boundaries, dtype=torch.int32), 16, torch.zeros(boundaries[-1], dtype=torch.int64))


def test_every_slot_must_be_full():
    q = torch.zeros(40, 4, 8)
    assert is_rectangle(q[:32], stream(0, 16, 32), HOW)
    assert not is_rectangle(q, stream(0, 16, 32, 40), HOW)
    assert not is_rectangle(q[:32], stream(0, 16, 32, 32), HOW), "a slot stands empty"
    assert not is_rectangle(q[:32], stream(0, 16, 32), replace(HOW, window=7))
    assert not is_rectangle(q[:32], stream(0, 16, 32), replace(HOW, dropout=0.1))


def test_it_equals_each_document_alone():
    torch.manual_seed(0)
    q, k, v = (torch.randn(32, n, 8) for n in (4, 2, 2))
    found = attend_rectangle(q, k, v, 16, HOW)
    apart = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    expected = packed_attention_reference(*apart, [0, 16, 32], True, None, HOW.scale, 0.0)[0].flatten(1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
