"""Several problems in one report: a person who has put one thing right should not meet the next one then."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from automodel.config.errors import UserError


class SeveralProblems(UserError):
    """Problems that were found together; `subject`: with what. `Problems` takes them one by one."""

    def __init__(self, found: Sequence[UserError], subject: str = "the data") -> None:
        self.found = tuple(found)
        listed = "\n".join(f"- {error}".replace("\n", "\n  ") for error in self.found)
        super().__init__(f"{len(self.found)} problems with {subject}\n{listed}")


class Problems:
    """Collects errors of steps that do not need each other, and raises them together."""

    def __init__(self, subject: str = "the data") -> None:
        self.found: list[UserError] = []
        self.subject = subject

    @contextmanager
    def collecting(self) -> Generator[None]:
        """Goes on after an error of the user's."""
        try:
            yield
        except UserError as error:
            for one in error.found if isinstance(error, SeveralProblems) else (error,):
                if str(one) not in map(str, self.found):
                    self.found.append(one)

    def __len__(self) -> int:
        return len(self.found)

    def raise_if_any(self) -> None:
        """One error as it is; several as one that holds them all."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            raise SeveralProblems(self.found, self.subject)
