"""What the plan promises from a config is what the model then gets, fused or plain."""

import pytest
import torch
from transformers import AutoConfig

import tiny_models
from automodel.models.block_support import can_fuse, can_pool, pooled_saving, whole_layers
from automodel.models.cpu_block import use_cpu_blocks
from automodel.models.fused_encoder import fuse_encoder
from automodel.models.pooled_block import pool_last_block
from flattened import flattened

WIDE = {"hidden_size": 64, "num_attention_heads": 4}  # 64² weights fill whole blocks; heads of 16
DISTIL = {"dim": 64, "n_heads": 4}

CASES = [
    ("bert", WIDE, True, True),
    ("roberta", WIDE, True, True),
    ("electra", WIDE, True, True),
    ("distilbert", DISTIL, True, True),
    ("bert", {**WIDE, "hidden_act": "relu"}, False, False),
    ("distilbert", {**DISTIL, "activation": "relu"}, False, False),
    ("bert", {"hidden_size": 40, "num_attention_heads": 5}, False, False),  # 1,600 weights: not whole blocks
    ("modernbert", WIDE, True, False),  # three layers, of which only the first is global
    ("modernbert", {**WIDE, "global_attn_every_n_layers": 1, "classifier_pooling": "mean"}, True, False),
    ("modernbert", {**WIDE, "global_attn_every_n_layers": 1}, True, True),
    ("modernbert", {**WIDE, "mlp_bias": True}, False, False),
    ("modernbert", {**WIDE, "attention_bias": True}, False, False),
    ("modernbert", {**WIDE, "mlp_dropout": 0.1}, False, False),
    ("modernbert", {**WIDE, "hidden_activation": "silu"}, False, False),
]


def layers_of(model):
    backbone = model.base_model
    if model.config.model_type == "modernbert":
        return backbone.layers
    return (backbone.transformer if model.config.model_type == "distilbert" else backbone.encoder).layer


def pools_inside(model) -> bool:
    return getattr(layers_of(model)[-1].forward, "pools", False)


@pytest.mark.parametrize(("kind", "changes", "fuses", "pools"), CASES)
def test_fused_blocks(kind, changes, fuses, pools):
    config, model = tiny_models.tiny(kind, "text-classification", num_labels=2, **changes)
    flattened(model, lr=1e-3)
    blocks = fuse_encoder(model, torch.zeros(1, dtype=torch.int64), None, 64)
    assert can_fuse(config) == bool(blocks) == fuses
    if blocks:
        assert can_pool(config, fused=True) == pools_inside(model) == pools


def test_modernbert_pools_only_with_full_attention_last():
    """22 layers with every third global end with a global one, as published; 24 do not."""
    found = {}
    for layers in (3, 4, 5, 6, 7):
        config, model = tiny_models.tiny(
            "modernbert", "text-classification", num_labels=2, num_hidden_layers=layers, **WIDE
        )
        flattened(model, lr=1e-3)
        assert fuse_encoder(model, torch.zeros(1, dtype=torch.int64), None, 64) == layers
        assert can_pool(config, fused=True) == pools_inside(model)
        found[layers] = pools_inside(model)
    assert found == {3: False, 4: True, 5: False, 6: False, 7: True}
    assert can_pool(AutoConfig.for_model("modernbert"), fused=True)


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "distilbert", "modernbert", "albert", "llama"])
def test_plain_blocks(kind):
    config, model = tiny_models.tiny(kind, "text-classification", num_labels=2, pad_token_id=0)
    assert can_pool(config, fused=False) == pool_last_block(model)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("bert", {}), ("distilbert", {}), ("bert", {"hidden_act": "relu"}), ("modernbert", {}), ("albert", {})],
)
def test_whole_layers(kind, changes):
    config, model = tiny_models.tiny(kind, "text-classification", num_labels=2, **changes)
    assert use_cpu_blocks(model) == (config.num_hidden_layers if whole_layers(config) else 0)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "modernbert"])
def test_saving_is_counted_from_the_real_matrices(kind):
    config, model = tiny_models.tiny(kind, "text-classification", num_labels=2)
    sizes = [sum(p.numel() for p in layer.parameters() if p.ndim == 2) for layer in layers_of(model)]
    kept = 2 * config.hidden_size**2
    assert pooled_saving(config) == pytest.approx((sizes[-1] - kept) / sum(sizes))


def test_the_published_sizes():
    assert pooled_saving(AutoConfig.for_model("bert")) == pytest.approx(10 / 12 / 12)
    assert pooled_saving(AutoConfig.for_model("distilbert")) == pytest.approx(10 / 12 / 6)
    assert pooled_saving(AutoConfig.for_model("modernbert")) == pytest.approx(6.5 / 8.5 / 22)
