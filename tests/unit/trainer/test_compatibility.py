"""docs/compatibility.md is what the code says, and names every block of the reference documents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from automodel.trainer.compatibility import BLOCKS, page

ROOT = Path(__file__).resolve().parents[3]
REFERENCE = ROOT.parent / "shared" / "reference"


def test_the_page_is_current():
    assert (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8") == page()


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="../shared/reference is not here")
def test_every_block_of_the_documents_is_listed():
    found = []
    for document in sorted(REFERENCE.glob("*.md")):
        inside = False
        for number, line in enumerate(document.read_text(encoding="utf-8").split("\n"), start=1):
            if re.match(r"\s*```", line):
                inside = not inside
                if inside:
                    found.append((document.stem, number))
    assert sorted((document, line) for document, line, _, _ in BLOCKS) == sorted(found)
