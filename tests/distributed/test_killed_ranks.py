"""kill -9 of a random rank at twenty random moments, during saves too: every resume continues exactly.

`AUTOMODEL_KILLS` for another number of kills.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_runs as tiny

SETTINGS = (
    "step_scheduler: {max_steps: 12, log_every_steps: 1, global_batch_size: 4, ckpt_every_steps: 2, "
    "val_every_steps: 6}\n"
    "dataloader: {batch_size: 1}\n"
    "distributed: {strategy: fsdp2}\n"
)


@pytest.mark.slow
def test_every_resume_continues_exactly(tmp_path):
    tiny.write_run(tmp_path, text=SETTINGS, dropout=0.1)
    kills = os.environ.get("AUTOMODEL_KILLS", "20")
    seed = int.from_bytes(os.urandom(4))
    here = Path(__file__)
    paths = [str(here.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "AUTOMODEL_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = [sys.executable, str(here.with_name("killed_ranks.py")), str(tmp_path), kills, str(seed)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, f"seed {seed}\n{ran.stdout}\n{ran.stderr[-4000:]}"
    done = json.loads(ran.stdout.splitlines()[-1])
    assert done["kills"] == int(kills)
    assert done["in_a_save"] >= int(kills) // 5
    assert done["left_over"] >= 1  # of a save, in the way of the next run
    assert done["resumed"] >= int(kills) // 5
    assert done["finished"] >= 1
    assert done["slowest_end_s"] < 60
