"""What the plan must know of a run's matrix products on a CPU: how fast this machine makes them, and how the run began.

The first rank times them, or finds what was timed before, and tells the others: all of them must plan alike. It does so
on the threads that each rank has.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import psutil
import torch

from automodel.distributed.world import ALONE, Alone
from automodel.kernels.product_speed import Passes, Sample, Timed, sample_of, time_products
from automodel.models.cpu_linears import matrix_sizes
from automodel.plan.facts import NO_PRODUCTS, ProductFacts
from automodel.plan.hardware import Hardware
from automodel.plan.product_record import record_key, remember, remembered, timed_of

LEAST_OPERATIONS = 1e9
"""Of a micro-batch's products, 5 ms in fp32 on two cores: below, what is around them takes longer."""
UNDISTURBED = 0.3
"""Processors that others may keep busy while products are timed; above, what was found is not remembered."""
DISTURBED_BUDGET_S = 0.4
"""For products among neighbours."""


def product_facts(
    hardware: Hardware,
    model: Any,
    tokens: float,
    *,
    passes: Passes = 3,
    ranks: Alone = ALONE,
    planned_ranks: int = 1,
    begun: Mapping[str, Any] | None = None,
) -> ProductFacts:
    """`model`: may be one without weights. `tokens`: of a micro-batch, on average. `passes`: products that are made for
    each matrix. `planned_ranks`: for how many ranks, where only the plan is wanted. `begun`: the plan of the run that
    is resumed. Nothing is timed for a GPU."""
    if hardware.device != "cpu":
        return NO_PRODUCTS
    matrices = matrix_sizes(model)
    before = begun if begun is not None and begun.get("device") == "cpu" else {}
    facts = ProductFacts(
        weights=float(sum(inputs * outputs for inputs, outputs in matrices)),
        tokens=tokens,
        passes=passes,
        begun_precision=before.get("precision", ""),
        begun_products=before.get("products", ""),
    )
    sample = sample_of(matrices, tokens)
    if sample is None:
        return replace(facts, not_measured="the blocks of this model have no linear layers")
    if 2 * passes * facts.weights * tokens < LEAST_OPERATIONS:
        return replace(facts, not_measured="these products are too small for it to matter")
    timed = timed_of(ranks.told(lambda: _remembered_or_timed(sample, _threads_for(planned_ranks)).to_json()))
    return replace(facts, speed=None if timed is None else timed.speed(passes))


def _remembered_or_timed(sample: Sample, threads: int) -> Timed:
    key = record_key(sample, threads)
    timed = remembered(key)
    if timed is not None:
        return timed
    with _on_threads(threads):
        began = _processor_seconds()
        timed = time_products(sample)
        others = _processor_seconds().of_others_since(began)
    if others < UNDISTURBED:
        remember(key, timed)
        return timed
    # Threads that share a product wait for the one whose core a neighbour has. One thread alone has moments of its own.
    with _on_threads(1):
        return time_products(sample, DISTURBED_BUDGET_S)


class _Seconds(NamedTuple):
    """Of time, of all processors that were busy, and of this process."""

    time: float
    busy: float
    own: float

    def of_others_since(self, began: _Seconds) -> float:
        """Processors that other processes kept busy, on average."""
        busy, own = self.busy - began.busy, self.own - began.own
        return max(0.0, busy - own) / max(1e-9, self.time - began.time)


def _processor_seconds() -> _Seconds:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    return _Seconds(time.perf_counter(), sum(times) - idle, time.process_time())


def _threads_for(planned_ranks: int) -> int:
    """Threads of a rank. Ranks that `automodel` starts share the cores, unless the environment says how many threads
    each of them has."""
    threads = torch.get_num_threads()
    return threads if "OMP_NUM_THREADS" in os.environ else max(1, threads // planned_ranks)


@contextmanager
def _on_threads(threads: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
