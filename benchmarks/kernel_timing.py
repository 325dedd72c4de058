"""How the kernel benchmarks measure: device time of a captured call with a cold cache, and its cost to the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

BANDWIDTH = 4.25e12
"""Bytes per second of a device-to-device copy on an H200, read plus written."""


def poison() -> None:
    """Leave NaN where the next outputs will be allocated."""
    blocks = [torch.full((size,), float("nan"), device="cuda") for size in [2**25] * 2 + [2**22] * 8 + [2**9] * 64]
    del blocks


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.detach().double() - exact.detach()).norm() / exact.detach().norm()).item()


def floor_us(bytes_moved: float) -> float:
    return bytes_moved / BANDWIDTH * 1e6


def capture(call: Callable[[], Any], after: Callable[[], Any] | None) -> Callable[[], None]:
    """The call as a CUDA graph; warmed up on the stream it is captured on. `after` runs once the capture is over."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    if after is not None:
        after()
    return graph.replay


def host_us(call: Callable[[], Any], repeats: int = 30) -> float:
    """Host time per call while the device has work queued."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / repeats * 1e6


def peak_mib(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def time_call(call: Callable[[], Any], after_capture: Callable[[], Any] | None = None) -> dict:
    """p20, p50 and p80 of the captured call in µs, host µs outside a graph, and peak memory."""
    from triton.testing import do_bench

    call()
    row = {"host_us": host_us(call), "peak_mib": peak_mib(call)}
    p50, p20, p80 = do_bench(capture(call, after_capture), warmup=10, rep=60, quantiles=[0.5, 0.2, 0.8])
    return row | {"us_p20": p20 * 1e3, "us_p50": p50 * 1e3, "us_p80": p80 * 1e3}
