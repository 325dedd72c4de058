"""Trains several configs one after the other, as one rank of however many torchrun started: imports cost seconds, and
are paid once. `python train_many.py OUT RUN.yaml …`; each run goes into OUT/<name of its file>."""

from __future__ import annotations

import sys
from pathlib import Path

from automodel.distributed.world import joined
from automodel.models.lean_imports import import_transformers
from automodel.plan.check import load_run_config


def main(out: Path, files: list[Path]) -> None:
    import_transformers()
    from automodel.engine.run import finetune

    with joined() as ranks:
        for file in files:
            folder = out / file.stem
            resume = (folder / "run").exists()
            ranks.barrier()  # everyone has looked before the first rank writes
            cfg = load_run_config([file], [f"checkpoint.checkpoint_dir={folder}"])
            finetune(cfg, resume=resume, ranks=ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
