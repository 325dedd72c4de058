"""From request to plan: every automatic choice is made here, once, with its reason.

`make_plan` sees the config, the machine, what the model's config allows and how the data looks. It never sees
weights. Each small function below decides one thing and returns it together with the line a person reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from automodel.data.loader import DEFAULT_PREFETCH
from automodel.distributed.layout import ONE, Layout
from automodel.plan.batches import Batches, cut_into_steps
from automodel.plan.bins import no_packing
from automodel.plan.buckets import decide_rounding
from automodel.plan.compile_pays import NOTHING_KNOWN, CompileFacts, decide_compile
from automodel.plan.config import RunConfig
from automodel.plan.facts import NO_PRODUCTS, DataFacts, ModelFacts, ProductFacts
from automodel.plan.fitting import Fitting, decide_fitting, load_of
from automodel.plan.fp8 import decide_fp8
from automodel.plan.hardware import Hardware
from automodel.plan.layout import layout_in_words, refuse_cut_head, refuse_with_shards, share_tokens
from automodel.plan.loss import decide_loss
from automodel.plan.memory import GIB, in_words
from automodel.plan.packing import refuse_packed
from automodel.plan.plan import Decision, Plan
from automodel.plan.precision import decide_precision, decide_products
from automodel.plan.remarks import adapter, how_it_learns, mixture, provider, sinks, without_effect
from automodel.plan.speed import (
    BF16_COPIES,
    decide_attention,
    decide_capture,
    decide_fused,
    decide_late_update,
    decide_lazy_embeddings,
    decide_offload,
    decide_pooled,
    decide_whole_layers,
    decide_word_rows,
    has_own_products,
    tell_what_is_read,
)
from automodel.plan.time import time_line
from automodel.tasks.task import Task

if TYPE_CHECKING:
    from automodel.data.stats import Cut


def make_plan(
    cfg: RunConfig,
    task: Task,
    hardware: Hardware,
    model: ModelFacts,
    data: DataFacts,
    compiling: CompileFacts = NOTHING_KNOWN,
    layout: Layout = ONE,
    why_ranks: str = "",
    products: ProductFacts = NO_PRODUCTS,
) -> Plan:
    lines = _what(cfg, task, hardware, model, data, layout, why_ranks)
    packs: list[Decision] = []
    path = _path(cfg, model, data, packs)
    own_layers = has_own_products(cfg, hardware, model, layout)
    precision = decide_precision(cfg, hardware, products, lines, own_layers=own_layers, packed=path == "packed")
    lines += packs
    batches, mean_tokens = cut_into_steps(cfg, data, layout.data_ranks, lines)
    total = batches.total_steps
    rounding = decide_rounding(cfg, path, hardware, model, data, batches, layout, lines)
    bucket = share_tokens(layout, rounding.tokens, model.shape, lines)
    fused_loss, fitting, room = _room(
        cfg, task, hardware, model, data, batches, precision=precision, path=path, bucket=bucket, layout=layout,
        lines=lines,
    )  # fmt: skip
    lines += adapter(cfg, task, model.trained, model.parameters, model.adapter_in_words)
    lines += mixture(cfg, model, batches.grad_acc_steps, layout.data_ranks)
    lines += how_it_learns(cfg, total, fitting.kind)
    validate, save = _intervals(cfg, data, batches.steps_per_epoch, total, lines)
    lines += room
    step = _step(
        cfg, task, hardware, model, data, compiling, batches, mean_tokens, fitting, precision=precision, path=path,
        layout=layout, read=data.learned if rounding.read is None else rounding.read, own_layers=own_layers,
        lines=lines,
    )  # fmt: skip
    own_layers = own_layers and not step.compile
    library = decide_products(hardware, products, precision, lines, own_layers=own_layers)
    own_products = own_layers and (precision == "bf16" or library == "onednn")
    if own_products and precision == "bf16":
        lines.append(BF16_COPIES)
    decide_attention(cfg, path, hardware, step.fused_kernels, lines)
    lines.append(
        time_line(
            hardware,
            model,
            data,
            batches,
            read=data.learned if rounding.read is None else rounding.read,
            checkpointing=fitting.checkpointing,
            ranks=layout.size,
            evaluations=-(-total // validate) if validate else 0,
        )
    )
    workers, pin = _workers(cfg, hardware, step.capture, lines), _pins(cfg, hardware, step.capture, lines)
    lines += [*sinks(cfg), *provider(cfg)]
    lines += without_effect(cfg, path, hardware, layout.size, compiled=step.compile)
    return Plan(
        task=task.name,
        device=hardware.device,
        precision=precision,
        path=path,
        bucket_tokens=bucket,
        bucket_reads=rounding.reads * bucket // rounding.tokens,
        max_length=data.max_length,
        val_every_steps=validate,
        ckpt_every_steps=save,
        num_workers=workers,
        pin_memory=pin,
        parameters=model.parameters,
        decisions=tuple(lines),
        fused_loss=fused_loss,
        packed_sequence_size=cfg.packed_sequence.packed_sequence_size,
        optimizer=fitting.kind,
        checkpointing=fitting.checkpointing,
        packing=fitting.packing,
        norms_again=fitting.norms_saved > 0,
        gates_kept=fitting.gates_kept > 0,
        memory_gib=round(fitting.estimate.total / GIB, 3),
        cannot_fit=_cannot_fit(hardware, fitting),
        ranks=layout.size,
        products=library,
        own_products=own_products,
        **batches._asdict(),
        **step._asdict(),
    )


def _cannot_fit(hardware: Hardware, fitting: Fitting) -> str:
    if not fitting.cannot_fit:
        return ""
    need, there = in_words(fitting.estimate.total), f"{hardware.memory_gib:.0f} GiB"
    return f"the run needs about {need} of memory, and {hardware.name} has {there}. {fitting.remedies}"


def _room(
    cfg: RunConfig,
    task: Task,
    hardware: Hardware,
    model: ModelFacts,
    data: DataFacts,
    batches: Batches,
    *,
    precision: str,
    path: Literal["packed", "padded"],
    bucket: int,
    layout: Layout,
    lines: list[Decision],
) -> tuple[bool, Fitting, list[Decision]]:
    """What the memory decides: whether logits are stored, optimizer and checkpointing. Its own lines come later."""
    micro, accumulation, room = batches.micro_batch_size, batches.grad_acc_steps, []
    size, count = cfg.packed_sequence.packed_sequence_size, batches.total_steps * accumulation
    load = load_of(task, path, data, batch=micro, batches=count, bucket=bucket, size=size)
    fused_loss = decide_loss(cfg, task, model, hardware, precision, load.rows, lines)
    fitting = decide_fitting(
        cfg, hardware, model, load, precision=precision, path=path, stored_logits=not fused_loss, layout=layout,
        accumulates=accumulation > 1, smallest=bool(size) or micro == 1, lines=room,
    )  # fmt: skip
    refuse_packed(cfg, layout, model.model_type)
    refuse_with_shards(layout, fitting.kind, precision, cfg)
    refuse_cut_head(layout, task, model)
    return fused_loss, fitting, room


class _Step(NamedTuple):
    """How a step runs, under the plan's own names."""

    capture: bool
    fused_kernels: bool
    compile: bool
    compile_mode: str
    offload: bool
    fp8: bool
    pooled_last_block: bool
    late_update: bool
    lazy_embeddings: bool
    word_rows: int
    whole_layers: bool


