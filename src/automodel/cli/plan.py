"""`automodel plan -c run.yaml`: what a run would do, and why, without loading a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from automodel.cli.finetune import RanksHere
from automodel.cli.options import TAKES_SETTINGS, Files, RemoteData, Trust, allowed, files_and_settings
from automodel.metrics.waiting import telling

if TYPE_CHECKING:
    from automodel.plan.config import RunConfig
    from automodel.plan.ranks import Ranks

app = typer.Typer(help="Say what a run will do, and why.")


@app.command("plan", context_settings=TAKES_SETTINGS)
def plan(
    context: typer.Context,
    config: Files = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    nproc_per_node: RanksHere = None,
    trust: Trust = None,
    allow_remote_data: RemoteData = False,
) -> None:
    """Read the machine, the model's config and the data, and print the plan.

    Nothing is trained, and nothing but caches is written (tokens, speeds of this machine).
    """
    from automodel.distributed import visible
    from automodel.distributed.world import world_of_environment
    from automodel.plan.check import load_run_config
    from automodel.plan.ranks import choose_ranks

    config, settings = files_and_settings(config, context.args, "plan")
    trusted = allowed(trust, allow_remote_data)
    cfg = load_run_config(config, settings, trusted)
    chosen = choose_ranks(cfg, nproc_per_node, world_of_environment(), visible.visible_gpus)
    print_plan_of(cfg, trusted, chosen, as_json)


def print_plan_of(cfg: RunConfig, trust: list[str], chosen: Ranks, as_json: bool = False) -> None:
    """The plan of a run on so many ranks."""
    with telling("Reading the model and the data"):
        from automodel.models.lean_imports import import_transformers

        import_transformers()
        from automodel.engine.run import dry_run

        dry_run(cfg, trust=trust, as_json=as_json, ranks=chosen)
