"""What the swapped blocks can do for a model, told from its config alone: the plan needs it before a weight is loaded.

The swaps themselves look at the modules once more (`fused_encoder.py`, `fused_modernbert.py`, `fused_decoder.py`,
`pooled_block.py`, `cpu_block.py`). A test holds the two to each other: a plan that promises what the model then does
not get is worse than no plan.
"""

from __future__ import annotations

from typing import Any

from automodel.kernels.flat_parameters import BLOCK
from automodel.models.decoder_parts import DECODERS, fusable_decoder_config, head_dim_of
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
    return fusable_decoder_config(config)


def can_fuse_adapters(config: Any, adapter: Any) -> bool:
    """Whether fused blocks compute an adapter of this kind: those of decoders do, where every layer of them is frozen
    and the adapter is a plain product of two (`adapted_product.py`)."""
    return config.model_type in DECODERS and not adapter.dora and not any(".layers." in n for n in adapter.saved)


def fused_in_words(config: Any) -> str:
    """What the fused blocks join."""
    if config.model_type in DECODERS:
        return "residual + RMSNorm, SwiGLU, rotation in place, joined query/key/value"
    return "residual + dropout + norm, bias + GELU, joined query/key/value"


def can_pool(config: Any, fused: bool) -> bool:
    """Whether the last block of a text classifier can run for the pooled token alone, in fused or in plain blocks."""
    if config.model_type in ENCODERS:
        return True
    if fused and config.model_type in DECODERS:
        return fusable_decoder_config(config) and not getattr(config, "attn_logit_softcapping", None)
    if not fused or config.model_type != "modernbert":
        return False
    # A window around the first token does not reach every token, and a mean reads them all.
    return config.layer_types[-1] == "full_attention" and config.classifier_pooling == "cls"


def whole_layers(config: Any) -> bool:
    """Whether a layer of it is one operation on the CPU (`cpu_block.py`)."""
    return config.model_type in ENCODERS and _activation(config) == "gelu"


def read_saving(config: Any) -> float:
    """Share of the blocks' multiplications that a fused decoder's last block makes after attention, which it does for
    the tokens alone that are read."""
    if config.model_type not in DECODERS:
        return 0.0
    width, head = config.hidden_size, head_dim_of(config)
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    after = queries * width + 3 * width * config.intermediate_size
    return after / (after + (queries + 2 * keys) * width) / config.num_hidden_layers


def pooled_saving(config: Any) -> float:
    """Share of the blocks' multiplications that is saved: in the last one, keys and values are all that every token
    still needs. A block of width N and inner width I multiplies 4 N² + 2 N I times a token, 4 N² + 3 N I if gated; in
    decoders, heads need not add up to N, and there are fewer of them for keys and values."""
    width, inner = config.hidden_size, _inner(config)
    queries = keys = width
    if config.model_type in DECODERS:
        head = head_dim_of(config)
        queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    matrices = 3 if config.model_type in ("modernbert", *DECODERS) else 2
    kept = 2 * keys * width
    block = 2 * queries * width + kept + matrices * width * inner
    return (block - kept) / block / config.num_hidden_layers


def _inner(config: Any) -> int:
    return config.hidden_dim if config.model_type == "distilbert" else config.intermediate_size


def _activation(config: Any) -> str:
    return config.activation if config.model_type == "distilbert" else config.hidden_act


def _flash_takes(config: Any) -> bool:
    return config.hidden_size // config.num_attention_heads % HEAD_SIZES == 0