def _step(
    cfg: RunConfig,
    task: Task,
    hardware: Hardware,
    model: ModelFacts,
    data: DataFacts,
    compiling: CompileFacts,
    batches: Batches,
    tokens: float,
    fitting: Fitting,
    *,
    precision: str,
    path: Literal["packed", "padded"],
    layout: Layout,
    read: float,
    own_layers: bool,
    lines: list[Decision],
) -> _Step:
    kind, checkpointing = fitting.kind, fitting.checkpointing
    accumulation = batches.grad_acc_steps
    capture = decide_capture(
        cfg, path, hardware, lines, kind=kind, checkpointing=checkpointing, dropout=model.dropout is not None,
        layout=layout,
    )  # fmt: skip
    fused = decide_fused(cfg, model, hardware, precision, capture, lines, path=path, layout=layout)
    mode = None if layout.fsdp else decide_compile(
        cfg, hardware, compiling, steps=batches.total_steps, accumulation=accumulation, tokens=tokens,
        precision=precision, capture=capture, fused=fused, lines=lines,
    )  # fmt: skip
    compiled, kept = mode is not None, checkpointing == "none"
    offload = decide_offload(cfg, checkpointing, fitting.offload, lines, capture=capture, compiled=compiled)
    fp8 = decide_fp8(cfg, hardware, model, precision, lines, capture=capture, fused=fused, compiled=compiled)
    # A plain pooled block reads boundaries on the host, so it can be neither recorded nor compiled.
    split = layout.tp > 1 or layout.cp > 1
    pooled = not split and decide_pooled(task, path, model, checkpointing, capture or compiled, fused, lines)
    tell_what_is_read(task, path, model, read, fused, lines)
    # 8-bit moments save memory; gradients that wait for the next step would cost what they save.
    wide = capture and (kind is None or kind.bits == 32) and not model.trained  # an adapter's update is over at once
    waiting = fitting.estimate.gradients / max(1.0, fitting.estimate.total)
    waiting = 0.0 if layout.size > 1 else waiting  # gradients of several ranks have places of their own anyway
    late = decide_late_update(fused and wide and kept, accumulation, model.parameters, tokens, waiting, lines)
    lazy = decide_lazy_embeddings(task, fused and wide, accumulation, lines, layout.size)
    plain = kept and not compiled and not layout.fsdp
    word_rows = decide_word_rows(cfg, task, hardware, model, data, lines, kind=kind, plain=plain)
    whole = (
        plain and not split and decide_whole_layers(cfg, hardware, model, precision, path, lines, own_layers=own_layers)
    )
    return _Step(capture, fused, compiled, mode or "", offload, fp8, pooled, late, lazy, word_rows, whole)


