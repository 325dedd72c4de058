"""From request to plan: every automatic choice is made here, once, with its reason.

`make_plan` sees the config, the machine, what the model's config allows and how the data looks. It never sees
weights. Each small function below decides one thing and returns it together with the line a person reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from automodel.config.errors import UserError
from automodel.data.loader import DEFAULT_PREFETCH
from automodel.plan.config import RunConfig
from automodel.plan.hardware import Hardware
from automodel.plan.plan import Decision, Plan
from automodel.plan.remarks import how_it_learns, sinks, without_effect

SMALLEST_BUCKET, LARGEST_BUCKET = 64, 2048
CAPTURE_S = 0.05  # recording one shape of a 6- to 12-layer encoder, measured
SHAPES_PER_PART = 0.8  # batches spread over about 80 % of their mean
DEFAULT_BATCH_SIZE = 8
DEFAULT_EPOCHS = 3

DTYPE_PRECISION = {
    "float32": "fp32",
    "fp32": "fp32",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
}


@dataclass(frozen=True)
class ModelFacts:
    """What the plan needs to know of the model, read from its config."""

    name: str
    model_type: str
    parameters: int
    can_pack: bool
    packing_reason: str
    can_fuse: bool = False
    """Whether the family has fused blocks."""
    can_pool: bool = False
    """Whether its last block can run for the pooled token alone."""
    layers: int = 0


@dataclass(frozen=True)
class DataFacts:
    """What the plan needs to know of the data."""

    rows: int
    tokens: int
    longest: int
    max_length: int
    has_validation: bool
    notes: tuple[str, ...] = ()
    """What a person should know about the data."""
    columns: str = ""
    """What is read and what is learned, e.g. `text → label`."""
    labels: str = ""
    """The classes in words, where there are any."""


def make_plan(cfg: RunConfig, task: str, hardware: Hardware, model: ModelFacts, data: DataFacts) -> Plan:
    lines: list[Decision] = [
        Decision("task", task, "from the config" if cfg.task else "inferred from the model class"),
        Decision("device", hardware.device, _device_reason(hardware)),
        Decision("model", model.name, f"{model.model_type}, {_counted(model.parameters)} parameters"),
        Decision(
            "data",
            f"{data.rows:,} examples",
            f"{data.tokens:,} tokens, mean {data.tokens / max(1, data.rows):.0f}, longest {data.longest}, "
            f"cut at {data.max_length}",
        ),
    ]
    if data.columns:
        lines.append(Decision("columns", data.columns, data.labels or "what is read and what is learned"))
    lines += [Decision("note", "data", note) for note in data.notes]
    precision = _precision(cfg, hardware, lines)
    path = _path(cfg, model, data, lines)
    micro, accumulation = _batch(cfg, lines)
    steps_per_epoch, total, epochs = _steps(cfg, data.rows, micro * accumulation, lines)
    mean_tokens = micro * data.tokens / max(1, data.rows)
    bucket = _bucket(cfg, path, hardware, model.parameters, mean_tokens, total * accumulation, lines)
    lines += how_it_learns(cfg, total)
    validate, save = _intervals(cfg, data, steps_per_epoch, total, lines)
    capture = _capture(cfg, path, hardware, lines)
    fused = _fused(cfg, model, precision, capture, lines)
    pooled = _pooled(cfg, task, path, model, capture, fused, lines)
    compiled = _compile(cfg, hardware, capture, lines)
    _attention(cfg, path, hardware, lines)
    workers = _workers(cfg, hardware, lines)
    pin = cfg.dataloader.pin_memory if cfg.dataloader.pin_memory is not None else hardware.device == "cuda"
    if pin and hardware.device == "cpu":
        pin = False
        lines.append(Decision("pin_memory", False, "there is no GPU to copy to"))
    lines += sinks(cfg)
    lines += without_effect(cfg, path, hardware)
    return Plan(
        task=task,
        device=hardware.device,
        precision=precision,
        path=path,
        bucket_tokens=bucket,
        max_length=data.max_length,
        micro_batch_size=micro,
        grad_acc_steps=accumulation,
        global_batch_size=micro * accumulation,
        steps_per_epoch=steps_per_epoch,
        total_steps=total,
        num_epochs=epochs,
        val_every_steps=validate,
        ckpt_every_steps=save,
        capture=capture,
        pooled_last_block=pooled,
        fused_kernels=fused,
        compile=compiled,
        num_workers=workers,
        pin_memory=pin,
        parameters=model.parameters,
        decisions=tuple(lines),
    )


def _counted(number: int) -> str:
    """`66.4M`, `1.24B`, `260k`."""
    for size, unit, digits in ((1e9, "B", 2), (1e6, "M", 1), (1e3, "k", 0)):
        if number >= size:
            return f"{number / size:.{digits}f}{unit}"
    return str(number)


def _device_reason(hardware: Hardware) -> str:
    if hardware.device == "cuda":
        more = f"; 1 of {hardware.gpus} GPUs is used" if hardware.gpus > 1 else ""
        return f"{hardware.name}, {hardware.memory_gib:.0f} GiB{more}"
    return f"no CUDA GPU found; {hardware.name}, {hardware.cores} cores, {hardware.memory_gib:.0f} GiB"


def asked_precision(cfg: RunConfig) -> tuple[str, str]:
    """The precision the config asks for and the key it came from; `auto` where it leaves the choice open."""
    options = cfg.training_optimizations
    if options.precision != "auto":
        return options.precision, "training_optimizations.precision"
    if options.bf16:
        return "bf16", "training_optimizations.bf16"
    if options.fp16:
        return "fp16", "training_optimizations.fp16"
    if cfg.model.torch_dtype and cfg.model.torch_dtype != "auto":
        name = cfg.model.torch_dtype.removeprefix("torch.")
        return DTYPE_PRECISION[name], "model.torch_dtype"
    return "auto", ""


def _precision(cfg: RunConfig, hardware: Hardware, lines: list[Decision]) -> str:
    asked, key = asked_precision(cfg)
    if asked == "auto":
        allowed = cfg.training_optimizations.bf16 is not False
        value = "bf16" if hardware.bf16 and allowed else "fp32"
        if value == "bf16":
            reason = "bf16 compute over fp32 master weights: native here and safe"
        elif hardware.device == "cpu":
            reason = "this processor has no native bf16 (AMX)"
        elif not allowed:
            reason = "bf16 is turned off"
        else:
            reason = "this GPU has no native bf16"
    else:
        value, reason = asked, f"{key} asks for it"
        if asked.startswith("bf16") and hardware.device == "cuda" and not hardware.bf16:
            raise UserError(
                f"{key} asks for bf16, but {hardware.name} has no native bf16. "
                "Use training_optimizations.precision: fp32, or fp16 on GPUs with tensor cores."
            )
        if asked == "fp16" and hardware.device == "cpu":
            raise UserError(f"{key} asks for fp16, which needs a GPU. Use fp32 (or bf16) on the CPU.")
        if asked == "tf32" and not hardware.tf32:
            raise UserError(f"{key} asks for tf32, which needs an Ampere or newer GPU. Use fp32 here.")
        if asked == "bf16":
            reason += "; master weights and optimizer states stay fp32"
            if hardware.device == "cpu" and not hardware.bf16:
                reason += "; without AMX this is slower than fp32 on this processor"
    lines.append(Decision("precision", value, reason))
    return value


def _path(cfg: RunConfig, model: ModelFacts, data: DataFacts, lines: list[Decision]) -> Literal["packed", "padded"]:
    wish = cfg.packed_sequence.enabled
    if wish and not model.can_pack:
        raise UserError(
            f"packed_sequence.enabled is true, but {model.model_type} cannot be packed: {model.packing_reason}. "
            "Leave it out to take the padded path."
        )
    if model.can_pack and wish is not False:
        lines.append(Decision("path", "packed", f"no padding: {model.packing_reason}"))
        return "packed"
    reason = "packed_sequence.enabled is false" if wish is False else model.packing_reason
    grouping = cfg.dataloader.group_by_length is not False
    lines.append(Decision("path", "padded", reason + ("; batches of similar lengths" if grouping else "")))
    return "padded"


def _bucket(
    cfg: RunConfig,
    path: str,
    hardware: Hardware,
    parameters: int,
    mean_tokens: float,
    steps: int,
    lines: list[Decision],
) -> int:
    """Rounding makes shapes repeat. Coarse buckets waste arithmetic in every step, fine ones cost a capture each."""
    asked = cfg.packed_sequence.bucket_tokens
    if path != "packed":
        return 1
    if asked is not None:
        lines.append(Decision("buckets", asked, "packed_sequence.bucket_tokens asks for it"))
        return asked
    if hardware.device == "cpu":
        lines.append(Decision("buckets", "off", "on the CPU a new shape costs nothing, a dummy token does"))
        return 1
    step_s = 6 * parameters * mean_tokens / 400e12

    def cost(parts: int) -> float:
        """Seconds of the run spent on captures and on dummy tokens, for buckets of a mean batch / parts."""
        return SHAPES_PER_PART * parts * CAPTURE_S + steps * step_s * 0.5 / parts

    parts = min((4, 8, 16, 32), key=cost)
    bucket = 2 ** round(math.log2(max(1.0, mean_tokens / parts)))
    bucket = min(max(bucket, SMALLEST_BUCKET), LARGEST_BUCKET)
    share = bucket / 2 / max(1.0, mean_tokens)
    reason = f"shapes repeat at about {share:.0%} dummy tokens; finer ones would cost more captures than they save"
    lines.append(Decision("buckets", bucket, reason))
    return bucket


def _batch(cfg: RunConfig, lines: list[Decision]) -> tuple[int, int]:
    schedule = cfg.step_scheduler
    micro = schedule.local_batch_size or cfg.dataloader.batch_size or DEFAULT_BATCH_SIZE
    if schedule.global_batch_size:
        if schedule.global_batch_size % micro:
            raise UserError(
                f"step_scheduler.global_batch_size: {schedule.global_batch_size} is not a multiple of the micro-batch "
                f"of {micro} examples. Use a multiple, or change dataloader.batch_size."
            )
        accumulation = schedule.global_batch_size // micro
        reason = f"global_batch_size {schedule.global_batch_size}"
    else:
        accumulation = schedule.grad_acc_steps or 1
        reason = "one micro-batch for each step" if accumulation == 1 else "grad_acc_steps"
    lines.append(Decision("batch", f"{micro} × {accumulation} = {micro * accumulation}", reason))
    return micro, accumulation


def _steps(cfg: RunConfig, rows: int, global_batch: int, lines: list[Decision]) -> tuple[int, int, float]:
    steps_per_epoch = rows // global_batch if cfg.dataloader.drop_last else math.ceil(rows / global_batch)
    if steps_per_epoch == 0:
        raise UserError(
            f"dataloader.drop_last drops everything: {rows} examples do not fill one batch of {global_batch}. "
            "Set drop_last: false or use a smaller batch."
        )
    schedule = cfg.step_scheduler
    by_epochs = (schedule.num_epochs or DEFAULT_EPOCHS) * steps_per_epoch
    if schedule.max_steps is None:
        total = by_epochs
        reason = _epochs(schedule.num_epochs or DEFAULT_EPOCHS, steps_per_epoch)
    elif schedule.num_epochs is None:
        total = schedule.max_steps
        reason = f"max_steps; an epoch is {steps_per_epoch}"
    else:
        total = min(schedule.max_steps, by_epochs)
        epochs = _epochs(schedule.num_epochs, steps_per_epoch)
        reason = f"the smaller of max_steps {schedule.max_steps} and {epochs}"
    lines.append(Decision("steps", total, reason))
    return steps_per_epoch, total, total / steps_per_epoch


def _epochs(count: int, steps: int) -> str:
    return f"{count} epoch{'s' if count != 1 else ''} of {steps}"


def _intervals(
    cfg: RunConfig, data: DataFacts, steps_per_epoch: int, total: int, lines: list[Decision]
) -> tuple[int, int]:
    schedule = cfg.step_scheduler
    validate = 0
    if data.has_validation:
        validate = schedule.val_every_steps or min(steps_per_epoch, total)
        often = f"every {validate} steps"
        lines.append(Decision("validation", often, "and at the end" if schedule.val_every_steps else "once an epoch"))
    else:
        lines.append(Decision("validation", "none", "no validation_dataset"))
    if not cfg.checkpoint.enabled:
        lines.append(Decision("checkpoints", "off", "checkpoint.enabled is false: no checkpoint and no model is saved"))
        return validate, 0
    save = schedule.ckpt_every_steps or validate or min(steps_per_epoch, total)
    reason = f"the last {cfg.checkpoint.keep_last} are kept" + (
        " and the best" if data.has_validation and cfg.checkpoint.keep_best else ""
    )
    lines.append(Decision("checkpoints", f"every {save} steps", reason))
    return validate, save


def _capture(cfg: RunConfig, path: str, hardware: Hardware, lines: list[Decision]) -> bool:
    """Whether the whole step becomes a CUDA graph; every obstacle is named."""
    optimizer = cfg.optimizer
    plain_adamw = optimizer.target in (None, "torch.optim.AdamW") and optimizer.name.startswith("adamw")
    if hardware.device != "cuda":
        return False
    if cfg.training_optimizations.capture is False:
        reason = "training_optimizations.capture is false"
    elif path != "packed":
        reason = "padded batches have a new shape every time"
    elif not plain_adamw or optimizer.extra:
        reason = "only AdamW is recorded; this optimizer runs step by step"
    elif cfg.training_optimizations.gradient_checkpointing:
        reason = "gradient checkpointing saves random states on the host"
    else:
        lines.append(Decision("step", "captured", "forward, backward, clip and AdamW are one CUDA-graph replay"))
        return True
    lines.append(Decision("step", "eager", reason))
    return False


def _fused(cfg: RunConfig, model: ModelFacts, precision: str, capture: bool, lines: list[Decision]) -> bool:
    """Fused blocks need flat parameters and half precision; `use_liger_kernel: false` asks for none."""
    if not capture:
        return False
    if cfg.model.use_liger_kernel is False:
        lines.append(Decision("kernels", "stock", "model.use_liger_kernel is false"))
        return False
    if precision not in ("bf16", "bf16-pure", "fp16"):
        lines.append(Decision("kernels", "stock", f"fused kernels compute in half precision, not in {precision}"))
        return False
    if not model.can_fuse:
        lines.append(Decision("kernels", "stock", f"{model.model_type} has no fused blocks yet"))
        return False
    lines.append(Decision("kernels", "fused", "residual + dropout + norm, bias + GELU, joined query/key/value"))
    return True


def _pooled(
    cfg: RunConfig, task: str, path: str, model: ModelFacts, capture: bool, fused: bool, lines: list[Decision]
) -> bool:
    """A classifier reads one token of each document, so its last block need not compute the others. Exact."""
    plain = not capture and not cfg.training_optimizations.gradient_checkpointing
    if task != "text-classification" or path != "packed" or not model.can_pool or not (fused or plain):
        return False
    # Of a block's 12 N² multiplications a token, keys and values (2 N²) remain.
    saved = 10 / 12 / max(1, model.layers)
    lines.append(Decision("last block", "pooled token only", f"exact; saves {saved:.0%} of the encoder's arithmetic"))
    return True


def _compile(cfg: RunConfig, hardware: Hardware, capture: bool, lines: list[Decision]) -> bool:
    wish = cfg.training_optimizations.use_compile
    if wish is None and cfg.compile.enabled != "auto":
        wish = bool(cfg.compile.enabled)
    if wish and hardware.device == "cpu":
        # Documents have any length and are attended one by one here: every batch would compile anew.
        lines.append(
            Decision("compile", "off", "asked for, but on the CPU every batch has a new shape; eager is exact")
        )
        return False
    if wish and capture:
        reason = "asked for, but captured steps are not compiled yet; training_optimizations.capture: false compiles"
        lines.append(Decision("compile", "off", reason))
        return False
    if wish:
        lines.append(Decision("compile", "on", f"asked for, mode {cfg.compile.mode}"))
        return True
    lines.append(Decision("compile", "off", "eager kernels start at once" if wish is None else "turned off"))
    return False


def _attention(cfg: RunConfig, path: str, hardware: Hardware, lines: list[Decision]) -> None:
    """Says what became of the reference's attention and kernel keywords; none of them changes a result."""
    asked = cfg.model.attn_implementation
    if path == "packed":
        used = "variable-length flash attention" if hardware.device == "cuda" else "SDPA, document by document"
    else:
        used = asked if asked in ("sdpa", "eager") else "sdpa"
    if cfg.model.use_sdpa_patching is False and asked is None:
        asked = "eager"  # the reference's way of asking for plain attention
        used = used if path == "packed" else asked
    reason = f"{asked} was asked for; this is exact too" if asked and asked != used else "exact, no mask"
    lines.append(Decision("attention", used, reason if path == "packed" or asked else "the model's own"))
    if cfg.model.use_liger_kernel:
        lines.append(Decision("liger", "not used", "our own kernels on a GPU (see kernels), torch's on the CPU"))


def _workers(cfg: RunConfig, hardware: Hardware, lines: list[Decision]) -> int:
    """Collation processes. Results do not depend on their number; more of them than cores only compete."""
    loader, asked = cfg.dataloader, cfg.dataloader.num_workers
    # Flat arrays collate in microseconds; a second process pays only while a GPU would otherwise wait.
    default = 0 if hardware.device == "cpu" else min(2, hardware.cores - 1)
    workers = default if asked is None else min(asked, hardware.cores)
    reason = "collation processes" if workers else "collation in the main process"
    if asked is not None and asked > workers:
        reason += f"; {asked} were asked for, but there are only {hardware.cores} cores"
    if workers:
        reason += f", each {loader.prefetch_factor or DEFAULT_PREFETCH} batches ahead"
        reason += "; new ones in every epoch" if loader.persistent_workers is False else ""
    elif loader.prefetch_factor or loader.persistent_workers:
        reason += "; set dataloader.num_workers to have workers that fetch ahead or persist"
    lines.append(Decision("workers", workers, reason))
    return workers
