"""Import names of the reference documents, as aliases of `automodel`. No logic lives here, and nothing is imported
before it is asked for."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    import automodel

    if name in automodel.__all__:
        return getattr(automodel, name)
    raise AttributeError(
        f"module 'nemo_automodel' has no attribute {name!r}; it re-exports {', '.join(automodel.__all__)}"
    )


def __dir__() -> list[str]:
    import automodel

    return sorted(automodel.__all__)