def _what(
    cfg: RunConfig, task: Task, hardware: Hardware, model: ModelFacts, data: DataFacts, layout: Layout, why_ranks: str
) -> list[Decision]:
    """What is trained, on what, where."""
    lines = [
        Decision("task", task.name, "from the config" if cfg.task else "inferred from the model class"),
        Decision("device", hardware.device, _device_reason(hardware, layout.size, why_ranks)),
        Decision("model", model.name, f"{model.model_type}, {_counted(model.parameters)} parameters"),
        Decision(
            "data",
            f"{data.rows:,} examples",
            f"{data.tokens:,} tokens, mean {data.tokens / max(1, data.rows):.0f}, {_longest(data)}",
        ),
    ]
    lines += [Decision("cut", cut.how_many, _of_cut(task, section, cut)) for section, cut in data.cuts]
    if layout.size > 1:
        why = f"{why_ranks}; " if why_ranks else ""
        lines.insert(2, Decision("ranks", f"{layout.size}, {layout.in_words()}", why + layout_in_words(layout)))
    if data.columns:
        lines.append(Decision("columns", data.columns, data.labels or "what is read and what is learned"))
    if data.mixture is not None:
        lines.append(Decision("mixture", f"{data.mixture.total:,} examples an epoch", data.mixture.in_words()))
    lines += [Decision("note", "data", note) for note in data.notes]
    return lines


def _longest(data: DataFacts) -> str:
    """The longest document as it was written, and what `max_length` makes of it."""
    longest, limit = data.longest_whole or data.longest, f"{data.max_length:,}"
    if longest <= data.max_length:
        done = f"none is {'split' if data.splits else 'cut'} at {limit}"
    else:
        done = f"continued in further samples of up to {limit}" if data.splits else f"cut at {limit}"
    return f"longest {longest:,}, {done}"


def _of_cut(task: Task, section: str, cut: Cut) -> str:
    """Of which part of the data, and what is lost with what was cut."""
    used = "learned" if section == "dataset" else "measured"
    lost = f"; the tags beyond are not {used}" if task.rows.labels == "token" else ""
    return f"{section}: {cut.why}{lost}"


def _pins(cfg: RunConfig, hardware: Hardware, capture: bool, lines: list[Decision]) -> bool:
    """Whether the loader's batches wait in page-locked memory."""
    wish = cfg.dataloader.pin_memory
    if hardware.device == "cpu" or capture:
        if wish:
            own = "captured steps have page-locked buffers of their own"
            lines.append(Decision("pin_memory", False, own if capture else "there is no GPU to copy to"))
        return False
    return wish is not False


