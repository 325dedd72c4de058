"""Packing by size in the plan: how many bins an epoch has, and how full they are.

The lengths of the data are known before a weight is loaded, so the bins of every planned epoch are packed here, once,
to count the steps: a few seconds for a million documents.
"""

from __future__ import annotations

from automodel.config.errors import UserError
from automodel.data.bins import BinOrder
from automodel.plan.config import RunConfig
from automodel.plan.facts import DataFacts
from automodel.plan.plan import Decision


def decide_bins(cfg: RunConfig, data: DataFacts, bins_per_step: int, lines: list[Decision]) -> BinOrder | None:
    """The order of the run's bins; None where micro-batches count examples."""
    size = cfg.packed_sequence.packed_sequence_size
    if not size:
        return None
    if data.lengths is None:
        raise TypeError("packing by size needs the lengths of the data")
    order = BinOrder(
        lengths=data.lengths,
        size=size,
        bins_per_step=bins_per_step,
        seed=cfg.seed,
        shuffle=cfg.dataloader.shuffle is not False,
        drop_last=cfg.dataloader.drop_last,
        mixture=data.mixture,
    )
    packing = order.packing(0)
    full = packing.fill(data.lengths, size)
    lines.append(
        Decision(
            "batch",
            f"{size:,} tokens × {bins_per_step} a step",
            f"mean {packing.mean_documents:.1f} documents a bin, {full:.1%} full; packed_sequence_size is given, so "
            "batch_size and grad_acc_steps count bins",
        )
    )
    return order


def no_packing(model_type: str, reason: str, cfg: RunConfig) -> UserError:
    """The config demands packing, and the model cannot do it."""
    by_size = cfg.packed_sequence.packed_sequence_size
    asked = "packed_sequence.packed_sequence_size is given" if by_size else "packed_sequence.enabled is true"
    return UserError(f"{asked}, but {model_type} cannot be packed: {reason}. Leave it out to take the padded path.")
