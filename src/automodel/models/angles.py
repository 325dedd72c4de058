"""Rotary angles that a config section asks for, in the form that transformers has today.

`rope_scaling` and `rope_theta` used to stand beside each other and are one dictionary now, `rope_parameters`, which
transformers replaces as a whole: a scaling without a base then fails in the middle of loading. Whoever gives one of
them means the rest to stay as the model has it.
"""

from __future__ import annotations

from typing import Any

from automodel.config.errors import UserError

KEYS_OF_ANGLES = frozenset({"rope_parameters", "rope_scaling", "rope_theta"})
STAYS = ("rope_theta", "partial_rotary_factor")
"""What does not belong to a way of scaling."""


def with_own_angles(wanted: dict[str, Any], own: Any) -> dict[str, Any]:
    """The attributes with the model's own angles where they say nothing about them. `own`: its `rope_parameters`."""
    if not isinstance(own, dict) or "rope_theta" not in own:  # none, or one for each kind of layer
        return wanted
    key = next((key for key in ("rope_parameters", "rope_scaling") if key in wanted), "rope_theta")
    given = {} if key == "rope_theta" else wanted[key] or {"rope_type": "default"}
    if not isinstance(given, dict):
        raise UserError(f"model.{key} is {given!r}, but must be a section, as {{rope_type: linear, factor: 2.0}}.")
    given = {"rope_type" if name == "type" else name: value for name, value in given.items()}
    kept = {name: own[name] for name in STAYS if name in own} if "rope_type" in given else own
    base = {"rope_theta": wanted["rope_theta"]} if "rope_theta" in wanted else {}
    angles = {**kept, **given, **base}
    _check(key, angles)
    return {**{name: wanted[name] for name in wanted if name not in KEYS_OF_ANGLES}, "rope_parameters": angles}


def _check(key: str, angles: dict[str, Any]) -> None:
    """transformers warns of what it does not know, and fails later."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, kinds = angles.get("rope_type", "default"), sorted({"default", *ROPE_INIT_FUNCTIONS})
    if kind not in kinds:
        raise UserError(f"model.{key}: there is no rope_type {kind!r}; there are {', '.join(kinds)}.")
    if kind in ("linear", "dynamic", "yarn", "llama3") and "factor" not in angles:
        raise UserError(f"model.{key}: rope_type {kind} needs a factor, by which it reaches further.")
