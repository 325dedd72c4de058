"""What a config says about kernels before the plan is made, and that the plan agrees with it."""

import json

import pytest

from automodel.kernels import ahead
from automodel.kernels.ahead_facts import Facts, Head
from automodel.plan.check import load_run_config
from automodel.plan.kernels_ahead import TIED, compile_kernels_ahead, facts_of, model_config

DISTILBERT = {"model_type": "distilbert", "dim": 128, "n_heads": 2, "hidden_dim": 192}


@pytest.fixture
def configured(tmp_path):
    """A function from overrides to a loaded config, whose model is a folder with nothing but a config.json."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DISTILBERT))
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {folder}\ndataset: {{path: reviews.csv}}\ntask: text-classification\n")

    def load(*overrides: str):
        return load_run_config([file], overrides)

    return load


def test_the_defaults(configured):
    facts = facts_of(configured(), DISTILBERT)
    assert facts is not None
    assert (facts.shape.blocks, facts.shape.width, facts.shape.pools) == ("post-norm", 128, True)
    assert (facts.precision, facts.batch, facts.evaluation_batch, facts.groups) == ("auto", 8, 0, 2)
    assert facts.lazy
    assert not facts.accumulates


@pytest.mark.parametrize(
    "override",
    [
        "training_optimizations.capture=false",
        "training_optimizations.gradient_checkpointing=true",
        "packed_sequence.enabled=false",
        "optimizer.name=sgd",
    ],
)
def test_steps_that_are_not_captured_need_no_kernels(configured, override):
    assert facts_of(configured(override), DISTILBERT) is None


@pytest.mark.parametrize(
    "override", ["model.use_liger_kernel=false", "training_optimizations.precision=fp32", "model.dtype=float32"]
)
def test_stock_blocks_need_the_optimizer_only(configured, override):
    facts = facts_of(configured(override), DISTILBERT)
    assert facts is not None
    assert facts.shape.blocks == "stock"
    assert not facts.lazy


def test_keys_that_change_kernels(configured):
    facts = facts_of(
        configured(
            "training_optimizations.precision=fp16",
            "step_scheduler.grad_acc_steps=2",
            "dataloader.batch_size=6",
            "validation_dataset.path=more.csv",
            "optimizer.decay_norms_and_biases=true",
            "model.dropout=0.0",
        ),
        DISTILBERT,
    )
    assert facts is not None
    assert (facts.precision, facts.accumulates, facts.lazy) == ("fp16", True, False)
    assert (facts.batch, facts.evaluation_batch, facts.groups) == (6, 16, 1)
    assert facts.shape.down_dropout == 0.0


def test_a_tagger_reads_every_token(configured):
    facts = facts_of(configured("task=token-classification"), DISTILBERT)
    assert facts is not None
    assert not facts.shape.pools
    assert facts.lazy


def test_bf16_turned_off_is_fp32(configured):
    facts = facts_of(configured("training_optimizations.bf16=false"), DISTILBERT)
    assert facts is not None
    assert facts.precision == "fp32"


LLAMA = {
    "model_type": "llama", "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 192, "vocab_size": 777,
}  # fmt: skip


def test_a_language_models_head_is_part_of_its_loss(configured):
    write = "task=causal-lm"
    assert facts_of(configured(write), LLAMA).head == Head(777)
    tied = facts_of(configured(write, "loss_fn.z_loss=0.001"), LLAMA | {"tie_word_embeddings": True})
    assert tied.head == Head(777, tied=True, z_loss=0.001)
    assert Facts.from_json(tied.to_json()) == tied
    assert facts_of(configured(write, "loss_fn.fused=false"), LLAMA).head == Head()
    assert facts_of(configured(), LLAMA).head == Head()
    gemma = LLAMA | {"model_type": "gemma3_text", "final_logit_softcapping": 30.0, "head_dim": 64}
    assert facts_of(configured(write), gemma).head == Head(777, tied=True, softcap=30.0)


def test_families_that_tie_their_heads():
    from transformers import AutoConfig

    from automodel.models.decoder_parts import DECODERS

    assert {kind for kind in DECODERS if AutoConfig.for_model(kind).tie_word_embeddings} == set(TIED)


def test_the_config_is_found_in_a_folder(configured):
    assert model_config(configured().model) == DISTILBERT


def test_the_config_is_found_in_the_cache(configured, tmp_path):
    cached = tmp_path / "hub" / "models--someone--small-bert"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "config.json").write_text(json.dumps(DISTILBERT))
    cfg = configured("model.name=someone/small-bert", f"model.cache_dir={tmp_path / 'hub'}").model
    assert model_config(cfg) == DISTILBERT


@pytest.mark.parametrize("name", ["nobody/has-this", "no//name", "./nowhere"])
def test_models_that_are_not_here(configured, tmp_path, name):
    assert model_config(configured(f"model.name={name}", f"model.cache_dir={tmp_path}").model) is None


def test_a_broken_config_is_none(configured, tmp_path):
    (tmp_path / "model" / "config.json").write_text("{")
    assert model_config(configured().model) is None


def test_reasons_come_back(configured, monkeypatch):
    monkeypatch.setattr(ahead, "GPU_SIGNS", ())
    assert compile_kernels_ahead(configured()) == "there is no NVIDIA GPU"
    monkeypatch.setattr(ahead, "why_never", lambda: None)
    started = []
    monkeypatch.setattr(ahead, "start", started.append)
    assert compile_kernels_ahead(configured()) is None
    assert started == [facts_of(configured(), DISTILBERT)]
    assert compile_kernels_ahead(configured("model.name=nobody/has-this")) is not None
    reason = compile_kernels_ahead(configured("training_optimizations.capture=false"))
    assert reason == "the step will not be captured"
    assert len(started) == 1
