"""Whether so many ranks can train what the config asks for; found out before any of them is started."""

from __future__ import annotations

import math

from automodel.config.errors import NotYetError, UserError
from automodel.distributed.layout import Layout, layout_of
from automodel.optim.kinds import Kind
from automodel.plan.asked import decide_batch
from automodel.plan.check import not_yet
from automodel.plan.config import RunConfig
from automodel.plan.facts import ModelFacts
from automodel.plan.memory import ModelShape
from automodel.plan.plan import Decision
from automodel.tasks.task import Task


def check_layout(cfg: RunConfig, ranks: int) -> Layout:
    """The grid of the ranks. Raises `NotYetError` for what is not built, and `UserError` for what cannot be shared by
    so many ranks."""
    unbuilt = not_yet(cfg, ranks)
    if unbuilt:
        raise NotYetError("the config asks for what is not yet built\n" + "\n".join(f"  {p}" for p in unbuilt))
    layout = layout_of(cfg.distributed, ranks)
    decide_batch(cfg, [], layout.data_ranks)
    return layout


SHARDED = ("adamw", "sgd", "lion", "rmsprop", "adagrad", "muon")
"""Optimizers that compute every number by itself, so that a part of a parameter can be updated as a part; and Muon,
whose products of matrices torch makes over the parts."""


def refuse_with_shards(layout: Layout, kind: Kind | None, precision: str, cfg: RunConfig) -> None:
    """What a sharded model cannot be trained with."""
    if not layout.fsdp:
        return
    if precision == "fp16":
        raise UserError(
            "training_optimizations.precision: fp16 needs a loss scale that all shards agree on, which fsdp2 does not "
            "have here. Use bf16, or strategy: ddp."
        )
    if kind is not None and (kind.algorithm not in SHARDED or not kind.plain):
        raise UserError(
            f"optimizer.name: {cfg.optimizer.name} cannot update parts of parameters, and fsdp2 gives every rank a "
            f"part. The nearest possible: {'adamw' if kind.algorithm not in SHARDED else kind.algorithm}, or "
            "strategy: ddp."
        )


def refuse_cut_head(layout: Layout, task: Task, model: ModelFacts) -> None:
    """A head that is cut by words leaves its last product to the loss."""
    if layout.tp > 1 and task.head.next_token and not model.head_words:
        raise UserError(
            f"distributed.tp_size is {layout.tp}, which cuts the vocabulary, but the head of {model.model_type} is not "
            "known to be a plain product. The nearest possible: tp_size: 1 (fsdp2 shards its weights instead)."
        )


def share_tokens(layout: Layout, bucket: int, shape: ModelShape | None, lines: list[Decision]) -> int:
    """Token counts that the ranks of a group can share equally; how context ranks attend is told besides."""
    if layout.cp > 1 and shape is not None:
        heads, keys = shape.heads // layout.tp, shape.heads * shape.keys // shape.queries // layout.tp
        trades = heads % layout.cp == 0 and (keys % layout.cp == 0 or layout.cp % keys == 0)
        gather = f"{layout.cp} ranks cannot share {heads} heads ({keys} of keys) equally; exact, but more traffic"
        trade = f"each of {layout.cp} ranks sees all tokens of {heads // layout.cp} heads in attention; exact"
        value = "heads are traded" if trades else "keys and values are gathered"
        lines.append(Decision("context", value, trade if trades else gather))
    parts = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    if bucket % parts == 0:
        return bucket
    lines.append(Decision("tokens", f"a multiple of {parts}", "the ranks of a group share them equally"))
    return math.lcm(bucket, parts)


def layout_in_words(layout: Layout) -> str:
    """What the ranks share, as the reason of a plan's line."""
    if not layout.fsdp:
        return "each holds the model; documents are dealt by cost, gradients are summed once a step"
    parts = layout.shards * layout.cp * layout.tp
    words = f"each holds 1/{parts} of weights, gradients and optimizer states"
    if layout.tp > 1:
        words += f"; groups of {layout.tp} share every product and the vocabulary"
    if layout.cp > 1:
        words += f"; groups of {layout.cp} share the tokens of a batch and exchange heads in attention"
    return words + "; gradients are summed once a step"


def check_gpus(ranks: int, gpus: int) -> None:
    """Every rank needs a GPU of its own, where there are any."""
    if gpus and ranks > gpus:
        raise UserError(
            f"{ranks} ranks need {ranks} GPUs, and this machine has {gpus}. The nearest possible: "
            f"--nproc-per-node {gpus}."
        )
