"""Gradient checkpointing: layers that forget what they computed and compute it again in the backward pass.

transformers wraps each layer's call (`GradientCheckpointingLayer`), swapped blocks included. `full` does so in every
layer and keeps what goes into each; `selective` in every other one, beginning with the first, which leaves the last
layer of an even number alone: a fused one computes only the rows that are read, and there is little to save.

Recomputing has to draw the same dropout and the same noise before a router again, so torch saves the random state
before each layer, on the host: nothing that a CUDA graph could record. A model that draws nothing in its layers does
not need that, and is checkpointed without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from automodel.config.errors import UserError

# Dropout that is drawn outside the layers, which is not drawn again.
OUTSIDE = ("classifier", "pooler", "summary", "seq_classif", "qa_", "embd", "embedding", "final", "head")


def layer_dropout(config: Mapping[str, Any]) -> str | None:
    """The first key of a model's config (as a mapping) that lets layers draw random numbers: to drop something, or as
    noise before a router. Code that comes with a model may do so without a key."""
    if config.get("auto_map"):
        return "auto_map"
    for key, value in config.items():
        if isinstance(value, Mapping) and key.endswith("_config"):  # the language half of a model that also sees
            inner = layer_dropout(value)
            if inner is not None:
                return inner
        named = any(part in key for part in ("dropout", "pdrop", "layerdrop", "jitter")) or key == "drop_path_rate"
        if named and isinstance(value, int | float) and value > 0 and not key.startswith(OUTSIDE):
            return key
    return None


def use_gradient_checkpointing(model: Any, mode: str) -> int:
    """Switches checkpointing on, `full` or `selective`; returns the number of checkpointed layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    from automodel.adapters.attach import adapter_of  # torch; the plan asks this file about dropout before it is there

    adapter = adapter_of(model)
    drops = layer_dropout(model.config.to_dict()) is not None or (adapter is not None and adapter.dropout > 0)
    options = {"use_reentrant": False, "preserve_rng_state": drops}
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    except ValueError as error:
        raise UserError(
            f"training_optimizations.gradient_checkpointing: {type(model).__name__} cannot recompute its layers. "
            "Remove the key."
        ) from error
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if mode == "full":
        return len(layers)
    if len(layers) < 2:
        raise UserError(
            "training_optimizations.gradient_checkpointing: selective takes every other layer, but the layers of "
            f"{type(model).__name__} cannot be told apart. Use full."
        )
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % 2 == 0
    return -(-len(layers) // 2)
