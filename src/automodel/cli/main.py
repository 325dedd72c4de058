"""`automodel`: the front door. Verbs live in files of their own and are imported when they are used.

`automodel --help` reads only the table below, so it answers at once; torch is not imported until work starts.
"""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from io import TextIOWrapper
from typing import Any, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup

from automodel.config.errors import EXIT_FAILED, Interrupted, UserError
from automodel.config.machine_errors import of_the_machine
from automodel.config.written import as_written

# Verb, its module, and its line in `automodel --help`. Each module has a typer `app`.
VERBS = {
    "finetune": ("automodel.cli.finetune", "Fine-tune a model from a YAML file."),
    "launch": ("automodel.cli.launch", "Run on a cluster: Slurm, Kubernetes or Ray."),
    "benchmark": ("automodel.cli.benchmark", "Compare with HF Trainer on the same run: time, memory, losses."),
    "run": ("automodel.cli.run", "Run a script for HF Trainer, unchanged, on this engine."),
    "migrate": ("automodel.cli.migrate", "Turn a script or other tools' settings into a config file."),
    "plan": ("automodel.cli.plan", "Say what a run will do, and why, without training."),
    "data": ("automodel.cli.data", "See samples, what is learned of them, and batches."),
    "config": ("automodel.cli.config", "Validate, show and describe config files."),
    "predict": ("automodel.cli.predict", "Classify or complete text with a fine-tuned model."),
    "generate": ("automodel.cli.generate", "Let a fine-tuned language model answer or continue prompts."),
    "evaluate": ("automodel.cli.evaluate", "Measure a fine-tuned model on a dataset."),
    "export": ("automodel.cli.export", "Write base and adapter of a run as one plain model."),
    "checkpoint": ("automodel.cli.checkpoint", "List, check, thin out and convert the checkpoints of a run."),
    "examples": ("automodel.cli.examples", "List and copy example configs."),
    "doctor": ("automodel.cli.doctor", "Say what this machine has for training, and what is missing."),
    "quickstart": ("automodel.cli.quickstart", "Fine-tune a real model on real reviews, in minutes."),
}

_TRAIN = "`automodel finetune -c run.yaml` trains a model."
_TALK = "`automodel generate RUN` lets a fine-tuned language model answer."
_NO_PAGE = "There are no pages for a browser. A run writes run/report.html; `automodel data preview` shows the data."
ELSEWHERE = {
    "train": _TRAIN,
    "tune": _TRAIN,
    "fit": _TRAIN,
    "sft": _TRAIN,
    "modelforge": "`modelforge run` is `automodel finetune -c settings.json` here, with the same flat JSON settings.",
    "compare": "`automodel benchmark -c run.yaml` compares a run with HF Trainer.",
    "chat": _TALK,
    "infer": "`automodel predict RUN` classifies or completes text. " + _TALK,
    "inference": "`automodel predict RUN` classifies or completes text. " + _TALK,
    "serve": "There is no server: a run folder is a plain Hugging Face model, which servers such as vLLM load. "
    + _TALK,
    "api": "There is no server: a run folder is a plain Hugging Face model, which servers such as vLLM load. " + _TALK,
    "ui": _NO_PAGE,
    "webui": _NO_PAGE,
    "studio": _NO_PAGE,
    "eval": "`automodel evaluate RUN` measures a fine-tuned model.",
    "merge-lora": "`automodel export RUN --merge` writes base and adapter as one model.",
    "preprocess": "`automodel data preview -c run.yaml` shows the prepared data; `finetune` keeps it for the next run.",
    "validate": "`automodel config validate -c run.yaml` checks a config.",
}
"""Commands that other tools have, and what to type here."""

CHANGES_NOTHING = ("finetune", "plan", "data", "config", "predict", "generate", "evaluate")
"""Verbs that write nothing before their work is done. Once `finetune` has work to lose, it says so itself."""

