"""A command imports what it needs, and ends when it is done."""

import os
import subprocess
import sys

import pytest

import tiny_runs as tiny

HEAVY = (
    "sklearn", "scipy", "pandas", "datasets", "sympy", "accelerate", "torchao", "torch._dynamo", "torch._inductor",
    "torch.distributed.fsdp",
)  # fmt: skip
CODE = """
import sys
from automodel.cli.main import main
heavy, sys.argv = sys.argv[1].split(","), ["automodel", *sys.argv[2:]]
try:
    main()
except SystemExit as ending:
    assert not ending.code, ending.code
print("heavy:", *[name for name in heavy if name in sys.modules])
"""


def imported_by(*arguments, **env):
    """The heavy modules that a command has imported when it ends."""
    command = [sys.executable, "-c", CODE, ",".join(HEAVY), *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run, so that its tokens are in the cache."""
    folder = tmp_path_factory.mktemp("run")
    tiny.write_run(folder, text="step_scheduler: {max_steps: 2}\ndataloader: {batch_size: 4}\n")
    tiny.automodel("finetune", "llm", "-c", folder / "run.yaml", AUTOMODEL_CACHE=str(folder / "cache"))
    return folder


def test_training_saving_and_predicting_import_nothing_heavy(run):
    cache = {"AUTOMODEL_CACHE": str(run / "cache")}
    assert imported_by("finetune", "llm", "-c", run / "run.yaml", "--overwrite", **cache) == []
    assert imported_by("predict", run / "out", "a good film", **cache) == []


@pytest.mark.slow
def test_plain_imports_can_be_asked_for(run):
    cache = {"AUTOMODEL_CACHE": str(run / "cache"), "AUTOMODEL_PLAIN_IMPORTS": "1"}
    assert "sympy" in imported_by("predict", run / "out", "a good film", **cache)


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["no-such-verb"], 2), (["finetune"], 2)])
def test_exit_codes_reach_the_shell(arguments, code):
    done = subprocess.run([sys.executable, "-m", "automodel", *arguments], capture_output=True, text=True)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
