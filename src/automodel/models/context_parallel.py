"""A packed batch, cut by tokens for the ranks of a context group (`distributed/context_parallel.py`).

Document boundaries stay those of the whole stream: attention sees it whole. Positions that the head reads go with their
tokens. Which token of a document a classifier pools is settled before the cut, while the document is still in one
piece.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from automodel.data.batch import IGNORE, PackedBatch
from automodel.models.families import family_of, pooled_positions
from automodel.models.gathered_attention import Gathers, spans_of
from automodel.models.task_head import TaskHead


@dataclass(frozen=True)
class ContextBatch(PackedBatch):
    """This rank's tokens of a batch."""

    group: Any = None
    """The process group whose ranks have the other tokens, or `Gathers`, which says more about them."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ContextBatch:
        moved = super().to(device, non_blocking)
        assert isinstance(moved, ContextBatch)
        return replace(moved, group=self.group.to(device)) if isinstance(self.group, Gathers) else moved


def cut_tokens(
    batch: PackedBatch, config: Any, head: TaskHead, part: int, parts: int, group: Any, gathers: bool = False
) -> ContextBatch:
    """The `part`-th of `parts` equal pieces of the stream. Done on the host: which positions are read depends on it.
    `gathers`: the ranks cannot share the heads, and gather keys and values."""
    tokens = batch.input_ids_T.shape[0]
    assert tokens % parts == 0, "the plan rounds token counts to a multiple of the ranks"
    size = tokens // parts
    own = slice(part * size, (part + 1) * size)
    read_R = batch.read_positions_R
    if head.wants == "pooled":
        read_R = pooled_positions(config, batch.input_ids_T, batch.position_ids_T, read_R)
    here_R = (read_R >= own.start) & (read_R < own.stop)
    positions_R, labels_R = read_R[here_R] - own.start, batch.labels_R[here_R]
    if not len(positions_R):  # the head takes at least one row
        positions_R = torch.zeros(1, dtype=read_R.dtype)
        labels_R = torch.full_like(batch.labels_R[:1], float("nan") if labels_R.is_floating_point() else IGNORE)
    types_T = batch.token_type_ids_T
    if gathers:
        spans = spans_of(batch.cu_seqlens_D.tolist(), own.start, own.stop, family_of(config).decoder)
        group = Gathers(group, own.start, spans)
    return ContextBatch(
        input_ids_T=batch.input_ids_T[own],
        position_ids_T=batch.position_ids_T[own],
        cu_seqlens_D=batch.cu_seqlens_D,
        max_seqlen=batch.max_seqlen,
        read_positions_R=positions_R,
        labels_R=labels_R,
        token_type_ids_T=None if types_T is None else types_T[own],
        num_documents=batch.num_documents,
        num_tokens=batch.num_tokens,
        num_labels=batch.num_labels,
        indices=batch.indices,
        group=group,
    )
