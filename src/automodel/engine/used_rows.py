"""The rows of the word table that training can reach, and nothing else, in the optimizer (CPU).

Half of MiniLM's 22.7M parameters are its word table. The gradient of the table is dense: 30,522 rows are allocated,
cleared, summed for the norm, clipped and updated in every step, though the training data has only some of the words.
Which ones is known before the first step. A row that no example reads has gradient zero and moments zero for good; of
AdamW's update only the weight decay remains,

    p ← p · (1 − lrₛ·wd)        in every step s.

So for the time of training the table is sorted: rows that occur come first, and the parameter is a view of these. The
others keep a list of the factors they owe, and take them one after the other when somebody reads the table. One
multiplication a step and not one by their product: these are then the very operations of the plain step, so its bits,
and it does not matter when a run was stopped in between.

Nobody else sees any of this. A forward pass without gradients (validation has words of its own) reads the whole table.
Checkpoints hold every row at its place, with zero moments for those that never had a gradient: what the plain step
writes, and takes back. A training example with a word that was not announced ends in torch's IndexError.

On a GPU the captured step has its own way (`kernels/lazy_rows.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel.data.store import TokenStore
from automodel.engine.optimizer_state import MOMENTS, AdamWRecord

Named = dict[str, Tensor]

MOST_TOKENS = 100_000_000  # looking through more takes seconds, and hardly a word is missing from them
TOKENS_AT_ONCE = 1 << 20
SETTLED_AT_ONCE = 32_000
"""Elements that take all their factors before the next ones do: they stay in the cache, and torch, which shares work
out from 32,768 elements on, wakes no threads for them. 1.5 ms a step for 18,000 rows of MiniLM; with 4,096 it is 9."""


def plain_word_table(model: Any) -> nn.Embedding | None:
    """The model's input embedding, where it is torch's own, in its plain form, and nothing else reads its weights."""
    try:
        table = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    if type(table) is not nn.Embedding or table.max_norm is not None or table.scale_grad_by_freq or table.sparse:
        return None
    if not table.weight.requires_grad or "forward" in table.__dict__ or table._forward_hooks:
        return None
    readers = sum(table.weight is p for module in model.modules() for p in module._parameters.values())
    return table if readers == 1 else None


def ids_that_occur(store: TokenStore, rows: int, always: Sequence[int | None] = ()) -> np.ndarray | None:
    """The distinct ids of a store and those of `always`, in order; None where that takes too long, or where some are
    not of this table. Id 0 is always among them: it fills up buckets."""
    ids = store.input_ids
    if len(ids) > MOST_TOKENS:
        return None
    seen = np.zeros(rows, dtype=bool)
    seen[[0, *(i for i in always if i is not None and 0 <= i < rows)]] = True
    for start in range(0, len(ids), TOKENS_AT_ONCE):
        part = ids[start : start + TOKENS_AT_ONCE]
        if int(part.max()) >= rows or int(part.min()) < 0:
            return None
        seen[part] = True
    return np.flatnonzero(seen)


class AllRows:
    """The plain case: the parameter is the table."""

    def stepped(self) -> None:
        """Called after every update."""

    def whole_weights(self, tensors: Named) -> Named:
        """The model's tensors with every row of the table."""
        return tensors

    def cut_weights(self, tensors: Named) -> Named:
        """Such tensors, for the parameters as they are now."""
        return tensors

    def whole_record(self, record: AdamWRecord) -> AdamWRecord:
        """The optimizer's record with the moments of every row."""
        return record

    def cut_record(self, record: AdamWRecord) -> AdamWRecord:
        """Such a record, for the parameters as they are now."""
        return record

    def restore(self) -> None:
        """Makes the parameter the whole table again. No step may follow."""


class UsedRows(AllRows):
    """Training for some rows of the table. Made after the optimizer and before the first step."""

    def __init__(self, model: nn.Module, ids: np.ndarray, optimizer: torch.optim.Optimizer):
        table = plain_word_table(model)
        assert table is not None, "the plan asks for what this model's embedding cannot do"
        self.embedding, self.weight = table, table.weight
        self.name = next(name for name, p in model.named_parameters() if p is self.weight)
        self.group = next(g for g in optimizer.param_groups if any(p is self.weight for p in g["params"]))
        self.owed: list[float] = []
        """Factors that the rows outside the parameter have still to take, oldest first."""
        self._sort(self.weight.detach(), torch.from_numpy(ids))
        self.embedding.forward = self._embed

    def _sort(self, whole_VN: Tensor, ids: Tensor) -> None:
        """Rows of `ids` to the front; the parameter becomes a view of them (and stays the same object)."""
        unused = torch.ones(len(whole_VN), dtype=torch.bool)
        unused[ids] = False
        order = torch.cat([ids, unused.nonzero().flatten()])
        self.ids, self.order_V = ids, order
        self.place_V = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
        self.table_VN = whole_VN.index_select(0, order)
        self.weight.data = self.table_VN[: len(ids)]
        padding = self.embedding.padding_idx
        self.padding_place = None if padding is None else int(self.place_V[padding])

    def _embed(self, input: Tensor) -> Tensor:
        places = self.place_V[input]
        if torch.is_grad_enabled():
            return F.embedding(places, self.weight, self.padding_place)
        self._settle()
        return F.embedding(places, self.table_VN, self.padding_place)

    def stepped(self) -> None:
        if self.group["weight_decay"]:
            self.owed.append(1 - self.group["lr"] * self.group["weight_decay"])

    @torch.no_grad()
    def _settle(self) -> None:
        if not self.owed:
            return
        for part in self.table_VN[len(self.ids) :].view(-1).split(SETTLED_AT_ONCE):
            for factor in self.owed:
                part.mul_(factor)
        self.owed.clear()

    def _whole(self) -> Tensor:
        self._settle()
        return self.table_VN.index_select(0, self.place_V)

    def whole_weights(self, tensors: Named) -> Named:
        return {**tensors, self.name: self._whole()}

    def cut_weights(self, tensors: Named) -> Named:
        self.owed.clear()
        self.table_VN.copy_(tensors[self.name].index_select(0, self.order_V))
        return {**tensors, self.name: self.weight.detach()}

    def whole_record(self, record: AdamWRecord) -> AdamWRecord:
        moments = dict(record.moments)
        for path in self._paths(moments):
            whole = moments[path].new_zeros(self.table_VN.shape)
            moments[path] = whole.index_copy_(0, self.ids, moments[path])
        return dataclasses.replace(record, moments=moments)

    def cut_record(self, record: AdamWRecord) -> AdamWRecord:
        """Rows that have moments join the parameter, whoever gave them some: they go on moving."""
        moments = dict(record.moments)
        paths = [path for path in self._paths(moments) if moments[path].shape == self.table_VN.shape]
        moved = torch.zeros(len(self.table_VN), dtype=torch.bool)
        moved[self.ids] = True
        for path in paths:
            moved |= (moments[path] != 0).any(dim=1)
        if int(moved.sum()) > len(self.ids):
            self._sort(self._whole(), moved.nonzero().flatten())
        for path in paths:
            moments[path] = moments[path].index_select(0, self.ids)
        return dataclasses.replace(record, moments=moments)

    def _paths(self, moments: Named) -> list[str]:
        return [path for path in (f"{key}/{self.name}" for key in MOMENTS) if path in moments]

    def restore(self) -> None:
        self.weight.data = self._whole()
        self.embedding.__dict__.pop("forward", None)
