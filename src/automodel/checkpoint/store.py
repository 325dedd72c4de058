"""Resumable checkpoints: complete or absent, never half.

A checkpoint (`catalog.py` says what is in it) is written under a temporary name, flushed to the disk, and renamed;
`LATEST` is replaced the same way. A process killed at any moment leaves either the whole checkpoint or an unfinished
temporary folder, which the next start removes. Nothing is ever pickled.

The last checkpoint of a run is written beside the model, which the disk is wanted for more (`begin`, not `at_once`): it
is renamed when the system has it, which brings it to the disk in its own time, usually within a minute. Nothing on the
disk is given away for it, so a power cut before that costs no more than one before it was written, and its hashes tell
what is left. Where an older one has to go for it, or an error ends the run, the disk is waited for after all.

Training need not wait for the disk. `begin` takes a snapshot (`snapshot.py`) and returns; a thread writes it. Whoever
asks the store for checkpoints waits until that is done, and `wait`, which the next save begins with, says what went
wrong: as an error, or, with `on_error: continue`, as a warning while the run goes on with the last good one.

Ranks. Tensors that every rank holds are written by the first. Of sharded tensors each rank writes its own parts into
the same temporary folder, in its own time, and leaves a note there with their sizes and hashes; the first rank's thread
waits for all notes (`notes.py`), makes the manifest of them and renames. All ranks must see the folder.

The store knows nothing about models or optimizers: it keeps named tensors and JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from automodel.checkpoint import catalog, notes
from automodel.checkpoint.catalog import MANIFEST, STATE, Checkpoint, DamagedCheckpointError, damage_of
from automodel.checkpoint.disk import Written, flush_to_disk, in_words, write_text
from automodel.checkpoint.parts import files_to_write, is_sharded, parts_of
from automodel.checkpoint.snapshot import Camera, Groups, let_devices_finish
from automodel.checkpoint.tensor_file import write_side_by_side
from automodel.config.errors import EXIT_FAILED, UserError
from automodel.distributed.world import ALONE, Alone

__all__ = ["Checkpoint", "CheckpointStore", "DamagedCheckpointError", "SaveFailedError"]

FALLING_BACK = "Falling back to the checkpoint before it."

Tensors = Mapping[str, Mapping[str, Tensor]]
"""By group and name; which files a group has, `catalog.py` says."""


class SaveFailedError(UserError):
    """A checkpoint that could not be written."""

    exit_code = EXIT_FAILED


@dataclass
class _Work:
    """A checkpoint that is being written."""

    step: int
    folder: Path
    """The temporary one."""
    groups: Groups
    state: str
    protected: set[int]
    sharded: frozenset[str]
    """Groups of which every rank writes its parts."""
    at_once: bool
    """Whether it has to be on the disk before it counts."""
    abandoned: threading.Event = field(default_factory=threading.Event)
    written: Future[dict[str, Written]] = field(default_factory=Future)
    """This rank's files."""
    sealed: Future[None] = field(default_factory=Future)
    """The checkpoint in its place; on the first rank."""


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(
        self,
        folder: Path,
        keep_last: int = 2,
        *,
        ranks: Alone = ALONE,
        background: bool = True,
        on_error: Literal["stop", "continue"] = "stop",
    ):
        self.folder, self.keep_last, self.ranks = folder, keep_last, ranks
        self.background, self.on_error = background, on_error
        self.warn: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
        self.last_place = "none"
        """Where the last snapshot was taken to: `device`, `host`, or `none` where training waited for the disk."""
        self.waited_s = 0.0
        """Seconds that training has waited in `begin`."""
        self._camera = Camera()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")  # finishes before Python ends
        self._work: _Work | None = None
        self._held: int | None = None
        """The lock on the folder that is being written; of the first rank."""
        self._damaged: set[int] = set()  # steps that were passed over
        self._in_the_system: Checkpoint | None = None
        """One that may not be on the disk yet."""

    def leave_room(self, most_bytes: int) -> None:
        """Some step to come needs so much GPU memory at once, whatever those before have needed: no snapshot there may
        take it."""
        self._camera.peak = max(self._camera.peak, most_bytes)

    def save(
        self,
        step: int,
        tensors: Tensors,
        state: Mapping[str, Any],
        protect: Iterable[int] = (),
    ) -> Checkpoint:
        """Writes a checkpoint, then drops old ones; steps in `protect` (the best one) are kept whatever their age."""
        self.wait()
        work = self._open(step, tensors, json.dumps(state), set(protect), at_once=True)
        if work is not None:
            self._carry_out(work)
        self.wait()
        return Checkpoint(step, self.folder / catalog.name_of(step))

    def begin(
        self,
        step: int,
        tensors: Tensors,
        state: Mapping[str, Any],
        protect: Iterable[int] = (),
        *,
        last: bool = False,
        at_once: bool = True,
    ) -> None:
        """As `save`, but returns when a snapshot was taken. Without room for one it is `save`. `last`: nobody changes
        the tensors before asking this store for something, so they are written as they are, and nothing is copied. Not
        `at_once`: the system may have it for a while, where it takes nobody's place and the block ends well."""
        began = time.monotonic()
        try:
            self._begin(step, tensors, state, set(protect), last, at_once)
        finally:
            self.waited_s += time.monotonic() - began

    def _begin(
        self, step: int, tensors: Tensors, state: Mapping[str, Any], protected: set[int], last: bool, at_once: bool
    ) -> None:
        self.wait()
        at_once = at_once or not self.background or self._takes_a_place(step, protected)
        work = self._open(step, tensors, json.dumps(state), protected, at_once)
        if work is None:
            return
        try:
            self._start(work, last)
        except BaseException as error:  # before the writing began, so that it is waited for in vain
            for outcome in (work.written, work.sealed):
                if not outcome.done():
                    outcome.set_exception(error)
            raise

    def _start(self, work: _Work, last: bool) -> None:
        snapshot = None
        if self.background:
            beside = self.ranks.world.local_size if work.sharded else 1
            snapshot = self._camera.hold(work.groups) if last else self._camera.take(work.groups, beside)
        self.last_place = snapshot.place if snapshot else "none"
        if snapshot is None:
            self._carry_out(work)
            if not self.background:  # on all ranks; room for a copy may be missing on some
                self.wait()
            return
        work.groups = snapshot.groups
        self._threads.submit(self._drain, work, snapshot.wait)

    def wait(self) -> None:
        """Returns once nothing is being written any more; says what went wrong. Where several ranks write, all of them
        call this."""
        work = self._work
        if work is None:
            return
        wait_for([work.written])  # Ctrl-C may end this; then the work is still there to be waited for
        problem = _reason(work.written)
        reasons = self.ranks.texts(problem) if work.sharded else [problem]
        if any(reasons):
            work.abandoned.set()
        if self.ranks.first:
            wait_for([work.sealed])
            if not any(reasons):
                reasons = [_reason(work.sealed)]
        self._work = None
        self._report(work.step, reasons)

    @property
    def writing(self) -> bool:
        """Whether a thread of this rank is at work."""
        work = self._work
        return work is not None and not (work.written.done() and (work.sealed.done() or not self.ranks.first))

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Leaves the block when nothing is being written any more. An error that ends it is not replaced by another,
        and asks no other rank, which may be gone."""
        if kind is None:
            self.wait()
            return
        if self._work is not None:
            if self._work.sharded:
                self._work.abandoned.set()
            self._settle()
        self.bring_to_disk()

    def bring_to_disk(self) -> None:
        """Returns once nothing is left to the system any more. To be called when nothing is being written."""
        left, self._in_the_system = self._in_the_system, None
        if left is not None:
            try:
                catalog.bring_to_disk(left.folder)
            except OSError as error:  # the run has ended, well or with an error of its own
                self.warn(f"The checkpoint of step {left.step} may not be on the disk: {in_words(error)}.")

    def complete(self) -> list[Checkpoint]:
        """Every finished checkpoint, oldest first."""
        self._settle()
        return catalog.complete(self.folder)

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole, and a message for each damaged one that was passed over. Every rank
        checks its share of the files, and all get the same answer."""
        if self.ranks.first:
            self.clean()
        passed_over = self.ranks.told(self._lost)
        steps = self.ranks.told(lambda: [c.step for c in self.complete()])
        for step in reversed(steps):
            checkpoint = Checkpoint(step, self.folder / catalog.name_of(step))
            damage = damage_of(checkpoint, self.ranks.rank, self.ranks.size)
            problems = [text for text in self.ranks.texts(damage) if text]
            if not problems:
                return checkpoint, passed_over
            passed_over.append(problems[0] + (f" {FALLING_BACK}" if step != steps[0] else ""))
            self._damaged.add(step)
        return None, passed_over

    def _lost(self) -> list[str]:
        gone, then = catalog.lost(self.folder), f" {FALLING_BACK}" if catalog.complete(self.folder) else ""
        return [f"{gone.folder} is missing, which LATEST names.{then}"] if gone else []

    def at(self, step: int) -> Checkpoint | None:
        return next((c for c in self.complete() if c.step == step), None)

    def clean(self) -> None:
        """Removes what a killed save left behind."""
        self.wait()
        catalog.clean(self.folder)

    # Before the writing.

    def _open(self, step: int, tensors: Tensors, state: str, protected: set[int], at_once: bool) -> _Work | None:
        """The temporary folder and what this rank puts into it; None where it has nothing to do with it."""
        sharded = frozenset(group for group, named in tensors.items() if any(map(is_sharded, named.values())))
        if not sharded and not self.ranks.first:
            return None
        made = self.ranks.told(lambda: self._make_folder(step)) if sharded else self._make_folder(step)
        if made["problem"]:
            self._report(step, [made["problem"]])
            return None
        groups = {group: parts_of(named, self.ranks) for group, named in tensors.items()}
        if not self.ranks.first:
            groups = {group: parts for group, parts in groups.items() if group in sharded}
        self._work = _Work(
            step, self.folder / made["name"], groups, state, protected, sharded, at_once or bool(sharded)
        )
        return self._work

    def _make_folder(self, step: int) -> dict[str, str]:
        folder = catalog.unfinished(self.folder, step)
        made = {"name": folder.name, "problem": ""}
        try:
            self._held = catalog.make_held(folder)
        except OSError as error:
            made["problem"] = in_words(error)
        return made

    def _takes_a_place(self, step: int, protected: set[int]) -> bool:
        """Whether another checkpoint goes when this one is there; or cannot be asked, as the saving will tell."""
        with suppress(OSError):
            old = catalog.too_old(self.folder, self.keep_last, protected | {step}, self._damaged, coming=[step])
            return bool(old) or (self.folder / catalog.name_of(step)).exists()
        return True

    # The writing.

    def _carry_out(self, work: _Work) -> None:
        """In this thread, before training goes on."""
        let_devices_finish(work.groups)
        self._drain(work, lambda: None)

    def _drain(self, work: _Work, ready: Callable[[], None]) -> None:
        """Writes this rank's files; the first rank then puts the checkpoint into its place."""
        try:
            ready()
            work.written.set_result(self._write_files(work))
        except BaseException as error:
            work.written.set_exception(error)
        finally:
            work.groups = {}  # the snapshot's memory
        if self.ranks.first:
            try:
                self._seal(work)
                self._let_go()
                work.sealed.set_result(None)
            except BaseException as error:
                shutil.rmtree(work.folder, ignore_errors=True)  # most often a full disk, which half of one keeps full
                self._let_go()
                work.sealed.set_exception(error)

    def _write_files(self, work: _Work) -> dict[str, Written]:
        """This rank's files; returns when all are written, or, after an error, when nobody writes any more."""
        try:
            written = write_side_by_side(
                work.folder,
                (
                    file
                    for group, parts in work.groups.items()
                    for file in files_to_write(group, parts, self.ranks, group in work.sharded)
                ),
                work.at_once,
            )
            if self.ranks.first:
                written[STATE] = write_text(work.folder / STATE, work.state)
        except OSError as error:
            if work.sharded:
                notes.leave_problem(work.folder, self.ranks.rank, in_words(error))
            raise
        if work.sharded:
            notes.leave_files(work.folder, self.ranks.rank, written)
        return written

    def _seal(self, work: _Work) -> None:
        """Manifest, rename, `LATEST`, and away with the old ones."""
        files = work.written.result()
        if work.sharded:
            files = notes.files_of_all(work.folder, self.ranks.size, work.abandoned)
        manifest = catalog.manifest_text(work.step, files, self.ranks.size if work.sharded else 1)
        write_text(work.folder / MANIFEST, manifest)
        flush_to_disk(work.folder)
        target = self.folder / catalog.name_of(work.step)
        if target.exists():  # an earlier, possibly damaged save of the same step
            catalog.retire(target)
        os.replace(work.folder, target)
        if not work.at_once:
            self._in_the_system = Checkpoint(work.step, target)
        flush_to_disk(self.folder)
        catalog.point_latest(self.folder, work.step)
        self._damaged.discard(work.step)
        if not work.at_once:  # nothing goes for it
            return
        for old in catalog.too_old(self.folder, self.keep_last, work.protected | {work.step}, self._damaged):
            catalog.retire(old.folder)

    def _let_go(self) -> None:
        held, self._held = self._held, None
        catalog.let_go(held)

    # After it.

    def _settle(self) -> None:
        """Waits for this rank's own work, and says nothing about it."""
        if self._work is not None:
            wait_for([self._work.written, *([self._work.sealed] if self.ranks.first else [])])

    def _report(self, step: int, reasons: list[str]) -> None:
        if not any(reasons):
            return
        self.bring_to_disk()  # it may be the one that is kept
        rank, reason = next((rank, text) for rank, text in enumerate(reasons) if text)
        who = f"rank {rank}: " if len(reasons) > 1 else ""
        kept = catalog.seem_whole(self.folder)
        good = f"The checkpoint of step {kept[-1].step} is kept" if kept else "There is no earlier checkpoint"
        what = f"the checkpoint of step {step} could not be written to {self.folder}"
        if kept and kept[-1].step == step:  # what follows its rename failed: `LATEST`, or older ones that go
            what = f"{self.folder} could not be changed after the checkpoint of step {step} was written"
        text = f"{what}: {who}{reason}. {good}"
        if self.on_error == "continue":
            self.warn(f"{text}; training goes on (checkpoint.on_error: continue).")
            return
        then = "continue with --resume" if kept else "start again"
        raise SaveFailedError(f"{text}. Make room and {then}; checkpoint.on_error: continue would have trained on.")


def last_saved(checkpoints: CheckpointStore | None) -> int | None:
    """The step that --resume would continue after."""
    if checkpoints is None:
        return None
    checkpoints._settle()
    whole = catalog.seem_whole(checkpoints.folder)
    return whole[-1].step if whole else None


def _reason(future: Future[Any]) -> str:
    """Why a disk did not take it; anything else is a mistake of ours, and raised as it is."""
    error = future.exception()
    if error is None:
        return ""
    if not isinstance(error, OSError):
        raise error
    return in_words(error)
