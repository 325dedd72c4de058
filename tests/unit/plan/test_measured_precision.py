"""What measured products decide on a CPU: the precision, and the library of fp32 products."""

import dataclasses

import pytest

from automodel.data.config import DatasetConfig, PackedSequenceConfig
from automodel.kernels.product_speed import ProductSpeed
from automodel.models.config import ModelConfig
from automodel.plan.config import RunConfig, TrainingOptimizations
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts, ProductFacts
from automodel.plan.hardware import Hardware
from automodel.plan.precision import gain_of_bf16, precision_of_answers
from automodel.tasks.registry import TEXT_CLASSIFICATION

CPU = Hardware("cpu", "Test CPU", 0, 24.0, False, False, 2)
H200 = Hardware("cuda", "NVIDIA H200", 1, 140.0, True, True, 16)
OWN = ModelFacts("bert", "bert", 23_000_000, True, "through the attention interface", whole_layers=True)
STOCK = dataclasses.replace(OWN, whole_layers=False)
ADAPTED = dataclasses.replace(OWN, trained=100_000)
DATA = DataFacts(rows=1000, tokens=115_000, longest=512, max_length=512, has_validation=True)
FAST_BF16 = ProductSpeed(fp32=150.0, onednn=220.0, bf16=640.0, casts=2.0)
EMULATED = ProductSpeed(fp32=150.0, onednn=155.0, bf16=60.0, casts=1.0)


def config(**options) -> RunConfig:
    return RunConfig(
        model=ModelConfig(pretrained_model_name_or_path="bert"),
        dataset=DatasetConfig(path="data.csv"),
        training_optimizations=TrainingOptimizations(**options),
    )


def plan_for(speed, cfg=None, hardware=CPU, model=OWN, tokens=1840.0, **facts):
    products = ProductFacts(speed, weights=10.6e6, tokens=tokens, **facts)
    return make_plan(cfg or config(), TEXT_CLASSIFICATION, hardware, model, DATA, products=products)


def line(plan, name):
    return next((d for d in plan.decisions if d.name == name), None)


def test_bf16_is_chosen_where_it_is_clearly_faster():
    plan = plan_for(FAST_BF16)
    assert plan.precision == "bf16"
    told = line(plan, "precision").reason
    assert "640 GFLOP/s in bf16, 220 in fp32" in told
    assert "measured on this machine" in told


def test_emulated_bf16_keeps_fp32():
    plan = plan_for(EMULATED)
    assert plan.precision == "fp32"
    assert plan.products == "torch"
    assert "60 GFLOP/s in bf16, 150 in fp32" in line(plan, "precision").reason


def test_a_precision_that_is_asked_for_stays():
    plan = plan_for(FAST_BF16, config(precision="fp32"))
    assert (plan.precision, plan.products) == ("fp32", "onednn")
    plan = plan_for(EMULATED, config(precision="bf16"))
    assert plan.precision == "bf16"
    assert "60 GFLOP/s in bf16, 150 in fp32" in line(plan, "precision").reason
    assert plan_for(FAST_BF16, config(bf16=False)).precision == "fp32"


def test_casts_of_a_large_model_eat_the_gain_of_a_small_batch():
    assert plan_for(FAST_BF16, model=ADAPTED, tokens=1840.0).precision == "bf16"
    small = plan_for(FAST_BF16, model=ADAPTED, tokens=16.0)
    assert small.precision == "fp32"
    assert "with the casts around them" in line(small, "precision").reason


def test_onednn_makes_fp32_products_where_it_is_faster_and_layers_are_ours():
    plan = plan_for(FAST_BF16, config(precision="fp32"))
    assert plan.products == "onednn"
    assert "220 GFLOP/s by oneDNN, 150 by torch's own library" in line(plan, "products").reason
    for other in (
        plan_for(FAST_BF16, config(precision="fp32"), model=ADAPTED),
        plan_for(dataclasses.replace(FAST_BF16, onednn=155.0), config(precision="fp32")),
        plan_for(None, config(precision="fp32")),
        plan_for(FAST_BF16, config(precision="bf16")),
        plan_for(FAST_BF16, config(precision="fp32"), hardware=H200),
    ):
        assert other.products == "torch"
        assert line(other, "products") is None


def test_padded_runs_have_the_faster_library_too():
    padded = dataclasses.replace(config(precision="fp32"), packed_sequence=PackedSequenceConfig(enabled=False))
    plan = plan_for(FAST_BF16, padded, model=STOCK)
    assert (plan.products, plan.own_products) == ("onednn", True)


