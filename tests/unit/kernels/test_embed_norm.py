"""Rows of two tables, summed, normed and dropped out at once, against the parts in torch; forward and backward."""

import pytest
import torch

from automodel.data.collate import _runs
from automodel.kernels.add_norm import Norm
from automodel.kernels.embed_norm import Stream, embed_norm, embed_norm_reference
from automodel.kernels.philox import keep_mask

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}


def make_stream(lengths: list[int]) -> Stream:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 12, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return Stream(ids, positions, bounds, torch.from_numpy(_runs(ids.numpy())))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize(("offset", "padding_id"), [(0, 0), (2, 1)])
def test_equals_the_parts(p, typed, offset, padding_id):
    stream, width = make_stream([4, 1, 7, 3]), 40
    generator = torch.Generator().manual_seed(1)
    shapes = [(15, width), (12, width), (width,), (width,), *([(width,)] if typed else [])]
    ours = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    seed = torch.tensor([77])
    norm = Norm(1e-6, p, seed if p else None, site=9)
    found = embed_norm(stream, *ours, norm=norm, offset=offset, padding_id=padding_id)
    keep = keep_mask(seed, 9, len(stream.ids_T), width, p) if p else None
    expected = embed_norm_reference(stream, *theirs, offset=offset, norm=norm, keep=keep)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    with torch.no_grad():
        unsorted = stream._replace(runs_2T=None)
        torch.testing.assert_close(embed_norm(unsorted, *ours, norm=norm, offset=offset), expected, **TOLERANCE)
    upstream = torch.randn(found.shape, generator=generator)
    found.backward(upstream)
    expected.backward(upstream)
    theirs[0].grad[padding_id] = 0.0
    for own, other in zip(ours, theirs):
        torch.testing.assert_close(own.grad, other.grad, **TOLERANCE)
