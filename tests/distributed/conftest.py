"""Every layout is trained once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """The same runs on one, two and four ranks: on1/…, on2/…, on4/…."""
    from many_runs import make_runs

    return make_runs(tmp_path_factory.mktemp("runs"))