EPILOG = (
    "Settings: any config key can follow a command, as optimizer.lr=1e-5 or --optimizer.lr 1e-5.\n\n"
    "Exit codes: 0 done; 1 something broke; 2 config, data or arguments are wrong, nothing was started; "
    "3 understood, but not built yet; 4 slower than --speedup-threshold; "
    "130 interrupted, state saved, --resume continues."
)


class LazyVerbs(TyperGroup):
    """A group that knows its verbs by name and imports one only to run it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, (module, _) in VERBS.items() if find_spec(module) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The verb as `--help` needs it: a name and a line."""
        if cmd_name not in VERBS:
            return None
        return TyperCommand(cmd_name, help=VERBS[cmd_name][1])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb as it is run."""
        if args[0] not in VERBS:
            close = get_close_matches(args[0], VERBS, n=1)
            hint = f" Did you mean `automodel {close[0]}`?" if close else " `automodel --help` lists them."
            if args[0] in ELSEWHERE:
                hint = f" {ELSEWHERE[args[0]]}"
            raise UserError(f"there is no command `{args[0]}`.{hint}")
        return args[0], load_verb(args[0]), args[1:]

    def invoke(self, ctx: Any) -> Any:
        """Runs the verb. Typer ends with 130 after Ctrl-C, and has no word for it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            verb = next(iter(sys.argv[1:]), "")
            if not isinstance(interrupt, Interrupted) and verb != "run":  # a script has its own last words
                begin = "\n" if sys.stderr.isatty() else ""  # a terminal shows ^C, perhaps behind half an answer
                print(f"{begin}Stopped{'; nothing was changed' * (verb in CHANGES_NOTHING)}.", file=sys.stderr)
            raise


def load_verb(name: str) -> Any:
    verb = import_module(VERBS[name][0]).app
    verb.rich_markup_mode = None  # the same plain help everywhere
    verb._add_completion = False  # typer would add its own options to every verb
    return typer.main.get_command(verb)


def _print_version(wanted: bool) -> None:
    if wanted:
        from automodel import __version__

        print(f"automodel {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=LazyVerbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=EPILOG,
)


@app.callback()
def automodel(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Fine-tune Hugging Face models several times faster, from one YAML file."""


def report(error: UserError) -> NoReturn:
    """Prints what the user can put right, without a traceback, and exits with the error's code."""
    colour = sys.stderr.isatty()
    label = "\033[1;31merror:\033[0m" if colour else "error:"
    print(f"{label} {error}", file=sys.stderr)
    raise SystemExit(error.exit_code)


def main() -> None:
    """What the `automodel` command does; ends with `SystemExit`."""
    try:
        app()
    except UserError as error:
        report(error)
    except Exception as error:
        line = of_the_machine(error)
        if line is None or sys.argv[1:2] == ["run"]:  # a script has its own errors
            raise
        print(f"error: {line}", file=sys.stderr)
        raise SystemExit(EXIT_FAILED) from error


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Letters as JSON writes them in ASCII: `--json > file` loses none."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


class WithoutSecrets:
    """A stream for warnings, logs and tracebacks, of libraries too: values of variables stand in it as `${NAME}`."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(as_written(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def command() -> None:
    """The `automodel` command as a process of its own."""
    if sys.argv[1:2] != ["run"]:  # what a script of somebody else's prints is its own affair
        codecs.register_error("automodel", _escaped)
        with suppress(AttributeError, ValueError):  # letters that an old encoding lacks; files may be read again
            kept = cast(TextIOWrapper, sys.stdout)
            kept.reconfigure(errors="replace" if kept.isatty() else "automodel")
        sys.stderr = cast(TextIOWrapper, WithoutSecrets(sys.stderr))
    try:
        main()
    except SystemExit as ending:
        from automodel.engine.leave import leave

        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
        leave(ending.code if isinstance(ending.code, int) else int(ending.code is not None))


if __name__ == "__main__":
    command()
