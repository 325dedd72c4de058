"""`HfArgumentParser` that also takes the names that `TrainingArguments` once had: on the command line, in `.args`
files, and in the dictionaries and files of `parse_dict`, `parse_json_file` and `parse_yaml_file`.

    --evaluation_strategy epoch --adafactor --warmup-ratio=0.1         # as in a command of 2022

Old flags are taken out of the command line with their values, translated as in Python (`migrate/old_names.py`), and
put at its end under today's names. What the script itself calls so (a field of its own dataclasses, an argument that
it added) stays the script's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

import transformers.hf_argparser
from transformers.hf_argparser import string_to_bool

from automodel.migrate.old_names import OLD_NAMES, RENAMED, modern_arguments
from automodel.trainer.arguments import TrainingArguments

STOCK_PARSER = transformers.hf_argparser.HfArgumentParser

BOOLEAN = (
    "no_cuda", "include_tokens_per_second", "overwrite_output_dir", "use_mps_device", "use_ipex", "jit_mode_eval",
    "use_legacy_prediction_loop", "tpu_metrics_debug", "group_by_length", "adafactor", "save_safetensors",
    "include_inputs_for_metrics", "dispatch_batches", "split_batches", "use_cpu", "include_num_input_tokens_seen",
)  # fmt: skip
"""Flags that stand alone or have a value such as `False`."""

NO_SAFETENSORS = "no_save_safetensors"
"""What `HfArgumentParser` adds for a boolean field that is True by default, as `save_safetensors` was."""

NUMBERS: dict[str, type] = {"warmup_ratio": float, "warmup_steps": float, "past_index": int}

LOOKED_AT = (
    *RENAMED.values(), "train_sampling_strategy", "warmup_steps", "optim", "include_for_metrics", "accelerator_config",
)  # fmt: skip
"""Today's names that old ones become, add to or give way to."""


class ArgumentParser(STOCK_PARSER):
    """`HfArgumentParser` that knows old names, where it fills our `TrainingArguments`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # every way to parse ends here
        if self._fills_ours():
            args = modern_flags(list(sys.argv[1:] if args is None else args), self)
        return super().parse_known_args(args, namespace)

    def parse_dict(self, args: dict[str, Any], allow_extra_keys: bool = False) -> Any:
        if self._fills_ours():
            kinds: Any = self.dataclass_types
            own = {f.name for kind in kinds for f in fields(kind) if f.name in OLD_NAMES}
            kept = {name: value for name, value in args.items() if name in own}
            args = _translated({name: value for name, value in args.items() if name not in own}) | kept
        return super().parse_dict(args, allow_extra_keys)

    def _fills_ours(self) -> bool:
        return any(isinstance(kind, type) and issubclass(kind, TrainingArguments) for kind in self.dataclass_types)


class _Reader(argparse.ArgumentParser):
    """Reads the named flags and leaves the others; mistakes are those of the script's parser."""

    def __init__(self, names: Iterable[str], parser: argparse.ArgumentParser):
        super().__init__(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        self.parser = parser
        for name in dict.fromkeys(names):
            written = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
            if name == NO_SAFETENSORS:
                self.add_argument(*written, dest="save_safetensors", action="store_false")
            elif name in BOOLEAN:
                self.add_argument(*written, dest=name, nargs="?", const=True, type=string_to_bool)
            elif name == "sharded_ddp":  # a boolean once, and words later
                self.add_argument(*written, dest=name, nargs="?", const=True)
            elif name == "include_for_metrics":
                self.add_argument(*written, dest=name, nargs="+")
            else:
                self.add_argument(*written, dest=name, type=NUMBERS.get(name, str))

    def error(self, message: str) -> NoReturn:
        self.parser.error(message)


def modern_flags(flags: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The command line with today's names of Trainer's flags. What the parser knows by itself is not touched."""
    known = {option.replace("-", "_") for option in parser._option_string_actions}
    old = (name for name in (*OLD_NAMES, NO_SAFETENSORS) if f"__{name}" not in known)
    given, rest = _Reader(old, parser).parse_known_args(flags)
    if not vars(given):
        return list(flags)
    today = vars(_Reader(LOOKED_AT, parser).parse_known_args(rest)[0])
    modern: list[str] = []
    for name, value in _translated({**today, **vars(given)}).items():
        if name not in today or today[name] != value:  # the last one counts
            modern += [f"--{name}", *value] if isinstance(value, list) else [f"--{name}={_written(value)}"]
    end = rest.index("--") if "--" in rest else len(rest)
    return [*rest[:end], *modern, *rest[end:]]


def _translated(given: Mapping[str, Any]) -> dict[str, Any]:
    arguments, notes = modern_arguments(given)
    for note in notes:
        print(f"automodel: TrainingArguments: {note}", file=sys.stderr)
    return arguments


def _written(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)
