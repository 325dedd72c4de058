"""Problems as they are found, each with its place, and in the order of the files when they are told."""

from __future__ import annotations

from automodel.config.errors import ConfigError, Problem
from automodel.config.tree import Place


class Complaints:
    """Everything wrong so far. One complaint for each key and place is enough: the first one wins."""

    def __init__(self) -> None:
        self._found: dict[tuple[Place, str, str], Problem] = {}

    def add(self, place: Place, path: str, message: str) -> None:
        if not self._said_inside(place, path):
            key = (place, path, "" if path else message)
            self._found.setdefault(key, Problem(path, message, str(place)))

    def _said_inside(self, place: Place, path: str) -> bool:
        """Whether something inside `path` was blamed at the same place: the finer complaint is enough."""
        return bool(path) and any(at == place and p.startswith(f"{path}.") for at, p, _ in self._found)

    def about(self, path: str) -> bool:
        """Whether the key or a section around it has been complained about."""
        return any(p and (path == p or path.startswith(f"{p}.")) for _, p, _ in self._found)

    def inside(self, path: str) -> bool:
        """Whether a key inside the section has been complained about."""
        return any(p.startswith(f"{path}.") for _, p, _ in self._found)

    def suggests(self, key: str) -> bool:
        """Whether a misspelt key was taken to mean this one: then it is not missing as well."""
        return any(p.message.endswith(f"did you mean `{key}`?") for p in self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def problems(self) -> list[Problem]:
        """In the order of the files, by line, the command line last; what has no line of its own ends its file."""

        def order(item: tuple[tuple[Place, str, str], Problem]) -> tuple[int, float]:
            place = item[0][0]
            return place.layer, place.line or float("inf")

        return [problem for _, problem in sorted(self._found.items(), key=order)]

    def raise_if_any(self) -> None:
        if self._found:
            raise ConfigError(self.problems())
