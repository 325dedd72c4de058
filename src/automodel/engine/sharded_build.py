"""Assembling a sharded run: grid → model → adapter → checkpointing → loss → shards → weights → blocks → optimizer.

The plain order (build.py), with two differences: the optimizer comes after the shards, whose parts it updates; and
where the weights lie in safetensors under the model's own names, the model is made without memory, sharded, and only
then filled, each rank reading its own rows (`models/streamed.py`). No rank ever holds the whole model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import psutil
import torch

from automodel.adapters.attach import attach
from automodel.adapters.packed_linear import pack_layers
from automodel.config.gate import resolve_target
from automodel.data.batch import Batch
from automodel.distributed.fully_sharded import settle, shard
from automodel.distributed.grid import Grid, make_grid
from automodel.distributed.layout import can_trade_heads
from automodel.distributed.shards import fill, held_elements
from automodel.distributed.tensor_parallel import apply_tensor_parallel
from automodel.engine.frozen_base import loraplus_ratio
from automodel.engine.own_loss import check_own_loss
from automodel.engine.prepare import Prepared
from automodel.engine.sharded import Loaded, ShardedStep, Whole
from automodel.engine.step import autocast
from automodel.engine.together import wire_dtype
from automodel.models.checkpointing import use_gradient_checkpointing
from automodel.models.compiled_blocks import repeated_blocks
from automodel.models.context_parallel import cut_tokens
from automodel.models.forward import make_loss_forward
from automodel.models.fuse import fuse_shards
from automodel.models.load import load_model
from automodel.models.match_tokenizer import match_tokenizer
from automodel.models.pooled_block import pool_last_block
from automodel.models.streamed import OpenWeights, open_weights
from automodel.optim.build import build_optimizer
from automodel.optim.schedule import Schedule
from automodel.plan.plan import Decision


def make_sharded_step(prepared: Prepared, blank: Callable[[], Batch], notes: list[Decision]) -> tuple[Any, ShardedStep]:
    """Model and step of this rank. `blank` makes a batch for a rank that has none; `notes` gets what was found."""
    cfg, plan, layout = prepared.cfg, prepared.plan, prepared.layout
    started, before = time.perf_counter(), psutil.Process().memory_info().rss
    grid = make_grid(layout, prepared.ranks.rank, plan.device)
    dtype = torch.bfloat16 if plan.precision == "bf16-pure" else torch.float32
    weights = _weights_in_parts(prepared, dtype)
    if weights is None:
        model = load_model(cfg.model, prepared.hf_config, prepared.task.head, dtype=dtype, device="cpu", seed=cfg.seed)
    else:
        model = weights.model
    match_tokenizer(model, prepared.tokenizer)
    model.train()
    if prepared.adapter is not None:
        weights = _packed(prepared, model, weights, dtype)
        attach(model, prepared.adapter, seed=cfg.seed)
        _measure_rows(prepared, model, weights, dtype)
    if layout.tp > 1:
        apply_tensor_parallel(model, grid)
    if plan.checkpointing != "none":
        use_gradient_checkpointing(model, plan.checkpointing)
    whole = make_whole(prepared, model, grid)
    half = torch.bfloat16 if plan.precision == "bf16" else None
    reduce = wire_dtype(cfg.distributed.reduce_dtype)
    offload = cfg.distributed.cpu_offload and plan.device == "cuda"
    shard(whole, repeated_blocks(model), grid, compute=half, reduce=reduce, offload=offload)
    if weights is not None:
        device = "cpu" if offload else plan.device
        # Adapters and weights in few bits have their numbers already.
        whole._apply(lambda part: torch.empty_like(part, device=device) if part.is_meta else part.to(device))
        weights.fill(model, fill, plan.device)
    if plan.fused_kernels:  # after the weights: tables of angles are made from what the model holds
        fused = fuse_shards(model, torch.full((1,), cfg.seed, dtype=torch.int64, device=plan.device), plan.max_length)
        assert fused, "the plan promised fused blocks"
    notes += filter(None, [check_own_loss(prepared, model, partial(_call_whole, whole), half)])
    step = make_step_over(prepared, whole, blank)
    grown = psutil.Process().memory_info().rss - before
    step.loaded = Loaded(weights is not None, time.perf_counter() - started, grown, held_elements(model.parameters()))
    return model, step


def _call_whole(whole: Whole, function: Callable[[], Any]) -> Any:
    """Runs a function of the model inside the outermost module, whose call gathers the weights."""
    kept, whole.call = whole.call, lambda batch: function()
    try:
        return whole(None)
    finally:
        whole.call = kept
        settle(whole)


def _weights_in_parts(prepared: Prepared, dtype: torch.dtype) -> OpenWeights | None:
    """Where the weights are read part by part; None where every rank has to read the whole: where the files are not as
    the model is, and where an adapter brings modules of its own."""
    cfg, adapter = prepared.cfg, prepared.adapter
    if adapter is not None and any(".lora_" not in name for name in adapter.start or ()):
        return None
    return open_weights(cfg.model, prepared.hf_config, prepared.task.head, dtype, cfg.seed)


def _packed(prepared: Prepared, model: Any, weights: OpenWeights | None, dtype: torch.dtype) -> OpenWeights | None:
    """Puts weights into few bits, where the plan says so, one after the other from their files; returns the rest. Codes
    are not shared out: each rank keeps them all."""
    plan, adapter = prepared.plan, prepared.adapter
    if plan.packing is None or adapter is None:
        return weights
    if weights is None:
        pack_layers(model, plan.packing, plan.device, dtype, adapter.saved)
        return None
    where = weights
    names = pack_layers(
        model, plan.packing, plan.device, dtype, adapter.saved, lambda name: where.read(name).to(dtype)
    )  # fmt: skip
    return weights.without([f"{name}.{kind}" for name in names for kind in ("weight", "bias")])


def _measure_rows(prepared: Prepared, model: Any, weights: OpenWeights | None, dtype: torch.dtype) -> None:
    """DoRA begins with the lengths of all rows: weights that come later are read once for them, one after the other."""
    adapter = prepared.adapter
    if weights is None or adapter is None or not adapter.dora:
        return
    for name in adapter.ranks:
        layer = model.get_submodule(name)
        if layer.weight.is_meta:
            layer.measure(weights.read(f"{name}.weight").to(dtype), begins=adapter.start is None)


def make_whole(prepared: Prepared, model: Any, grid: Grid) -> Whole:
    plan = prepared.plan
    swapped = plan.fused_kernels or (plan.pooled_last_block and pool_last_block(model))
    words_cut = grid.layout.tp > 1  # the loss then must make the logits
    forward = make_loss_forward(
        model, prepared.task.head, plan.path, swapped=swapped, fused=plan.fused_loss or words_cut
    )
    cut = None
    if grid.layout.cp > 1:
        gathers = not can_trade_heads(model.config, grid.layout)
        whose = {"part": grid.cp_rank, "parts": grid.layout.cp, "group": grid.context, "gathers": gathers}
        cut = partial(cut_tokens, config=model.config, head=prepared.task.head, **whose)
    # Fused blocks compute in the dtype that weights are gathered in, and so does what stands around them.
    compute = nullcontext if plan.fused_kernels else partial(autocast, plan.precision, plan.device)
    return Whole(model, forward, prepared.loss, compute, cut)


def make_step_over(prepared: Prepared, whole: Whole, blank: Callable[[], Batch]) -> ShardedStep:
    cfg, plan = prepared.cfg, prepared.plan
    optimizer_class = None
    if cfg.optimizer.target:
        optimizer_class = resolve_target(cfg.optimizer.target, "optimizer", cfg.optimizer.extra, prepared.trust)
    layout, rank = prepared.layout, prepared.ranks.rank
    return ShardedStep(
        whole,
        blank,
        (layout.cp_rank(rank), layout.tp_rank(rank)),
        build_optimizer(whole.model, cfg.optimizer, optimizer_class, plan.optimizer, loraplus_ratio(prepared)),
        Schedule(cfg.lr_scheduler, plan.total_steps),
        peak_lr=cfg.optimizer.lr,
        max_norm=cfg.training_optimizations.gradient_clipping,
        precision=plan.precision,
        device=plan.device,
        ranks=prepared.ranks,
    )
