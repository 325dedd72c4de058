"""What `pip install` is told: one distribution name everywhere, extras that exist, one version.

PyPI's `automodel` is another program, so a hint that named it would install that one.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import automodel
from versions import constraints

ROOT = Path(__file__).parents[2]
TEXTS = [
    *(ROOT / "src").rglob("*.py"),
    *(ROOT / "docs").glob("*.md"),
    *(path for path in (ROOT / "examples").rglob("*") if path.is_file()),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml", "Makefile")),
]


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_name_is_not_that_of_another_program_and_the_command_stays(project):
    assert project["name"] == "automodel-finetune"
    assert list(project["scripts"]) == ["automodel"]
    assert project["version"] == automodel.__version__


def test_every_line_that_installs_extras_names_this_distribution_and_extras_that_it_has(project):
    extras = set(project["optional-dependencies"]) | {"{section}"}  # the trackers' hint names their own
    found = 0
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        for name, named in re.findall(r"([\w.-]*automodel[\w.-]*)\[([a-z0-9_,{}]+)\]", text):
            found += 1
            assert name == project["name"], path
            assert set(named.split(",")) <= extras, path
    assert found > 8


def test_no_line_installs_the_other_program():
    for path in TEXTS:
        assert not re.search(r"pip install [^\n`#]*(?<![\w-])automodel(?![\w./-])", path.read_text(encoding="utf-8")), (
            path
        )


def test_versions_that_did_not_pass_the_tests_are_not_installed(project):
    """Libraries whose next version can change numbers are bounded above; the tested set lies within every bound."""
    requirements = [Requirement(r) for extra in ("compare", "demo") for r in project["optional-dependencies"][extra]]
    requirements += map(Requirement, project["dependencies"])
    bounded = {r.name for r in requirements if "<" in {s.operator for s in r.specifier}}
    assert bounded == {"torch", "transformers", "datasets", "accelerate", "peft", "trl"}
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for requirement in requirements:
        assert tested[requirement.name] in requirement.specifier, requirement


def test_both_ends_of_the_versions_are_constraints_that_pip_can_meet(project):
    oldest, newest = (dict(line.split("==") for line in constraints(end)) for end in ("oldest", "newest"))
    assert newest.keys() == {"torch", "triton"}
    for requirement in map(Requirement, project["dependencies"]):
        assert oldest[requirement.name] in requirement.specifier, requirement
    assert oldest["transformers"] == "5.17"
