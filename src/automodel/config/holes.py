"""`FILL-IN`: a value that a file leaves to be written by hand. `automodel migrate` writes it where a fragment names no
model or no data.

A hole is nothing: another file or a setting may fill it, whichever layer it stands in. One that nothing fills is a
problem of its own line.
"""

from __future__ import annotations

from dataclasses import dataclass

from automodel.config.complaints import Complaints
from automodel.config.layers import join
from automodel.config.tree import Listing, Mapping, Node, Place, Scalar

FILL_IN = "FILL-IN"


@dataclass(frozen=True)
class Hole:
    """Where `FILL-IN` stands."""

    names: tuple[str, ...]
    """The fields on the way to it."""
    spelt: str
    """The way as the file spells it."""
    place: Place


def take_holes(layer: Mapping, names: tuple[str, ...] = (), spelt: str = "", outer: Place | None = None) -> list[Hole]:
    """Takes every `FILL-IN` out of a layer whose keys are field names already."""
    holes = []
    for name, entry in list(layer.entries.items()):
        short_form = entry.place == outer  # `model: FILL-IN` names the section alone
        inner, inner_spelt = (*names, name), spelt if short_form else join(spelt, entry.key)
        if isinstance(entry.node, Mapping):
            holes += take_holes(entry.node, inner, inner_spelt, entry.place)
        elif _is_hole(entry.node):
            holes.append(Hole(inner, inner_spelt, entry.place))
            del layer.entries[name]
    return holes


def _is_hole(node: Node) -> bool:
    if isinstance(node, Listing):
        return any(_is_hole(item) for item in node.items)
    return isinstance(node, Scalar) and node.text.strip() == FILL_IN


def complain_of_holes(holes: list[Hole], tree: Mapping, complaints: Complaints) -> None:
    """Every hole that no layer fills."""
    for hole in holes:
        if not _is_filled(tree, hole.names):
            message = f"is still {FILL_IN}. Write the value there, or give it in another file or as `{hole.spelt}=…`."
            complaints.add(hole.place, hole.spelt, message)


def _is_filled(tree: Mapping, names: tuple[str, ...]) -> bool:
    node: Node = tree
    for name in names:
        if not isinstance(node, Mapping) or name not in node.entries:
            return False
        node = node.entries[name].node
    return True
