"""What an adapter is, as the run that trains it keeps it (`run/adapter.json`).

Checkpoints hold A and B, but not how they are scaled or where they stand. A run that started from somebody's folder
would have to ask that folder, which may say something else by then, or be gone.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from automodel.adapters.attach import Adapter
from automodel.adapters.lora import is_linear
from automodel.config.errors import UserError

KEPT = "adapter.json"


def to_keep(adapter: Adapter) -> dict[str, Any]:
    """As JSON carries it. Base and task are the config's, whose model may lie elsewhere by then; the tensors that it
    started with are the checkpoints' by then."""
    return {
        "ranks": dict(adapter.ranks),
        "alphas": dict(adapter.alphas),
        "saved": list(adapter.saved),
        "dropout": adapter.dropout,
        "rslora": adapter.rslora,
        "dora": adapter.dora,
        "before": adapter.before,
    }


def resolve_kept(kept: dict[str, Any], model: nn.Module, task_type: str, base: str, revision: str | None) -> Adapter:
    """The adapter of a run that goes on, compared with the model's modules."""
    try:
        ranks = {str(name): int(rank) for name, rank in kept["ranks"].items()}
        alphas = {name: float(kept["alphas"][name]) for name in ranks}
        saved = tuple(map(str, kept["saved"]))
        adapter = Adapter(
            ranks, alphas, saved, task_type, base, revision, float(kept["dropout"]), bool(kept["rslora"]),
            bool(kept["dora"]), str(kept["before"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"run/{KEPT} is damaged: it does not say what the adapter is. Put back a copy of it, or remove it to have "
            "that read from the config once more."
        ) from error
    modules = dict(model.named_modules())
    strange = [name for name in ranks if name not in modules or not is_linear(modules[name])]
    strange += [name for name in saved if name not in modules]
    if strange:
        raise UserError(
            f"run/{KEPT}: the run's adapter stands beside '{strange[0]}', which this model does not have. Name the "
            "model that the run began with."
        )
    return adapter
