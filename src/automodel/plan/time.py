"""How long training will take, roughly, before a step was taken: arithmetic over speed.

    operations = tokens × (6 × parameters of the layers + 6 × those of the head for each position it reads)

Two thirds of them are the backward pass; a frozen weight has no gradient of its own (4 instead of 6), and layers that
are computed again need a third more. The speeds are those of the machines that were measured; of another GPU none is
known, and the plan says so. Evaluations take the forward pass alone. Loading, compiling and saving are not counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from automodel.plan.batches import Batches
from automodel.plan.buckets import FLOPS, costs
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.plan import Decision

if TYPE_CHECKING:
    from automodel.plan.hardware import Hardware  # which imports torch

CORE = 70e9
"""Operations of a core in a second: two cores of an AMD Zen 4 took 821 ms for a step of the quickstart, 116 billion
operations (docs/log.md); two of an Intel with AVX-512 481 ms."""
MEASURED = ("H100", "H200", "GH200")  # GPUs that `FLOPS` is of
AGAIN = {"none": 0.0, "selective": 1 / 6, "full": 1 / 3}


def time_line(
    hardware: Hardware,
    model: ModelFacts,
    data: DataFacts,
    batches: Batches,
    *,
    read: float,
    checkpointing: str,
    ranks: int,
    evaluations: int,
) -> Decision:
    """`read`: the share of the tokens that a language model's head reads; `evaluations`: of all validation data."""
    known = hardware.device == "cpu" or any(name in hardware.name for name in MEASURED)
    if not known or not model.parameters:
        return Decision("time", "not known yet", f"no {hardware.name} was measured; the first steps tell it")
    layers, head = costs(model)
    seconds_of_token = layers * (1 + AGAIN[checkpointing]) + head * read
    speed = hardware.cores * CORE if hardware.device == "cpu" else ranks * FLOPS
    trained, evaluated = data.tokens * batches.num_epochs, data.validation_tokens * evaluations / 3
    seconds = (trained + evaluated) * seconds_of_token * FLOPS / speed
    tokens = f"{trained:,.0f} tokens" + (f" and {evaluations} evaluations" if evaluations else "")
    where = "this GPU" if ranks == 1 else f"{ranks} GPUs"
    where = f"{hardware.cores} idle cores" if hardware.device == "cpu" else where
    reason = f"rough estimate: {tokens} on {where}, without loading and saving; the first steps tell it better"
    return Decision("time", about(seconds), reason)


def about(seconds: float) -> str:
    """`under a minute`, `about 12 min`, `about 3 h`, `about 4 days`."""
    if seconds < 60:
        return "under a minute"
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size or unit == "min":
            return f"about {round(seconds / size):,} {unit}"
    raise AssertionError(seconds)
