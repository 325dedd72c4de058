"""`python -m automodel.trainer.old_script script.py …`: a script for an older transformers, with stock Trainer.

What a script that runs under `automodel run` starts as `python script.py` (`children.py`): names that transformers
removed are understood, and everything else is transformers' own, so that a baseline stays one.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    from automodel.trainer.as_main import run_as_main
    from automodel.trainer.stand_in import stand_in

    script = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(script.parent.resolve()))
    with stand_in(trainer=False):
        run_as_main(script)


if __name__ == "__main__":
    main()
