"""Which kernels a config will need, before the plan is made: just enough to begin compiling them (`kernels/ahead.py`).

The plan itself comes much later, when torch and transformers are imported and the data is read. This foresees the part
of it that decides on kernels, with the plan's own functions, for an ordinary GPU. Where it is wrong, a kernel is
compiled for nothing, or later: no result depends on it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from automodel.config.errors import UserError
from automodel.kernels import ahead
from automodel.kernels.ahead_facts import Facts, Head, shape_of
from automodel.models.checkpointing import layer_dropout
from automodel.models.config import ModelConfig
from automodel.models.head_form import head_form
from automodel.optim.kinds import KINDS, Kind
from automodel.plan.asked import asked_checkpointing, asked_precision, decide_batch
from automodel.plan.config import RunConfig
from automodel.plan.facts import ModelFacts
from automodel.plan.loss import why_stored
from automodel.plan.speed import decide_capture, decide_fused, decide_lazy_embeddings
from automodel.tasks.infer import infer_task
from automodel.tasks.registry import TEXT_CLASSIFICATION, task_named
from automodel.tasks.task import Task

SMALLEST_EVALUATION_BATCH = 16
TIED = ("gemma", "gemma2", "gemma3_text", "smollm3")  # families that tie their head where the file does not say
ORDINARY_GPU: Any = SimpleNamespace(device="cuda", bf16=True)


def compile_kernels_ahead(cfg: RunConfig) -> str | None:
    """Begins to compile, in the background, the kernels of this run; returns why not where it does not."""
    reason = ahead.why_never()
    if reason is not None:
        return reason
    config = model_config(cfg.model)
    if config is None:
        return "the model's config.json is not on this machine"
    try:
        facts = facts_of(cfg, config)
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # The file is read as it lies there; whether it is right is said where the model is loaded.
        return f"unknown, because the model's config.json has its sizes in another form ({type(error).__name__})"
    return "the step will not be captured" if facts is None else ahead.start(facts)


def facts_of(cfg: RunConfig, config: dict[str, Any]) -> Facts | None:
    """What decides on the kernels; None where none of ours will be used."""
    if cfg.packed_sequence.enabled is False or not _will_capture(cfg, config):
        return None
    shape = shape_of({**config, **cfg.model.extra})
    precision, _ = asked_precision(cfg)
    if precision == "auto" and cfg.training_optimizations.bf16 is False:
        precision = "fp32"
    model = ModelFacts(
        name="", model_type="", parameters=0, can_pack=True, packing_reason="", can_fuse=shape.blocks != "stock"
    )
    computed = "bf16" if precision == "auto" else precision
    fused = decide_fused(cfg, model, ORDINARY_GPU, computed, True, [])
    named = task_named(cfg.task) if cfg.task else infer_task(cfg.model, cfg.dataset.target, None)
    task = named or TEXT_CLASSIFICATION
    if not fused:
        shape = dataclasses.replace(shape, blocks="stock")
    batch, accumulation = decide_batch(cfg, [])
    evaluation_batch = cfg.validation_dataloader.batch_size or max(SMALLEST_EVALUATION_BATCH, batch)
    return Facts(
        shape=dataclasses.replace(shape, pools=shape.pools and task.head.wants == "pooled"),
        precision=precision,
        batch=batch,
        evaluation_batch=evaluation_batch if cfg.validation_dataset is not None else 0,
        accumulates=accumulation > 1,
        lazy=decide_lazy_embeddings(task, fused, accumulation, []),
        groups=1 if cfg.optimizer.decay_norms_and_biases else 2,
        head=_head(cfg, {**config, **cfg.model.extra}, task) if shape.blocks == "decoder" else Head(),
        classes=_classes(cfg, config) if task.head.wants == "pooled" and shape.blocks == "post-norm" else 0,
    )


def _classes(cfg: RunConfig, config: dict[str, Any]) -> int:
    """As far as the files tell, before the data is read; two otherwise."""
    loss = cfg.loss_fn
    if loss.class_weights or loss.label_smoothing or loss.z_loss:
        return 0
    return cfg.model.num_labels or len(config.get("id2label") or ()) or 2


def _head(cfg: RunConfig, config: dict[str, Any], task: Task) -> Head:
    """What of a fused decoder's head is part of the loss."""
    form, words, loss = head_form(SimpleNamespace(**config)), config.get("vocab_size", 0), cfg.loss_fn
    if not task.head.next_token or form is None or why_stored(cfg, config["model_type"], words) is not None:
        return Head()
    tied = config.get("tie_word_embeddings", config["model_type"] in TIED)
    return Head(words, tied, *form, z_loss=loss.z_loss, label_smoothing=loss.label_smoothing)


def _will_capture(cfg: RunConfig, config: dict[str, Any]) -> bool:
    """As long as memory is no matter: state that could be paged is not, and nothing is checkpointed unasked."""
    kind, asked = KINDS[cfg.optimizer.name], asked_checkpointing(cfg)
    config = {**config, **cfg.model.extra}
    silent = not any("drop" in key for key in config)  # a file leaves out what is the family's default
    return decide_capture(
        cfg,
        "packed",
        ORDINARY_GPU,
        [],
        kind=Kind(kind.algorithm, kind.bits),
        checkpointing="none" if asked == "auto" else asked,
        dropout=silent or layer_dropout(config) is not None,
    )


def model_config(cfg: ModelConfig) -> dict[str, Any] | None:
    """The contents of the model's `config.json`, from its folder or the hub's cache; None where it is in neither."""
    folder = Path(cfg.pretrained_model_name_or_path).expanduser()
    path = folder / "config.json"
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        try:
            cached = try_to_load_from_cache(
                cfg.pretrained_model_name_or_path, "config.json", cache_dir=cfg.cache_dir, revision=cfg.revision
            )
        except ValueError:  # no name that the hub would take; whoever loads the model says so
            return None
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None
