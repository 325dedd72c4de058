"""A Slurm batch script: one task for each rank, and the job again in the queue when its time is up.

`srun` starts every rank itself, so nothing stands between Slurm and the ranks: some minutes before the time limit it
sends SIGUSR1 to all of them, they save after the same step and end with 130, and the script puts the job back into the
queue. It continues from the last complete checkpoint, on whatever nodes it gets next. A job that Slurm itself requeues
(preempted, a node failed) continues the same way. Any other exit code ends it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from automodel.config.errors import EXIT_INTERRUPTED

UNREADY = 128 + 10
"""SIGUSR1 before the first step, when there was nothing to save yet."""


@dataclass(frozen=True)
class SlurmJob:
    """What the script says."""

    name: str
    arguments: Sequence[str]
    """Of `automodel`."""
    python: str
    """The interpreter that has automodel installed, on all nodes."""
    folder: Path
    """Where the command runs."""
    nodes: int = 1
    tasks_per_node: int = 8
    gpus: bool = True
    """One for each task."""
    time: str = "04:00:00"
    grace: int = 300
    """Seconds before the limit at which the state is saved."""
    requeues: int = 100
    """How often the job may go back into the queue."""
    partition: str | None = None
    account: str | None = None
    extra: Sequence[str] = field(default_factory=tuple)
    """More options of sbatch."""
    setup: Sequence[str] = field(default_factory=tuple)
    """Lines to run on the first node before the ranks start."""


def job_name(text: str) -> str:
    """A name that is one word to Slurm, to Python and to a file system; at a space Slurm would see the next option."""
    return re.sub(r"[^\w.+-]+", "-", text).strip(".-") or "automodel"


def slurm_script(job: SlurmJob) -> str:
    options = {
        "job-name": job_name(job.name),
        "nodes": job.nodes,
        "ntasks-per-node": job.tasks_per_node,
        "gpus-per-node": job.tasks_per_node if job.gpus else None,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "signal": f"USR1@{job.grace}",
        "output": "%x-%j.log",
        "open-mode": "append",
    }
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    lines += ["#SBATCH --requeue", *(f"#SBATCH {option}" for option in job.extra)]
    command = shlex.join([job.python, "-m", "automodel", *job.arguments])
    return "\n".join([*lines, _BODY.format(
        folder=shlex.quote(str(job.folder)),
        setup="".join(f"{line}\n" for line in job.setup),
        command=command.replace("'", "'\\''"),
        saved=EXIT_INTERRUPTED,
        unready=UNREADY,
        requeues=job.requeues,
    )])  # fmt: skip


_BODY = """
cd {folder} || exit 2
{setup}
# The ranks meet at the first node. Two jobs of one node rarely share a port.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# A rank that fails takes the others with it. Signals go to the ranks, not to this script.
srun --kill-on-bad-exit=1 bash -c '
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
  export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
  exec {command}
'
code=$?

# {saved}: the state is saved and time is up. {unready}: time was up before the first step.
if [ $code -eq {saved} ] || [ $code -eq {unready} ]; then
  if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeues} ]; then
    echo "Back into the queue (start $((${{SLURM_RESTART_COUNT:-0}} + 1)) is over, exit code $code)"
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "Requeued {requeues} times; sbatch it again to go on" >&2
  fi
fi
exit $code
"""
