"""What can be wrong between sections, said before a model or a row of data is read.

`check_run` finds contradictions: two keys that cannot both be meant. `not_yet` lists keys that are understood but
whose feature comes in a later release: `config validate` mentions them, `finetune` refuses them, nothing is ignored.
Each check is a small generator that yields problems.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from automodel.config.errors import ConfigError, Problem, UserError
from automodel.config.gate import REMOTE_CODE, REMOTE_DATA, canonical, resolve_target
from automodel.config.load import read_config
from automodel.config.names import near
from automodel.config.targets import SLOTS
from automodel.config.written import as_written
from automodel.data.config import MixtureEntry
from automodel.data.keys import foreign_keys
from automodel.data.permitted import refusals
from automodel.distributed.layout import ranks_wanted
from automodel.distributed.step_aside import BECAUSE
from automodel.optim.config import LRSchedulerConfig
from automodel.optim.schedule import Schedule
from automodel.plan.config import RunConfig
from automodel.plan.places import as_meant
from automodel.tasks.registry import ROW_FORMATS, TASKS, task_named

DTYPES = {"auto": "auto", "float32": "fp32", "fp32": "fp32", "bfloat16": "bf16", "bf16": "bf16"}
DTYPES |= {"float16": "fp16", "fp16": "fp16"}

ATTENTION = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "sdpa", "eager")

PATH_NEEDED = ("automodel.TextClassificationDataset", "datasets.load_dataset", "datasets.load_from_disk")
"""Datasets that mean nothing without a path; a maker of the user's may not need one."""

_BY_METRIC = (
    "changes the rate by what was measured so far, so it is no function of the step: a resumed run would take another "
    "course, and steps recorded as CUDA graphs know their rates beforehand. "
)
NO_FUNCTION_OF_THE_STEP = {
    "reduce_lr_on_plateau": _BY_METRIC + "Use `cosine` or `linear`, with `early_stopping:` for the plateau.",
    "greedy": _BY_METRIC + "Use `cosine`.",
}

_WAVES = ("cosine", "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr")
_STABLE = ("wsd", "warmup_stable_decay")
KEYS_OF_SHAPES = {
    "decay_steps": _STABLE,
    "decay_ratio": _STABLE,
    "decay_type": _STABLE,
    "power": ("polynomial",),
    "num_cycles": _WAVES,
    "timescale": ("inverse_sqrt",),
}
"""Keys of `lr_scheduler:` that only some shapes have."""

TASK_OF_CLASS = {task.head.auto_class: task for task in reversed(TASKS)}
"""The first task that trains the head of an auto class."""


def load_run_config(
    files: Sequence[str | Path],
    overrides: Sequence[str] = (),
    trust: Sequence[str] = (),
    *,
    reads_data: bool = True,
) -> RunConfig:
    """Files and overrides as a `RunConfig` that makes sense. Raises `ConfigError` with everything that is wrong.
    `reads_data`: whether the data it names may have to be read; a saved model is asked without."""
    loaded = read_config(RunConfig, files, overrides, trust)
    if loaded.config is not None:
        for problem in check_run(loaded.config, trust):
            if not loaded.is_bad(problem.path):  # a value that is wrong in itself need not fit the others as well
                loaded.complaints.add(loaded.place_of(problem.path), problem.path, problem.message)
    loaded.complaints.raise_if_any()
    assert loaded.config is not None
    config, notes = as_meant(loaded.config, loaded.places)
    for problem in _not_permitted(config, REMOTE_DATA in trust) if reads_data else ():
        loaded.complaints.add(loaded.place_of(problem.path), problem.path, problem.message)
    loaded.complaints.raise_if_any()
    notes.extend(loaded.flat)
    # Once, where several ranks read the config, and whoever started them before.
    if os.environ.get("RANK", "0") == "0" and BECAUSE not in os.environ:
        for note in notes:
            print(as_written(note), file=sys.stderr)
    return config


def _not_permitted(cfg: RunConfig, remote: bool) -> Iterator[Problem]:
    """What the data sections would have read that may not be. Only now it is known where relative paths lead."""
    for section, where in ((cfg.dataset, "dataset"), (cfg.validation_dataset, "validation_dataset")):
        if section is None:
            continue
        elsewhere = section.path or section.target or section.mixture
        own = section if elsewhere else replace(section, path=cfg.dataset.path)
        entries = [(f"{where}.mixture.{number}", entry) for number, entry in enumerate(section.mixture or ())]
        for place, part in [(where, own), *entries]:
            for key, message in refusals(part, remote=remote):
                if key != "path" or part is not own or own is section:  # said of `dataset` already
                    yield Problem(f"{place}.{key}", message)


