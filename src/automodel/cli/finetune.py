"""`automodel finetune llm -c run.yaml [section.key=value …]`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from automodel.cli.options import TAKES_SETTINGS, Files, RemoteData, Trust, allowed, files_and_settings, is_config_file
from automodel.config.errors import EXIT_OK, Interrupted, UserError
from automodel.config.json_text import parse_json
from automodel.config.written import as_written
from automodel.metrics.waiting import Waiting

if TYPE_CHECKING:
    from automodel.distributed.world import Alone
    from automodel.plan.config import RunConfig
    from automodel.plan.ranks import Ranks


class Kinds(TyperGroup):
    """`finetune` takes the kind of model first, as the reference does. `llm` is the one there is, so it may be left
    out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        left_out = args and args[0] not in self.commands and args[0] not in ("--help", "-h")
        if left_out and (args[0].startswith("-") or is_config_file(args[0]) or "=" in args[0]):
            args = ["llm", *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            raise UserError(f"`automodel finetune {args[0]}` is not known. Write `automodel finetune llm -c run.yaml`.")
        return super().resolve_command(ctx, args)


app = typer.Typer(no_args_is_help=True, help="Fine-tune a model from a YAML file.", cls=Kinds)

RanksHere = Annotated[
    int | None, typer.Option("--nproc-per-node", min=1, help="Ranks on this machine; all visible GPUs by default.")
]


@app.callback()
def finetune() -> None:
    """Fine-tune a model from a YAML file."""


@app.command("llm", context_settings=TAKES_SETTINGS)
def llm(
    context: typer.Context,
    config: Files = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the run folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the run folder.")] = False,
    resume_or_start: Annotated[
        bool, typer.Option("--resume-or-start", help="Continue the run if it has a checkpoint, start it otherwise.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; load no weights, train nothing.")] = False,
    nproc_per_node: RanksHere = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="So often, go on from the last checkpoint after a rank died.")
    ] = 0,
    trust: Trust = None,
    allow_remote_data: RemoteData = False,
) -> None:
    """Fine-tune a language model or a text classifier.

    Any key can be overridden: optimizer.lr=1e-5 or --optimizer.lr 1e-5.
    """
    from automodel.distributed import visible
    from automodel.distributed.world import joined, was_restarted, world_of_environment
    from automodel.plan.check import load_run_config
    from automodel.plan.ranks import choose_ranks

    config, settings = files_and_settings(config, context.args, "finetune llm")
    with joined() as ranks:  # before the config is read: what is wrong with it is said once
        trusted = allowed(trust, allow_remote_data)
        cfg = load_run_config(config, settings, trusted)
        begun = _ranks_begun(cfg) if resume or resume_or_start else None
        chosen = choose_ranks(cfg, nproc_per_node, world_of_environment(), visible.visible_gpus, begun)
        if dry_run:
            from automodel.cli.plan import print_plan_of

            print_plan_of(cfg, trusted, chosen)
            code = EXIT_OK
        elif chosen.count > ranks.size:
            code = _launch(cfg, chosen, max_restarts)
        elif (resume_or_start or was_restarted()) and ranks.told(lambda: _is_done(cfg)):
            code = EXIT_OK
        else:
            if (resume_or_start or was_restarted()) and ranks.told(lambda: _has_checkpoint(cfg)):
                resume, overwrite = True, False  # what --overwrite replaced is gone since the first start
            if cfg.compares_first and ranks.size == 1 and not resume:
                _stock_trainer_first(cfg, trusted)
            code = _finetune(cfg, resume, overwrite, trusted, ranks, chosen.why)
    raise typer.Exit(code)


def _stock_trainer_first(cfg: RunConfig, trust: list[str]) -> None:
    """`provider: huggingface` together with `benchmark:`: the same training by stock Trainer, side by side."""
    from dataclasses import replace

    from automodel.benchmark.verb import Wishes, benchmark
    from automodel.plan.config import BenchmarkConfig

    folder = Path(f"{cfg.checkpoint.checkpoint_dir.rstrip('/')}-comparison")
    try:
        print(as_written(f"provider: huggingface: stock Trainer first, for comparison; results in {folder}"))
        asked = cfg.benchmark or BenchmarkConfig()
        benchmark(replace(cfg, provider=None), Wishes(asked.against, folder, asked.repeat, trust=tuple(trust)))
    except UserError as error:
        print(f"provider: huggingface: no comparison with stock Trainer: {error}", file=sys.stderr)
    except KeyboardInterrupt as interrupt:
        print(f"Stopped during the comparison; {folder} holds what there is of it.", file=sys.stderr)
        raise Interrupted from interrupt


