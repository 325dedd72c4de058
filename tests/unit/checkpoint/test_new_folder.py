"""A new folder is complete or absent, however the process that writes it ends."""

import os
import signal

import pytest

from automodel.checkpoint.new_folder import UNFINISHED, check_new, new_folder
from automodel.config.errors import UserError


def write(target, *, killed_before: str = "") -> None:
    """Three files; the process is killed before one of them is written, or before the folder takes its name."""
    with new_folder(target) as writing:
        for name in ("model.safetensors", "config.json", "run/layout.json"):
            if name == killed_before:
                os.kill(os.getpid(), signal.SIGKILL)
            (writing / name).parent.mkdir(exist_ok=True)
            (writing / name).write_text(name)
        if killed_before == "its name":
            os.kill(os.getpid(), signal.SIGKILL)


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


WHOLE = ["config.json", "model.safetensors", "run/layout.json"]


@pytest.mark.parametrize("killed_before", ["model.safetensors", "config.json", "run/layout.json", "its name"])
@pytest.mark.parametrize("there", [False, True])
def test_a_killed_export_is_absent_and_its_retry_works(tmp_path, killed_before, there):
    target = tmp_path / "deep" / "merged"
    if there:
        target.mkdir(parents=True)
    child = os.fork()
    if child == 0:
        write(target, killed_before=killed_before)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not target.exists() or not any(target.iterdir())
    write(target)
    assert files(target) == WHOLE
    assert [p.name for p in target.parent.iterdir()] == ["merged"]


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), new_folder(tmp_path / "merged") as writing:
        {(writing / "half").write_text("x"): 1}["y"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_process_writes_is_left_alone(tmp_path):
    with new_folder(tmp_path / "merged") as writing:
        (writing / "file").write_text("mine")
        with pytest.raises(UserError, match="another process is writing"), new_folder(tmp_path / "merged"):
            pass
    assert files(tmp_path / "merged") == ["file"]


def test_what_is_there_is_never_replaced(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("full", "file"):
        with pytest.raises(UserError, match="--out: .* exists and is not empty"):
            check_new(tmp_path / name)
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(UserError, match="Name a folder inside it"):
        check_new(tmp_path / "disk")


def test_a_link_to_an_empty_folder_is_followed(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write(tmp_path / "link")
    assert files(tmp_path / "there") == WHOLE
    assert not (tmp_path / f"link{UNFINISHED}").exists()
