"""Products are timed once for a machine, by the first rank, and never for a GPU."""

import json
import math

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from automodel.distributed.world import Alone
from automodel.engine import product_facts as gathering
from automodel.engine.product_facts import product_facts
from automodel.kernels.product_speed import Timed
from automodel.models.cpu_linears import matrix_sizes
from automodel.plan.facts import NO_PRODUCTS
from automodel.plan.hardware import Hardware

CPU = Hardware("cpu", "Test CPU", 0, 24.0, False, False, 2)
H200 = Hardware("cuda", "NVIDIA H200", 1, 140.0, True, True, 16)
TIMED = Timed((150.0, 150.0, 150.0), (220.0, 220.0, 110.0), (640.0, 640.0, 320.0), 2.0)


class Timer:
    """Stands where products are timed; counts how often, on how many threads."""

    def __init__(self):
        self.threads = []

    def __call__(self, sample, budget_s=None):
        self.threads.append(torch.get_num_threads())
        self.sample = sample
        return TIMED


@pytest.fixture
def timer(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    timer = Timer()
    monkeypatch.setattr(gathering, "time_products", timer)
    monkeypatch.setattr(gathering, "LEAST_OPERATIONS", 0.0)
    monkeypatch.setattr(gathering, "UNDISTURBED", math.inf)
    return timer


@pytest.fixture(scope="module")
def bert():
    with torch.device("meta"):
        return BertForSequenceClassification(
            BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=90)
        )


def test_matrices_are_those_of_blocks_and_of_a_language_models_head(bert):
    assert sorted(matrix_sizes(bert)) == sorted(([(32, 32)] * 4 + [(32, 64), (64, 32)]) * 2)  # and no pooler
    with torch.device("meta"):
        gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=90, n_inner=64))
    assert sorted(matrix_sizes(gpt2)) == [(32, 32), (32, 64), (32, 90), (32, 96), (64, 32)]


def test_products_are_timed_once(bert, timer):
    facts = product_facts(CPU, bert, 100.0)
    assert facts.speed == TIMED.speed(3)
    assert (facts.weights, facts.tokens, facts.passes) == (16_384.0, 100.0, 3)
    assert facts.not_measured == ""
    assert product_facts(CPU, bert, 100.0) == facts
    assert len(timer.threads) == 1
    assert timer.sample.tokens == 64


def test_what_neighbours_disturbed_is_not_remembered(bert, timer, monkeypatch):
    monkeypatch.setattr(gathering, "UNDISTURBED", -1.0)
    assert product_facts(CPU, bert, 100.0).speed == TIMED.speed(3)
    assert len(timer.threads) == 2, "timed again, for longer"
    assert timer.threads[1] == 1, "which waits for no other thread"
    monkeypatch.setattr(gathering, "UNDISTURBED", math.inf)
    product_facts(CPU, bert, 100.0)
    assert len(timer.threads) == 3


def test_products_that_are_small_are_not_timed(bert, timer, monkeypatch):
    """Tiny models: what is around their products takes longer than the products."""
    monkeypatch.setattr(gathering, "LEAST_OPERATIONS", 1e9)
    facts = product_facts(CPU, bert, 100.0, begun={"device": "cpu", "precision": "bf16"})
    assert facts.speed is None
    assert "too small" in facts.not_measured
    assert facts.begun_precision == "bf16"
    assert timer.threads == []
    assert product_facts(CPU, bert, 1e5).speed == TIMED.speed(3)


def test_one_timing_serves_training_adapters_and_evaluations(bert, timer):
    assert product_facts(CPU, bert, 100.0, passes=2).speed.bf16 == 640.0
    assert product_facts(CPU, bert, 100.0, passes=3).speed.bf16 == pytest.approx(480.0)
    assert len(timer.threads) == 1


def test_nothing_is_timed_for_a_gpu(bert, timer):
    assert product_facts(H200, bert, 100.0, begun={"device": "cuda", "precision": "bf16"}) is NO_PRODUCTS
    assert timer.threads == []


def test_a_model_without_linear_layers_is_not_timed(timer):
    class Nothing(torch.nn.Module):
        def get_output_embeddings(self):
            return None

    facts = product_facts(CPU, Nothing(), 100.0)
    assert (facts.speed, facts.not_measured) == (None, "the blocks of this model have no linear layers")
    assert timer.threads == []


class Ranks(Alone):
    """One of several ranks; what the first one says goes through JSON, and comes from `said` on the others."""

    def __init__(self, first, said=None):
        self.is_first, self.said = first, said

    def told(self, make):
        if self.is_first:
            self.said = json.dumps(make())
        return json.loads(self.said)


def test_the_first_rank_tells_the_others(bert, timer):
    first = Ranks(True)
    facts = product_facts(CPU, bert, 100.0, ranks=first)
    assert len(timer.threads) == 1
    timer.threads.clear()
    assert product_facts(CPU, bert, 100.0, ranks=Ranks(False, first.said)) == facts
    assert timer.threads == []


def test_planned_ranks_share_the_cores(bert, timer, monkeypatch):
    """As `automodel finetune --nproc-per-node` gives them threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        product_facts(CPU, bert, 100.0, planned_ranks=2)
        monkeypatch.delenv("OMP_NUM_THREADS")
        product_facts(CPU, bert, 100.0, planned_ranks=2)
        product_facts(CPU, bert, 100.0, planned_ranks=8)
        product_facts(CPU, bert, 100.0, planned_ranks=1)  # timed before, on four
        assert timer.threads == [4, 2, 1]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_what_the_run_began_with_is_handed_on(bert, timer):
    begun = {"device": "cpu", "precision": "fp32", "products": "onednn", "compile": False}
    facts = product_facts(CPU, bert, 100.0, begun=begun)
    assert (facts.begun_precision, facts.begun_products) == ("fp32", "onednn")
    older = product_facts(CPU, bert, 100.0, begun={"device": "cpu", "precision": "fp32"})
    assert (older.begun_precision, older.begun_products) == ("fp32", "")
    elsewhere = product_facts(CPU, bert, 100.0, begun={"device": "cuda", "precision": "bf16"})
    assert (elsewhere.begun_precision, elsewhere.begun_products) == ("", "")
