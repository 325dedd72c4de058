"""Weights that are read part by part are those that transformers reads."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file

import tiny_runs as tiny
from automodel.config.errors import UserError
from automodel.models.config import ModelConfig
from automodel.models.load import load_hf_config, load_model
from automodel.models.streamed import open_weights
from automodel.models.task_head import NEXT_TOKEN, POOLED
from automodel.tasks.registry import task_named

SIZES = {"vocab_size": 48, "pad_token_id": 0}
DECODER = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 128, **SIZES,
}  # fmt: skip
ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, **SIZES}
SEQUENCES = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 48} | {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("attention_heads", 4), ("ffn_dim", 64))
}
MODELS = {
    "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, vocab_size=48)),
    "gemma": lambda: t.GemmaForCausalLM(t.GemmaConfig(**DECODER, head_dim=8)),
    "gemma3": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**DECODER, head_dim=8)),
    "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**DECODER, head_dim=8, tie_word_embeddings=False)),
    "roberta": lambda: t.RobertaModel(t.RobertaConfig(**ENCODER | {"pad_token_id": 1}, max_position_embeddings=130)),
    "albert": lambda: t.AlbertModel(t.AlbertConfig(**ENCODER, embedding_size=16)),
    "modernbert": lambda: t.ModernBertModel(t.ModernBertConfig(**ENCODER, cls_token_id=1, sep_token_id=2)),
    "bart": lambda: t.BartForConditionalGeneration(t.BartConfig(**SEQUENCES)),
    "pegasus": lambda: t.PegasusForConditionalGeneration(t.PegasusConfig(**SEQUENCES)),
    "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)),
}


def put(target: torch.Tensor, read) -> None:
    """The whole tensor, in two halves."""
    half = target.shape[0] // 2
    with torch.no_grad():
        for rows in (slice(0, half), slice(half, target.shape[0])):
            target[rows] = read((rows, *(slice(0, size) for size in target.shape[1:])))


def filled(weights, device="cpu"):
    model = weights.model.to_empty(device=device)
    weights.fill(model, put, device)
    return model


def assert_alike(found, expected) -> None:
    for kind in ("named_parameters", "named_buffers"):
        wanted, got = dict(getattr(expected, kind)()), dict(getattr(found, kind)())
        assert wanted.keys() == got.keys()
        for name in wanted:
            assert torch.equal(wanted[name], got[name]), name
            assert wanted[name].dtype == got[name].dtype, name
            assert wanted[name].requires_grad == got[name].requires_grad, name


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("bert", "text-classification"),
        ("distilbert", "text-classification"),
        ("llama", "text-classification"),
        ("llama", "causal-lm"),
    ],
)
def test_the_same_numbers(tmp_path, kind, task):
    """New heads too: drawn from the same seed."""
    cfg = ModelConfig(pretrained_model_name_or_path=str(tiny.make_model_folder(tmp_path, kind)))
    config = load_hf_config(cfg, task_named(task).head, num_labels=3 if task != "causal-lm" else None)
    weights = open_weights(cfg, config, task_named(task).head, seed=7)
    assert weights is not None
    assert_alike(filled(weights), load_model(cfg, config, task_named(task).head, seed=7))


@pytest.mark.parametrize("kind", MODELS)
def test_families(tmp_path, kind):
    """Either the same numbers, or a word that the ordinary way has to be taken."""
    torch.manual_seed(0)
    MODELS[kind]().save_pretrained(tmp_path)
    task = "text-classification" if kind in ("roberta", "albert", "modernbert") else "causal-lm"
    task = "seq2seq" if kind in ("bart", "pegasus", "t5") else task
    cfg = ModelConfig(pretrained_model_name_or_path=str(tmp_path))
    config = load_hf_config(cfg, task_named(task).head, num_labels=2 if task == "text-classification" else None)
    weights = open_weights(cfg, config, task_named(task).head)
    assert weights is not None
    assert_alike(filled(weights), load_model(cfg, config, task_named(task).head))
    for dtype in (torch.float32, torch.bfloat16):
        weights, expected = (
            open_weights(cfg, config, task_named(task).head, dtype),
            load_model(cfg, config, task_named(task).head, dtype=dtype),
        )
        assert weights is not None
        weights.place("cpu")
        assert_alike(weights.model, expected)


def test_straight_to_a_device(tmp_path):
    """By several threads, into another dtype, tied tables once; with the model's own way of writing."""
    folder = tiny.make_model_folder(tmp_path, "llama", tie_word_embeddings=True)
    own = {"eos_token_id": [1, 2], "temperature": 0.3, "do_sample": True, "transformers_version": "5.0.0"}
    (folder / "generation_config.json").write_text(json.dumps(own))
    cfg = ModelConfig(pretrained_model_name_or_path=str(folder))
    config = load_hf_config(cfg, NEXT_TOKEN)
    for dtype in (torch.float32, torch.bfloat16):
        weights, expected = (
            open_weights(cfg, config, NEXT_TOKEN, dtype),
            load_model(cfg, config, NEXT_TOKEN, dtype=dtype),
        )
        assert weights is not None
        weights.place("cpu")
        assert_alike(weights.model, expected)
        assert weights.model.lm_head.weight is weights.model.model.embed_tokens.weight
        assert all(p.dtype == dtype and p.requires_grad for p in weights.model.parameters())
        assert weights.model.generation_config.to_dict() == expected.generation_config.to_dict()
        assert weights.model.generation_config.eos_token_id == [1, 2]
        assert weights.model.config.to_dict() == expected.config.to_dict()
        assert weights.model.newly_initialised == expected.newly_initialised


