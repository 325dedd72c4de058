"""What has to fit into memory: the optimizer's form, gradient checkpointing, and the line that shows the sum.

Both choices depend on each other and on whether steps are captured, so each candidate is estimated as it would run,
from the fastest to the smallest, and the first that fits is taken. A paged optimizer of 32 bits computes what the plain
one computes; where its state fits, there is nothing to page, and the plain one runs in captured steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING

from automodel.config.errors import UserError
from automodel.distributed.layout import ONE, Layout
from automodel.optim.kinds import CAPTURED, INSTALL, KINDS, Kind, has_bitsandbytes
from automodel.plan.asked import asked_checkpointing
from automodel.plan.config import RunConfig
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.fp8 import asked_fp8
from automodel.plan.memory import (
    FITS,
    GIB,
    MODES,
    Estimate,
    Mode,
    Setting,
    can_keep_gates,
    can_norm_again,
    estimate,
    in_words,
    largest_batch_tokens,
    mean_document,
)
from automodel.plan.packing import base_line, packings
from automodel.plan.plan import Decision
from automodel.plan.remedies import remedies_in_words
from automodel.plan.speed import decide_capture, decide_fused
from automodel.tasks.task import Task

if TYPE_CHECKING:
    from automodel.adapters.config import Packing
    from automodel.plan.hardware import Hardware  # which imports torch


NORMS_AGAIN_SHARE = 1 / 6
"""Of the GPU's memory. A run that needs less has nothing to gain from half a percent of its time."""


@dataclass(frozen=True)
class Load:
    """The largest micro-batch of the run."""

    tokens: int
    rows: int
    """Rows whose logits are computed; 0 where the head is small."""
    attended: float
    """How many tokens a token attends to, on average."""


@dataclass(frozen=True)
class Fitting:
    """What was decided."""

    kind: Kind | None
    """The optimizer; none: the class that `_target_` names."""
    checkpointing: Mode
    estimate: Estimate
    offload: bool = False
    """Whether inputs of recomputed layers wait in host memory."""
    packing: Packing | None = None
    """Of frozen weights in few bits."""
    norms_saved: float = 0.0
    """Bytes that are not kept because norms are made again; 0: they are not."""
    gates_kept: float = 0.0
    """Bytes that are kept although they could be made again, in the MLPs; 0: they are not."""
    unknown: str = ""
    """Why activations and logits are not in the estimate, where they are not."""
    setting: Setting = field(kw_only=True)
    """What was estimated."""
    cannot_fit: bool = False
    """Whether even the smallest batch is too much."""
    remedies: str = ""
    """What needs less memory, where the estimate does not fit."""


def load_of(task: Task, path: str, data: DataFacts, *, batch: int, batches: int, bucket: int, size: int) -> Load:
    """The largest of so many micro-batches of `batch` documents, or of bins of `size` tokens where that is not 0."""
    lengths = data.lengths
    if size:
        tokens = size
    elif path == "padded" or lengths is None:
        tokens = batch * data.longest
    else:
        tokens = largest_batch_tokens(lengths, batch, batches, bucket)
    attended = data.longest if path == "padded" or lengths is None else mean_document(lengths)
    return Load(tokens, tokens if task.head.wants == "vocabulary" else 0, float(attended))


