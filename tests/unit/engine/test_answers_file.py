"""Where answers go is looked at before they are made."""

from __future__ import annotations

import errno
import os

import pytest

from automodel.config.errors import UserError
from automodel.engine import tables


def test_a_folder_that_takes_nothing_is_found_before_an_hour_of_answers(tmp_path, monkeypatch):
    tables.check_output(tmp_path / "answers.jsonl", None)
    assert not any(tmp_path.iterdir())

    def refuse(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tables.tempfile, "TemporaryFile", refuse)
    with pytest.raises(UserError, match=r"--output: nothing can be written to .* \(Read-only file system\)"):
        tables.check_output(tmp_path / "answers.jsonl", None)
