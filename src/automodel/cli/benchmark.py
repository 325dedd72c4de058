"""`automodel benchmark -c run.yaml --against hf-trainer,hf-trainer-tuned`: the speed-up, measured on your own run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from automodel.cli.options import TAKES_SETTINGS, Files, RemoteData, Trust, allowed, files_and_settings

app = typer.Typer(help="Compare with HF Trainer on the same run: time, memory, losses.")

Against = Annotated[
    str | None,
    typer.Option(
        help="Opponents, separated by commas; the first is the baseline: hf-trainer (as the reference's script sets it "
        "up), hf-trainer-tuned (the best a careful user gets), hf-trainer-ungrouped (that, without grouping by "
        "length), hf-trainer-compile (tuned + torch.compile). Default: benchmark.against, or hf-trainer."
    ),
]
Threshold = Annotated[
    float | None,
    typer.Option("--speedup-threshold", min=0.0, help="Exit with code 4 where the training time's speedup is smaller."),
]
Repeat = Annotated[int | None, typer.Option(min=1, help="Runs of each side; the median one is reported.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Train this many steps instead of the config's.")]
Warmup = Annotated[int | None, typer.Option(min=0, help="Steps left out of the steady state.")]


@app.command("benchmark", context_settings=TAKES_SETTINGS)
def benchmark(
    context: typer.Context,
    config: Files = None,
    against: Against = None,
    speedup_threshold: Threshold = None,
    repeat: Repeat = None,
    ladder: Annotated[bool, typer.Option("--ladder", help="Add one optimization at a time.")] = False,
    steps: Steps = None,
    warmup: Warmup = None,
    output: Annotated[Path, typer.Option(help="Folder for results, report and logs.")] = Path("benchmark"),
    trust: Trust = None,
    allow_remote_data: RemoteData = False,
) -> None:
    """Run each side in its own process on the same data, seed and weights, and compare time, memory and losses.

    Writes performance_comparison_results.json and report.html to the output folder. Exit codes: 0 done (and at or
    above the threshold), 1 a side failed, 2 bad input, 3 not comparable yet, 4 below the threshold.
    """
    from automodel.plan.check import load_run_config

    config, settings = files_and_settings(config, context.args, "benchmark")
    trusted = allowed(trust, allow_remote_data)
    cfg = load_run_config(config, settings, trusted)
    from automodel.benchmark.verb import Wishes
    from automodel.benchmark.verb import benchmark as compare

    defaults = cfg.benchmark
    names = against.split(",") if against is not None else list(defaults.against if defaults else ["hf-trainer"])
    wishes = Wishes(
        against=tuple(name.strip() for name in names if name.strip()),
        output=output,
        repeat=repeat or (defaults.repeat if defaults else 1),
        steps=steps,
        warmup=warmup,
        threshold=speedup_threshold,
        ladder=ladder,
        trust=tuple(trusted),
    )
    raise typer.Exit(compare(cfg, wishes).exit_code)
