"""What the plan makes of adapters: captured, fused steps, the form of frozen weights, the memory of an 8B model."""

import numpy as np
import pytest

from automodel.adapters.config import Packing, PeftConfig
from automodel.config.errors import UserError
from automodel.data.config import DataloaderConfig, DatasetConfig
from automodel.models.config import Fp8Config, ModelConfig, QuantizationConfig
from automodel.models.fp8 import Product
from automodel.plan.config import RunConfig, StepSchedulerConfig, TrainingOptimizations
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware
from automodel.plan.memory import ModelShape
from automodel.tasks.registry import CAUSAL_LM

SHAPE = ModelShape(36, 4096, 4096, 1024, 32, 12_288, 151_936, rms=True, gated=True, head_norms=True)
PRODUCTS = (Product(("q_proj",), 4096, 6144),)
LENGTHS = np.full(64, 4096)
DATA = DataFacts(64, int(LENGTHS.sum()), 4096, 4096, False, lengths=LENGTHS)


def gpu(memory):
    return Hardware("cuda", "Test GPU", 1, memory, True, True, 8, fp8=True)


def facts(**changes):
    usual = {"can_fuse": True, "fused_in_words": "norms", "trained": 43_646_976, "adapter_in_words": "rank 16"}
    usual |= {"head_words": 151_936, "shape": SHAPE, "products_fused": PRODUCTS}
    return ModelFacts("qwen3", "qwen3", 8_190_735_360, True, "packs", **{**usual, **changes})


def plan(memory=140.0, model=None, checkpointing=False, offload=False, **sections):
    cfg = RunConfig(
        model=ModelConfig(pretrained_model_name_or_path="qwen3"), dataset=DatasetConfig(path="data.jsonl"),
        peft=PeftConfig(dim=16), dataloader=DataloaderConfig(batch_size=2),
        step_scheduler=StepSchedulerConfig(max_steps=10),
        training_optimizations=TrainingOptimizations(
            gradient_checkpointing=checkpointing, activation_offload=offload
        ), **sections,
    )  # fmt: skip
    made = make_plan(cfg, CAUSAL_LM, gpu(memory), model or facts(), DATA)
    return made, {d.name: d for d in made.decisions}


FOUR = QuantizationConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)


def test_steps_with_adapters_are_captured_and_fused_and_update_at_once():
    made, lines = plan()
    assert (made.capture, made.fused_kernels, made.late_update, made.lazy_embeddings) == (True, True, False, False)
    assert "one read of x" in lines["kernels"].reason
    assert 45 < made.memory_gib < 52  # weights 15.3, activations of 8,192 tokens 32
    assert "frozen weights 15.3 GiB, adapter 250 MiB, gradients 83 MiB, optimizer 333 MiB" in lines["memory"].reason


def test_adapters_without_fused_blocks_are_captured_in_stock_ones():
    made, lines = plan(model=facts(can_fuse=False))
    assert made.capture
    assert not made.fused_kernels
    assert "adapter of this kind" in lines["kernels"].reason


@pytest.mark.parametrize(("memory", "resident"), [(140.0, True), (48.0, False)])
def test_packed_weights_are_kept_expanded_where_they_fit(memory, resident):
    made, lines = plan(memory, quantization=FOUR)
    assert made.packing == Packing("nf4", double=True, resident=resident)
    assert lines["base"].value == ("bf16, expanded from " if resident else "") + "NF4, doubly quantised"
    how = "expanded once to bf16 and kept" if resident else "expanded to bf16 for each product; kept expanded, about 48"
    assert how in lines["base"].reason
    assert made.memory_gib == pytest.approx(48.6 if resident else 39.2, abs=0.5)


def test_checkpointing_is_the_last_resort():
    made, _ = plan(40.0, quantization=FOUR, checkpointing="auto")
    assert (made.packing.resident, made.checkpointing) == (True, "selective")
    made, lines = plan(12.0, quantization=FOUR, checkpointing="auto", offload=True)
    assert (made.packing.resident, made.checkpointing) == (False, "full")
    assert 7.5 < made.memory_gib < 8.6
    assert "frozen weights (products in NF4, doubly quantised) 5.8 GiB" in lines["memory"].reason


def test_what_is_asked_for_is_done():
    made, lines = plan(quantization=QuantizationConfig(load_in_8bit=True, resident=False))
    assert made.packing == Packing("int8")
    assert "quantization.resident is false" in lines["base"].reason
    _, lines = plan(quantization=QuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="float16"))
    assert "bnb_4bit_compute_dtype is float16, but the run computes in bf16" in lines["base"].reason


def test_fp8_belongs_to_fused_blocks_under_an_adapter():
    made, lines = plan(fp8=Fp8Config())
    assert made.fp8
    assert "frozen weights, rounded once" in lines["fp8"].reason
    with pytest.raises(UserError, match="part of fused blocks"):
        plan(fp8=Fp8Config(), model=facts(can_fuse=False, products=PRODUCTS))
    with pytest.raises(UserError, match="another form of the frozen weights than fp8"):
        plan(fp8=Fp8Config(), quantization=FOUR)


def test_dropout_of_an_adapter_and_recomputed_layers_are_not_recorded():
    made, lines = plan(model=facts(dropout="peft.dropout"), checkpointing="full")
    assert not made.capture
    assert "dropout" in lines["step"].reason