def _finetune(cfg: RunConfig, resume: bool, overwrite: bool, trust: list[str], ranks: Alone, why_ranks: str) -> int:
    """One rank's part, which is everything where there is only one. Returns the exit code."""
    from rich.console import Console

    from automodel.distributed.step_aside import reason_of_environment
    from automodel.engine.closing import process_started
    from automodel.engine.gpu_context import open_gpu_context

    with Waiting(Console() if ranks.first else Console(quiet=True, force_terminal=False)) as waiting:
        waiting.begins("Importing torch and transformers")
        open_gpu_context()
        if ranks.size == 1:  # the kernels of captured steps
            from automodel.plan.kernels_ahead import compile_kernels_ahead

            compile_kernels_ahead(cfg)
        from automodel.models.lean_imports import import_transformers

        import_transformers()
        from automodel.engine.run import finetune as run_finetune

    why_ranks = reason_of_environment() or why_ranks
    done = run_finetune(
        cfg,
        resume=resume,
        overwrite=overwrite,
        trust=trust,
        ranks=ranks,
        why_ranks=why_ranks,
        started=process_started(),
    )
    return done.exit_code


def _ranks_begun(cfg: RunConfig) -> int | None:
    """How many ranks the run in the folder had. Read without the run folder's own class, which imports torch."""
    path = Path(cfg.checkpoint.checkpoint_dir).expanduser() / "run" / "plan.json"
    try:
        return parse_json(path.read_text(encoding="utf-8")).get("ranks")
    except (
        OSError,
        ValueError,
        AttributeError,
    ):  # no run, or none that can be resumed: that is said later
        return None


def _has_checkpoint(cfg: RunConfig) -> bool:
    from automodel.checkpoint.catalog import complete
    from automodel.engine.folder import RunFolder

    return bool(complete(RunFolder(Path(cfg.checkpoint.checkpoint_dir).expanduser()).steps))


def _is_done(cfg: RunConfig) -> bool:
    """Whether this run has ended and exported its model: whoever starts it again by itself need not do anything. Raises
    `UserError` where it is another one; one that is to be longer, or lies elsewhere, goes on, and is judged there."""
    from automodel.engine.folder import RunFolder
    from automodel.engine.same_run import asks_for_more, check_same_run

    folder = RunFolder(Path(cfg.checkpoint.checkpoint_dir).expanduser())
    summary = folder.read_json("summary.json") or {}
    done = folder.is_exported() and summary.get("status") in ("finished", "stopped early")
    if done:
        check_same_run(cfg, folder)
        done = not asks_for_more(cfg, folder)
    if done:
        finished = f"The run in {folder.root} is finished ({summary.get('steps')} steps); nothing to do."
        print(as_written(finished))
    return done


def _launch(cfg: RunConfig, chosen: Ranks, restarts: int) -> int:
    """This very command again, once for each rank; refused first where it cannot work."""
    from automodel.distributed.layout import ranks_wanted
    from automodel.plan.layout import check_gpus, check_layout

    ranks = chosen.count
    layout = check_layout(cfg, ranks)
    if layout.tp > 1 or layout.cp > 1 or cfg.distributed.ep_size > 1:  # what the model must have heads or experts for
        from automodel.distributed.layout import check_model
        from automodel.models.lean_imports import import_transformers

        import_transformers()
        from automodel.models.load import read_hf_config

        packed = cfg.packed_sequence.enabled is not False
        check_model(cfg.distributed, layout, read_hf_config(cfg.model), packed)
    import torch

    from automodel.distributed.launch import launch, launch_or_fewer
    from automodel.distributed.step_aside import BECAUSE

    check_gpus(ranks, torch.cuda.device_count())
    os.environ.setdefault(BECAUSE, chosen.why)
    command, lost = sys.argv[1:], _how_to_go_on(cfg, ranks)
    if chosen.automatic:
        return launch_or_fewer(ranks, ranks_wanted(cfg.distributed), command, lost, restarts)
    return launch(ranks, command, lost, restarts)


def _how_to_go_on(cfg: RunConfig, ranks: int) -> str:
    """What to type when a rank was lost: the same again, or fewer ranks with the same steps."""
    from automodel.plan.asked import decide_batch
    from automodel.plan.layout import check_layout

    data_ranks = getattr(check_layout(cfg, ranks), "data_ranks", ranks)
    micro, accumulation = decide_batch(cfg, [], data_ranks)
    total = cfg.step_scheduler.global_batch_size or micro * accumulation * data_ranks
    from automodel.distributed.launch import going_on

    return (
        f"Go on from the last checkpoint: {shlex.join(['automodel', *going_on(sys.argv[1:], '--resume')])}\n"
        "On another number of ranks a step must stay what it is: add "
        f"step_scheduler.global_batch_size={total} dataloader.batch_size={micro}"
    )
