"""Whether a config may go on with a run, and what a person should know where it goes on differently.

What decides what is learned from what (`MUST_MATCH`) has to be as it was: a run is one experiment. Model and data may
lie elsewhere (`MOVED`), as on another machine. How long it is, and how the learning rate falls, may change; but then
losses bend where they did not before, so it is said (`COURSE`). What decides which evaluation is the best may change
too, and then the search begins anew. The rest, how often something is logged, evaluated or saved, changes nothing.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

import yaml

from automodel.adapters.kept import KEPT
from automodel.checkpoint.catalog import complete
from automodel.config.dump import as_setting, to_plain
from automodel.config.errors import UserError
from automodel.config.yaml_text import parse_yaml
from automodel.data.config import WHERE_NOBODY_SAYS
from automodel.data.keys import OF_ROWS
from automodel.engine.folder import RunFolder
from automodel.engine.state import Best
from automodel.engine.variables import VARIABLES, as_begun
from automodel.models.same_base import known
from automodel.optim.build import left_open
from automodel.optim.config import OptimizerConfig
from automodel.plan.config import RunConfig
from automodel.plan.places import changed_paths, found_at, homes_of
from automodel.tasks.registry import TASKS

MUST_MATCH = ("model", "dataset", "task", "seed", "optimizer", "loss_fn", "peft", "quantization")
MOVED = ("model.pretrained_model_name_or_path", "dataset.path")
"""May name another place where the same lies: the data are told by their content, weights by samples of them."""
COURSE = (
    "lr_scheduler",
    "step_scheduler.max_steps",
    "step_scheduler.num_epochs",
    "training_optimizations.gradient_clipping",
)


OF_A_STEP = ("step_scheduler.global_batch_size", "step_scheduler.grad_acc_steps", "dataloader.batch_size")


def check_same_run(cfg: RunConfig, folder: RunFolder) -> None:
    """A resumed run must train the same model on the same data. Raises `UserError` with the keys that differ."""
    changed = [difference for difference in _changed(cfg, folder, MUST_MATCH) if difference[0] not in MOVED]
    if changed:
        lines = "".join(f"  {key}: was {before}, now {after}\n" for key, before, after in changed)
        raise UserError(
            f"--resume: the config differs from the one this run was started with.\n{lines}"
            f"{_other_default(cfg, changed)}Use {folder.config}, or start a new run in another folder."
        )


def _other_default(cfg: RunConfig, changed: list[tuple[str, str, str]]) -> str:
    """What to do where nobody changed the weight decay, but the default of a `_target_` did."""
    was = {key: before for key, before, _ in changed}.get("optimizer.weight_decay")
    if was != "0.0" or cfg.optimizer.target is None or cfg.optimizer.weight_decay is not None:
        return ""
    return (
        "Earlier versions had no weight decay where none was given; now a `_target_` has that of its class. To go on "
        "as before, add optimizer.weight_decay=0.\n"
    )


def check_same_base(before: str | None, now: str | None, cfg: RunConfig, folder: RunFolder) -> None:
    """The weights that `model:` names must be those of before where nothing else tells: below an adapter, of which no
    checkpoint holds them, and where they lie elsewhere. `before`, `now`: as `sample_of` tells them. Raises
    `UserError`."""
    moved = _changed(cfg, folder, MOVED[:1])
    comparable = known(before) is not None and now is not None
    if before == now if comparable else not moved:
        return
    if moved:
        key, was, name = moved[0]
        raise UserError(
            f"--resume: {key} was {was}, now {name}, and {'these are' if comparable else 'they may be'} other weights. "
            f"Use {folder.config}, or start a new run in another folder."
        )
    if cfg.peft is not None:
        raise UserError(
            f"--resume: the weights of '{cfg.model.pretrained_model_name_or_path}' were replaced since: they are not "
            "those that this adapter was trained beside. Put the old ones back (or name their revision), or start a "
            "new run in another folder."
        )


def changes_of_course(cfg: RunConfig, folder: RunFolder) -> list[str]:
    """What may change, and bends the curves."""
    falls = not cfg.lr_scheduler.name.startswith("constant")
    notes = []
    if _parsed(_text_of(folder)) is None:
        known = "what it said is known from a checkpoint"
        notes.append(f"{folder.config} is missing or damaged; {known}. It is written anew.")
    for key, before, after in _changed(cfg, folder, COURSE):
        longer = key.startswith("step_scheduler") and falls
        then = "; the learning rate goes on as in a run of that length" if longer else ""
        notes.append(f"{key} was {before} so far, now {after}{then}.")
    begun, now = _begun_with(folder, cfg), to_plain(cfg, filled=True)["optimizer"]
    for key, own in _perhaps_unused(begun).items():
        if now.get(key) == begun["optimizer"][key]:
            notes.append(
                f"optimizer.{key} is {now[key]}. Earlier versions wrote that into {folder.config} without using it; a "
                f"run of theirs had {_shown(own)} so far, and goes on with it by optimizer.{key}=null."
            )
    return notes


def best_so_far(
    before: Best, now: Best, cfg: RunConfig, folder: RunFolder, same_data: bool | None
) -> tuple[Best, list[str]]:
    """The best evaluation of the run, where those to come can be compared with it: by one metric, on the same data.
    Else there is none yet, which is said. `now` is what the config asks for; `same_data` is None for checkpoints that
    do not know what they were measured on: then the config tells."""
    if not (
        cfg.checkpoint.best_metric or cfg.checkpoint.best_mode or (cfg.early_stopping and cfg.early_stopping.metric)
    ):
        now = replace(now, metric=before.metric, mode=before.mode)  # nobody asks for another, so it stays what it was
    others = [] if same_data else _changed(cfg, folder, ("validation_dataset",))
    if before.metric != now.metric or before.mode != now.mode:
        changed = f"The best evaluation was the one of the {before.mode}imal {before.metric} so far"
    elif others:
        key, was, is_now = others[0]
        changed = f"{key} was {was} so far, now {is_now}"
    elif same_data is False:
        changed = "validation_dataset has other samples than so far"
    else:
        return replace(before, min_delta=now.min_delta), []
    if before.value is None:
        return now, []
    return now, [f"{changed}; from here on the best one by {now.metric} is looked for anew, among those to come."]


def given_since(cfg: RunConfig, folder: RunFolder) -> list[str]:
    """The settings that make this config of the run's own, for a command that goes on with it; without the sizes of a
    step, which whoever writes that command knows better. What must match does."""
    before, now, typed = _begun_with(folder, cfg), to_plain(cfg, filled=True), to_plain(cfg)
    found: dict[str, Any] = {}
    for section in dict.fromkeys((*before, *now)):
        was, new = before.get(section), now.get(section)
        if isinstance(was, dict) and isinstance(new, dict):
            keys = [key for key in dict.fromkeys((*was, *new)) if was.get(key) != new.get(key)]
            found |= {f"{section}.{key}": typed[section].get(key) for key in keys}
        elif was != new:
            found[section] = typed.get(section)
    return [
        as_setting(key, value)
        for key, value in found.items()
        if key not in OF_A_STEP and (key in MOVED or key.split(".")[0] not in MUST_MATCH)
    ]


def asks_for_more(cfg: RunConfig, folder: RunFolder) -> bool:
    """Whether a finished run is to be longer, or names another place for model or data: whether those are the same is
    known only once they are read."""
    return bool(_changed(cfg, folder, ("step_scheduler.max_steps", "step_scheduler.num_epochs", *MOVED)))


def _changed(cfg: RunConfig, folder: RunFolder, keys: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Dotted keys whose values differ between the run's config and this one, with both values."""
    begun, now = _begun_with(folder, cfg), _as_used(to_plain(cfg, filled=True))
    used, early = _as_used(begun), not (folder.run / KEPT).exists()
    for tree in (used, now):
        if tree.get("peft"):
            tree["peft"] = tree["peft"] | {"dropout": _dropout_of(tree["peft"], early)}
    used["optimizer"] |= {k: own for k, own in _perhaps_unused(begun).items() if now["optimizer"].get(k) == own}
    before, after, unread = _flat(used), _flat(now), _without_meaning(folder)
    lay, lie = _flat(_found(used, homes_of(folder.config))), _flat(_found(now, (os.getcwd(),)))
    watched = [k for k in (*before, *after) if any(k == key or k.startswith(f"{key}.") for key in keys)]
    was_typed, is_typed = _flat(_as_typed(folder)), _flat(to_plain(cfg))
    return [
        (key, *_told(was_typed.get(key, before.get(key)), is_typed.get(key, after.get(key))))
        for key in dict.fromkeys(watched)
        if before.get(key) != after.get(key) and lay.get(key) != lie.get(key) and key not in unread
    ]


