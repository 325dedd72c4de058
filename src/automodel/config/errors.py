"""What a person gets to read when their input is wrong.

Every error a user can cause is a `UserError`: it is printed without a traceback, and the process exits with its
`exit_code`. A programming mistake of ours stays an ordinary exception and keeps its traceback.
"""

from __future__ import annotations

from dataclasses import dataclass

from automodel.config.written import as_written

MOST_TOLD = 20  # problems of a config that are listed
EXIT_OK = 0
EXIT_FAILED = 1  # something broke while working (a bug, a full disk)
EXIT_BAD_INPUT = 2  # config, data or arguments are wrong; nothing was started
EXIT_NOT_YET = 3  # understood, but not built yet
EXIT_INTERRUPTED = 130  # SIGINT or SIGTERM: state was saved, `--resume` continues


class UserError(ValueError):
    """Something the user can put right. The message says what is wrong and how to fix it. A `ValueError`, since scripts
    for transformers and TRL catch that where they are told of a bad argument. Values of variables stand in it as
    `${NAME}`, and secrets are hidden."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, message: str = ""):
        super().__init__(as_written(message))


class WrongTypeError(UserError, TypeError):
    """An object of another kind than the one that is taken, which scripts for transformers and TRL expect a `TypeError`
    for."""


class NotYetError(UserError):
    """A key that is understood and valid, but whose feature is not built yet."""

    exit_code = EXIT_NOT_YET


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after a line that says what it cost: nobody else need say anything."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a config: where, what, and the fix."""

    path: str
    """Dotted path of the key, e.g. `optimizer.lr`."""
    message: str
    """What is wrong and what to do, one sentence or two."""
    where: str = ""
    """`file.yaml:12`, or `command line`."""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.path}: {self.message}" if self.path else f"{place}{self.message}"


class ConfigError(UserError):
    """Every problem of a config at once, in file order."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''} in the config"
        more = f"\n  … and {len(problems) - MOST_TOLD} more" if len(problems) > MOST_TOLD else ""
        super().__init__(count + "\n" + "\n".join(f"  {p}" for p in problems[:MOST_TOLD]) + more)
