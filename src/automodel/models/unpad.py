"""From the rectangle that people hand to a Hugging Face model to a stream without padding, and back.

    batch     = unpad(…)               rows of the rectangle one after another, padding left out
    logits_TC = forward(batch.packed)
    batch.pad(logits_TC)               (B, S, C), zeros where the rectangle is padding

The stream means what the rectangle means in stock transformers, or there is none: `unpad` raises `Rectangular`, with
the reason, and the caller runs the stock model. Positions are those that stock code gives the tokens (the column of the
rectangle, or the caller's `position_ids`, or RoBERTa's count of tokens), so a row may be padded on either side.

Asking a GPU for facts makes the host wait, so all of them are asked for at once.

Legend: B rows, S columns, T real tokens, C classes or words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from automodel.data.batch import IGNORE, PackedBatch
from automodel.models.families import Family, family_of
from automodel.models.task_head import TaskHead


class Rectangular(Exception):
    """The batch only means the same as a rectangle; the message says why."""


@dataclass(frozen=True)
class Inputs:
    """What a model was called with, as far as a stream can carry it."""

    input_ids_BS: Tensor
    attention_mask_BS: Tensor | None
    position_ids: Tensor | None
    """(B, S) or (1, S)."""
    token_type_ids_BS: Tensor | None
    labels: Tensor | None
    caches: bool
    """Whether stock code makes a cache, which turns off its search for documents in `position_ids`."""


@dataclass(frozen=True)
class Unpadded:
    """A stream, and where its tokens stood."""

    packed: PackedBatch
    places_T: Tensor | None
    """Index of each token in the flattened rectangle; None where there is no padding."""
    shape: tuple[int, int]

    def pad(self, rows_TC: Tensor) -> Tensor:
        """(B, S, C)."""
        if self.places_T is None:
            return rows_TC.unflatten(0, self.shape)
        rectangle = rows_TC.new_zeros(self.shape[0] * self.shape[1], rows_TC.shape[1])
        return rectangle.index_copy(0, self.places_T, rows_TC).unflatten(0, self.shape)

    def take(self, values_BS: Tensor) -> Tensor:
        """(T,): what stands at the tokens."""
        return _taken(values_BS, self.places_T)


def _taken(values_BS: Tensor, places_T: Tensor | None) -> Tensor:
    flat = values_BS.reshape(-1)
    return flat if places_T is None else flat.index_select(0, places_T)


def unpad(inputs: Inputs, head: TaskHead, config: Any) -> Unpadded:
    """The batch as a stream; its head reads every token, or, for text classification, the token that stock code pools.
    Raises `Rectangular`."""
    family, (B, S) = family_of(config), inputs.input_ids_BS.shape
    if inputs.input_ids_BS.numel() == 0:
        raise Rectangular("the batch is empty")
    pooled_B = _pooled_columns(inputs, family, config) if head.wants == "pooled" else None
    real_BS = None if inputs.attention_mask_BS is None else inputs.attention_mask_BS.bool()
    facts = _facts(inputs, family, config, head, real_BS, pooled_B)
    if real_BS is None or facts["tokens"] == B * S:
        places_T, starts_D = None, torch.arange(0, (B + 1) * S, S, device=inputs.input_ids_BS.device)
    else:
        places_T = real_BS.reshape(-1).nonzero().squeeze(1)
        starts_D = torch.nn.functional.pad(real_BS.sum(1).cumsum(0), (1, 0))
    types_BS = inputs.token_type_ids_BS
    positions_BS = _positions(inputs, family, config, real_BS)
    if inputs.position_ids is not None and real_BS is None:
        starts_D = _document_starts(positions_BS, B, S)
    if pooled_B is None:
        reads_R = torch.arange(facts["tokens"], device=starts_D.device)
    else:
        first_B = starts_D[:-1] if real_BS is None else starts_D[:-1] - real_BS.int().argmax(1)
        reads_R = first_B + pooled_B
    packed = PackedBatch(
        input_ids_T=_taken(inputs.input_ids_BS, places_T),
        position_ids_T=_taken(positions_BS, places_T),
        cu_seqlens_D=starts_D.int(),
        max_seqlen=max(S, facts["longest"]),
        read_positions_R=reads_R,
        labels_R=torch.empty(0, dtype=torch.int64),  # the caller knows its loss
        token_type_ids_T=None if types_BS is None else _taken(types_BS, places_T),
        num_documents=B,
        num_tokens=facts["tokens"],
        num_labels=0,
    )
    return Unpadded(packed, places_T, (B, S))


def _pooled_columns(inputs: Inputs, family: Family, config: Any) -> Tensor:
    """The column that a stock classifier reads in each row: by the pad token, not by the mask."""
    ids_BS = inputs.input_ids_BS
    if family.pooling == "first":
        return torch.zeros(len(ids_BS), dtype=torch.int64, device=ids_BS.device)
    if config.pad_token_id is None:
        if len(ids_BS) != 1:
            raise Rectangular("the config has no pad token, by which a classifier finds the end of a row")
        return torch.full((1,), ids_BS.shape[1] - 1, device=ids_BS.device)
    columns = torch.arange(ids_BS.shape[1], device=ids_BS.device)
    return (columns * (ids_BS != config.pad_token_id)).argmax(-1)


def _facts(
    inputs: Inputs, family: Family, config: Any, head: TaskHead, real_BS: Tensor | None, pooled_B: Tensor | None
) -> dict[str, int]:
    """Numbers the host needs, in one transfer, with everything checked that could make a stream mean something else."""
    ids_BS, given = inputs.input_ids_BS, inputs.position_ids
    B, S = ids_BS.shape
    asked: dict[str, Tensor] = {}
    if given is not None:
        if not family.decoder:
            raise Rectangular("position_ids were given to an encoder")
        if pooled_B is not None:
            raise Rectangular("position_ids were given to a classifier")
        if inputs.caches and real_BS is None:
            raise Rectangular("position_ids without a mask mean documents only with use_cache=False")
        asked["longest"] = given.max() + 1
        asked["lowest"] = given.min()
    if family.positions_after_padding:
        pads_BS = ids_BS == config.pad_token_id
        asked["unlike"] = (pads_BS if real_BS is None else pads_BS == real_BS).any()
    if real_BS is not None:
        asked["tokens"] = real_BS.sum()
        edges = torch.nn.functional.pad(real_BS.int(), (1, 1)).diff(dim=1) == 1
        asked["broken"] = (edges.sum(1) != 1).any()  # a row of several pieces, or of none
        asked["left"] = (~real_BS[:, 0]).any()
        if pooled_B is not None:
            asked["blind"] = (~real_BS.gather(1, pooled_B[:, None])).any()
        if inputs.labels is not None and head.wants != "pooled":
            asked["taught"] = ((aligned_labels(inputs.labels, head) != IGNORE) & ~real_BS).any()
    if not asked:
        return {"tokens": B * S, "longest": S}
    found = dict(zip(asked, torch.stack([value.long() for value in asked.values()]).tolist()))
    if found.get("lowest", 0) < 0:
        raise Rectangular("position_ids are negative")
    if found.get("unlike"):
        raise Rectangular("attention_mask and pad tokens disagree, and positions are counted by the pad tokens")
    if found.get("broken"):
        raise Rectangular("attention_mask has a row with gaps, or with no token")
    if found.get("left") and not family.decoder:
        raise Rectangular("rows of an encoder are padded on the left")
    if found.get("blind"):
        raise Rectangular("a row ends with tokens that the mask hides, and the classifier would read them")
    if found.get("taught"):
        raise Rectangular("padding carries a label, or predicts one (the first token of a row padded on the left)")
    return {"tokens": B * S, "longest": S, **found}


def aligned_labels(labels_BS: Tensor, head: TaskHead) -> Tensor:
    """Labels under the token that predicts them: a language model's stand one to the right."""
    if not head.next_token:
        return labels_BS
    return torch.nn.functional.pad(labels_BS[:, 1:], (0, 1), value=IGNORE)


def _positions(inputs: Inputs, family: Family, config: Any, real_BS: Tensor | None) -> Tensor:
    """(B, S), counted from 0 where the family adds an offset itself."""
    B, S = inputs.input_ids_BS.shape
    if inputs.position_ids is not None:
        return inputs.position_ids.expand(B, S) - family.position_offset(config)
    if real_BS is not None and family.positions_after_padding:
        return real_BS.long().cumsum(1) - 1
    return torch.arange(S, device=inputs.input_ids_BS.device).expand(B, S)


def _document_starts(positions_BS: Tensor, B: int, S: int) -> Tensor:
    """Boundaries of documents in rows that hold several: a position that does not follow the one before it."""
    begins_BS = torch.ones((B, S), dtype=torch.bool, device=positions_BS.device)
    begins_BS[:, 1:] = positions_BS.diff(dim=1) != 1
    starts = begins_BS.reshape(-1).nonzero().squeeze(1)
    return torch.nn.functional.pad(starts, (0, 1), value=B * S)
