"""The ranks of a run as a grid: replicas × shards × context × tensor, the last one innermost.

    world = dp_replicate · dp_shard · cp · tp

Neighbouring ranks talk most: the ranks of one tensor group add up activations several times in every layer, those of
one context group exchange heads twice, shards gather weights once a layer, replicas add gradients once a step. So the
tensor axis is innermost (the fastest links), replicas outermost.

`layout_of` makes the grid from the `distributed:` section and the number of ranks, `check_model` holds it against the
model. Whatever is impossible is refused here, before a rank is started, with the nearest layout that works.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from automodel.config.errors import NotYetError, UserError
from automodel.distributed.config import DistributedConfig

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Layout:
    """How many ranks there are along each axis."""

    replicas: int = 1
    """Copies of the sharded model (HSDP); under `ddp`, all data-parallel ranks."""
    shards: int = 1
    """Ranks that share one copy of the model."""
    cp: int = 1
    """Ranks that share the tokens of one batch."""
    tp: int = 1
    """Ranks that share every matrix product."""
    fsdp: bool = False
    """Whether the model is sharded at all (several ranks and `fsdp2`)."""
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        return self.replicas * self.shards * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Ranks that train on documents of their own."""
        return self.replicas * self.shards

    def data_rank(self, rank: int) -> int:
        """Which share of the documents a rank gets; the same for a whole context and tensor group."""
        return rank // (self.cp * self.tp)

    def cp_rank(self, rank: int) -> int:
        return rank // self.tp % self.cp

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp

    def in_words(self) -> str:
        """`fsdp2, 2 replicas × 4 shards × tp 2`."""
        if not self.fsdp:
            return "ddp"
        parts = [f"{self.replicas} replicas"] * (self.replicas > 1)
        parts += [f"{self.shards} shard{'s' if self.shards > 1 else ''}"]
        parts += [f"cp {self.cp}"] * (self.cp > 1) + [f"tp {self.tp}"] * (self.tp > 1)
        return f"fsdp2, {' × '.join(parts)}"


ONE = Layout()


def ranks_wanted(cfg: DistributedConfig) -> int:
    """How many ranks the section asks for, where nobody else says."""
    return (cfg.dp_size or cfg.dp_replicate_size or 1) * cfg.tp_size * cfg.cp_size


