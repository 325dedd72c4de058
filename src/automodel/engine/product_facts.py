"""What the plan must know of a run's matrix products on a CPU: how fast this machine makes them, and how the run began.

The first rank times them, or finds what was timed before, and tells the others: all of them must plan alike. It does so
on the threads that each rank has.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from automodel.distributed.world import ALONE, Alone
from automodel.kernels.product_speed import Passes, Sample, Timed, sample_of, time_products
from automodel.models.cpu_linears import matrix_sizes
from automodel.plan.facts import NO_PRODUCTS, ProductFacts
from automodel.plan.hardware import Hardware
from automodel.plan.product_record import record_key, remember, remembered, timed_of


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
    sample = sample_of(matrices, tokens)
    timed = None
    if sample is not None:
        timed = timed_of(ranks.told(lambda: _remembered_or_timed(sample, _threads_for(planned_ranks)).to_json()))
    before = begun if begun is not None and begun.get("device") == "cpu" else {}
    return ProductFacts(
        speed=None if timed is None else timed.speed(passes),
        not_measured="" if timed is not None else "the blocks of this model have no linear layers",
        weights=float(sum(inputs * outputs for inputs, outputs in matrices)),
        tokens=tokens,
        passes=passes,
        begun_precision=before.get("precision", ""),
        begun_products=before.get("products", ""),
    )


def _remembered_or_timed(sample: Sample, threads: int) -> Timed:
    key = record_key(sample, threads)
    timed = remembered(key)
    if timed is None:
        with _on_threads(threads):
            timed = time_products(sample)
        remember(key, timed)
    return timed


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
