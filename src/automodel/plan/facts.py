"""What the plan needs to know of a model and of the data, read before a weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFacts:
    """What the plan needs to know of the model, read from its config."""

    name: str
    model_type: str
    parameters: int
    can_pack: bool
    packing_reason: str
    can_fuse: bool = False
    """Whether the family has fused blocks."""
    can_pool: bool = False
    """Whether its last block can run for the pooled token alone."""
    layers: int = 0


@dataclass(frozen=True)
class DataFacts:
    """What the plan needs to know of the data."""

    rows: int
    tokens: int
    longest: int
    max_length: int
    has_validation: bool
    notes: tuple[str, ...] = ()
    """What a person should know about the data."""
    columns: str = ""
    """What is read and what is learned, e.g. `text → label`."""
    labels: str = ""
    """The classes in words, where there are any."""