def test_without_figures_fp32_stays_and_the_plan_says_why():
    plan = plan_for(None)
    assert plan.precision == "fp32"
    assert "not measured" in line(plan, "precision").reason


def test_a_model_without_linear_layers_says_so():
    plan = plan_for(None, not_measured="the blocks of this model have no linear layers")
    assert "not measured: the blocks of this model have no linear layers" in line(plan, "precision").reason


@pytest.mark.parametrize(
    ("speed", "words"),
    [
        (ProductSpeed(fp32=150.0), "torch has no oneDNN here; products of this run: 150 GFLOP/s in fp32;"),
        (ProductSpeed(fp32=150.0, onednn=90.0), "torch makes no products in bf16 here; products of this run: 150"),
    ],
    ids=["no oneDNN", "no bf16"],
)
def test_a_library_that_is_missing_is_named(monkeypatch, speed, words):
    plan = plan_for(speed)
    assert (plan.precision, plan.products) == ("fp32", "torch")
    assert words in line(plan, "precision").reason


def test_a_resumed_run_keeps_its_precision():
    kept = plan_for(FAST_BF16, begun_precision="fp32")
    assert (kept.precision, kept.products) == ("fp32", "torch")
    assert "as the run began; products of this run: 640 GFLOP/s in bf16" in line(kept, "precision").reason
    kept = plan_for(EMULATED, begun_precision="bf16")
    assert kept.precision == "bf16"
    assert "as the run began; products of this run: 60 GFLOP/s in bf16" in line(kept, "precision").reason
    assert line(plan_for(None, begun_precision="bf16"), "precision").reason == "as the run began"


def test_a_resumed_run_keeps_its_library():
    fp32 = config(precision="fp32")
    assert plan_for(FAST_BF16, fp32, begun_precision="fp32", begun_products="torch").products == "torch"
    kept = plan_for(EMULATED, fp32, begun_precision="fp32", begun_products="onednn")
    assert kept.products == "onednn"
    assert line(kept, "products").reason == "as the run began"


def test_what_a_config_asks_for_wins_over_how_the_run_began():
    assert plan_for(FAST_BF16, config(precision="bf16"), begun_precision="fp32").precision == "bf16"
    assert plan_for(EMULATED, config(precision="fp32"), begun_precision="bf16").precision == "fp32"
    assert plan_for(FAST_BF16, config(bf16=False), begun_precision="bf16").precision == "fp32"


def test_on_a_gpu_nothing_is_kept_of_a_processors_run():
    assert plan_for(FAST_BF16, hardware=H200, begun_precision="fp32").precision == "bf16"


def test_frozen_matrices_have_no_gradient_to_cast():
    speed = ProductSpeed(fp32=100.0, bf16=400.0, casts=1.0)
    trained, frozen, read = (ProductFacts(speed, weights=1e6, tokens=100.0, passes=passes) for passes in (3, 2, 1))
    # 10⁶ numbers and 100 tokens: 6, 4 and 2 ms in fp32, a fourth of it in bf16, and 1 ms for each cast
    assert gain_of_bf16(trained, own_layers=False) == pytest.approx(6 / (1.5 + 2))
    assert gain_of_bf16(frozen, own_layers=False) == pytest.approx(4 / (1 + 1))
    assert gain_of_bf16(read, own_layers=False) == pytest.approx(2 / (0.5 + 1))
    assert gain_of_bf16(trained, own_layers=True) == pytest.approx(6 / (1.5 + 1))
    assert gain_of_bf16(read, own_layers=True) == pytest.approx(4)


def test_stock_attention_over_padded_batches_keeps_fp32():
    padded = dataclasses.replace(config(), packed_sequence=PackedSequenceConfig(enabled=False))
    assert plan_for(FAST_BF16, padded, model=ADAPTED).precision == "fp32"
    assert plan_for(FAST_BF16, padded, model=STOCK).precision == "bf16", "linear layers are our own"


def test_answers_are_computed_in_the_fastest_precision():
    products = ProductFacts(FAST_BF16, weights=10.6e6, tokens=512.0, passes=1)
    assert precision_of_answers("auto", products) == ("bf16", "torch")
    assert precision_of_answers("fp32", products) == ("fp32", "onednn")
    emulated = dataclasses.replace(products, speed=EMULATED)
    assert precision_of_answers("auto", emulated) == ("fp32", "torch")
    assert precision_of_answers("bf16", emulated) == ("bf16", "torch")
    assert precision_of_answers("auto", ProductFacts()) == ("fp32", "torch")
