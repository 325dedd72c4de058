"""A place that cannot be written to is refused in one line, whichever command was given it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from automodel.checkpoint.new_folder import check_new
from automodel.cli import examples, launch
from automodel.config.errors import UserError
from automodel.config.writable import require_writable
from automodel.migrate.document import Document
from automodel.migrate.verb import write_config

CANNOT = "nothing can be written to .*(Not a directory|File name too long|No such file or directory).*Choose another"


@pytest.mark.parametrize("wrong", ["file/x", "file/deep/x", "y" * 300, "/proc/no/x"])
def test_no_command_writes_where_nothing_can_be_written(tmp_path, monkeypatch, wrong):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "c.yaml").write_text("model: bert-base-uncased\ndataset: imdb\ntask: text-classification\n")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / wrong
    for write in (
        lambda: require_writable(path, "-o"),
        lambda: check_new(path),
        lambda: write_config(Document("a.yaml"), path),
        lambda: run(examples.app, "cp", "chat_sft", path),
        lambda: run(launch.app, "slurm", "-c", "c.yaml", "-o", path),
    ):
        with pytest.raises(UserError, match=CANNOT):
            write()
    assert (tmp_path / "file").read_text() == "kept"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["c.yaml", "file"]


def test_a_folder_that_is_missing_is_made(tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text("model: bert-base-uncased\ndataset: imdb\ntask: text-classification\n")
    monkeypatch.chdir(tmp_path)
    assert "Wrote" in run(launch.app, "slurm", "-c", "c.yaml", "-o", tmp_path / "a" / "b" / "c.sbatch")
    require_writable(tmp_path / "c.yaml", "-o")


def run(app, *typed):
    return CliRunner().invoke(app, [str(word) for word in typed], catch_exceptions=False).output
