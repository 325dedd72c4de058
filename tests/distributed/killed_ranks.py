"""Kills ranks at random moments and resumes, until so many kills are spent. `python killed_ranks.py FOLDER KILLS SEED`.

FOLDER has a run.yaml. Two ranks are forked for every start: importing takes longer than training, so this process
imports what the first run came to import, and never computes anything itself. Every kill but the first is one of a run
that goes on after the kill before, until one comes through. Every second kill waits for a checkpoint
that is being written. Whatever a kill leaves, the other rank must end by itself, every checkpoint must be whole and the
next run must start; one that comes through must have the losses and the weights of the one that was left alone.
Prints what happened as JSON.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch
from safetensors.torch import load_file

import tiny_runs as tiny
from automodel.checkpoint import catalog, tensor_file
from automodel.checkpoint.catalog import damage_of
from automodel.distributed import processes
from automodel.distributed.world import joined
from automodel.models.lean_imports import import_transformers

RANKS = 2
PATIENCE = 90
"""Seconds for a rank to end in. Torch's store looks for another rank for up to 40 where its limit is 16."""
IMPORTS = 300
"""The same for the first run, which imports everything."""
FORK = multiprocessing.get_context("fork")


def one_rank(rank: int, port: int, config: Path, out: Path, resume: bool) -> None:
    """A rank of the run, with a disk slow enough to be killed on."""
    from rich.console import Console

    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    faulthandler.register(signal.SIGUSR2)  # where a rank is that does not end
    processes.MEETING = 0.0  # nobody imports anything: whoever is not there within twice the patience was killed
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_PORT": str(port)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "AUTOMODEL_HANG_SECONDS": "8"}
    write = tensor_file.write_tensors

    def slowly(*given):
        time.sleep(0.01)
        return write(*given)

    tensor_file.write_tensors = slowly
    cfg = load_run_config([config], [f"checkpoint.checkpoint_dir={out}"])
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere, joined() as ranks:
        finetune(cfg, resume=resume, overwrite=not resume, ranks=ranks, console=Console(file=nowhere))
    if rank == 0:
        (out / "modules.json").write_text(json.dumps(sorted(sys.modules)))


def import_what_a_run_imports(out: Path) -> None:
    for name in json.loads((out / "modules.json").read_text()):
        if name not in sys.modules:
            with suppress(Exception):
                importlib.import_module(name)


def start(config: Path, out: Path) -> list[multiprocessing.process.BaseProcess]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    resume = any((out / "run" / "steps").glob("step-*"))
    arguments = [(rank, port, config, out, resume) for rank in range(RANKS)]
    ranks = [FORK.Process(target=one_rank, args=each, daemon=True) for each in arguments]
    for rank in ranks:
        rank.start()
    return ranks


def wait_for_a_save(out: Path, ranks: list) -> bool:
    """Whether a checkpoint is being written now."""
    until = time.monotonic() + PATIENCE
    while all(rank.is_alive() for rank in ranks):
        with suppress(FileNotFoundError):  # a new run puts away what the one before left
            if any((out / "run" / "steps").glob(".unfinished-*")):
                return True
        time.sleep(0.001)
        if time.monotonic() > until:
            give_up(ranks, "neither rank ends or saves")
    return False


def give_up(ranks: list, why: str) -> NoReturn:
    """Says where the ranks are, and leaves none: one that hangs has no ear for the end of this process, either."""
    for rank in ranks:
        if rank.is_alive():
            os.kill(rank.pid, signal.SIGUSR2)
    time.sleep(1)
    for rank in ranks:
        rank.kill()
    raise AssertionError(why)


def wait_for_the_end(ranks: list, why: str, patience: float = PATIENCE) -> None:
    for rank in ranks:
        rank.join(patience)
        if rank.exitcode is None:
            give_up(ranks, why)


def finished(out: Path) -> bool:
    summary = out / "run" / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["status"] == "finished"


def same(out: Path, alone: Path) -> None:
    for split in ("train", "validation"):
        assert tiny.losses(out, split) == tiny.losses(alone, split), split
    ours, theirs = load_file(out / "model.safetensors"), load_file(alone / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def left_alone(config: Path, out: Path) -> float:
    """A run that nobody kills, and the seconds it takes."""
    begun = time.monotonic()
    ranks = start(config, out)
    wait_for_the_end(ranks, "the run that is left alone does not end", IMPORTS)
    assert [rank.exitcode for rank in ranks] == [0, 0], "the run that is left alone"
    return time.monotonic() - begun


def main(folder: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    config, alone, out = folder / "run.yaml", folder / "alone", folder / "out"
    left_alone(config, alone)
    import_what_a_run_imports(alone)
    usual = left_alone(config, folder / "again")
    same(folder / "again", alone)
    done = {
        "kills": 0,
        "in_a_save": 0,
        "finished": 0,
        "resumed": 0,
        "slowest_end_s": 0.0,
        "usual_s": usual,
        "failed": 0,
        "left_over": 0,
    }
    while done["kills"] < kills or not done["finished"]:
        done["resumed"] += any((out / "run" / "steps").glob("step-*"))
        ranks = start(config, out)
        if done["kills"] < kills:
            in_a_save = False
            if done["kills"] % 2:
                # Not always the first; after a second one there is something to resume, which is not left to chance.
                fewest = 1 if done["resumed"] > done["kills"] // 4 else 2
                for _ in range(chance.randint(fewest, 3)):
                    in_a_save = wait_for_a_save(out, ranks)
                    time.sleep(chance.uniform(0, 0.02))
            else:
                time.sleep(chance.uniform(0.1, 1.0) * usual)
            victim = ranks[chance.randrange(RANKS)]
            if all(rank.is_alive() for rank in ranks):
                os.kill(victim.pid, signal.SIGKILL)
                done["kills"] += 1
                done["in_a_save"] += in_a_save
        killed = time.monotonic()
        wait_for_the_end(ranks, "a rank waits for one that is gone")
        codes = [rank.exitcode for rank in ranks]
        if -signal.SIGKILL not in codes and codes != [0, 0]:
            done["failed"] += 1  # somebody else may have taken the port, once
            assert done["failed"] == 1, f"nobody was killed, and the ranks ended with {codes}"
        if -signal.SIGKILL in codes:
            done["slowest_end_s"] = max(done["slowest_end_s"], time.monotonic() - killed)
        # Looked at, not cleaned up: what a killed save leaves is for the next run to find.
        damage = [damage_of(checkpoint) for checkpoint in catalog.complete(out / "run" / "steps")]
        assert not any(damage), damage
        done["left_over"] += any((out / "run" / "steps").glob(".unfinished-*"))
        if finished(out):
            same(out, alone)
            done["finished"] += 1
            shutil.rmtree(out)
    same_when_converted(alone, folder / "hf")
    print(json.dumps(done))


def same_when_converted(out: Path, target: Path) -> None:
    """A checkpoint in parts, as the folder that the run exported."""
    from automodel.engine.convert import convert_checkpoint

    exported = json.loads((out / "run" / "summary.json").read_text())["exported_step"]
    convert_checkpoint(out, target, step=exported)
    ours, theirs = load_file(target / "model.safetensors"), load_file(out / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


if __name__ == "__main__":
    import_transformers()
    importlib.import_module("automodel.engine.run")
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