def _told(before: Any, after: Any) -> tuple[str, str]:
    """Two values that differ, as they were typed: `${SEED}` may be both."""
    return _shown(before), _shown(after) if before != after else f"another value of {_shown(after)}"


def _dropout_of(section: dict[str, Any], early: bool) -> float | None:
    """A new adapter's is 0 where nobody says it. `early`: the run is of a version that wrote 0 where nobody had said
    it, and beside `pretrained_adapter` did not hear it either."""
    said = section.get("dropout")
    if section.get("pretrained_adapter") is None:
        return said or 0.0
    return said or None if early else said


def as_heard(cfg: RunConfig, kept: dict[str, Any] | None) -> RunConfig:
    """The config as the version read it that began the run: earlier ones, which kept nothing of the adapter, trained
    with the dropout of `pretrained_adapter` where the config had 0."""
    if kept is not None or cfg.peft is None or cfg.peft.pretrained_adapter is None:
        return cfg
    return replace(cfg, peft=replace(cfg.peft, dropout=cfg.peft.dropout or None))


def _found(tree: dict[str, Any], homes: tuple[str, ...]) -> dict[str, Any]:
    """The tree with every path that leads somewhere written in one way, wherever it was typed."""

    def whole(key: str, path: str) -> str:
        home, full = found_at(path, homes)[1] or "", os.path.expanduser(path)
        return os.path.realpath(os.path.join(home, full)) if home or os.path.isabs(full) else path

    return changed_paths(tree, whole)


