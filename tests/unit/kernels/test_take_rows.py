"""Rows taken out of a stream, and their gradient put back."""

import pytest
import torch

from automodel.kernels.take_rows import take_rows


@pytest.mark.parametrize("rows", [[0, 2, 3, 8], [1, 4, 0, 0, 0], [0, 0, 0], [5]])
@pytest.mark.parametrize("width", [16, 40, 1500])
def test_equals_index_select(path, rows, width):
    """Slots behind the ascending rows read row 0 and have no gradient."""
    x = torch.randn(9, width, generator=torch.Generator().manual_seed(0)).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    at = torch.tensor(rows)
    ours, theirs = take_rows(x, at), twin.index_select(0, at)
    assert torch.equal(ours, theirs)
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    real = 1 + next((i for i in range(len(rows) - 1) if rows[i + 1] <= rows[i]), len(rows) - 1)
    upstream[real:] = 0.0
    ours.backward(upstream)
    theirs.backward(upstream)
    torch.testing.assert_close(x.grad, twin.grad)
