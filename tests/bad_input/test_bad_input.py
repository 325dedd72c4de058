"""400 bad configs and 200 bad data files, each met by the command that people type. Every one ends with exit code 2 and
a line that names the key or the row and a way out, within 30 seconds, and nothing is written.

A sample runs with the quick tests, everything with the slow ones. `case.py` says what a case is, `configs.py` and
`data.py` make them from a seed, and `run_cases.py` runs them.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bad_input import configs, data
from bad_input.case import SEED, Case
from bad_input.run_cases import SECONDS

SAMPLE = 6
LONGEST_LINE = 1200
MOST_LINES = 30
WAY_OUT = re.compile(
    r"\b([Aa]dd|[Cc]hange|[Cc]heck|[Cc]hoose|Close|[Cc]opy|Correct|Download|[Gg]ive|Indent|Install|[Kk]eep|[Ll]eave"
    r"|Lower|[Mm]ake|makes|Merge|[Nn]ame|[Pp]ut|Quote|Raise|[Rr]emove|Rename|[Ss]ave|Say|[Ss]et|[Ss]horten|Split|[Tt]akes?"
    r"|[Uu]se|[Ww]rite|[Dd]id you mean|must|expected|at most|at least|belongs|here it is|is spelt|is missing|needs"
    r"|is a section|the keys here|smallest config|It has|There are|nearest possible|such as|Readable are|is an option"
    r"|indents|Is (a|it|this)|a config is|means nothing)\b"
)
"""Words of a sentence that says what to do, or what would be right."""


def test_the_generator_gives_what_it_promises():
    for cases, count in ((configs.cases(), 400), (data.cases(), 200)):
        assert len(cases) == count
        assert len({case.name for case in cases}) == count
        assert all(case.fault and case.names for case in cases)
    again = [pickle.dumps(configs.cases()), pickle.dumps(data.cases())]
    assert again == [pickle.dumps(configs.cases()), pickle.dumps(data.cases())]


def test_a_sample_is_refused_and_what_it_was_made_from_is_not(tmp_path):
    chance = random.Random(SEED)
    good = configs.good_cases()
    cases = [*chance.sample(configs.cases(), SAMPLE), *chance.sample(data.cases(), SAMPLE)]
    results = run(tmp_path, [*good, *cases])
    assert [(r["name"], r["said"]) for r in results[: len(good)] if r["code"] != 0] == []
    assert_refused(cases, results[len(good) :])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [configs, data], ids=["configs", "data"])
def test_every_case(kind, tmp_path):
    cases = kind.cases()
    assert_refused(cases, run(tmp_path, cases))


def run(folder: Path, cases: list[Case]) -> list[dict]:
    (folder / "cases.pickle").write_bytes(pickle.dumps(cases))
    tests = Path(__file__).resolve().parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")]),
        "AUTOMODEL_CACHE": str(folder / "cache"),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(tests / "bad_input" / "run_cases.py"), str(folder), str(folder / "cases.pickle")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_refused(cases: list[Case], results: list[dict]) -> None:
    wrong = [
        f"{case.name}: {fault}\n  bad: {case.fault}\n  command: automodel {' '.join(case.arguments)[:300]}\n"
        f"  exit {result['code']} after {result['seconds']:.1f} s\n  {result['said'][-1500:]}"
        for case, result in zip(cases, results)
        if (fault := what_is_wrong(case, result))
    ]
    assert not wrong, f"{len(wrong)} of {len(cases)} cases\n" + "\n".join(wrong)


def what_is_wrong(case: Case, result: dict) -> str:
    """What an answer lacks; empty where it lacks nothing."""
    said = result["said"]
    named = [line for line in said.splitlines() if re.search(case.names, line)]
    if result["code"] is None:
        return f"no answer within {SECONDS} s"
    if "Traceback" in said:
        return "a traceback"
    if result["code"] != 2:
        return "accepted" if result["code"] == 0 else "another exit code than 2"
    if not named:
        return f"nothing names {case.names}"
    if not any(WAY_OUT.search(line) for line in said.splitlines()):
        return "no way out"
    if max(map(len, said.splitlines())) > LONGEST_LINE or len(said.splitlines()) > MOST_LINES:
        return "more than a person reads"
    if result["changed"]:
        return f"files changed: {', '.join(result['changed'][:5])}"
    return ""
