"""Runs cases as the `automodel` command would, each in a process of its own that begins with everything imported.

    python tests/bad_input/run_cases.py FOLDER CASES.pickle > results.json

The cases are a pickle of our own making. Each result says how the command ended, what it printed, how long it took and
which files changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from bad_input.case import Case

SECONDS = 30
MEMORY = 16 << 30  # bytes of address space: an input that asks for more must not take the machine down
AT_ONCE = 2


def make_models(folder: Path) -> None:
    """A tiny classifier, a language model and a sequence-to-sequence model."""
    import tiny_runs

    for kind in ("bert", "llama", "t5"):
        if not (folder / kind).exists():
            tiny_runs.make_model_folder(folder / kind, kind)


def main(folder: Path, cases: list[Case]) -> list[dict[str, Any]]:
    make_models(folder / "models")
    from automodel.models.lean_imports import import_transformers

    import_transformers()
    import datasets  # noqa: F401
    import pandas  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    import automodel.cli.config
    import automodel.cli.finetune
    import automodel.cli.plan
    import automodel.engine.run  # noqa: F401

    results: dict[str, dict[str, Any]] = {}
    running: dict[int, tuple[Case, float]] = {}
    waiting = list(reversed(cases))
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            case = waiting.pop()
            place = _lay_out(folder, case)
            before = _files(place)
            (folder / "before" / case.name).write_text(json.dumps(before))
            running[_start(folder, place, case)] = case, time.monotonic()
        time.sleep(0.01)
        for process, (case, began) in list(running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            late = time.monotonic() - began > SECONDS
            if late and not ended:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            if ended or late:
                del running[process]
                code = os.waitstatus_to_exitcode(status) if ended else None
                results[case.name] = _result(folder, case, code, time.monotonic() - began)
    return [results[case.name] for case in cases]


def _place(folder: Path, case: Case) -> Path:
    return folder / "cases" / case.name


def _lay_out(folder: Path, case: Case) -> Path:
    place = _place(folder, case)
    for name in ("before", "said", f"home/{case.name}"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    place.mkdir(parents=True)
    for name, content in case.files.items():
        path = place / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_bytes(content)
    for name, target in case.links.items():
        (place / name).symlink_to(target)
    return place


def _start(folder: Path, place: Path, case: Case) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.setpgid(0, 0)
        said = os.open(folder / "said" / case.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, target in enumerate((nothing, said, said)):
            os.dup2(target, number)
        os.chdir(place)
        os.environ["HOME"] = str(folder / "home" / case.name)
        code = _command(case.arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _command(arguments: tuple[str, ...]) -> int:
    from automodel.cli.main import main as automodel

    sys.argv = ["automodel", *arguments]
    try:
        automodel()
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    return 0


def _files(place: Path) -> dict[str, list[int]]:
    """Size and time of everything below a folder; links are not followed."""
    found = {}
    for path in sorted(place.rglob("*")):
        state = path.lstat()
        found[str(path.relative_to(place))] = [state.st_size, 0 if path.is_dir() else state.st_mtime_ns]
    return found


def _result(folder: Path, case: Case, code: int | None, seconds: float) -> dict[str, Any]:
    before = json.loads((folder / "before" / case.name).read_text())
    after = _files(_place(folder, case))
    home = _files(folder / "home" / case.name)
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    said = (folder / "said" / case.name).read_text(encoding="utf-8", errors="replace")
    return {
        "name": case.name,
        "code": code,
        "said": said,
        "seconds": seconds,
        "changed": changed + [f"~/{name}" for name in home],
    }


if __name__ == "__main__":
    place, pickled = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    print(json.dumps(main(place, pickle.loads(pickled.read_bytes()))))