def layout_of(cfg: DistributedConfig, ranks: int) -> Layout:
    """The grid of so many ranks. Raises `UserError` where the section's numbers do not make one."""
    inner = cfg.tp_size * cfg.cp_size
    if ranks % inner:
        raise _no_grid(cfg, ranks)
    dp = ranks // inner
    if cfg.dp_size is not None and cfg.dp_size != dp:
        started = f"{ranks} rank{'s are' if ranks > 1 else ' is'} started"
        share = f", {dp} of them data-parallel" if inner > 1 else ""
        raise UserError(
            f"distributed.dp_size is {cfg.dp_size}, but {started}{share}. The nearest possible: dp_size: {dp} "
            f"(or none), or --nproc-per-node {cfg.dp_size * inner}."
        )
    replicas = cfg.dp_replicate_size or 1
    if dp % replicas:
        nearest = min(_divisors(dp), key=lambda d: (abs(d - replicas), d))
        raise UserError(
            f"distributed.dp_replicate_size is {replicas}, but {dp} data-parallel rank{'s' if dp > 1 else ''} cannot "
            f"form {replicas} equal replicas. The nearest possible: dp_replicate_size: {nearest}."
        )
    fsdp = ranks > 1 and (cfg.shards or inner > 1 or replicas > 1)
    if cfg.strategy == "ddp" and fsdp:
        key = "tp_size" if cfg.tp_size > 1 else "cp_size" if cfg.cp_size > 1 else "dp_replicate_size"
        raise UserError(
            f"distributed.{key} is {getattr(cfg, key)}, and strategy is ddp, under which every rank holds the whole "
            "model. The nearest possible: strategy: fsdp2 with the same sizes, or no "
            f"{key}."
        )
    if cfg.sequence_parallel and cfg.tp_size == 1:
        raise UserError(
            "distributed.sequence_parallel shards activations between tensor-parallel products, and tp_size is 1. The "
            "nearest possible: tp_size: 2, or no sequence_parallel."
        )
    if not fsdp:
        return Layout(replicas=dp)
    return Layout(replicas, dp // replicas, cfg.cp_size, cfg.tp_size, True, cfg.sequence_parallel)


def _no_grid(cfg: DistributedConfig, ranks: int) -> UserError:
    inner = cfg.tp_size * cfg.cp_size
    sizes = " × ".join(f"{key} {getattr(cfg, key)}" for key in ("tp_size", "cp_size") if getattr(cfg, key) > 1)
    counts = [count for count in (ranks // inner * inner, (ranks // inner + 1) * inner) if count]
    ways = [f"--nproc-per-node {' or '.join(map(str, counts))}"]
    if cfg.tp_size > 1:
        fitting = [d for d in _divisors(ranks // cfg.cp_size) if d < cfg.tp_size] if ranks % cfg.cp_size == 0 else [1]
        ways.append(f"tp_size: {max(fitting)}")
    if cfg.cp_size > 1:
        fitting = [d for d in _divisors(ranks // cfg.tp_size) if d < cfg.cp_size] if ranks % cfg.tp_size == 0 else [1]
        ways.append(f"cp_size: {max(fitting)}")
    return UserError(
        f"distributed: {sizes} needs a multiple of {inner} ranks, but {ranks} rank{'s are' if ranks > 1 else ' is'} "
        f"started. The nearest possible: {', or '.join(ways)}."
    )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def check_model(cfg: DistributedConfig, layout: Layout, config: Any, packed: bool) -> None:
    """Refuses what this model cannot be split into. `config`: transformers' config. `packed`: whether its batches are
    packed."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kind = config.model_type
    if cfg.ep_size > 1:
        if not any(getattr(text, name, None) for name in EXPERTS):
            raise UserError(
                f"distributed.ep_size is {cfg.ep_size}, but {kind} has no experts to share out. The nearest possible: "
                "ep_size: 1 (remove the key)."
            )
        raise NotYetError(f"distributed.ep_size is {cfg.ep_size}: expert parallelism comes in a later release.")
    heads = getattr(text, "num_attention_heads", None) or 1
    keys = getattr(text, "num_key_value_heads", None) or heads
    if layout.tp > 1:
        if not getattr(config, "base_model_tp_plan", None):
            raise UserError(
                f"distributed.tp_size is {layout.tp}, but transformers has no tensor-parallel plan for {kind}. The "
                "nearest possible: tp_size: 1 (fsdp2 shards its weights instead)."
            )
        _require_heads("tp_size", layout.tp, heads, keys, kind)
        _require_equal_parts(layout.tp, text, kind)
    if layout.sequence_parallel and not packed:
        raise UserError(
            f"distributed.sequence_parallel shares out the tokens of packed batches, but {kind} takes padded ones "
            "here. The nearest possible: the same without sequence_parallel."
        )
    if layout.cp > 1:
        if not packed:
            raise UserError(
                f"distributed.cp_size is {layout.cp}, but {kind} takes padded batches here, whose attention cannot be "
                "exchanged over heads. The nearest possible: cp_size: 1."
            )
        if getattr(config, "attn_logit_softcapping", None) is not None and not can_trade_heads(config, layout):
            raise UserError(
                f"distributed.cp_size is {layout.cp}, but {kind} caps its attention scores, which is done only where "
                "ranks can share its heads equally. The nearest possible: cp_size: 1."
            )
        if getattr(config, "classifier_pooling", "cls") == "mean":
            raise UserError(
                f"distributed.cp_size is {layout.cp}, but this {kind} pools the mean of a document, which lies on "
                "several ranks then. The nearest possible: cp_size: 1, or model.classifier_pooling: cls."
            )


def _require_equal_parts(tp: int, text: Any, kind: str) -> None:
    inner = getattr(text, "intermediate_size", None)
    if isinstance(inner, int) and inner % tp:
        raise UserError(
            f"distributed.tp_size is {tp}, but the MLPs of this {kind} have {inner} inner units, which {tp} ranks "
            "cannot share equally. The nearest possible: tp_size: 1 (fsdp2 shards its weights instead)."
        )
    if getattr(text, "clip_qkv", None) is not None:
        raise UserError(
            f"distributed.tp_size is {tp}, but this {kind} clips its queries, keys and values in place (`clip_qkv`), "
            "which torch does not allow where they are cut. The nearest possible: tp_size: 1 (fsdp2 shards its weights "
            "instead)."
        )


def can_trade_heads(config: Any, layout: Layout) -> bool:
    """Whether context ranks can share the attention heads equally; otherwise they gather keys and values."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None) or 1
    keys = (getattr(text, "num_key_value_heads", None) or heads) // layout.tp
    return (heads // layout.tp) % layout.cp == 0 and (keys % layout.cp == 0 or layout.cp % keys == 0)


def _require_heads(key: str, size: int, heads: int, keys: int, kind: str) -> None:
    if heads % size == 0 and keys % size == 0:
        return
    possible = [d for d in _divisors(heads) if keys % d == 0]
    nearest = min(possible, key=lambda d: (abs(d - size), d))
    groups = f" and {keys} key-value heads" if keys != heads else ""
    raise UserError(
        f"distributed.{key} is {size}, but {kind} has {heads} attention heads{groups}, which {size} ranks cannot share "
        f"equally. The nearest possible: {key}: {nearest}."
    )
