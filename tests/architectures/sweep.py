"""Every class that transformers maps, one after the other: `make test-architectures`.

Each class runs in a process of its own, forked from one that has imported everything, so that a crash or a hang is one
row and not the end. Rows are written to `results.json` as they come; a sweep that was stopped goes on where it was
(`--again` begins anew). `python tests/architectures/sweep.py --table` writes `docs/architectures.md` from the rows.

`--sample 20` takes twenty classes chosen by the commit, and every class whose model type stands on a line that the
commit changes in `src/` or here; `.ci/run` does that. Rows of a sample are compared with the committed ones: a verdict
that got worse is an error (exit code 1).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.json"
TABLE = ROOT / "docs" / "architectures.md"
LIMIT_S = 240
"""A class that takes longer counts as crashed."""
GOOD = ("equal", "as stock pads", "refused", "stock cannot", "cannot be built")

sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--jobs", type=int, default=2)
    arguments.add_argument("--only", nargs="*", default=[], help="model types, or type:task")
    arguments.add_argument("--sample", type=int, default=0, help="this many, chosen by the commit, and what it touches")
    arguments.add_argument("--again", action="store_true", help="forget the rows that are there")
    arguments.add_argument("--table", action="store_true", help="write docs/architectures.md and end")
    asked = arguments.parse_args()
    if asked.table:
        TABLE.write_text(table(json.loads(RESULTS.read_text())))
        return 0
    import tiny

    everything = tiny.mapped()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"versions": {}, "rows": []}
    known = {(row["kind"], row["task"]): row for row in kept["rows"]}
    if asked.sample:
        return _check(sample(everything, asked.sample), known, asked.jobs)
    wanted = [c for c in everything if not asked.only or c[0] in asked.only or ":".join(c) in asked.only]
    if not asked.again and not asked.only:
        wanted = [c for c in wanted if c not in known]
    for row in run(wanted, asked.jobs):
        known[row["kind"], row["task"]] = row
        _write(known, everything)
    print(Counter(row["verdict"] for row in known.values()))
    return int(any(row["verdict"] not in GOOD for row in known.values()))


def _check(wanted: list[tuple[str, str]], known: dict[tuple[str, str], dict[str, Any]], jobs: int) -> int:
    """Runs some classes and compares their verdicts with the committed ones."""
    worse = []
    rows = list(run(wanted, jobs))
    for row in rows:
        before = known.get((row["kind"], row["task"]), {}).get("verdict", "nothing")
        trained = before in ("equal", "as stock pads")
        if row["verdict"] != before and (trained or row["verdict"] not in GOOD) and row["verdict"] != "equal":
            worse.append(f"{row['kind']} {row['task']}: {before} → {row['verdict']} ({row['reason']})")
    for line in worse:
        print(f"worse than {RESULTS.name} says: {line}")
    print(f"{len(rows) - len(worse)} passed, {len(worse)} failed")
    return int(bool(worse))


def run(wanted: list[tuple[str, str]], jobs: int):
    """Yields a row for every class as it is done."""
    _import_everything()
    waiting, running = list(reversed(wanted)), {}
    done = 0
    while waiting or running:
        while waiting and len(running) < jobs:
            child = _Child(*waiting.pop())
            running[child.pipe] = child
        ready, _, _ = select.select(list(running), [], [], 1.0)
        for pipe in ready:
            if running[pipe].read():
                continue
            child = running.pop(pipe)
            done += 1
            row = child.row()
            print(
                f"{done}/{len(wanted)} {row['kind']} {row['task']}: {row['verdict']} {row['reason'][:150]}", flush=True
            )
            yield row
        for child in running.values():
            child.end_if_late()


class _Child:
    """One class in a process of its own."""

    def __init__(self, kind: str, task: str):
        self.kind, self.task = kind, task
        self.started = time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{kind}-"))
        self.text = b""
        self.pipe, end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.close(self.pipe)
            _examine(kind, task, self.folder, end)
        os.close(end)

    def read(self) -> bool:
        """Reads what has come; False at the end."""
        some = os.read(self.pipe, 1 << 16)
        self.text += some
        return bool(some)

    def end_if_late(self) -> None:
        if time.monotonic() - self.started > LIMIT_S:
            os.killpg(self.pid, signal.SIGKILL)

    def row(self) -> dict[str, Any]:
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.text:
            return json.loads(self.text)
        seconds = round(time.monotonic() - self.started, 1)
        reason = f"the process ended with status {status} after {seconds} s"
        return {"kind": self.kind, "task": self.task, "verdict": "crashed", "reason": reason, "seconds": seconds}


def _examine(kind: str, task: str, folder: Path, end: int) -> None:
    """In the child: examines the class, writes its row into the pipe and ends."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    os.environ["AUTOMODEL_CACHE"] = str(folder / "cache")
    import examine

    row = examine.examine(kind, task, folder)
    os.write(end, json.dumps(row).encode())
    os._exit(0)


