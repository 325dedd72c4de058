"""A machine that gives too little, as a process: one line, no traceback."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

import tiny_runs as tiny

MB = 1 << 20


@pytest.mark.parametrize(
    ("limit", "most", "said"),
    [
        (resource.RLIMIT_NOFILE, 12, "this process may open no more files. Raise the limit (`ulimit -n"),
        (resource.RLIMIT_AS, 1200 * MB, "the machine gave no more "),
    ],
    ids=["files", "memory"],
)
def test_a_limit_of_the_machine_is_named(tmp_path, limit, most, said):
    path = tiny.write_run(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "automodel.cli.main", "finetune", "llm", "-c", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "AUTOMODEL_CACHE": str(tmp_path / "cache")},
        preexec_fn=lambda: resource.setrlimit(limit, (most, most)),
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: ")
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