def decide_fitting(
    cfg: RunConfig,
    hardware: Hardware,
    model: ModelFacts,
    load: Load,
    *,
    precision: str,
    path: str,
    stored_logits: bool = True,
    layout: Layout = ONE,
    accumulates: bool = False,
    smallest: bool = False,
    lines: list[Decision],
) -> Fitting:
    """The first candidate that fits, or the smallest. `smallest`: micro-batches cannot be halved."""
    tried: list[Fitting] = []
    halves, ranks = not smallest, layout.size
    for kind in _kinds(cfg, hardware):
        # Expanding costs less than computing again, and that less than moving to the host.
        for (mode, offload), packing in product(_modes(cfg, hardware, smallest), packings(cfg)):
            captured = decide_capture(
                cfg, path, hardware, [], kind=kind, checkpointing=mode, dropout=model.dropout is not None,
                layout=layout,
            )  # fmt: skip
            setting = Setting(
                precision=precision,
                captured=captured,
                fused=decide_fused(cfg, model, hardware, precision, captured, [], path=path, layout=layout),
                kind=kind,
                checkpointing=mode,
                tokens=-(-load.tokens // layout.cp),
                rows=-(-load.rows // layout.cp),
                attended=load.attended,
                device=hardware.device,
                stored_logits=stored_logits,
                offload=offload and captured,
                trained=model.trained,
                packing=packing,
                shards=layout.shards * layout.cp * layout.tp if layout.fsdp else 1,
                accumulates=accumulates,
            )
            if offload and not cfg.training_optimizations.activation_offload and not setting.fused:
                continue  # unasked, only where it is known to work
            if kind is not None and kind.bits == 8 and not captured and not has_bitsandbytes():
                raise _no_library(cfg.optimizer.name, kind)
            tried.append(_fitting(hardware, model, setting, fp8=asked_fp8(cfg) is not None))
            if tried[-1].estimate.fits(hardware.memory_gib):
                return _told(
                    cfg, hardware, model, load, tried, precision, lines, halves=not smallest, ranks=layout.size
                )
    return _told(cfg, hardware, model, load, tried, precision, lines, halves=halves, ranks=ranks)


def may_be_captured(cfg: RunConfig, path: str, hardware: Hardware, layout: Layout) -> bool:
    """Whether steps are recorded, unless little memory asks for something that cannot be."""
    return any(
        decide_capture(cfg, path, hardware, [], kind=kind, checkpointing="none", dropout=False, layout=layout)
        for kind in _kinds(cfg, hardware)
    )


def _fitting(hardware: Hardware, model: ModelFacts, setting: Setting, fp8: bool) -> Fitting:
    """One candidate, as it would run. `fp8`: products keep what they read in FP8, not what norms gave."""
    unknown = model.no_shape
    try:
        found, saved, kept = estimate(model.shape, model.parameters, setting), 0.0, 0.0
    except Exception as error:  # sizes of a family that was not tried here; the run itself may be right
        unknown = f"the sizes in the config of {model.model_type} do not fit together ({type(error).__name__})"
        model, found, saved, kept = replace(model, shape=None), estimate(None, model.parameters, setting), 0.0, 0.0
    much = found.total > NORMS_AGAIN_SHARE * hardware.memory_gib * GIB
    if not fp8 and much and can_norm_again(model.shape, setting):
        less = estimate(model.shape, model.parameters, replace(setting, norms_again=True))
        found, saved = less, found.total - less.total
    elif not fp8 and not much and can_keep_gates(model.shape, setting):
        more = estimate(model.shape, model.parameters, replace(setting, gates_kept=True))
        found, kept = more, more.total - found.total
    return Fitting(
        setting.kind, setting.checkpointing, found, setting.offload, setting.packing, saved, kept, unknown,
        setting=replace(setting, norms_again=saved > 0, gates_kept=kept > 0),
    )  # fmt: skip


def _modes(cfg: RunConfig, hardware: Hardware, smallest: bool) -> list[tuple[Mode, bool]]:
    """What may be computed again, and whether its inputs may wait in host memory: the fastest first."""
    asked, options = asked_checkpointing(cfg), cfg.training_optimizations
    if options.gradient_checkpointing is None and (hardware.device == "cpu" or not smallest):
        return [("none", False)]
    modes: tuple[Mode, ...] = MODES if asked == "auto" else (asked,)
    found = [(mode, bool(options.activation_offload)) for mode in modes]
    if asked == "auto" and options.activation_offload is None:
        found.append(("full", True))
    return found


def _kinds(cfg: RunConfig, hardware: Hardware) -> list[Kind | None]:
    """The forms of the optimizer that may be used, the fastest first."""
    name = cfg.optimizer.name
    if cfg.optimizer.target is not None:
        return [None]
    kind = KINDS[name]
    if kind.bits == 8 and hardware.device == "cpu":
        raise UserError(
            f"optimizer.name: {name} keeps its state in 8 bits to save GPU memory, and there is no GPU here. "
            f"Use {kind.algorithm}."
        )
    if kind.paged and kind.bits == 32:
        return [Kind(kind.algorithm)] if hardware.device == "cpu" else [Kind(kind.algorithm), kind]
    return [kind]


def _no_library(name: str, kind: Kind) -> UserError:
    own = ", unless steps are captured (see training_optimizations.capture)" if kind in CAPTURED else ""
    return UserError(f"optimizer.name: {name} comes from bitsandbytes{own}, which is not installed: {INSTALL}.")


def _told(
    cfg: RunConfig,
    hardware: Hardware,
    model: ModelFacts,
    load: Load,
    tried: list[Fitting],
    precision: str,
    lines: list[Decision],
    *,
    halves: bool,
    ranks: int,
) -> Fitting:
    """The last candidate, with the lines that say why. `halves`: whether micro-batches can be halved."""
    chosen = tried[-1]
    known = replace(model, shape=None) if chosen.unknown else model  # whose sizes an estimate fell over
    if (base := base_line(cfg, tried, precision)) is not None:
        lines.append(base)
    _tell_paging(cfg, hardware, tried, lines)
    asked, unsaid = asked_checkpointing(cfg), cfg.training_optimizations.gradient_checkpointing is None
    if asked == "auto" and not (unsaid and chosen.checkpointing == "none"):
        alike = [t for t in tried if (t.kind, t.packing) == (chosen.kind, chosen.packing)]
        sums = ", ".join(
            f"{t.checkpointing}{' with inputs on the host' if t.offload else ''} {in_words(t.estimate.total)}"
            for t in alike
        )
        room = f"of the {in_words(FITS * hardware.memory_gib * GIB)} that may be filled"
        lines.append(Decision("checkpointing", chosen.checkpointing, f"auto: {sums} {room}"))
    elif chosen.checkpointing != "none" and asked != "auto":
        which = "every layer" if asked == "full" else "every other layer"
        lines.append(Decision("checkpointing", asked, f"{which} is computed again in the backward pass; asked for"))
    if chosen.norms_saved:
        saved = in_words(chosen.norms_saved)
        reason = f"what they give is made again for the gradients of the products behind them, not kept: {saved} less"
        lines.append(Decision("norms", "made again", reason))
    if chosen.gates_kept:
        more = in_words(chosen.gates_kept)
        reason = (
            f"of so few tokens the input of each MLP's last product is kept, not made again: {more} more, for speed"
        )
        lines.append(Decision("gates", "kept", reason))
    if not chosen.estimate.fits(hardware.memory_gib):
        chosen = replace(
            chosen,
            cannot_fit=_cannot_fit(hardware, chosen.estimate, halves),
            remedies=_remedies(cfg, known, chosen.setting, hardware, halves),
        )
    lines.append(_memory_line(cfg, hardware, load, chosen, ranks))
    return chosen


def _tell_paging(cfg: RunConfig, hardware: Hardware, tried: list[Fitting], lines: list[Decision]) -> None:
    asked, chosen = None if cfg.optimizer.target else KINDS[cfg.optimizer.name], tried[-1]
    if asked is None or not asked.paged or asked.bits == 8:
        return
    if chosen.kind == asked:
        if not has_bitsandbytes():
            raise UserError(
                f"optimizer.name: without paging about {in_words(tried[0].estimate.total)} are needed, and there are "
                f"{hardware.memory_gib:.0f} GiB; {cfg.optimizer.name} comes from bitsandbytes, which is not installed: "
                f"{INSTALL}."
            )
        reason = f"{in_words(chosen.estimate.on_host)} of states move between GPU and host as they are needed"
        lines.append(Decision("paging", "on", reason))
    elif hardware.device == "cpu":
        reason = "states are in host memory anyway; the numbers are the same"
        lines.append(Decision("paging", "not needed", reason))
    else:
        lines.append(Decision("paging", "not needed", "everything fits into GPU memory; the numbers are the same"))


def _memory_line(cfg: RunConfig, hardware: Hardware, load: Load, chosen: Fitting, ranks: int) -> Decision:
    parts = chosen.estimate
    named = {"weights": parts.weights, "gradients": parts.gradients, "optimizer": parts.states}
    if parts.adapter:
        named = {_frozen_in_words(chosen): parts.weights - parts.adapter, "adapter": parts.adapter, **named}
        del named["weights"]
    words = [f"{name} {in_words(size)}" for name, size in named.items()]
    if parts.activations:
        words.append(f"activations of {load.tokens:,} tokens {in_words(parts.activations)}")
    else:
        words.append("activations not known" + (f", because {chosen.unknown}" if chosen.unknown else ""))
    if parts.logits > 0.01 * parts.total:
        words.append(f"logits {in_words(parts.logits)}")
    reason = "estimate: " + ", ".join(words)
    if hardware.device == "cpu" and ranks > 1:
        reason += f"; each of the {ranks} ranks needs as much of the same memory"
    if parts.fits(hardware.memory_gib):
        return Decision("memory", f"{in_words(parts.total)} of {hardware.memory_gib:.0f} GiB", reason)
    reason += "; this cannot fit" if chosen.cannot_fit else "; this may not fit"
    whole = not cfg.distributed.shards and cfg.distributed.tp_size * cfg.distributed.cp_size == 1
    if whole and hardware.gpus > 1:
        reason += f"; distributed.strategy: fsdp2 shares weights and states among {hardware.gpus} GPUs"
    reason += f". {chosen.remedies}"
    return Decision("memory", f"{in_words(parts.total)}, and there are {hardware.memory_gib:.0f} GiB", reason)


def _frozen_in_words(chosen: Fitting) -> str:
    """What the frozen weights are held in: what is expanded and kept takes the memory of what it was expanded to."""
    packing, precision = chosen.packing, chosen.setting.precision
    if packing is None:
        return "frozen weights"
    if packing.resident:
        return f"frozen weights ({precision.removesuffix('-pure')}, expanded from {packing.in_words()})"
    return f"frozen weights (products in {packing.in_words()})"


def _remedies(cfg: RunConfig, model: ModelFacts, setting: Setting, hardware: Hardware, halves: bool) -> str:
    try:
        return remedies_in_words(cfg, model, setting, hardware.memory_gib, halves=halves)
    except Exception:  # sizes that one estimate takes and another does not: they must not end a run
        return "A smaller model needs less."


def _cannot_fit(hardware: Hardware, parts: Estimate, halves: bool) -> bool:
    """Whether no batch of the run fits. On a GPU micro-batches are halved until they do, so what counts is the rest. On
    the CPU nothing is halved, and the system ends a process without a word where memory runs out."""
    sure = parts.weights + parts.gradients + parts.states if halves and hardware.device == "cuda" else parts.total
    return sure > hardware.memory_gib * GIB
