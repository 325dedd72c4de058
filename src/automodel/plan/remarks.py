"""Lines of the plan that decide nothing but leave no key unanswered.

Optimizer, schedule and sinks are shown as they will be used. A key that cannot matter on this machine or on this path
(`distributed` on one device, `tf32` on the CPU, the order of an evaluation) gets a line that says so: whoever wrote it
should not have to wonder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from automodel.data.config import DatasetConfig
from automodel.data.sources import is_local
from automodel.metrics.progress import format_lr
from automodel.optim.kinds import Kind
from automodel.optim.schedule import Schedule
from automodel.plan.config import RunConfig
from automodel.plan.facts import ModelFacts
from automodel.plan.hardware import Hardware
from automodel.plan.plan import Decision
from automodel.tasks.task import Task

UNUSED_IN_EVALUATIONS = ("shuffle", "drop_last", "group_by_length", "persistent_workers", "prefetch_factor")
"""Keys of the validation loader that an evaluation of every row, in its own order, has no use for."""


def how_it_learns(cfg: RunConfig, total_steps: int, kind: Kind | None) -> Iterator[Decision]:
    """Optimizer, clipping, schedule and the loss's adjustments. `kind`: the optimizer, where it is not a class of the
    user's."""
    optimizer, schedule = cfg.optimizer, Schedule(cfg.lr_scheduler, total_steps)
    shown = kind.in_words if kind else (optimizer.target or "").split(".")[-1]
    decay = _decay(cfg, shown)
    norm = cfg.training_optimizations.gradient_clipping
    clipping = f"gradients clipped at norm {norm:g}" if norm else "gradients not clipped"
    if kind and kind.algorithm == "muon":
        own = f", lr {format_lr(optimizer.muon_lr)} there" if optimizer.muon_lr else ""
        decay = f"for the matrices of hidden layers{own}, AdamW for the rest; {decay}"
    yield Decision("optimizer", f"{shown}, lr {format_lr(optimizer.lr)}", f"{decay}; {clipping}")
    warmup = schedule.warmup_steps
    begin = f"{warmup} warm-up step{'s' if warmup > 1 else ''}" if warmup else "no warm-up"
    if warmup >= total_steps > 1:
        last = format_lr(schedule.lr_at(total_steps - 1, optimizer.lr))
        yield Decision("schedule", cfg.lr_scheduler.name, f"{begin}, but only {total_steps} steps: it ends at {last}")
    else:
        yield Decision("schedule", cfg.lr_scheduler.name, begin + _then(schedule, optimizer.lr))
    loss = cfg.loss_fn
    if loss.label_smoothing or loss.class_weights or loss.z_loss:
        parts = [f"label smoothing {loss.label_smoothing:g}"] if loss.label_smoothing else []
        parts += ["class weights"] if loss.class_weights else []
        parts += [f"z-loss {loss.z_loss:g}"] if loss.z_loss else []
        yield Decision("loss", " and ".join(parts), "loss_fn asks for it")


def _decay(cfg: RunConfig, shown: str) -> str:
    """How much weights decay, where, and who says so. `shown`: the optimizer's name."""
    optimizer, decay = cfg.optimizer, cfg.optimizer.decay
    if decay == 0:
        return "no weight decay" + (
            ", so decay_norms_and_biases changes nothing" if optimizer.decay_norms_and_biases else ""
        )
    where = "everywhere" if optimizer.decay_norms_and_biases else "not on norms and biases"
    if decay is None:
        return f"weight decay as {shown} has it, {where}"
    whose = "" if optimizer.weight_decay else f" ({shown}'s own default)"
    return f"weight decay {decay:g}{whose}, {where}"


def _then(schedule: Schedule, peak: float) -> str:
    """What the rate does after the warm-up."""
    name, floor = schedule.cfg.name, format_lr(schedule.floor(peak))
    last = format_lr(schedule.lr_at(max(0, schedule.total_steps - 1), peak))
    if name.startswith("constant"):
        return ""
    if name == "inverse_sqrt":
        return f", then by the square root of the steps, {last} at the end"
    if name in ("wsd", "warmup_stable_decay"):
        return _steady_and_down(schedule, peak, floor)
    if waves := schedule.cfg.num_cycles:  # which may end anywhere
        kind = "falls" if name == "cosine_with_restarts" else "waves"
        return f", then a cosine of {waves:g} {kind}, {last} at the end"
    return f", then down to {floor}"


