"""From a plan to a step and the batches it reads: the model loaded and swapped as planned, the optimizer over it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from automodel.checkpoint import randomness
from automodel.config.gate import resolve_target
from automodel.data.batch import Batch
from automodel.data.collate import PackedCollator, PaddedCollator
from automodel.data.loader import StepLoader
from automodel.data.prepare import PreparedData
from automodel.engine.captured import CapturedStep
from automodel.engine.compiled import compile_model, try_compiled
from automodel.engine.fit import fits, on_two_streams, smaller
from automodel.engine.fp8_guard import guarded
from automodel.engine.frozen_base import half_of, load_trainable, loraplus_ratio
from automodel.engine.observe import NOBODY, Observer
from automodel.engine.own_loss import check_own_loss
from automodel.engine.prepare import Prepared, words_read
from automodel.engine.step import Forward, TrainStep, release_memory
from automodel.engine.together import TogetherOnHost, TogetherStep, seed_offset_of, wire_dtype
from automodel.engine.used_rows import UsedRows
from automodel.kernels import ahead
from automodel.kernels.cpu_products import Bf16Copies, make_products
from automodel.kernels.flat_adamw import FlatAdamW
from automodel.kernels.late_update import LateUpdates, late_parameters
from automodel.kernels.side_stream import SideStream
from automodel.models.cheap_dropout import use_cheap_dropout
from automodel.models.checkpointing import use_gradient_checkpointing
from automodel.models.compiled_blocks import repeated_blocks
from automodel.models.cpu_linears import use_cpu_products
from automodel.models.forward import make_loss_forward
from automodel.models.fp8 import use_fp8
from automodel.models.fuse import fuse, layers_of, will_fuse
from automodel.models.head_outputs import Outputs
from automodel.models.pooled_block import pool_last_block
from automodel.models.recompute import use_own_checkpoints, will_recompute
from automodel.models.task_head import TaskHead
from automodel.optim.build import build_optimizer, parameter_groups
from automodel.optim.quantized import eight_bit_parameters
from automodel.optim.schedule import Schedule
from automodel.plan.fp8 import asked_fp8
from automodel.plan.plan import Decision, Plan


def make_fitting_step(
    prepared: Prepared, observer: Observer = NOBODY
) -> tuple[Prepared, Any, TrainStep | CapturedStep]:
    """Model and step, with micro-batches that fit the GPU; the plan that comes back says what had to change."""
    if prepared.plan.capture:
        ahead.import_triton()
        if prepared.ranks.together:  # NCCL takes its own memory now, before anybody asks what fits
            prepared.ranks.add_up([torch.zeros(1, device=prepared.plan.device)])
    while True:
        randomness.seed_everything(prepared.cfg.seed)
        notes: list[Decision] = []
        model, step = make_step(prepared, notes)
        prepared = _with_lines(prepared, notes)
        observer.model_loaded()
        if isinstance(step, CapturedStep):
            ahead.wait()
        if prepared.plan.compile:
            prepared = try_compiled(prepared, model, step, make_step_loader(prepared))
            if not prepared.plan.compile:
                del model, step
                release_memory()
                continue
            randomness.seed_everything(prepared.cfg.seed)
        if not isinstance(step, CapturedStep) and (prepared.plan.device == "cpu" or prepared.layout.fsdp):
            return prepared, model, step
        loader = make_step_loader(prepared)
        if isinstance(step, CapturedStep) and prepared.plan.fp8:
            prepared = guarded(prepared, model, step, loader.collate(loader.order.micro_batches(0, 0)[0].tolist()))
        # What does not fit on one rank is made smaller on all: they have to take the same steps.
        if not prepared.ranks.highest(int(not fits(prepared, step, loader))):
            randomness.seed_everything(prepared.cfg.seed)
            return prepared, model, step
        two_streams = on_two_streams(prepared, step)
        if isinstance(step, CapturedStep):
            step.hand_on_streams()  # new ones would cost every attempt memory that the one before had
        del model, step
        release_memory()
        if prepared.plan.device == "cuda":
            torch.cuda.reset_peak_memory_stats()  # of a batch that is not the run's
        prepared = smaller(prepared, two_streams)


def _with_lines(prepared: Prepared, notes: list[Decision]) -> Prepared:
    """The run with these lines in its plan, each once: a step may be made several times."""
    plan, names = prepared.plan, {line.name for line in notes}
    kept = (line for line in plan.decisions if line.name not in names)
    return replace(prepared, plan=replace(plan, decisions=(*kept, *notes))) if notes else prepared


def make_step(prepared: Prepared, notes: list[Decision] | None = None) -> tuple[Any, TrainStep | CapturedStep]:
    """`notes`: gets what was found of the loaded model."""
    plan = prepared.plan
    notes = [] if notes is None else notes
    if prepared.layout.fsdp:
        from automodel.engine.sharded_build import make_sharded_step  # FSDP takes a fifth of a second to import

        return make_sharded_step(prepared, lambda: make_step_loader(prepared).collate([0]), notes)
    model = load_trainable(prepared)
    notes += filter(None, [check_own_loss(prepared, model)])
    if plan.checkpointing != "none":
        use_gradient_checkpointing(model, plan.checkpointing)
    if plan.offload or (plan.checkpointing != "none" and plan.fused_kernels and will_recompute(model)):
        use_own_checkpoints(model, plan.offload)
    return model, make_captured_step(prepared, model) if plan.capture else make_eager_step(prepared, model)


def make_eager_step(prepared: Prepared, model: Any) -> TrainStep:
    cfg, plan = prepared.cfg, prepared.plan
    forward, copies = make_eager_forward(model, prepared.task.head, plan)
    if plan.compile:
        compile_model(prepared, model)
    optimizer_class = None
    if cfg.optimizer.target:
        optimizer_class = resolve_target(cfg.optimizer.target, "optimizer", cfg.optimizer.extra, prepared.trust)
    optimizer = build_optimizer(model, cfg.optimizer, optimizer_class, plan.optimizer, loraplus_ratio(prepared))
    tell_copies(optimizer, copies)
    rows = None
    if plan.word_rows:
        read = words_read(prepared.train, model.get_input_embeddings(), prepared.tokenizer)
        rows = UsedRows(model, read, optimizer)
    return TrainStep(
        model,
        forward,
        prepared.loss,
        optimizer,
        Schedule(cfg.lr_scheduler, plan.total_steps),
        peak_lr=cfg.optimizer.lr,
        max_norm=cfg.training_optimizations.gradient_clipping,
        precision=precision_around(plan),
        device=plan.device,
        rows=rows,
        ranks=prepared.ranks,
        wire=wire_dtype(cfg.distributed.reduce_dtype),
    )


def make_eager_forward(model: Any, head: TaskHead, plan: Plan) -> tuple[Forward, Bf16Copies | None]:
    """The forward pass of plain steps, with what it swaps in the model; and the copies of matrices that it reads."""
    pooled = plan.pooled_last_block and pool_last_block(model)
    copies = Bf16Copies() if plan.own_products and plan.precision == "bf16" else None
    forward = make_loss_forward(model, head, plan.path, swapped=pooled, fused=plan.fused_loss, copies=copies)
    if plan.device == "cpu" and not plan.compile:
        use_cheap_dropout(model)
    if plan.own_products or plan.whole_layers:
        products = make_products(plan.precision, plan.products)
        use_cpu_products(model, products, copies, whole_layers=plan.whole_layers, linears=plan.own_products)
    if copies is None:
        return forward, None

    def with_fresh_copies(batch: Batch) -> Outputs:
        copies.refresh()
        return forward(batch)

    return with_fresh_copies, copies


def tell_copies(optimizer: torch.optim.Optimizer, copies: Bf16Copies | None) -> None:
    """Copies of matrices are out of date after every update."""
    if copies is not None:
        optimizer.register_step_post_hook(lambda *_: copies.forget())


def precision_around(plan: Plan) -> str:
    """What is around the products of a plain step: where these are our own, nothing casts."""
    return "fp32" if plan.own_products else plan.precision


def make_captured_step(prepared: Prepared, model: Any) -> CapturedStep:
    """Flat parameters first (query, key and value become neighbours), then the fused blocks over them."""
    cfg, plan = prepared.cfg, prepared.plan
    schedule = Schedule(cfg.lr_scheduler, plan.total_steps)
    peak = cfg.optimizer.lr
    factors = [schedule.lr_at(step, peak) / peak for step in range(plan.total_steps)]
    accumulates = plan.grad_acc_steps > 1
    layers = layers_of(model) if plan.late_update and will_fuse(model) else []
    together, host = prepared.ranks.together, plan.device == "cpu"
    optimizer = FlatAdamW(
        parameter_groups(model, cfg.optimizer, loraplus_ratio(prepared)),
        lr=peak,
        **cfg.optimizer.adam,
        max_norm=cfg.training_optimizations.gradient_clipping or float("inf"),
        copy_dtype=half_of(prepared),
        flat_gradients=accumulates,
        lr_factors=torch.tensor(factors, dtype=torch.float64),
        initial_loss_scale=2.0**16 if plan.precision == "fp16" else None,
        lazy=model.get_input_embeddings().weight if plan.lazy_embeddings and will_fuse(model) else None,
        late=late_parameters(layers),
        eight_bit=eight_bit_parameters(model) if plan.optimizer is not None and plan.optimizer.bits == 8 else (),
        placed=together and not accumulates,
    )
    own_seed = cfg.seed + seed_offset_of(prepared.ranks.rank)
    seed = torch.full((1,), own_seed, dtype=torch.int64, device=plan.device)
    # What the second stream reads lives longer: the inner tensors of a layer, into the next one.
    tight = plan.offload and prepared.adapter is not None
    side = SideStream() if plan.second_stream and not (accumulates or tight or host) else None
    kept = (plan.norms_again, plan.gates_kept)
    fused = fuse(model, seed, side, plan.max_length, *kept) if plan.fused_kernels else 0
    if plan.fp8 and (asked := asked_fp8(cfg)):
        use_fp8(model, asked[1].filter_fqns)
    few_classes = prepared.task.head.wants == "pooled" and prepared.loss.plain
    forward = make_loss_forward(
        model, prepared.task.head, plan.path, swapped=bool(fused), fused=plan.fused_loss or few_classes
    )
    if plan.compile:
        compile_model(prepared, model)
    make: Any = CapturedStep
    if together:
        wire = wire_dtype(cfg.distributed.reduce_dtype)
        shared = {"ranks": prepared.ranks, "wire": wire, "blocks": repeated_blocks(model)}
        make = partial(TogetherOnHost if host else TogetherStep, **shared)
    return make(
        model,
        forward,
        prepared.loss,
        optimizer,
        schedule,
        peak_lr=peak,
        seed=seed,
        accumulates=accumulates,
        device=plan.device,
        side=side,
        compiled=plan.compile,
        late=LateUpdates(optimizer, layers, side.stream) if layers and side is not None else None,
    )


def make_collator(
    prepared: Prepared, data: PreparedData, batch_size: int, recorded: bool = False
) -> PackedCollator | PaddedCollator:
    """`recorded`: whether steps of its batches may be recorded, which evaluations are not."""
    plan = prepared.plan
    if plan.path == "packed":
        return PackedCollator(
            data.store,
            place=prepared.task.rows.labels,
            pool=prepared.packing.pooling or "first",
            bucket_tokens=plan.bucket_tokens,
            bucket_reads=plan.bucket_reads if recorded else plan.evaluated_reads,
            max_seqlen=plan.max_length,
            micro_batch_size=batch_size,
            sort_tokens=plan.capture or plan.fused_kernels,
            longest_first=plan.capture or plan.fused_kernels,
        )
    return PaddedCollator(
        data.store,
        place=prepared.task.rows.labels,
        pad_token_id=prepared.tokenizer.pad_token_id or 0,
        padding_side="right",
    )


def make_step_loader(prepared: Prepared) -> StepLoader:
    cfg, plan = prepared.cfg.dataloader, prepared.plan
    return StepLoader(
        make_collator(prepared, prepared.train, plan.micro_batch_size, recorded=True),
        lengths=prepared.train.store.lengths,
        micro_batch_size=plan.micro_batch_size,
        grad_acc_steps=plan.grad_acc_steps * prepared.layout.data_ranks,
        seed=prepared.cfg.seed,
        shuffle=cfg.shuffle is not False,
        drop_last=cfg.drop_last,
        group_by_length=plan.path == "padded" and cfg.shuffle is not False and cfg.group_by_length is not False,
        packed_sequence_size=plan.packed_sequence_size,
        mixture=prepared.train.mixture,
        num_workers=plan.num_workers,
        pin_memory=plan.pin_memory,
        persistent_workers=cfg.persistent_workers,
        prefetch_factor=cfg.prefetch_factor,
        rank=prepared.layout.data_rank(prepared.ranks.rank),
        ranks=prepared.layout.data_ranks,
    )
