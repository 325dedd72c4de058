"""What passes between fused pre-norm blocks, and what no longer does."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Stream(NamedTuple):
    """What one block hands to the next: a branch, and the stream it is still to be added to."""

    branch_TN: Tensor
    residual_TN: Tensor


class UnusedAngles:
    """Takes the place of a rotary embedding's `forward`. transformers computes cosines and sines of every token before
    the first layer, a dozen launches; fused blocks read theirs from a table."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None
