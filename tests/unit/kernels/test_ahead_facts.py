"""Facts for compiling ahead come from config.json alone, and agree with what transformers and the models make of it."""

import json

import pytest
from transformers import AutoConfig, AutoModelForSequenceClassification

from automodel.kernels.ahead_facts import FAMILIES, Facts, Shape, shape_of
from automodel.kernels.flat_parameters import BLOCK
from automodel.models.block_support import can_fuse
from automodel.models.fuse import layers_of
from automodel.models.fused_decoder import DECODERS
from automodel.models.fused_encoder import ENCODERS

SMALL = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 192}


def small(kind: str) -> dict:
    return SMALL | ({"num_key_value_heads": 2, "head_dim": 32} if kind in DECODERS else {})


def saved_config(tmp_path, kind: str, **options) -> tuple[dict, object]:
    """A config.json as transformers writes it, and the config itself."""
    config = AutoConfig.for_model(kind, **options)
    config.save_pretrained(tmp_path)
    return json.loads((tmp_path / "config.json").read_text()), config


def test_every_fused_family_can_be_read():
    assert set(FAMILIES) == {*ENCODERS, "modernbert", *DECODERS}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_silent_file_means_what_transformers_makes_of_it(kind):
    defaults, _ = FAMILIES[kind]
    stock = AutoConfig.for_model(kind).to_dict()
    # None follows from other values; names that a family does not have are not looked at for it.
    known = {name: value for name, value in defaults.items() if value is not None and name in stock}
    assert len(known) >= 5
    assert known == {name: stock[name] for name in known}
    assert shape_of({"model_type": kind}) == shape_of(stock)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_shape_of_a_saved_model(tmp_path, kind):
    written, config = saved_config(tmp_path, kind, **small(kind))
    shape = shape_of(written)
    assert shape == shape_of(config.to_dict())
    assert (shape.width, shape.heads) == (128, 4)
    assert shape.inner == (config.hidden_dim if kind == "distilbert" else 192)
    assert shape.embedding_width == 128
    kinds = {"modernbert": "modernbert", **dict.fromkeys(DECODERS, "decoder")}
    assert shape.blocks == kinds.get(kind, "post-norm")
    if kind in DECODERS:
        assert (shape.key_heads, shape.head_dim, shape.turning_dim) == (2, 32, 32)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("bert", {"hidden_act": "gelu_new"}),
        ("bert", {"hidden_size": 48, "num_attention_heads": 2}),
        ("electra", {"hidden_size": 64, "num_attention_heads": 32}),
        ("distilbert", {"activation": "relu"}),
        ("modernbert", {"mlp_bias": True}),
        ("modernbert", {"mlp_dropout": 0.1}),
        ("modernbert", {"hidden_activation": "silu"}),
        ("gpt2", {}),
        ("llama", {"hidden_act": "relu"}),
        ("llama", small("llama") | {"head_dim": 36}),
        ("llama", small("llama") | {"intermediate_size": 190}),
        ("phi3", small("phi3") | {"resid_pdrop": 0.1}),
        ("phi3", small("phi3") | {"intermediate_size": 190}),
        ("gemma3_text", small("gemma3_text") | {"attn_logit_softcapping": 30.0}),
        *((kind, small(kind)) for kind in FAMILIES),
        *((kind, {}) for kind in FAMILIES),
    ],
)
def test_models_are_fused_where_the_plan_will_say_so(tmp_path, kind, options):
    written, config = saved_config(tmp_path, kind, **options)
    assert (shape_of(written).blocks != "stock") == can_fuse(config)


def test_blocks_of_the_flat_buffer():
    from automodel.kernels import ahead_facts

    assert ahead_facts.BLOCK == BLOCK


def test_electra_embeds_narrower_than_it_computes():
    shape = shape_of({"model_type": "electra"})
    assert (shape.embedding_width, shape.width) == (128, 256)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_matrices_of_a_block(kind):
    """Those of one product together: as many elements as the layer has, each read by the width of some stream."""
    config = AutoConfig.for_model(kind, **small(kind), num_hidden_layers=2, vocab_size=64, pad_token_id=0)
    layer = layers_of(AutoModelForSequenceClassification.from_config(config))[1]
    sizes = [tuple(p.shape) for p in layer.parameters() if p.ndim == 2]
    found = shape_of(config.to_dict()).matrices()
    assert sum(o * i for o, i in found) == sum(o * i for o, i in sizes)
    assert {i for _, i in found} == {i for _, i in sizes}
    assert {found[1], found[3]} <= set(sizes), "of the products that stand alone"


def test_what_is_particular_about_decoders():
    shapes = {kind: shape_of({"model_type": kind}) for kind in DECODERS}
    assert [kind for kind, shape in shapes.items() if shape.qkv_bias] == ["qwen2"]
    assert {kind: shape.head_norms for kind, shape in shapes.items() if shape.head_norms} == {
        "qwen3": "each",
        "gemma3_text": "each",
        "olmo2": "all",
    }
    assert {kind for kind, shape in shapes.items() if shape.norm_offset} == {"gemma", "gemma2", "gemma3_text"}
    assert {kind: shape.softcap for kind, shape in shapes.items() if shape.softcap} == {"gemma2": 50.0}
    assert shape_of({"model_type": "llama", "attention_bias": True}).out_bias
    assert shape_of({"model_type": "phi3", "partial_rotary_factor": 0.75}).turning_dim == 72
    narrow = shape_of({"model_type": "llama", "hidden_size": 2048, "num_attention_heads": 32})
    assert (narrow.head_dim, narrow.key_heads) == (64, 32)


def test_distilbert_understands_the_common_names():
    shape = shape_of({"model_type": "distilbert", "hidden_size": 256, "num_attention_heads": 4})
    assert (shape.width, shape.embedding_width, shape.heads) == (256, 256, 4)


def test_dropout_is_part_of_the_shape():
    on, off = ({"model_type": "bert", "hidden_dropout_prob": p} for p in (0.1, 0.0))
    assert shape_of(on).down_dropout == shape_of(on).out_dropout == 0.1
    assert shape_of(off).down_dropout == shape_of(off).out_dropout == 0.0
    assert shape_of({"model_type": "distilbert"}).out_dropout == 0.0  # it has none after attention


def test_a_round_trip():
    facts = Facts(shape_of({"model_type": "modernbert"}), batch=3, lazy=True)
    assert Facts.from_json(facts.to_json()) == facts


def test_the_gpu_decides_what_was_left_open():
    facts = Facts(shape_of({"model_type": "bert"}), lazy=True)
    assert facts.on(90).precision == "bf16"
    assert facts.on(90).shape == facts.shape
    old = facts.on(75)
    assert (old.precision, old.shape, old.lazy) == ("fp32", Shape("stock"), False)
    asked = Facts(shape_of({"model_type": "bert"}), precision="tf32").on(90)
    assert (asked.precision, asked.shape.blocks) == ("tf32", "stock")