def _steady_and_down(schedule: Schedule, peak: float, floor: str) -> str:
    """What is left for `wsd` after the warm-up."""
    total, warmup, falling = schedule.total_steps, schedule.warmup_steps, schedule.last_phase
    if warmup + falling < total:
        return f", then steady, and down to {floor} in the last {falling}"
    if warmup + falling == total:
        return f", then down to {floor} in the last {falling}"
    start = format_lr(schedule.lr_at(warmup, peak))
    too_many = f"warm-up and decay ({warmup} + {falling}) are more than the {total} steps"
    return f", then from {start} down to {floor}: {too_many}"


def adapter(cfg: RunConfig, task: Task, trained: int, parameters: int, words: str) -> Iterator[Decision]:
    """What is trained beside a frozen model."""
    if cfg.peft is None:
        return
    share = trained / max(1, parameters)
    start = f"; starts from {cfg.peft.pretrained_adapter}" if cfg.peft.pretrained_adapter else ""
    reason = f"{words}; everything else is frozen{start}"
    if cfg.peft.loraplus_lr_ratio:
        reason += f"; B learns {cfg.peft.loraplus_lr_ratio:g} times as fast (LoRA+)"
    if cfg.model.extra and not task.head.has_classes:  # whose folder has a config of its own
        changed = ", ".join(cfg.model.extra)
        reason += (
            f"; PEFT's folder does not hold changes of the base's config ({changed}): make them where it is loaded"
        )
    kind = "DoRA" if cfg.peft.use_dora else "LoRA"
    yield Decision("adapter", f"{kind}, {trained:,} parameters ({share:.1%})", reason)
    if cfg.peft.use_triton:
        reason = "adapters are thin products, which cuBLAS makes; on a GPU they stand inside fused blocks (see kernels)"
        yield Decision("use_triton", "not needed", reason)


def mixture(cfg: RunConfig, model: ModelFacts, grad_acc_steps: int, ranks: int) -> Iterator[Decision]:
    """What a mixture of experts has besides. `ranks`: that have documents of their own."""
    if not model.experts and not model.balance:
        return
    if cfg.peft is not None and model.experts:
        held = ", and they are not packed into few bits" if cfg.quantization is not None else ""
        share = f"{model.experts / model.parameters:.0%} of the parameters lie in stacks"
        reason = f"{share}, which are no linear layers: no adapter stands beside them{held}"
        yield Decision("experts", "as they are", reason)
    if model.balance:
        reason = "model.output_router_logits is true; in evaluations it does not count"
        if ranks > 1:
            reason += f"; of the tokens of all {ranks} ranks together"
        if grad_acc_steps > 1:
            reason += f"; of each of {grad_acc_steps} micro-batches, weighted by its tokens"
        if grad_acc_steps * ranks > 1:
            parts = "the micro-batches" if ranks == 1 else "micro-batches and ranks"
            reason += f"; HF Trainer adds up those of {parts}, about {grad_acc_steps * ranks} times as much"
        yield Decision("router", f"balance loss, weight {model.balance:g}", reason)
    else:
        yield Decision("router", "no balance loss", "model.output_router_logits is not true, or its weight is 0")


def sinks(cfg: RunConfig) -> Iterator[Decision]:
    """Where the numbers go besides the run folder."""
    chosen = [
        name
        for name, section in (("wandb", cfg.wandb), ("mlflow", cfg.mlflow), ("tensorboard", cfg.tensorboard))
        if section is not None and getattr(section, "enabled", True)
    ]
    if chosen:
        yield Decision("sinks", ", ".join(chosen), "besides run/metrics.jsonl and run/report.html")


def provider(cfg: RunConfig) -> Iterator[Decision]:
    """Another tool's choice of engine."""
    if cfg.compares_first:
        reason = (
            "stock Trainer runs the same training first: provider: huggingface, and a benchmark: section asks for it"
        )
        yield Decision("provider", "this engine", reason)
    elif cfg.provider == "huggingface":
        reason = "it trains once; `automodel benchmark` (or a benchmark: section) compares with stock Trainer"
        yield Decision("provider", "this engine", reason)
    elif cfg.provider == "unsloth":
        yield Decision("provider", "this engine", "it takes Unsloth's place, with kernels of its own")


