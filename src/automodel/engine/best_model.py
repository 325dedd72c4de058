"""The weights of the best evaluation, where a run's end looks for them: in its checkpoint, or in the run folder, into
which an earlier end of the run has exported them. They are worth more than the last ones, so nothing replaces them that
is worse.
"""

from __future__ import annotations

from typing import Any

from automodel.checkpoint.catalog import Checkpoint, damage_of, seem_whole
from automodel.checkpoint.store import CheckpointStore
from automodel.distributed.world import ALONE
from automodel.engine.folder import RunFolder
from automodel.engine.prepare import Prepared
from automodel.engine.state import Best

OF_THE_MODEL = ("exported_step", "validation", "confusion_matrix")  # what a summary says about the exported model


def whole_checkpoint(
    prepared: Prepared, checkpoints: CheckpointStore, folder: RunFolder, step: int
) -> tuple[Checkpoint | None, str, dict[str, Any]]:
    """The checkpoint of a step, or why it cannot be used: it could not be written and the run went on (`checkpoint.
    on_error: continue`), or its files were changed or removed since. Then also what is known of the model of that step
    in the run folder, if it is there. Ranks that export together come to the same answer."""
    ranks = ALONE
    if prepared.layout.fsdp:
        ranks = prepared.ranks
        checkpoints.wait()
        ranks.barrier()  # the first rank has put the last one into its place
    checkpoint = checkpoints.at(step)
    problem = "is missing"
    if checkpoint is not None:
        damage = damage_of(checkpoint, ranks.rank, ranks.size)
        problem = f"cannot be used: {damage.rstrip('.')}" if damage else ""
    problems = [text for text in ranks.texts(problem) if text]
    if not problems:
        return checkpoint, "", {}
    exported = ranks.told(lambda: exported_before(folder))
    return None, problems[0], exported if exported.get("exported_step") == step else {}


def exported_before(folder: RunFolder) -> dict[str, Any]:
    """What is known of the model that lies in the run folder; nothing where none does, or not the whole of it."""
    files, summary = folder.exported(), folder.read_json("summary.json") or {}
    if not folder.is_exported() or not all((folder.root / name).is_file() for name in files):
        return {}
    # A run that was interrupted on its way further has a summary of its own, with this in it.
    known = summary.get("exported") or {key: summary[key] for key in OF_THE_MODEL if key in summary}
    return known if "exported_step" in known else {}


def lost_best(folder: RunFolder, best: Best, step: int) -> list[str]:
    """What to say where a run goes on after `step` without the checkpoint of its best evaluation."""
    if best.step in (None, step) or best.step in [checkpoint.step for checkpoint in seem_whole(folder.steps)]:
        return []
    stays = exported_before(folder).get("exported_step") == best.step
    then = f"its model stays in {folder.root}" if stays else "the last weights are exported in the end"
    what = f"The checkpoint of step {best.step}, the best by {best.metric} so far, is missing or damaged"
    return [f"{what}: unless a later evaluation is better, {then}."]
