"""Ranks that nobody asked for, and how they make way for one.

`automodel finetune` takes all visible GPUs by itself. Whether that is possible and any good is known for certain when
the data is read and the plan is made, which happens inside the ranks: reading everything once more before they start
would delay every run for the sake of a few. So ranks that were not asked for may find that one of them does better. The
first writes down why, all end with a code of their own, and the process that started them becomes the one rank
(`launch.py`); tokenised data is on the disk by then. A person sees one run, whose plan says why it has one rank.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from automodel.distributed.world import Alone

BECAUSE = "AUTOMODEL_RANKS_BECAUSE"
"""Why there are so many ranks: told to them by who started them."""
NOTE = "AUTOMODEL_RANKS_NOTE"
"""A file for the reason why one rank is to go on instead; only where nobody asked for several."""
EXIT_ONE_RANK = 75


def reason_of_environment() -> str:
    """Why so many ranks were started; nothing where somebody else did it."""
    return os.environ.get(BECAUSE, "")


def may_step_aside() -> bool:
    """Whether these ranks were started without anybody asking for several."""
    return NOTE in os.environ


def step_aside(ranks: Alone, why: str) -> NoReturn:
    """All ranks end; one goes on in their place."""
    if ranks.first:
        Path(os.environ[NOTE]).write_text(why, encoding="utf-8")
    ranks.barrier()
    raise SystemExit(EXIT_ONE_RANK)
