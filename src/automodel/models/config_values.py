"""Values of a model's config that no model can be made of, found before anything expensive, with the key's name.

transformers checks types, and some families more. The rest shows when modules are made, or in the first forward pass:
a dropout of 2, key heads that do not divide the heads, a thousand times too many layers. Tests hold the rules against
the default config of every class that transformers maps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from automodel.config.errors import UserError

WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")
HEADS = ("num_attention_heads", "encoder_attention_heads", "n_head", "n_heads", "num_heads")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""0 in the dense models of a family that has mixtures, too (Granite 4)."""
LARGEST = {
    "vocab_size": 2**27, "intermediate_size": 2**22, "ffn_dim": 2**22, "encoder_ffn_dim": 2**22, "d_ff": 2**22,
    "decoder_ffn_dim": 2**22, "n_inner": 2**22, "num_hidden_layers": 10_000, "num_layers": 10_000, "n_layer": 10_000,
    "n_layers": 10_000, "encoder_layers": 10_000, "decoder_layers": 10_000, "num_decoder_layers": 10_000,
    "num_key_value_heads": 2**16, "head_dim": 2**16, "max_position_embeddings": 2**40, "n_positions": 2**40,
    "num_labels": 10**7,
    **dict.fromkeys(EXPERTS, 2**16), **dict.fromkeys(WIDTHS, 2**20), **dict.fromkeys(HEADS, 2**16),
}  # fmt: skip
"""Whole numbers from 1 on, experts from 0. Ten times what any model has, or more."""
DROPPED = ("dropout", "pdrop", "drop_rate", "layerdrop", "drop_path_rate")

Place = Callable[[str], str]
"""Where a key stands, in words: `model.hidden_size`, or a file."""


def check_values(config: Any, place: Place) -> None:
    """Raises `UserError` for the first value that makes no sense. `config`: of transformers."""
    for above, part in _parts(config):
        own = vars(part)

        def named(key: str, above: str = above, own: Mapping[str, Any] = own) -> str:
            return f"{place(above + key)}: {own[key]}"

        for key, value in own.items():
            # None follows the dropout of another key: `classifier_dropout`, DeBERTa's `cls_dropout`.
            usual = None if key == "classifier_dropout" else getattr(type(part), key, None)
            dropped = usual is not None and any(name in key for name in DROPPED)
            if (value is not None or dropped) and not isinstance(value, list | tuple | dict):
                _check_value(key, value, named)
        _check_heads(own, named)


def check_sizes(said: Mapping[str, Any], place: Place) -> None:
    """The same for sizes as a file or the run says them, before transformers makes lists of them."""
    for key, value in said.items():
        if isinstance(value, Mapping):
            check_sizes(value, lambda inner, key=key: place(f"{key}.{inner}"))
        elif isinstance(value, int | float) and not isinstance(value, bool) and value > LARGEST.get(key, math.inf):
            raise UserError(f"{place(key)}: {value} should be {_whole_number(key)}.")


def _parts(config: Any) -> Iterator[tuple[str, Any]]:
    """The config and those inside it that a run computes with, each with how its keys begin."""
    yield "", config
    try:
        text = config.get_text_config()
    except ValueError:  # of several, as in a model of music
        return
    for key, part in vars(config).items():
        if part is text:
            yield f"{key}.", part


def _least(key: str) -> int:
    return 0 if key in EXPERTS else 1


def _whole_number(key: str) -> str:
    return f"a whole number from {_least(key)} to {LARGEST[key]:,}"


def _check_value(key: str, value: Any, named: Place) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key in LARGEST and not (number and value % 1 == 0 and _least(key) <= value <= LARGEST[key]):
        raise UserError(f"{named(key)} should be {_whole_number(key)}.")
    drops = any(part in key for part in DROPPED) and not isinstance(value, bool)
    if drops and not (number and 0 <= value < 1):
        raise UserError(f"{named(key)} should be from 0 to below 1: the share that is dropped.")
    if key.endswith(("_eps", "epsilon")) and not (number and math.isfinite(value) and 0 <= value < 1):
        raise UserError(f"{named(key)} should be a small number from 0 to below 1, as 1e-5.")


def _check_heads(own: Mapping[str, Any], named: Place) -> None:
    heads, keys = own.get("num_attention_heads"), own.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(keys, int) and heads % keys:
        raise UserError(
            f"{named('num_key_value_heads')} does not divide num_attention_heads: {heads}. Choose one that does."
        )
    width = own.get("head_dim")
    # transformers 5.17 accepts odd widths and fails in the first forward pass. Heads of 1 compute, in models for tests.
    if isinstance(width, int) and width > 1 and width % 2 and _turns_all(own.get("rope_parameters")):
        raise UserError(
            f"{named('head_dim')} is odd, but rotary positions turn a head's numbers in pairs. Choose an even width; "
            "where head_dim is not given, it is usually hidden_size / num_attention_heads."
        )


def _turns_all(rope: Any) -> bool:
    """Whether rotary positions turn all numbers of a head. `rope`: `rope_parameters`, of the model or by layer type."""
    if not isinstance(rope, Mapping) or not rope:
        return False
    by_layer_type = [one for one in rope.values() if isinstance(one, Mapping)]
    return any(one.get("partial_rotary_factor", 1) == 1 for one in by_layer_type or [rope])


def no_model_of(config: Any, error: BaseException, place: Place) -> UserError:
    """What to say where modules cannot be made of a config: the keys that the error speaks of, by name or by value."""
    said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    keys = [
        f"{place(above + key)}: {value}"
        for above, part in _parts(config)
        for key, value in vars(part).items()
        if (isinstance(value, int | float | str) and not isinstance(value, bool) and _spoken_of(key, value, said))
        or (value is None and "NoneType" in said and getattr(type(part), key, None) is not None)
    ]
    about = f" It may be about {', '.join(keys[:4])}." if keys else ""
    return UserError(f"model: no {config.model_type} model can be made of this config: {said}.{about}")


def _spoken_of(key: str, value: Any, said: str) -> bool:
    if re.search(rf"\b{re.escape(key)}\b", said) or (key == "pad_token_id" and "adding_idx" in said):
        return True
    if isinstance(value, str):
        return bool(value) and f"'{value}'" in said
    return isinstance(value, int) and not 0 <= value <= 1 and bool(re.search(rf"(?<![\w.]){value}(?![\w.])", said))
