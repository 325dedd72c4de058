"""Ranks that nobody asked for: they train where they can, and make way for fewer where those do better.

A plan for all visible GPUs may be refused (something that only one GPU has yet) or may be worse than that of one (a
step of more examples than there are). Nobody asked for several, so neither may end the run: the plan is then made for
what the layout needs at least, which is one rank as a rule, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from automodel.config.errors import UserError
from automodel.distributed.layout import ranks_wanted
from automodel.distributed.step_aside import may_step_aside, step_aside
from automodel.distributed.world import ALONE, Alone
from automodel.engine.prepare import Prepared, prepare_run
from automodel.plan.config import RunConfig
from automodel.plan.ranks import Ranks, better_alone, in_one_line


def planned(cfg: RunConfig, trust: Sequence[str], ranks: Ranks | None) -> Prepared:
    """A run that is only planned, for so many ranks or for as many as they would become."""
    least = ranks_wanted(cfg.distributed)
    ranks = ranks or Ranks(least)
    if ranks.automatic:

        def prepare(count: int) -> Prepared:
            return prepare_run(cfg, trust, planned_ranks=count, why_ranks=ranks.why)

        prepared, why = _prepared_or_why_not(cfg, prepare, ranks.count)
        if prepared is not None:
            return prepared
        ranks = Ranks(least, why)
    return prepare_run(cfg, trust, planned_ranks=ranks.count, why_ranks=ranks.why)


def prepare_or_step_aside(
    cfg: RunConfig,
    trust: Sequence[str],
    begun: Mapping[str, Any] | None,
    ranks: Alone,
    why_ranks: str,
    kept: dict[str, Any] | None = None,
) -> Prepared:
    """A run that begins, or goes on with the adapter that it has kept. Ranks that nobody asked for may end here, and
    leave it to fewer."""
    prepare = partial(prepare_run, cfg, trust, begun=begun, why_ranks=why_ranks, kept=kept)
    if ranks.size == 1 or not may_step_aside():
        return prepare(ranks=ranks)

    def prepare_for(count: int) -> Prepared | None:
        if count == ranks.size:
            return prepare(ranks=ranks)
        # The refusal may have come before anything was read: the first rank tokenises, and the others only hear of it.
        ranks.told(lambda: prepare(ranks=ALONE, planned_ranks=count) is not None)
        return None

    prepared, why = _prepared_or_why_not(cfg, prepare_for, ranks.size)
    return prepared or step_aside(ranks, why)


def _prepared_or_why_not(
    cfg: RunConfig, prepare: Callable[[int], Prepared | None], ranks: int
) -> tuple[Prepared | None, str]:
    """The run as `prepare(ranks)` makes it, or nothing and why fewer ranks are to do it. Raises `UserError` where those
    could not do it either. Every rank comes to the same conclusion, from the same data."""
    from automodel.distributed.processes import LostRankError

    try:
        prepared = prepare(ranks)
        assert prepared is not None
    except LostRankError:
        raise
    except UserError as error:
        prepare(ranks_wanted(cfg.distributed))  # what is wrong with one rank as well is said for one rank
        return None, f"{ranks} cannot do it: {in_one_line(error)}"
    rows = prepared.train.mixture.total if prepared.train.mixture else prepared.train.stats.used
    why = better_alone(cfg, prepared.plan, rows, prepared.layout.data_ranks)
    return (prepared, "") if why is None else (None, why)