def test_several_files_old_names_and_another_head(tmp_path):
    """As checkpoints of 2019 lie on the hub: `gamma` and `beta`, and a head of other classes."""
    tiny.make_model_folder(tmp_path, "bert", classifier=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
        for n, v in tensors.items()
    }
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, chosen in parts.items():
        save_file({name: tensors[name] for name in chosen}, tmp_path / file, metadata={"format": "pt"})
    (tmp_path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: file for file, chosen in parts.items() for name in chosen}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    cfg = ModelConfig(pretrained_model_name_or_path=str(tmp_path))
    config = load_hf_config(cfg, POOLED, num_labels=5)
    weights = open_weights(cfg, config, POOLED)
    assert weights is not None
    assert set(weights.drawn) == {"classifier.weight", "classifier.bias"}
    assert_alike(filled(weights), load_model(cfg, config, POOLED))


def test_what_takes_the_ordinary_way(tmp_path):
    folder = tiny.make_model_folder(tmp_path, "llama")
    cfg = ModelConfig(pretrained_model_name_or_path=str(folder))
    config = load_hf_config(cfg, NEXT_TOKEN)
    drawn = ModelConfig(target="automodel.AutoModelForCausalLM.from_config", pretrained_model_name_or_path=str(folder))
    assert open_weights(drawn, config, NEXT_TOKEN) is None
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert open_weights(cfg, config, NEXT_TOKEN) is None  # which then says what is missing


def test_damaged_files_are_left_to_the_ordinary_way(tmp_path):
    folder = tiny.make_model_folder(tmp_path, "llama")
    cfg = ModelConfig(pretrained_model_name_or_path=str(folder))
    config = load_hf_config(cfg, NEXT_TOKEN)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert open_weights(cfg, config, NEXT_TOKEN) is None
    with pytest.raises(UserError, match="are damaged"):
        load_model(cfg, config, NEXT_TOKEN)
    file.unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
    assert open_weights(cfg, config, NEXT_TOKEN) is None


def test_tables_that_only_the_config_ties(tmp_path):
    """transformers leaves two stored tables with different numbers apart, whatever the config says."""
    folder = tiny.make_model_folder(tmp_path, "llama", tie_word_embeddings=True)
    cfg = ModelConfig(pretrained_model_name_or_path=str(folder))
    config = load_hf_config(cfg, NEXT_TOKEN)
    tensors = load_file(folder / "model.safetensors")
    words = tensors["model.embed_tokens.weight"]
    for head, streamed in ((words.clone(), True), (words + 1, False)):
        save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
        weights = open_weights(cfg, config, NEXT_TOKEN)
        assert (weights is not None) == streamed
        expected = load_model(cfg, config, NEXT_TOKEN)
        assert (expected.lm_head.weight is expected.model.embed_tokens.weight) == streamed