def _import_everything() -> None:
    import logging

    import examine
    import tiny
    from transformers import DataCollatorForSeq2Seq, Trainer

    import automodel.engine.run
    import hf_trainer

    logging.disable(logging.ERROR)
    assert all((automodel.engine.run, examine, hf_trainer, tiny, DataCollatorForSeq2Seq, Trainer))


def sample(everything: list[tuple[str, str]], size: int) -> list[tuple[str, str]]:
    """Classes chosen by the commit, and those that it touches."""
    commit = _git("rev-parse", "HEAD").strip()
    changed = _git("show", "--format=", "--unified=0", "HEAD", "--", "src", "tests/architectures/tiny.py")
    lines = [line for line in changed.splitlines() if re.match(r"[+-](?![+-])", line)]
    words = set(re.findall(r'"([\w.-]+)"', "\n".join(lines)))
    chosen = set(random.Random(commit).sample(everything, min(size, len(everything))))
    return sorted(chosen | {c for c in everything if c[0] in words})


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _write(known: dict[tuple[str, str], dict[str, Any]], everything: list[tuple[str, str]]) -> None:
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    rows = [known[c] for c in everything if c in known]
    lines = ",\n".join(f"  {json.dumps(_rounded(row))}" for row in rows)
    text = f'{{"versions": {json.dumps(versions)}, "rows": [\n{lines}\n]}}\n'
    written = RESULTS.with_suffix(".writing")
    written.write_text(text)
    written.replace(RESULTS)


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Two digits are enough to see how far from the tolerance a number is."""
    return {name: float(f"{v:.1e}") if isinstance(v, float) and name != "seconds" else v for name, v in row.items()}


def table(results: dict[str, Any]) -> str:
    """`docs/architectures.md` of those results."""
    rows = results["rows"]
    counted = Counter(row["verdict"] for row in rows)
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [_HEAD.format(count=len(rows), versions=versions)]
    lines += ["| verdict | classes | what it means |", "|---|---|---|"]
    lines += [f"| {verdict} | {counted[verdict]} | {meaning} |" for verdict, meaning in _MEANING.items()]
    lines += [
        "",
        "| model type | task | verdict | path | alone: logits; gradients | curve | why |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        alone = f"{_number(row.get('alone_logits'))}; {_number(row.get('alone_gradients'))}"
        why = row["reason"].replace("|", "\\|").replace("\n", " ")
        cells = [
            row["kind"],
            row["task"],
            row["verdict"],
            row.get("path") or "–",
            alone,
            _number(row.get("curve")),
            why,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}"


_HEAD = """# Architectures

Made from `tests/architectures/results.json` by `python tests/architectures/sweep.py --table`; a test checks that it is
current. `make test-architectures` makes the results: each of the {count} classes that transformers maps to causal
language models, classifiers of texts and of tokens, and seq2seq models, with a tiny random config ({versions}).

Relative differences, in fp32 without dropout. *Alone*: logits and gradients of a batch beside the stock model given
each document alone. *Curve*: ten steps beside transformers' Trainer. FSMT's own code writes padding into the labels
that Trainer's collator hands it, and would learn to write it: in this comparison it gets a copy of them.
"""

_MEANING = {
    "equal": "logits within 1e-5, gradients and curve within 1e-4; the saved folder loads in stock transformers",
    "as stock pads": "the curve equals Trainer's; the stock model itself reads padded documents otherwise than alone",
    "refused": "`automodel` says before the run that it does not train this class, and why",
    "differs": "not equal: a fault, to be mended",
    "crashed": "an error that is not for people: a fault, to be mended",
    "stock cannot": "stock Trainer itself fails on text alone (pictures, sounds or boxes are missing)",
    "cannot be built": "needs a package that is not installed, or sizes that the sweep does not know",
}

if __name__ == "__main__":
    sys.exit(main())
