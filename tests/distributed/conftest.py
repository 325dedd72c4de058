"""Every layout is trained once for all tests of this folder, also where several workers run them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """The same runs on one, two and four ranks: on1/…, on2/…, on4/…. Nobody may change them. The first worker that asks
    for them makes them; the others wait."""
    from many_runs import make_runs

    own = tmp_path_factory.getbasetemp()
    place = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder = place / "layouts"
    with (place / "layouts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            folder.mkdir()
            make_runs(folder)
            (folder / "made").touch()
    return folder
