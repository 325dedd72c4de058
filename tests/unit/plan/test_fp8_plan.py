"""Who asks for FP8 gets it, with a line that says for what, or is told why not."""

import dataclasses

import pytest

from automodel.config.errors import UserError
from automodel.models.fp8 import Product
from automodel.plan.check import load_run_config
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware
from automodel.tasks.registry import CAUSAL_LM

CPU = Hardware("cpu", "Test CPU", 0, 24.0, True, False, 2)
AMPERE = Hardware("cuda", "NVIDIA A100", 1, 80.0, True, True, 16)
H200 = dataclasses.replace(AMPERE, name="NVIDIA H200", memory_gib=140.0, fp8=True)
DATA = DataFacts(rows=1000, tokens=250_000, longest=512, max_length=512, has_validation=False)


def layer(index, *sizes):
    kinds = ("q_proj", "o_proj", "gate_proj", "down_proj")
    return [Product((f"model.layers.{index}.{kind}",), i, o) for kind, (i, o) in zip(kinds, sizes)]


QWEN = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))
MODEL = ModelFacts(
    "org/qwen", "qwen3", 8_000_000_000, True, "packs", can_fuse=True, fused_in_words="everything",
    products_fused=tuple(p for i in range(36) for p in layer(i, *QWEN)),
)  # fmt: skip
SMALL = dataclasses.replace(MODEL, name="org/small", products_fused=tuple(layer(0, (2048, 3072), (2048, 16384))))


def plan_for(tmp_path, text="fp8: {}", hardware=H200, model=MODEL):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: org/qwen\ndataset: x.csv\ntask: causal-lm\n{text}\n")
    return make_plan(load_run_config([path]), CAUSAL_LM, hardware, model, DATA)


def fp8_line(plan):
    return next((d for d in plan.decisions if d.name == "fp8"), None)


def test_nobody_gets_it_unasked(tmp_path):
    for text in ("", "fp8: {enabled: false}"):
        plan = plan_for(tmp_path, text)
        assert not plan.fp8
        assert fp8_line(plan) is None


def test_the_line_says_for_what(tmp_path):
    plan = plan_for(tmp_path)
    assert plan.fp8
    assert fp8_line(plan).value == "144 of 144 products"
    assert "4096→6144 (36)" in fp8_line(plan).reason
    assert "head, embeddings and norms stay bf16" in fp8_line(plan).reason
    listed = plan_for(tmp_path, "fp8: {filter_fqns: [down_proj, layers.0.]}")
    assert fp8_line(listed).value == "105 of 144 products"
    assert "39 smaller or listed ones" in fp8_line(listed).reason
    assert plan_for(tmp_path, "training_optimizations: {precision: bf16-pure}\nfp8: {}").fp8


def test_the_references_place(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {name: org/qwen, fp8_config: {}}\ndataset: x.csv\ntask: causal-lm\n")
    assert (
        "model.fp8_config asks for it"
        in fp8_line(make_plan(load_run_config([path]), CAUSAL_LM, H200, MODEL, DATA)).reason
    )


@pytest.mark.parametrize(
    ("text", "hardware", "model", "message"),
    [
        ("fp8: {}", CPU, MODEL, "fp8: FP8 needs a GPU with FP8 tensor cores .* this is Test CPU"),
        ("fp8: {}", AMPERE, MODEL, "compute capability 8.9 or newer.* this is NVIDIA A100"),
        ("fp8: {}\ntraining_optimizations: {precision: fp16}", H200, MODEL, "the precision is fp16"),
        ("fp8: {}\ntraining_optimizations: {precision: fp32}", H200, MODEL, "the precision is fp32"),
        ("fp8: {}\ntraining_optimizations: {capture: false}", H200, MODEL, "part of captured steps"),
        ("fp8: {}\noptimizer: lion", H200, MODEL, "part of captured steps"),
        ("fp8: {}\ncompile: true", H200, MODEL, "Set compile: false"),
        ("fp8: {}", H200, SMALL, "largest product of org/small is 2048→16384, and FP8 pays only from 4096"),
        ("fp8: {filter_fqns: [proj]}", H200, MODEL, "filter_fqns proj leaves no product"),
        ("fp8: {}", H200, dataclasses.replace(MODEL, products_fused=()), "no products of FP8 are built for qwen3"),
    ],
)
def test_refused_with_the_reason(tmp_path, text, hardware, model, message):
    with pytest.raises(UserError, match=message):
        plan_for(tmp_path, text, hardware, model)
