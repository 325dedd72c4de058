"""Settings that a run does not use yet and that need less memory, each with what it would leave of the estimate."""

from __future__ import annotations

from dataclasses import replace

from automodel.adapters.config import Packing
from automodel.optim.kinds import ADAMW, KINDS
from automodel.plan.config import RunConfig
from automodel.plan.facts import ModelFacts
from automodel.plan.memory import FITS, GIB, Setting, estimate, in_words

TRAINED_OF_AN_ADAPTER = 0.01  # share of the parameters; what its modules really have is known once they are chosen
WORTH_NAMING = 0.95
"""Of the memory needed now: what leaves more of it is no remedy."""


def remedies_in_words(cfg: RunConfig, model: ModelFacts, setting: Setting, memory_gib: float, *, halves: bool) -> str:
    """`To need less: peft={} (9.1 GiB, fits), optimizer.name=adafactor (61.0 GiB).` The smallest comes first. `halves`:
    whether micro-batches can be halved. Nothing where no setting helps."""
    now = estimate(model.shape, model.parameters, setting).total
    left = {key: estimate(model.shape, model.parameters, changed).total for key, changed in _changes(
        cfg, model, setting, halves
    ).items()}  # fmt: skip
    named = [
        f"{key} ({in_words(total)}{', fits' if total <= FITS * memory_gib * GIB else ''})"
        for key, total in sorted(left.items(), key=lambda item: item[1])
        if total < WORTH_NAMING * now
    ]
    return f"To need less: {', '.join(named)}." if named else "A smaller model needs less."


def _changes(cfg: RunConfig, model: ModelFacts, setting: Setting, halves: bool) -> dict[str, Setting]:
    """Each remedy by itself, as it is typed after a command."""
    options, found = "training_optimizations", {}
    if halves:
        half = replace(setting, tokens=-(-setting.tokens // 2), rows=-(-setting.rows // 2))
        found["half dataloader.batch_size with twice step_scheduler.grad_acc_steps"] = half
    if setting.checkpointing != "full":
        found[f"{options}.gradient_checkpointing=full"] = replace(setting, checkpointing="full")
    if setting.precision not in ("bf16-pure", "fp16"):
        found[f"{options}.precision=bf16-pure"] = replace(setting, precision="bf16-pure")
    if setting.kind == ADAMW and setting.device == "cuda":
        found["optimizer.name=adamw_8bit"] = replace(setting, kind=KINDS["adamw_8bit"])
    if setting.kind is not None and setting.kind.algorithm != "adafactor" and not setting.trained:
        found["optimizer.name=adafactor"] = replace(setting, kind=KINDS["adafactor"])
    adapted = replace(setting, trained=setting.trained or max(1, round(TRAINED_OF_AN_ADAPTER * model.parameters)))
    if not setting.trained and setting.shards == 1:
        found["peft={}"] = adapted
    if setting.packing is None and setting.shards == 1 and cfg.fp8 is None and model.shape is not None:
        adapter = "" if setting.trained else "peft={} "
        four, key = replace(adapted, packing=Packing("nf4")), f"{adapter}quantization.load_in_4bit=true"
        found[key] = four
        if setting.checkpointing != "full":  # where neither is enough by itself
            found[f"{key} {options}.gradient_checkpointing=full"] = replace(four, checkpointing="full")
    elif setting.packing is not None and setting.packing.resident:
        found["quantization.resident=false"] = replace(setting, packing=replace(setting.packing, resident=False))
    return found