def check_run(cfg: RunConfig, trust: Sequence[str] = ()) -> list[Problem]:
    """Contradictions that need neither model nor data to be seen."""
    checks = (
        _data(cfg),
        _task(cfg),
        _batch(cfg),
        _schedule(cfg),
        _validation(cfg),
        _precision(cfg),
        _attention(cfg),
        _compile(cfg),
        _offload(cfg),
        _quantization(cfg),
        _optimizer(cfg, trust),
        _loss(cfg),
        _remote_code(cfg, trust),
    )
    return [problem for check in checks for problem in check]


def _data(cfg: RunConfig) -> Iterator[Problem]:
    if not cfg.model.pretrained_model_name_or_path:
        yield Problem("model.pretrained_model_name_or_path", "is empty: name a model on the hub or a local folder.")
    if not cfg.checkpoint.checkpoint_dir:
        yield Problem("checkpoint.checkpoint_dir", "is empty: name a folder, e.g. `./checkpoints`.")
    maker = canonical(cfg.dataset.target or "")
    if not cfg.dataset.path and cfg.dataset.mixture is None and maker in ("", *PATH_NEEDED):
        yield Problem("dataset.path", "is missing: name a file, a folder or a hub dataset, e.g. `path: reviews.csv`.")
    yield from _mixture(cfg)
    for section, where in ((cfg.dataset, "dataset"), (cfg.validation_dataset, "validation_dataset")):
        if section is not None and section.label_column and section.label_columns:
            yield Problem(f"{where}.label_columns", "give this or `label_column`, not both.")
        if section is not None and section.source_column and section.source_column == section.target_column:
            yield Problem(f"{where}.target_column", "is the source itself, which could be copied. Name another column.")
    for loader, where in ((cfg.dataloader, "dataloader"), (cfg.validation_dataloader, "validation_dataloader")):
        if loader.num_workers == 0 and loader.prefetch_factor is not None:
            yield Problem(f"{where}.prefetch_factor", "needs workers, but `num_workers` is 0. Remove one of the two.")
        if loader.num_workers == 0 and loader.persistent_workers:
            yield Problem(
                f"{where}.persistent_workers", "needs workers, but `num_workers` is 0. Remove one of the two."
            )


def _mixture(cfg: RunConfig) -> Iterator[Problem]:
    for section, where in ((cfg.dataset, "dataset"), (cfg.validation_dataset, "validation_dataset")):
        if section is None or section.mixture is None:
            continue
        if not section.mixture:
            yield Problem(f"{where}.mixture", "is an empty list: name datasets, e.g. `- {path: a.jsonl, weight: 0.7}`.")
        for key in ("path", "target"):
            if getattr(section, key):
                yield Problem(f"{where}.mixture", f"give this or `{'_target_' if key == 'target' else key}`, not both.")
        if where == "validation_dataset":
            for number, entry in enumerate(section.mixture):
                if entry.weight != MixtureEntry.weight:
                    yield Problem(
                        f"{where}.mixture.{number}.weight", "an evaluation reads every row once. Remove the weight."
                    )
    held_out = cfg.validation_dataset
    if cfg.dataset.mixture is not None and held_out and not (held_out.path or held_out.target or held_out.mixture):
        yield Problem("validation_dataset.path", "is missing, and a mixture has no validation split of its own.")


def _task(cfg: RunConfig) -> Iterator[Problem]:
    name = (cfg.model.target or "").rpartition(".")[0].rpartition(".")[2].removeprefix("NeMo")
    task = TASK_OF_CLASS.get(name)
    if task and cfg.task and task.head != task_named(cfg.task).head:
        yield Problem("task", f"is {cfg.task}, but the model's `_target_` {name} is for {task}. Change one of the two.")
    elif known := task_named(cfg.task) if cfg.task else task:  # otherwise the model's own config tells, once it is read
        for section, where in ((cfg.dataset, "dataset"), (cfg.validation_dataset, "validation_dataset")):
            if section is not None and not section.has_maker:
                yield from foreign_keys(known.rows, ROW_FORMATS, section, where)