def _without_meaning(folder: RunFolder) -> set[str]:
    """Keys of the data that belong to other tasks than the run's. Earlier versions took them and left them unread, and
    now they are refused: whoever removes them goes on with the same run."""
    name = (folder.read_json("plan.json") or {}).get("task")
    own = next((task.rows.keys for task in TASKS if task.name == name), None)
    return set() if own is None else {f"dataset.{key}" for key in OF_ROWS if key not in own}


def _begun_with(folder: RunFolder, cfg: RunConfig) -> dict[str, Any]:
    """The config of the run in the folder, with the values that its variables had where those are known."""
    return as_begun(_as_typed(folder), cfg, folder.read_json(VARIABLES))


def plan_begun_with(folder: RunFolder) -> dict[str, Any]:
    """The plan of the run in the folder. Where its file is missing or damaged, what a checkpoint knows of it."""
    plan = folder.read_json("plan.json")
    for checkpoint in reversed(complete(folder.steps)) if plan is None else ():
        with suppress(OSError, ValueError, AttributeError):  # the checkpoint before a damaged one will do
            state = checkpoint.state()
            return {key: state[key] for key in ("device", "precision", "products") if key in state}
    return plan or {}


def _as_typed(folder: RunFolder) -> dict[str, Any]:
    """The config of the run in the folder, as its file has it. Every checkpoint has a copy of it, for when the file is
    damaged."""
    found = _parsed(_text_of(folder))
    for checkpoint in reversed(complete(folder.steps)) if found is None else ():
        with suppress(OSError, ValueError, AttributeError):  # the checkpoint before a damaged one will do
            found = found or _parsed(checkpoint.state().get("config"))
    if found is None:
        raise UserError(
            f"--resume: {folder.config} is missing or damaged, and no checkpoint has a copy of it, so the run cannot "
            "be recognised. Put the file back, or start anew with --overwrite."
        )
    return found


def _text_of(folder: RunFolder) -> str | None:
    with suppress(OSError, ValueError):
        return folder.config.read_text(encoding="utf-8")
    return None


def _parsed(text: str | None) -> dict[str, Any] | None:
    """A config as a tree; None where it is none any more."""
    with suppress(yaml.YAMLError, ValueError):
        tree = parse_yaml(text or "")
        return tree if isinstance(tree, dict) and "model" in tree else None
    return None


def _as_used(tree: dict[str, Any]) -> dict[str, Any]:
    """The config with what holds where it leaves something open: the numbers of its optimizer, and some of its data's.
    Whether that is written out, as older versions did, changes nothing."""
    given = tree.get("optimizer") or {}
    used = tree | {"optimizer": _left_open(given) | given}
    holds = dict(WHERE_NOBODY_SAYS)
    for section in ("dataset", "validation_dataset"):  # the second has what it does not say from the first
        if used.get(section):
            holds |= {key: said for key in holds if (said := used[section].get(key)) is not None}
            used[section] = used[section] | holds
    return used


def _perhaps_unused(begun: dict[str, Any]) -> dict[str, Any]:
    """Numbers of the optimizer that may not be those that the run used, with those it used then. Earlier versions wrote
    Adam's `betas` and `eps` beside every optimizer, given or not, and used what the class has. They always wrote
    `weight_decay` too; where all are written nobody can tell whether they were given, so both are the same run."""
    given = begun.get("optimizer") or {}
    if "weight_decay" not in given:
        return {}
    own, usual = _left_open(given), _listed(OptimizerConfig.USUAL)
    return {key: own[key] for key in usual if given.get(key) == usual[key] != own[key]}


def _left_open(given: dict[str, Any]) -> dict[str, Any]:
    section = OptimizerConfig(target=given.get("_target_"), name=given.get("name", OptimizerConfig.name))
    return _listed(left_open(section))


def _listed(numbers: dict[str, Any]) -> dict[str, Any]:
    """As a file has them."""
    return {key: list(n) if isinstance(n, tuple) else n for key, n in numbers.items()}


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return out


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
