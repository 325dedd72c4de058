"""Rows with room behind them."""

import pytest
import torch

from automodel.kernels.with_room import with_room


@pytest.mark.parametrize(
    ("rows", "width", "zeros_from", "whole"), [(7, 40, 48, 64), (4, 1024, 1040, 1088), (1, 8, 8, 16)]
)
def test_x_stands_left_and_zeros_right(path, rows, width, zeros_from, whole):
    x = torch.randn(rows, width + 24, generator=torch.Generator().manual_seed(0))[:, :width]  # rows lie apart
    wide = with_room(x, zeros_from, whole)
    assert wide.shape == (rows, whole)
    assert torch.equal(wide[:, :width], x)
    assert not wide[:, zeros_from:].any()
