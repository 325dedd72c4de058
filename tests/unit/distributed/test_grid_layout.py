"""Ranks as a grid, and what is refused before any of them is started."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from automodel.config.errors import NotYetError, UserError
from automodel.distributed.config import DistributedConfig
from automodel.distributed.layout import Layout, can_trade_heads, check_model, layout_of, ranks_wanted


def section(**keys) -> DistributedConfig:
    return DistributedConfig(**keys)


def model(heads=8, keys=4, kind="llama", **more):
    return SimpleNamespace(
        model_type=kind,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        base_model_tp_plan={"x": "colwise"},
        **more,
    )


def test_neighbours_share_tensors_then_tokens_then_weights():
    layout = layout_of(section(strategy="fsdp2", dp_replicate_size=2, tp_size=2, cp_size=2), 16)
    assert layout == Layout(replicas=2, shards=2, cp=2, tp=2, fsdp=True)
    assert layout.size == 16
    assert [layout.tp_rank(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert [layout.cp_rank(rank) for rank in range(6)] == [0, 0, 1, 1, 0, 0]
    assert [layout.data_rank(rank) for rank in (0, 3, 4, 15)] == [0, 0, 1, 3]
    assert layout.in_words() == "fsdp2, 2 replicas × 2 shards × cp 2 × tp 2"
    assert Layout(replicas=4).in_words() == "ddp"


def test_the_section_says_how_many_ranks_it_wants():
    assert ranks_wanted(section()) == 1
    assert ranks_wanted(section(tp_size=2, cp_size=2)) == 4
    assert ranks_wanted(section(dp_size=4, tp_size=2)) == 8
    assert ranks_wanted(section(dp_replicate_size=2)) == 2


@pytest.mark.parametrize(
    ("keys", "ranks", "message"),
    [
        ({"tp_size": 4}, 6, "tp_size 4 needs a multiple of 4 ranks, but 6 .* --nproc-per-node 4 or 8, or tp_size: 3"),
        ({"tp_size": 2, "cp_size": 2}, 6, "multiple of 4 ranks.*tp_size: 1, or cp_size: 1"),
        ({"cp_size": 2}, 1, "multiple of 2 ranks, but 1 rank is started.*--nproc-per-node 2, or cp_size: 1"),
        ({"dp_size": 3, "tp_size": 2}, 4, "dp_size is 3, but 4 ranks are started, 2 of them data-parallel.*dp_size: 2"),
        ({"dp_replicate_size": 3}, 8, "nearest possible: dp_replicate_size: 2"),
        ({"strategy": "ddp", "tp_size": 2}, 2, "tp_size is 2, and strategy is ddp.*strategy: fsdp2"),
        ({"strategy": "ddp", "cp_size": 2}, 2, "cp_size is 2, and strategy is ddp"),
        ({"sequence_parallel": True}, 2, "tp_size is 1. The nearest possible: tp_size: 2"),
    ],
)
def test_grids_that_cannot_be(keys, ranks, message):
    with pytest.raises(UserError, match=message):
        layout_of(section(**keys), ranks)


@pytest.mark.parametrize(
    ("keys", "config", "packed", "message"),
    [
        ({"ep_size": 4}, model(), True, "llama has no experts.*ep_size: 1"),
        ({"tp_size": 8}, model(), True, "8 attention heads and 4 key-value heads.*nearest possible: tp_size: 4"),
        ({"tp_size": 3}, model(keys=8), True, "nearest possible: tp_size: 2"),
        ({"tp_size": 2}, SimpleNamespace(model_type="bert"), True, "no tensor-parallel plan for bert"),
        ({"cp_size": 2}, model(), False, "takes padded batches"),
        ({"cp_size": 2}, model(kind="modernbert", classifier_pooling="mean"), True, "classifier_pooling: cls"),
        ({"tp_size": 2, "sequence_parallel": True}, model(), False, "without sequence_parallel"),
        ({"tp_size": 2}, model(intermediate_size=37), True, "llama have 37 inner units, which 2 ranks cannot share"),
        ({"tp_size": 2}, model(kind="olmo", clip_qkv=8.0), True, "clips its queries, keys and values in place"),
    ],
)
def test_models_that_cannot_be_split_so(keys, config, packed, message):
    cfg = section(**keys)
    with pytest.raises(UserError, match=message):
        check_model(cfg, layout_of(cfg, 24), config, packed)


def test_heads_that_context_ranks_can_share():
    assert can_trade_heads(model(), Layout(cp=2, fsdp=True))
    assert can_trade_heads(model(), Layout(cp=8, fsdp=True))  # four key heads, each twice
    assert not can_trade_heads(model(), Layout(cp=3, fsdp=True))
    assert not can_trade_heads(model(), Layout(cp=16, fsdp=True))
    assert not can_trade_heads(model(heads=24, keys=8), Layout(cp=12, fsdp=True))
    assert can_trade_heads(model(), Layout(cp=4, tp=2, fsdp=True))


def test_what_is_possible():
    for keys in (
        {"tp_size": 4},
        {"cp_size": 8},
        {"cp_size": 16},
        {"cp_size": 2, "tp_size": 2},
        {"tp_size": 2, "cp_size": 4},
    ):
        cfg = section(**keys)
        check_model(cfg, layout_of(cfg, 16), model(), True)
    with pytest.raises(NotYetError, match="expert parallelism"):
        check_model(section(ep_size=2), Layout(), model(num_experts=8), True)
