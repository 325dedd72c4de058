"""Fixtures for every room's tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Two cores and several test processes: threads that spin would only slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import interpreted_triton  # noqa: F401  before torch imports it
from hf_cache import HfCache


@pytest.fixture
def hf_cache(tmp_path: Path) -> HfCache:
    """An empty local Hugging Face cache; see hf_cache.py."""
    return HfCache(tmp_path / "hf-home")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data beside the checkout."""
    folder = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("../shared/data is not here")
    return folder.resolve()


def pytest_terminal_summary(terminalreporter) -> None:
    """Says where it is read what a green run did not run, and which tests belong to the slow tier."""
    missing = [report for report in terminalreporter.stats.get("skipped", []) if "../shared" in str(report.longrepr)]
    if missing:
        line = f"{len(missing)} tests did not run: ../shared is not beside this checkout"
        terminalreporter.write_line(line, yellow=True)
    for report in terminalreporter.stats.get("passed", []):
        if report.duration > 10 and "slow" not in report.keywords:
            line = f"{report.nodeid} took {report.duration:.0f} s: mark it slow if it does on two idle cores"
            terminalreporter.write_line(line, yellow=True)
