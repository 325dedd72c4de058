"""A file's bytes, straight to the disk or through the page cache: always the same file."""

import errno
import mmap
import os
import random

import pytest

from automodel.checkpoint import disk
from automodel.checkpoint.disk import PAGE, NewFile

DATA = random.Random(0).randbytes(40 * PAGE + 123)


def pieces(size: int):
    """In memory that begins with a page."""
    place = mmap.mmap(-1, size)
    for start in range(0, len(DATA), size):
        part = DATA[start : start + size]
        place[: len(part)] = part
        yield memoryview(place)[: len(part)]


def write(path, size: int = 4 * PAGE) -> NewFile:
    with NewFile(path) as file:
        for piece in pieces(size):
            file.write(piece)
        file.flush()
    assert path.read_bytes() == DATA
    assert file.size == len(DATA)
    return file


@pytest.fixture
def calls(monkeypatch):
    """Every write, and whether it was to go straight to the disk."""
    seen, real = [], os.write

    def note(descriptor, piece):
        import fcntl

        seen.append((len(piece), bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)))
        return real(descriptor, piece)

    monkeypatch.setattr(os, "write", note)
    return seen


needs_a_straight_way = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")


@needs_a_straight_way
def test_whole_pages_go_straight_and_the_rest_through_the_cache(tmp_path, calls):
    with NewFile(tmp_path / "probe") as probe:
        if not probe.straight:
            pytest.skip("the file system of the temporary folder has no O_DIRECT")
    write(tmp_path / "file")
    assert calls == [(4 * PAGE, True)] * 10 + [(123, False)]


@needs_a_straight_way
def test_pieces_that_are_no_whole_pages_are_never_tried(tmp_path, calls):
    write(tmp_path / "file", 1000)
    assert not any(straight for _, straight in calls)


@needs_a_straight_way
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EFAULT, errno.ENOTSUP])
@pytest.mark.parametrize("good", [0, 3])
def test_a_file_system_that_refuses_gets_the_rest_through_the_cache(tmp_path, monkeypatch, good, number):
    real, done = os.write, []

    def refuse(descriptor, piece):
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and len(done) == good:
            raise OSError(number, "not like this")
        done.append(len(piece))
        return real(descriptor, piece)

    monkeypatch.setattr(os, "write", refuse)
    assert not write(tmp_path / "file").straight


@needs_a_straight_way
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_one_that_cannot_be_opened_so_is_opened_otherwise(tmp_path, monkeypatch, number):
    real = os.open

    def refuse(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(number, "not like this")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    write(tmp_path / "file")


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, piece: real(descriptor, piece[:777]))
    write(tmp_path / "file")


def test_a_full_disk_is_an_error_and_not_a_reason_to_try_another_way(tmp_path, monkeypatch):
    tried = []

    def full(descriptor, piece):
        tried.append(len(piece))
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no space left"):
        write(tmp_path / "file")
    assert len(tried) == 1


def test_without_a_straight_way_the_disk_is_told_of_every_byte_in_time(tmp_path, monkeypatch):
    told = []
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    monkeypatch.setattr(disk, "AHEAD", 4096)
    monkeypatch.setattr(os, "posix_fadvise", lambda *where: told.append(where[1:3]), raising=False)
    write(tmp_path / "file", 1000)
    covered = 0
    for start, length in told:
        assert start <= covered, "no gap"
        covered = max(covered, start + length)
    assert len(DATA) - 4096 <= covered <= len(DATA)
    monkeypatch.setattr(os, "posix_fadvise", lambda *where: (_ for _ in ()).throw(OSError(22, "not here")))
    write(tmp_path / "file", 1000)  # a hint that is refused costs nothing


@needs_a_straight_way
def test_what_has_time_is_neither_hurried_nor_flushed(tmp_path, monkeypatch, calls):
    told = []
    monkeypatch.setattr(disk, "AHEAD", 4096)
    monkeypatch.setattr(os, "posix_fadvise", lambda *where: told.append(where), raising=False)
    monkeypatch.setattr(os, "fsync", told.append)
    with NewFile(tmp_path / "file", at_once=False) as file:
        for piece in pieces(4 * PAGE):
            file.write(piece)
    assert (tmp_path / "file").read_bytes() == DATA
    assert not told
    assert calls == [(4 * PAGE, False)] * 10 + [(123, False)]
