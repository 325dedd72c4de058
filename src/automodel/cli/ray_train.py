"""A Ray Train job: a worker for each rank, started, placed and restarted by Ray.

`ray_script` is what `automodel launch ray` writes: a few lines that hand `train` to Ray's `TorchTrainer`. Ray makes the
process group, and the run uses it (`distributed/processes.py`). A worker that dies makes Ray start all of them again,
and `--resume-or-start` continues from the last complete checkpoint; the run folder must be where every node sees it.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel.config.errors import EXIT_OK
from automodel.distributed.slurm import job_name

BACKEND = {True: "cpu:gloo,cuda:nccl", False: "gloo"}


@dataclass(frozen=True)
class RayJob:
    """What the script says."""

    name: str
    arguments: Sequence[str]
    """Of `automodel`."""
    folder: Path
    """Where the command runs."""
    workers: int
    gpus: bool
    """One for each worker."""
    restarts: int = 3


def ray_script(job: RayJob) -> str:
    return f'''"""automodel on {job.workers} Ray workers. Written by `automodel launch ray`."""

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from automodel.cli.ray_train import train

trainer = TorchTrainer(
    train,
    train_loop_config={{"arguments": {list(job.arguments)!r}, "folder": {str(job.folder)!r}}},
    torch_config=TorchConfig(backend={BACKEND[job.gpus]!r}, timeout_s=12 * 3600),
    scaling_config=ScalingConfig(num_workers={job.workers}, use_gpu={job.gpus}),
    run_config=RunConfig(name={job_name(job.name)!r}, failure_config=FailureConfig(max_failures={job.restarts})),
)

if __name__ == "__main__":
    trainer.fit()
'''


def train(config: dict[str, Any]) -> None:
    """What each worker does: the command, as this rank. Raises where it did not end well, so that Ray knows."""
    from automodel.cli.main import main

    os.chdir(config["folder"])
    before, sys.argv = sys.argv, ["automodel", *config["arguments"]]
    try:
        main()
    except SystemExit as ending:
        if ending.code not in (None, EXIT_OK):
            raise RuntimeError(f"`{shlex.join(sys.argv)}` ended with exit code {ending.code}") from None
    finally:
        sys.argv = before
