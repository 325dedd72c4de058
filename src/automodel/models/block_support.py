"""What the swapped blocks can do for a model, told from its config alone: the plan needs it before a weight is loaded.

The swaps themselves look at the modules once more (`fused_encoder.py`, `fused_modernbert.py`, `pooled_block.py`). A
test holds the two to each other: a plan that promises what the model then does not get is worse than no plan.
"""

from __future__ import annotations

from typing import Any

from automodel.kernels.flat_parameters import BLOCK
from automodel.models.fused_encoder import ENCODERS

HEAD_SIZES = 8  # flash attention takes multiples of it


def can_fuse(config: Any) -> bool:
    """Whether the family has fused blocks, and this member of it is of the kind they compute."""
    if config.model_type == "modernbert":
        extras = config.attention_bias or config.mlp_bias or config.norm_bias or config.mlp_dropout
        return not extras and config.hidden_activation == "gelu" and _flash_takes(config)
    if config.model_type in ENCODERS:
        # Query, key and value weights are joined where they lie, so each has to fill its blocks of the flat buffer.
        joins = config.hidden_size**2 % BLOCK == 0
        return _activation(config) == "gelu" and joins and _flash_takes(config)
    return False


def can_pool(config: Any, fused: bool) -> bool:
    """Whether the last block of a text classifier can run for the pooled token alone, in fused or in plain blocks."""
    if config.model_type in ENCODERS:
        return True
    if not fused or config.model_type != "modernbert":
        return False
    # A window around the first token does not reach every token, and a mean reads them all.
    return config.layer_types[-1] == "full_attention" and config.classifier_pooling == "cls"


def pooled_saving(config: Any) -> float:
    """Share of the blocks' multiplications that is saved: in the last one, keys and values are all that every token
    still needs. A block of width N and inner width I multiplies 4 N² + 2 N I times a token, 4 N² + 3 N I if gated."""
    width, inner = config.hidden_size, _inner(config)
    matrices = 3 if config.model_type == "modernbert" else 2
    block = 4 * width**2 + matrices * width * inner
    return (block - 2 * width**2) / block / config.num_hidden_layers


def _inner(config: Any) -> int:
    return config.hidden_dim if config.model_type == "distilbert" else config.intermediate_size


def _activation(config: Any) -> str:
    return config.activation if config.model_type == "distilbert" else config.hidden_act


def _flash_takes(config: Any) -> bool:
    return config.hidden_size // config.num_attention_heads % HEAD_SIZES == 0
