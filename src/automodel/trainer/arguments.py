"""`TrainingArguments`: transformers' own, which also takes the names that were removed since version 4.

    TrainingArguments("out", evaluation_strategy="steps", warmup_ratio=0.1)      # as in a script of 2022

It is a subclass, so `isinstance`, `HfArgumentParser` and every method work. What was translated is said once, on
stderr. Saved, it is a plain `transformers.TrainingArguments`: whoever loads `training_args.bin` needs no automodel.
"""

from __future__ import annotations

import copyreg
import sys
from typing import Any

from transformers.training_args import TrainingArguments as StockArguments

from automodel.migrate.old_names import modern_arguments


class TrainingArguments(StockArguments):
    """`transformers.TrainingArguments` and its older names."""

    def __init__(self, *args: Any, **kwargs: Any):
        arguments, notes = modern_arguments(kwargs)
        super().__init__(*args, **arguments)
        for note in notes:
            print(f"automodel: TrainingArguments: {note}", file=sys.stderr)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is not TrainingArguments:
            return super().__reduce_ex__(protocol)
        rebuilt = copyreg._reconstructor  # ty: ignore[missing-attribute]
        return rebuilt, (StockArguments, object, None), dict(vars(self))
