"""Settings typed on the command line: `optimizer.lr=1e-5`, `wandb.tags.0=x`, `'dataset={path: x}'`.

Each is a small layer of its own, laid over the files in order. `=` sets: a mapping in braces replaces the section,
`null` takes it away, a bare name sets the section's short form (`model=roberta-base` changes the name and keeps the
rest).
"""

from __future__ import annotations

from automodel.config.complaints import Complaints
from automodel.config.read import LONGEST_KEY, read_value
from automodel.config.tree import COMMAND_LINE, MOST_LEVELS, Entry, Mapping, Node, Place, letter_fault
from automodel.config.values import short


def setting_layer(text: str, layer: int, complaints: Complaints) -> Mapping | None:
    """`a.b=value` as the tree `{a: {b: value}}`."""
    place = Place(layer, 0, COMMAND_LINE)
    path, equals, value = text.removeprefix("--").partition("=")
    keys = path.strip().split(".")
    if not equals:
        complaints.add(place, "", f"`{short(text)}` sets nothing. Write `section.key=value`, e.g. `optimizer.lr=1e-5`.")
        return None
    if not all(keys):
        complaints.add(
            place, "", f"`{short(text)}` has an empty key. Write `section.key=value`, e.g. `optimizer.lr=1e-5`."
        )
        return None
    if not value.strip():  # `model=$MODEL`, and the variable is not set: the file's own must not be taken for it
        complaints.add(place, path.strip(), f"`{text}` has no value. Write `{path}=null` for none, or leave it out.")
        return None
    if fault := letter_fault(path):
        complaints.add(place, "", f"the key {path.strip()!a} {fault}")
        return None
    if len(path) > LONGEST_KEY:
        complaints.add(
            place, "", f"the setting `{path[:40]}…` has a key of {len(path):,} letters; no key is so long. Shorten it."
        )
        return None
    if len(keys) > MOST_LEVELS:
        complaints.add(
            place,
            keys[0],
            f"`{text[:40]}…` has {len(keys):,} keys inside each other; no section is so deep. Remove it.",
        )
        return None
    node: Node = read_value(value.strip(), layer)
    for key in reversed(keys):
        node = Mapping({key: Entry(key, node, place)}, place)
    assert isinstance(node, Mapping)
    return node
