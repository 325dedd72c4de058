"""What ranks ask each other, and how they end together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def torchrun(what: str, ranks: int, script: str = "one_rank.py") -> subprocess.CompletedProcess[str]:
    options = ["--standalone", "--nproc-per-node", str(ranks), "--monitor-interval", "0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(Path(__file__).with_name(script))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return subprocess.run([*command, *what.split()], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_ranks_talk():
    done = torchrun("talk", 3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("talked") == 3  # lines of several processes may run into each other


@pytest.mark.slow
def test_an_error_that_all_have_is_shown_once():
    done = torchrun("fail", 2)
    assert done.returncode != 0
    assert done.stderr.count("KeyError: 'boom'") == 1
    assert done.stderr.count("of 2)") == 1  # with the rank that speaks


@pytest.mark.slow
def test_families_cut_in_two():
    """Scaled words, a tied head with a bias, joined products, interleaved heads. Without names it is all thirteen."""
    done = torchrun("gemma phi phi3 gpt_neox", 2, "cut_families.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gradients within") == 8
