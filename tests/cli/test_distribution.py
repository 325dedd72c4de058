"""What `pip install` is told: one distribution name everywhere, extras that exist, one version.

PyPI's `automodel` is another program, so a hint that named it would install that one.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import automodel

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