def _counted(number: int) -> str:
    """`66.4M`, `1.24B`, `260k`."""
    for size, unit, digits in ((1e9, "B", 2), (1e6, "M", 1), (1e3, "k", 0)):
        if number >= size:
            return f"{number / size:.{digits}f}{unit}"
    return str(number)


def _device_reason(hardware: Hardware, ranks: int, why_ranks: str) -> str:
    if hardware.device == "cuda":
        why = why_ranks or f"`automodel finetune llm --nproc-per-node {hardware.gpus}` uses all"
        several = f"; 1 of {hardware.gpus} GPUs is used: {why}"
        more = several if hardware.gpus > 1 and ranks == 1 else ""
        return f"{hardware.name}, {hardware.memory_gib:.0f} GiB{more}"
    return f"no CUDA GPU found; {hardware.name}, {hardware.cores} cores, {hardware.memory_gib:.0f} GiB"


def _path(cfg: RunConfig, model: ModelFacts, data: DataFacts, lines: list[Decision]) -> Literal["packed", "padded"]:
    wish = cfg.packed_sequence.enabled
    if (wish or cfg.packed_sequence.packed_sequence_size) and not model.can_pack:
        raise no_packing(model.model_type, model.packing_reason, cfg)
    if model.can_pack and wish is not False:
        lines.append(Decision("padding", "none, documents are packed", model.packing_reason))
        return "packed"
    reason = "packed_sequence.enabled is false" if wish is False else model.packing_reason
    grouping = cfg.dataloader.group_by_length is not False
    grouped = "; batches of similar lengths (group_by_length)" if grouping else ""
    lines.append(Decision("padding", "to the longest of a batch", reason + grouped))
    return "padded"


def _intervals(
    cfg: RunConfig, data: DataFacts, steps_per_epoch: int, total: int, lines: list[Decision]
) -> tuple[int, int]:
    schedule = cfg.step_scheduler
    validate = 0
    if data.has_validation:
        validate = schedule.val_every_steps or min(steps_per_epoch, total)
        often, why = every(validate), "and at the end" if schedule.val_every_steps else "once an epoch"
        if not schedule.val_every_steps and total <= steps_per_epoch:
            often, why = "at the end", "the run has no more than one epoch; step_scheduler.val_every_steps: N for more"
        lines.append(Decision("validation", often, why))
    else:
        lines.append(Decision("validation", "none", "no validation_dataset"))
    if not cfg.checkpoint.enabled:
        lines.append(Decision("checkpoints", "off", "checkpoint.enabled is false: no checkpoint and no model is saved"))
        return validate, 0
    save = schedule.ckpt_every_steps or validate or min(steps_per_epoch, total)
    reason = f"the last {cfg.checkpoint.keep_last} are kept" + (
        " and the best" if data.has_validation and cfg.checkpoint.keep_best else ""
    )
    reason += "; written while training goes on" if cfg.checkpoint.async_save else "; training waits for the disk"
    lines.append(Decision("checkpoints", every(save), reason))
    return validate, save


def every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"


def _workers(cfg: RunConfig, hardware: Hardware, capture: bool, lines: list[Decision]) -> int:
    """Collation processes. Results do not depend on their number; more of them than cores only compete."""
    loader, asked = cfg.dataloader, cfg.dataloader.num_workers
    # Flat arrays collate in microseconds, and who replays a captured step has nothing else to do. A second process pays
    # only while a GPU would otherwise wait.
    default = 0 if hardware.device == "cpu" or capture else min(2, hardware.cores - 1)
    workers = default if asked is None else min(asked, hardware.cores)
    reason = "collation processes" if workers else "collation in the main process"
    if not workers and capture and asked is None:
        reason += ", which is idle while a captured step runs"
    if asked is not None and asked > workers:
        reason += f"; {asked} were asked for, but there are only {hardware.cores} cores"
    if workers:
        reason += f", each {loader.prefetch_factor or DEFAULT_PREFETCH} batches ahead"
        reason += "; new ones in every epoch" if loader.persistent_workers is False else ""
    elif loader.prefetch_factor or loader.persistent_workers:
        reason += "; set dataloader.num_workers to have workers that fetch ahead or persist"
    lines.append(Decision("workers", workers, reason))
    return workers