def without_effect(
    cfg: RunConfig, path: str, hardware: Hardware, ranks: int = 1, *, compiled: bool = False
) -> Iterator[Decision]:
    """Keys that were given and change nothing here, each with the reason."""
    layout = cfg.distributed
    if layout.cpu_offload and (ranks == 1 or hardware.device == "cpu"):
        reason = "parts are in host memory already" if ranks > 1 else "there is one rank, which has no parts"
        yield Decision("cpu_offload", "not used", reason)
    if ranks == 1 and (layout.target or layout.strategy or layout.reduce_dtype):
        kind = (layout.target or layout.strategy or "reduce_dtype").split(".")[-1]
        reason = f"{kind} has nothing to share out on one device: one shard is the whole model, trained as without it"
        yield Decision("distributed", "1 device", reason)
    if cfg.training_optimizations.tf32 and not hardware.tf32:
        yield Decision("tf32", "off", f"{hardware.name} has no TF32")
    if cfg.dataloader.group_by_length and path == "packed":
        yield Decision("group_by_length", "not needed", "the packed path has no padding to save")
    if cfg.dataloader.shuffle is False:
        yield Decision("shuffle", False, "dataloader.shuffle is false: the same order in every epoch")
    if cfg.benchmark is not None and not cfg.compares_first:
        yield Decision(
            "benchmark", "not used", "these are settings of `automodel benchmark`; finetune has none of them"
        )
    yield from _of_evaluations(cfg)
    yield from _of_the_step(cfg, path, hardware, compiled)
    yield from _of_the_hub(cfg)


def _of_evaluations(cfg: RunConfig) -> Iterator[Decision]:
    """Keys of `validation_dataloader:`."""
    loader = cfg.validation_dataloader
    if cfg.validation_dataset is None:
        if given := _given(loader, tuple(f.name for f in fields(loader) if f.name != "target")):
            keys = ", ".join(f"validation_dataloader.{name}" for name in given)
            later = "; `automodel evaluate` reads the batch_size" if "batch_size" in given else ""
            yield Decision("not used", keys, f"there is no validation_dataset{later}")
        return
    unused = [name for name in UNUSED_IN_EVALUATIONS if getattr(loader, name)]
    unused += ["pin_memory"] if loader.pin_memory is not None else []
    if unused:
        keys = ", ".join(f"validation_dataloader.{name}" for name in unused)
        yield Decision("evaluation", "all rows, longest first", f"{keys}: changes no metric and is not needed")


def _of_the_step(cfg: RunConfig, path: str, hardware: Hardware, compiled: bool) -> Iterator[Decision]:
    """Keys of how a step runs, where it runs in another way."""
    if cfg.packed_sequence.bucket_tokens and path != "packed":
        yield Decision("not used", "packed_sequence.bucket_tokens", "padded batches are not rounded up to buckets")
    if cfg.training_optimizations.capture and hardware.device == "cpu":
        yield Decision("not used", "training_optimizations.capture", "there is no GPU to record steps on")
    if not compiled:
        for name in _given(cfg.compile, ("mode", "dynamic", "fullgraph")):
            yield Decision("not used", f"compile.{name}", "no block is compiled")
    quantized = cfg.quantization
    if quantized is not None and quantized.load_in_8bit:
        for name in _given(quantized, ("bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant")):
            yield Decision("not used", f"quantization.{name}", "load_in_8bit: the base weights have 8 bits")


def _of_the_hub(cfg: RunConfig) -> Iterator[Decision]:
    """Keys that say which version of something on the hub is meant, beside what lies here."""
    model = cfg.model
    folders = [name for name in (model.pretrained_model_name_or_path, model.tokenizer) if name]
    here = [os.path.isdir(os.path.expanduser(name)) for name in folders]
    unused = {"revision": here[0], "cache_dir": all(here)}  # the tokenizer's revision is its own
    for name in _given(model, tuple(name for name in unused if unused[name])):
        yield Decision("not used", f"model.{name}", f"{folders[0]} is a folder here, not a name on the hub")
    for where, section in (("dataset", cfg.dataset), ("validation_dataset", cfg.validation_dataset)):
        for place, part, path in _read_here(where, section, cfg.dataset) if section is not None else ():
            for key in _given(part, ("name", "revision")):
                yield Decision("not used", f"{place}.{key}", f"{path} is read from here, not from the hub")


def _read_here(where: str, section: DatasetConfig, train: DatasetConfig) -> Iterator[tuple[str, Any, str]]:
    """The parts of a section whose rows are in local files, with their places in the config; the section itself is
    among them where it is all of them."""
    own = section if section.path or section.target or section.mixture else train  # validation data of the same place
    if own.has_maker:
        return  # who makes rows may take anything
    parts = own.mixture or (own,)
    here = [is_local(part.path or "", part.data_files or section.data_files) for part in parts]
    if all(here):
        yield where, section, ", ".join(str(part.path) for part in parts)
    for number, part in enumerate(section.mixture or ()):
        if here[number]:
            yield f"{where}.mixture.{number}", part, part.path


def _given(section: Any, names: tuple[str, ...]) -> list[str]:
    """Those keys of a section that are not left at their defaults."""
    return [f.name for f in fields(section) if f.name in names and getattr(section, f.name) != f.default]
