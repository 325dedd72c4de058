"""Fused decoder blocks against stock transformers, in fp32 and on the CPU: logits and gradients of every family to
1e-5, for classifiers, taggers and language models, each document alone. Here the blocks run on the kernels' torch
references; the kernels run in `tests/unit/kernels/test_decoder_blocks.py` (interpreter) and in `tests/gpu`."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

from automodel.kernels.flat_parameters import FlatParameters
from automodel.models import fused_decoder
from automodel.models.block_support import can_fuse, can_pool, fused_in_words, pooled_saving, read_saving
from automodel.models.checkpointing import use_gradient_checkpointing
from automodel.models.decoder_parts import DECODERS
from automodel.models.families import packing_support
from automodel.models.forward import make_forward, stock_attention
from automodel.models.fuse import fuse, pools_inside, unfuse, will_fuse
from automodel.models.recompute import use_own_checkpoints
from automodel.optim.build import parameter_groups
from automodel.optim.config import OptimizerConfig
from automodel.tasks.registry import task_named
from live_bytes import LiveBytes
from parity.test_packed_families import CLASSES, assert_same_logits_and_gradients, documents, packed
from tiny_models import tiny

# The smallest width at which every weight fills its blocks of the flat buffer, which lets neighbours be joined.
SIZE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_labels": CLASSES,
}
TASKS = ("text-classification", "causal-lm", "token-classification")
NO_TAGGER = ("gemma3_text", "olmo2")  # transformers has no token classifier for them

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24, "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.3, 1.2], "long_factor": [2.0, 3.0, 4.0, 5.0],
}  # fmt: skip
VARIANTS = [
    ("llama", "text-classification", {"pad_token_id": 2}, "the pooled token is not the last one"),
    ("qwen3", "text-classification", {"pad_token_id": 2}, "with head norms"),
    ("olmo2", "text-classification", {"pad_token_id": 2}, "with wide norms"),
    ("phi3", "text-classification", {"pad_token_id": 2}, "with one weight for all three"),
    ("mistral", "text-classification", {"sliding_window": 6, "pad_token_id": 2}, "pooled inside a window"),
    ("mistral", "causal-lm", {"sliding_window": 6}, "windows"),
    ("phi3", "causal-lm", {"sliding_window": 5}, "windows of the config"),
    (
        "qwen2",
        "text-classification",
        {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
        "last layer",
    ),
    (
        "smollm3",
        "causal-lm",
        {"no_rope_layers": [0, 1], "sliding_window": 6, "use_sliding_window": True},
        "layers that do not turn",
    ),
    ("smollm3", "text-classification", {"no_rope_layers": [1, 0]}, "the last layer does not turn"),
    ("gemma3_text", "causal-lm", {"final_logit_softcapping": 5.0}, "capped logits"),
    ("gemma3_text", "text-classification", {"layer_types": ["full_attention", "sliding_attention"]}, "other order"),
    ("llama", "causal-lm", {"rope_parameters": LLAMA3}, "llama3 angles"),
    ("qwen3", "causal-lm", {"rope_parameters": YARN}, "scaled angles"),
    (
        "phi3",
        "causal-lm",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
        "a part of each head turns",
    ),
    (
        "phi3",
        "causal-lm",
        {"rope_parameters": LONG_ROPE, "max_position_embeddings": 128},
        "angles that depend on the length, below where they do",
    ),
    ("llama", "causal-lm", {"attention_bias": True, "mlp_bias": True}, "biases everywhere"),
    ("llama", "text-classification", {"attention_bias": True, "mlp_bias": True}, "biases, pooled"),
    ("llama", "causal-lm", {"tie_word_embeddings": True}, "tied head"),
    ("llama", "text-classification", {"num_key_value_heads": 4}, "as many keys as queries"),
    ("qwen3", "text-classification", {"num_key_value_heads": 1, "head_dim": 32}, "one key head, wide heads"),
    ("gemma", "text-classification", {"num_hidden_layers": 1}, "first block and last"),
]


def fused(kind, task, norms_again=False, **overrides):
    """(fused model, stock copy, forward)."""
    _, stock = tiny(kind, task, **{**SIZE, **overrides})
    ours = deepcopy(stock)
    FlatParameters(parameter_groups(ours, OptimizerConfig()))
    assert fuse(ours, torch.zeros(1, dtype=torch.int64), None, 24, norms_again) == ours.config.num_hidden_layers
    return ours, stock, make_forward(ours, task_named(task).head, "packed", swapped=True)


@pytest.mark.parametrize(
    ("kind", "task"), [(k, t) for k in DECODERS for t in TASKS if t != TASKS[2] or k not in NO_TAGGER]
)
def test_equal_to_each_document_alone_before_and_after_training(kind, task):
    ours, stock, forward = fused(kind, task)
    assert_same_logits_and_gradients(ours, stock, forward, task, documents(0))
    optimizer = torch.optim.AdamW(ours.parameters(), lr=3e-3)
    losses = []
    for _ in range(5):
        batch = packed(documents(0), task, packing_support(ours.config, task_named(task).head).pooling)
        loss = F.cross_entropy(forward(batch), batch.labels_R)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    stock.load_state_dict(ours.state_dict())  # under the same names
    assert_same_logits_and_gradients(ours, stock, forward, task, documents(2))


@pytest.mark.parametrize(
    ("kind", "task", "overrides"), [v[:3] for v in VARIANTS], ids=[f"{v[0]}: {v[3]}" for v in VARIANTS]
)
def test_variants_equal_each_document_alone(kind, task, overrides):
    ours, stock, forward = fused(kind, task, **overrides)
    assert_same_logits_and_gradients(ours, stock, forward, task, documents(0))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "olmo2"])
def test_under_gradient_checkpointing_gradients_are_the_same(kind):
    """Blocks hand on two tensors; the checkpointed call has to carry both."""
    ours, stock, forward = fused(kind, "causal-lm")
    ours.train()
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same_logits_and_gradients(ours, stock, forward, "causal-lm", documents(0))


@pytest.mark.parametrize("kind", DECODERS)
def test_norms_that_are_made_again_change_no_gradient_and_are_not_kept(kind):
    """Not a bit differs, and each of two layers keeps two rows less of every token."""
    task = "causal-lm" if kind in NO_TAGGER else "token-classification"
    gradients, kept = [], []
    for again in (False, True):
        ours, _, forward = fused(kind, task, again)
        batch = packed(documents(0), task, None)
        with LiveBytes() as live:
            loss = F.cross_entropy(forward(batch), batch.labels_R)
            kept.append(live.total)
        loss.backward()
        gradients.append({name: p.grad for name, p in ours.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name
    tokens, read, row = len(batch.input_ids_T), len(batch.read_positions_R), 4 * SIZE["hidden_size"]
    assert kept[0] - kept[1] == (0 if kind == "olmo2" else (3 * tokens + read) * row)


@pytest.mark.parametrize("ours_too", [False, True], ids=["torch's checkpoints", "ours"])
def test_checkpointed_layers_have_nothing_to_make_again(ours_too):
    kept = []
    for again in (False, True):
        ours, stock, forward = fused("llama", "causal-lm", again)
        ours.train()
        use_gradient_checkpointing(ours, "full")
        if ours_too:
            use_own_checkpoints(ours, offload=False)
        with LiveBytes() as live:
            logits = forward(packed(documents(0), "causal-lm", None))
            kept.append(live.total)
        assert logits.requires_grad
        assert_same_logits_and_gradients(ours, stock, forward, "causal-lm", documents(0))
    assert kept[0] == kept[1]


def test_evaluation_data_may_be_longer_than_the_tables_were_made_for():
    ours, stock, forward = fused("llama", "causal-lm")
    angles = ours.model.layers[0].forward.angles
    first = angles.up_to(8)
    assert first.shape[1] == 24
    assert angles.up_to(60).shape[1] == 60
    assert angles.up_to(24) is first  # graphs that were recorded keep reading it
    assert_same_logits_and_gradients(ours, stock, forward, "causal-lm", documents(0))


def test_only_rows_that_are_read_go_through_the_last_mlp(monkeypatch):
    seen = []
    real = fused_decoder.swiglu_linear
    monkeypatch.setattr(fused_decoder, "swiglu_linear", lambda x, *rest: seen.append(x.shape[0]) or real(x, *rest))
    for task in TASKS:
        ours, _, forward = fused("llama", task)
        batch = packed(documents(0), task, packing_support(ours.config, task_named(task).head).pooling)
        assert forward(batch).shape[0] == len(batch.read_positions_R)
        assert seen == [len(batch.input_ids_T), len(batch.read_positions_R)]
        assert pools_inside(ours)
        seen.clear()


def test_ordinary_calls_get_the_stock_code_and_the_swaps_come_back():
    ours, stock, forward = fused("qwen3", "causal-lm")
    batch = packed(documents(0), "causal-lm", None)
    before = forward(batch)
    prompt = {"input_ids": documents(0)[1]["ids"][None], "max_new_tokens": 4, "do_sample": False}
    with stock_attention(ours), torch.no_grad():
        assert torch.equal(ours.generate(**prompt), stock.generate(**prompt))
    assert torch.equal(forward(batch), before)
    unfuse(ours)
    assert not any("forward" in module.__dict__ for module in ours.modules())


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", {"hidden_act": "relu"}),
        ("llama", {"intermediate_size": 37}),
        ("llama", {"head_dim": 12}),
        ("phi3", {"resid_pdrop": 0.1}),
    ],
    ids=lambda x: str(x),
)
def test_what_the_blocks_do_not_compute_is_left_alone(kind, overrides):
    config, model = tiny(kind, "causal-lm", **{**SIZE, **overrides})
    assert not can_fuse(config)
    FlatParameters(parameter_groups(model, OptimizerConfig()))
    assert fuse(model, torch.zeros(1, dtype=torch.int64)) == 0
    assert "forward" not in model.model.layers[0].__dict__


@pytest.mark.parametrize("kind", DECODERS)
def test_the_plan_knows_what_the_pooled_block_saves(kind):
    config, model = tiny(kind, "text-classification", **SIZE)
    sizes = [sum(p.numel() for p in layer.parameters() if p.ndim == 2) for layer in model.model.layers]
    keys_and_values = 2 * 2 * 16 * 64
    assert can_pool(config, fused=True) == (kind != "gemma2")  # whose capped scores have no kernel for a single query
    assert pooled_saving(config) == pytest.approx((sizes[-1] - keys_and_values) / sum(sizes))
    queries = 4 * 16 * 64
    assert read_saving(config) == pytest.approx((sizes[-1] - keys_and_values - queries) / sum(sizes))
    assert "RMSNorm" in fused_in_words(config)


def test_frozen_layers_are_left_alone():
    _, model = tiny("llama", "causal-lm", **SIZE)
    model.model.layers[0].requires_grad_(False)
    assert can_fuse(model.config)
    assert not will_fuse(model)


def test_neighbours_survive_weight_decay_on_everything():
    """Biases and norms in the same group must not come to lie between the weights."""
    _, model = tiny("qwen2", "causal-lm", **SIZE)
    FlatParameters(parameter_groups(model, OptimizerConfig(decay_norms_and_biases=True)))
    assert fuse(model, torch.zeros(1, dtype=torch.int64)) == 2