def _batch(cfg: RunConfig) -> Iterator[Problem]:
    schedule, loader = cfg.step_scheduler, cfg.dataloader
    if schedule.local_batch_size and loader.batch_size and schedule.local_batch_size != loader.batch_size:
        yield Problem(
            "step_scheduler.local_batch_size",
            f"is {schedule.local_batch_size}, but dataloader.batch_size is {loader.batch_size}; they are two names for "
            "the same number. Keep one.",
        )
        return
    micro = schedule.local_batch_size or loader.batch_size
    if micro and schedule.global_batch_size and schedule.global_batch_size % micro:
        below = schedule.global_batch_size // micro * micro
        nearest = f"{below} or {below + micro}" if below else str(micro)
        yield Problem(
            "step_scheduler.global_batch_size",
            f"is {schedule.global_batch_size}, which is not a multiple of the micro-batch of {micro} examples. "
            f"Use {nearest}, or change dataloader.batch_size.",
        )


def _schedule(cfg: RunConfig) -> Iterator[Problem]:
    decay = cfg.lr_scheduler
    if decay.name in NO_FUNCTION_OF_THE_STEP:
        yield Problem("lr_scheduler.name", f"`{decay.name}` {NO_FUNCTION_OF_THE_STEP[decay.name]}")
        return
    if decay.warmup_steps is not None and decay.warmup_ratio is not None:
        yield Problem("lr_scheduler.warmup_ratio", "give this or `warmup_steps`, not both.")
    if decay.decay_steps is not None and decay.decay_ratio != LRSchedulerConfig.decay_ratio:
        yield Problem("lr_scheduler.decay_ratio", "give this or `decay_steps`, not both.")
    if decay.name == "constant" and (decay.warmup_steps or decay.warmup_ratio):
        yield Problem("lr_scheduler.name", "`constant` has no warm-up, but one is given. Use `constant_with_warmup`.")
    for key, shapes in KEYS_OF_SHAPES.items():
        if decay.name not in shapes and getattr(decay, key) != getattr(LRSchedulerConfig, key):
            belongs = " or ".join(f"`name: {shape}`" for shape in shapes)
            yield Problem(f"lr_scheduler.{key}", f"belongs to {belongs}, but the name is `{decay.name}`.")
    yield from _floor(cfg)


def _floor(cfg: RunConfig) -> Iterator[Problem]:
    """Where the learning rate ends."""
    decay, key = cfg.lr_scheduler, "min_lr" if cfg.lr_scheduler.min_lr_ratio is None else "min_lr_ratio"
    given = decay.min_lr is not None or decay.min_lr_ratio is not None
    if decay.min_lr is not None and decay.min_lr_ratio is not None:
        yield Problem("lr_scheduler.min_lr_ratio", "give this or `min_lr`, not both.")
    elif given and decay.name.startswith("constant"):
        yield Problem(f"lr_scheduler.{key}", f"`{decay.name}` does not fall, so it has no lowest rate. Remove it.")
    elif not given and decay.name.endswith("_with_min_lr"):
        yield Problem("lr_scheduler.min_lr", f"is missing: `{decay.name}` falls to `min_lr` or `min_lr_ratio`.")
    floor = Schedule(decay, 1).floor(cfg.optimizer.lr)
    if floor and floor >= cfg.optimizer.lr and decay.min_lr_ratio is None:
        yield Problem(
            "lr_scheduler.min_lr", f"is {floor}, not below the peak optimizer.lr of {cfg.optimizer.lr}. Lower it."
        )


def _validation(cfg: RunConfig) -> Iterator[Problem]:
    watched, best = cfg.early_stopping.metric if cfg.early_stopping else None, cfg.checkpoint.best_metric
    if watched and best and not _one_metric(watched, best):
        yield Problem(
            "early_stopping.metric",
            f"is {watched}, but checkpoint.best_metric is {best}; one metric decides both. Keep one of the two.",
        )
    if cfg.validation_dataset is not None:
        if wrong := wrong_direction(cfg):
            yield Problem("checkpoint.best_mode", wrong)
        return
    needs = "needs a `validation_dataset:` section; add one or remove this."
    if cfg.early_stopping is not None:
        yield Problem("early_stopping", needs)
    if cfg.checkpoint.best_metric is not None:
        yield Problem("checkpoint.best_metric", needs)
    if cfg.checkpoint.best_mode is not None:
        yield Problem("checkpoint.best_mode", needs)
    if cfg.step_scheduler.val_every_steps is not None:
        yield Problem("step_scheduler.val_every_steps", needs)


def _one_metric(name: str, other: str) -> bool:
    """Whether two names mean one metric: Trainer's (`eval_f1`) and `evaluate`'s are known besides our own."""
    from automodel.metrics.compute import metric_called  # numpy, for the few who give both

    return metric_called(name) == metric_called(other)


