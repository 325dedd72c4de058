"""A CUDA graph is recorded while the device is busy with something else.

`torch.cuda.graph` first waits for the device and hands all unused memory back to it, so that the graph may have it.
Every new shape of a run then costs what the host takes to go through the model once, with an idle GPU: 60 ms for
DistilBERT, 150 for Llama 1B. Neither is needed to record: nothing runs, and addresses come from the graphs' own pool.
Here the steps before go on meanwhile, as many as are queued; memory is handed back where it might run short.

A recording that fails has an end, too. Where CUDA refuses to end it, torch leaves its allocators as if it went on:
the next recording into the same pool is refused ("already recording"), and no memory is given back any more. In some
versions nobody can draw random numbers, either. What can be put right is put right here; the pool is not used again.

Nor is one whose last graph is gone: torch's allocators keep its number until both of their caches are emptied, which
`torch.cuda.graph` does every time, and refuse it ("use_count > 0 INTERNAL ASSERT FAILED").

Graphs that were recorded before one that failed cannot stay, either. In torch 2.11 those that draw random numbers share
the state that a recording without an end has spoiled. In newer versions a graph that is thrown away takes with it what
cuBLAS works in on its stream, and the others, recorded on the same stream, still write to it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from automodel.distributed.gpu_memory import free_bytes

Pool = Any  # a pair of numbers, which torch gives a type of its own
_BROKEN: list[torch.cuda.CUDAGraph] = []
"""Recordings that did not end: the allocator of page-locked memory still asks them whether they go on."""
MARGIN = 2  # times the memory that a step has needed so far: the next shape may be larger, and pools have holes


def is_roomy() -> bool:
    """Whether a recording will find memory: what the device has free must do for a step, since nobody can hand any back
    while it is recorded."""
    return free_bytes() >= MARGIN * (torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())


def ran_out(error: RuntimeError) -> bool:
    """Whether there was too little memory, whoever says so: torch's allocator, CUDA making a graph, or cuBLAS."""
    told = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in told or "alloc_failed" in told


def make_room() -> None:
    if not is_roomy():
        hand_back_unused()


def hand_back_unused() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Pool, stream: torch.cuda.Stream) -> Generator[None]:
    """What the block launches becomes the graph. Errors of the block go out of it as they are."""
    main = torch.cuda.current_stream()
    stream.wait_stream(main)  # torch 2.11 first writes the seeds, in a place that steps under way may still read
    try:
        with torch.cuda.stream(stream):
            try:
                graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads write checkpoints
                yield
            except BaseException:
                with suppress(RuntimeError):  # it says only that something went wrong before
                    _end(graph, pool)
                raise
            _end(graph, pool)
    finally:
        main.wait_stream(stream)  # what the next replay writes there comes after it


def _end(graph: torch.cuda.CUDAGraph, pool: Pool) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        _BROKEN.append(graph)
        device = torch.cuda.current_device()
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        _free_random_numbers(device)
        raise


def _free_random_numbers(device: int) -> None:
    try:
        torch.rand((), device=f"cuda:{device}")
    except RuntimeError:  # "outside graph capture": the generator believes that it is being recorded
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())  # the same numbers, believed by nobody to be recorded