def wrong_direction(cfg: RunConfig) -> str | None:
    """What is wrong with a `checkpoint.best_mode` that would take the worst weights for the best."""
    asked = cfg.checkpoint.best_mode
    if asked is None:
        return None
    from automodel.metrics.compute import better, is_known, metric_called

    watched = cfg.early_stopping.metric if cfg.early_stopping else None
    metric = metric_called(cfg.checkpoint.best_metric or watched or "loss")
    if not is_known(metric) or better(metric) == asked:
        return None
    least, most = ("smallest", "largest") if asked == "max" else ("largest", "smallest")
    return f"is {asked}, but the {least} {metric} is the best: the {most} would be exported. Remove it."


def _precision(cfg: RunConfig) -> Iterator[Problem]:
    options = cfg.training_optimizations
    if options.bf16 and options.fp16:
        yield Problem("training_optimizations.fp16", "choose this or `bf16`, not both; bf16 where the GPU has it.")
        return
    asked = "bf16" if options.bf16 else "fp16" if options.fp16 else None
    if asked and options.precision not in ("auto", asked) and not options.precision.startswith(asked):
        yield Problem(
            "training_optimizations.precision", f"is {options.precision}, but `{asked}: true` says otherwise. Keep one."
        )
        return
    for switch, value in (("bf16", options.bf16), ("fp16", options.fp16), ("tf32", options.tf32)):
        if value is False and options.precision.startswith(switch):
            yield Problem(
                "training_optimizations.precision",
                f"is {options.precision}, but `{switch}: false` says otherwise. Keep one.",
            )
    yield from _dtype("model.torch_dtype", cfg.model.torch_dtype)
    yield from _dtype("distributed.reduce_dtype", cfg.distributed.reduce_dtype)
    if cfg.quantization is not None:
        yield from _dtype("quantization.bnb_4bit_compute_dtype", cfg.quantization.bnb_4bit_compute_dtype)
    held = DTYPES.get((cfg.model.torch_dtype or "auto").removeprefix("torch."), "auto")
    computed = asked or options.precision
    switched_off = held in ("bf16", "fp16") and getattr(options, held) is False
    if switched_off and computed == "auto":
        off = f"`training_optimizations.{held}: false`"
        yield Problem("model.torch_dtype", f"is {cfg.model.torch_dtype}, but {off} says otherwise. Keep one.")
    # float32 beside bf16 is no contradiction: bf16 computes over fp32 master weights anyway.
    if held in ("bf16", "fp16") and computed != "auto" and not computed.startswith(held):
        key = f"`training_optimizations.{asked or 'precision'}`"
        yield Problem("model.torch_dtype", f"is {cfg.model.torch_dtype}, but {key} asks for {computed}. Keep one.")


def _dtype(path: str, name: str | None) -> Iterator[Problem]:
    if name is None or name.removeprefix("torch.") in DTYPES:
        return
    guess = near(name.removeprefix("torch."), list(DTYPES), cutoff=0.5)
    hint = f" Did you mean `{guess}`?" if guess else ""
    yield Problem(path, f"there is no dtype {name!r} here; use float32, bfloat16, float16 or auto.{hint}")


def _attention(cfg: RunConfig) -> Iterator[Problem]:
    name = cfg.model.attn_implementation
    if name is None or name in ATTENTION:
        return
    guess = near(name, list(ATTENTION), cutoff=0.5)
    hint = f" Did you mean `{guess}`?" if guess else ""
    yield Problem("model.attn_implementation", f"there is no {name!r}; use one of {', '.join(ATTENTION)}.{hint}")


def _compile(cfg: RunConfig) -> Iterator[Problem]:
    short, long = cfg.training_optimizations.use_compile, cfg.compile.enabled
    if short is not None and long != "auto" and short != long:
        yield Problem(
            "training_optimizations.use_compile",
            f"is {str(short).lower()}, but compile.enabled is {str(long).lower()}; they are the same switch. Keep one.",
        )
    if cfg.packed_sequence.enabled is False and cfg.packed_sequence.packed_sequence_size:
        yield Problem("packed_sequence.packed_sequence_size", "is given, but `enabled` is false. Keep one.")
    if cfg.packed_sequence.bucket_tokens and cfg.packed_sequence.packed_sequence_size:
        yield Problem(
            "packed_sequence.bucket_tokens", "is given beside `packed_sequence_size`, which is the bucket. Keep one."
        )


def _offload(cfg: RunConfig) -> Iterator[Problem]:
    options = cfg.training_optimizations
    if options.activation_offload and options.gradient_checkpointing in (None, False, "none"):
        yield Problem(
            "training_optimizations.activation_offload",
            "moves what recomputed layers keep, but `gradient_checkpointing` is off. Set it to `full` (or `auto`).",
        )


def _quantization(cfg: RunConfig) -> Iterator[Problem]:
    section = cfg.quantization
    if section is not None and section.load_in_4bit and section.load_in_8bit:
        yield Problem("quantization.load_in_8bit", "choose this or `load_in_4bit`, not both.")
    elif section is not None and not (section.load_in_4bit or section.load_in_8bit):
        yield Problem("quantization", "says neither `load_in_4bit: true` nor `load_in_8bit: true`. Add one of them.")
    elif section is not None and cfg.peft is None:
        yield Problem("quantization", "weights in few bits cannot be trained. Add `peft:` for an adapter beside them.")
    if cfg.fp8 is not None and cfg.model.fp8_config is not None:
        yield Problem("model.fp8_config", "is another place for the section `fp8:`, which is given too. Keep one.")


def _optimizer(cfg: RunConfig, trust: Sequence[str]) -> Iterator[Problem]:
    """Arguments that only the optimizer's class can judge. It is torch's, which takes a second to import."""
    section = cfg.optimizer
    if not section.extra and (section.target is None or section.target in SLOTS["optimizer"].known):
        return
    from automodel.optim.build import check_arguments

    try:
        target = resolve_target(section.target, "optimizer", section.extra, trust) if section.target else None
    except ConfigError:  # complained about where it is written
        return
    try:
        check_arguments(section, target)
    except UserError as error:
        yield Problem("optimizer", str(error).removeprefix("optimizer: "))


def _loss(cfg: RunConfig) -> Iterator[Problem]:
    weights, labels = cfg.loss_fn.class_weights, cfg.model.num_labels
    if weights is not None and labels is not None and len(weights) != labels:
        yield Problem(
            "loss_fn.class_weights",
            f"has {len(weights)} weights, but model.num_labels is {labels}. Give one for each class.",
        )
    elif weights is not None and not any(weights):
        yield Problem(
            "loss_fn.class_weights",
            "no weight is above 0, so nothing would be learned. Give a weight to the classes that count.",
        )


def _remote_code(cfg: RunConfig, trust: Sequence[str]) -> Iterator[Problem]:
    if cfg.model.trust_remote_code and REMOTE_CODE not in trust:
        yield Problem(
            "model.trust_remote_code",
            "runs code that comes with the model, which a file alone cannot allow. If you have read that code, add "
            "`--trust remote_code` to the command line.",
        )


def not_yet(cfg: RunConfig, world_devices: int = 1) -> list[Problem]:
    """Keys that are valid and understood, but whose feature comes in a later release."""
    return list(_not_yet(cfg, world_devices))


def _not_yet(cfg: RunConfig, world_devices: int) -> Iterator[Problem]:
    layout = cfg.distributed
    for path, fp8 in (("fp8", cfg.fp8), ("model.fp8_config", cfg.model.fp8_config)):
        if fp8 is not None and fp8.enabled and fp8.recipe_name not in (None, "tensorwise"):
            later = f"`{fp8.recipe_name}` comes in a later release. Use `tensorwise`, or leave it out."
            yield Problem(f"{path}.recipe_name", later)
    ranks = max(world_devices, ranks_wanted(layout))
    sharded = ranks > 1 and (layout.shards or max(layout.tp_size, layout.cp_size, layout.dp_replicate_size or 1) > 1)
    if layout.tp_size > 1 and cfg.peft is not None and (cfg.peft.use_dora or cfg.peft.dropout):
        key = "use_dora" if cfg.peft.use_dora else "dropout"
        yield Problem(f"peft.{key}", "comes in a later release for cut matrices (tp_size). Remove one of the two.")
    if sharded and (cfg.training_optimizations.use_compile or cfg.compile.enabled is True):
        yield Problem("compile", "compiled blocks of a sharded model come in a later release. Remove it for now.")
    if layout.tp_size > 1 and cfg.quantization is not None:
        yield Problem("quantization", "on cut matrices (tp_size) comes in a later release. Use fsdp2 alone.")
    if sharded and any(fp8 is not None and fp8.enabled for fp8 in (cfg.fp8, cfg.model.fp8_config)):
        yield Problem("fp8", "FP8 products of a sharded model come in a later release. Remove it for now.")
