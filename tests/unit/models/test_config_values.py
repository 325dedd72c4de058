"""A model's config that no model can be made of ends with exit code 2 and the key, before data and weights are read."""

from __future__ import annotations

import json
import sys

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tiny_runs as tiny
from architectures.tiny import TASKS, default_config, tiny_config, tiny_model
from automodel.cli.main import main
from automodel.config.errors import UserError
from automodel.models.config import ModelConfig
from automodel.models.config_values import check_values
from automodel.models.load import load_hf_config, skeleton_of
from automodel.models.streamed import require_shapes
from automodel.tasks.registry import task_named

INVALID = {"gemma4_assistant", "nemo_speechlm"}
"""Types whose default config, or the tiny one, is not valid in transformers itself."""
KINDS = sorted({kind for _, names in TASKS.values() for kind in names} - INVALID)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rule_refuses_a_family(kind):
    for config in (default_config(kind), tiny_config(kind)):
        check_values(config, str)


# Granite 4 publishes dense models of its family of mixtures; DeBERTa's heads read `cls_dropout`, null by default.
PUBLISHED = [
    ("granitemoehybrid", {"num_local_experts": 0, "num_experts_per_tok": 0}),
    ("deberta-v2", {"cls_dropout": None}),
]


@pytest.mark.parametrize(("kind", "said"), PUBLISHED, ids=lambda value: str(value)[:20])
def test_no_rule_refuses_values_of_published_models(kind, said):
    check_values(CONFIG_MAPPING[kind](**said), str)


def test_a_count_of_experts_is_not_negative():
    with pytest.raises(UserError, match="num_local_experts: -1 should be a whole number from 0 to 65,536"):
        check_values(CONFIG_MAPPING["granitemoehybrid"](num_local_experts=-1), str)


def with_heads_of(kind, width):
    """A config whose width transformers has not seen: 5.17 never looks at it, later versions when a config is made."""
    config = tiny_config(kind)
    config.head_dim = width
    return config


# Gemma 3's rope_parameters are told by the type of the layer.
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_rotary_positions_turn_pairs(kind):
    for width in (3, 7, 129):
        with pytest.raises(UserError, match=f"head_dim: {width} is odd, .* Choose an even width"):
            check_values(with_heads_of(kind, width), str)
    for width in (1, 6, 8):
        check_values(with_heads_of(kind, width), str)


def test_heads_that_are_turned_in_part_may_be_odd():
    assert tiny_config("glm").rope_parameters["partial_rotary_factor"] == 0.5
    check_values(with_heads_of("glm", 7), str)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    folders = {kind: tiny.make_model_folder(made / kind, kind) for kind in ("bert", "llama")}
    for kind in ("gpt2", "qwen2"):
        tiny_model(kind, "causal-lm").save_pretrained(made / kind)
    return {**folders, "gpt2": made / "gpt2", "qwen2": made / "qwen2"}


def looked_at(folder, task, **extra):
    """What a run does before it reads weights."""
    cfg = ModelConfig(pretrained_model_name_or_path=str(folder), extra=extra)
    labels = {"num_labels": 2} if "classification" in task else {}
    config = load_hf_config(cfg, task_named(task).head, **labels)
    require_shapes(cfg, skeleton_of(cfg, config, task_named(task).head), task_named(task).head)


WRONG = [
    ("bert", {"hidden_size": 33}, "hidden_size: 33"),
    ("llama", {"hidden_size": 33}, "hidden_size: 33|hidden size"),
    ("gpt2", {"n_embd": 33}, "n_embd: 33"),
    ("bert", {"hidden_dropout_prob": 2}, r"hidden_dropout_prob: 2.* from 0 to below 1"),
    ("llama", {"attention_dropout": 2.0}, r"attention_dropout: 2.0.* from 0 to below 1"),
    ("gpt2", {"resid_pdrop": -0.1}, r"resid_pdrop: -0.1"),
    ("bert", {"num_attention_heads": 5}, "num_attention_heads: 5"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads: 3"),
    ("llama", {"head_dim": 7}, "head_dim"),
    ("bert", {"num_hidden_layers": 0}, "num_hidden_layers: 0 should be a whole number from 1 to 10,000"),
    ("llama", {"num_hidden_layers": 10**7}, "num_hidden_layers: 10000000 should be"),
    ("bert", {"hidden_size": -32}, "hidden_size: -32"),
    ("bert", {"hidden_size": "wide"}, "hidden_size"),
    ("llama", {"num_attention_heads": 4.5}, "num_attention_heads"),
    ("llama", {"num_attention_heads": None}, "num_attention_heads"),
    ("bert", {"layer_norm_eps": 7.0}, "layer_norm_eps: 7.0 should be a small number"),
    ("bert", {"layer_norm_eps": float("nan")}, "layer_norm_eps"),
    ("bert", {"num_labels": 10**11}, "num_labels: 100000000000 should be a whole number from 1 to 10,000,000"),
    ("bert", {"hidden_act": "no_such"}, "no_such"),
    ("llama", {"rope_parameters": "wide"}, "rope_parameters"),
    ("llama", {"rope_parameters": {"rope_type": "no_such"}}, "no_such"),
    ("bert", {"pad_token_id": 10**6}, "pad_token_id"),
    ("bert", {"vocab_size": 9}, "vocab_size: 9"),
    ("llama", {"vocab_size": 99}, "vocab_size: 99"),
    ("llama", {"intermediate_size": 48}, "intermediate_size: 48"),
    ("qwen2", {"layer_types": ["no_such"] * 2}, "layer_types|no_such"),
    ("llama", {"attention_dropout": None}, "attention_dropout: None"),
    ("llama", {"hidden_size": -1}, "hidden_size: -1"),
    ("llama", {"num_hidden_layers": 10**30}, "num_hidden_layers"),
    ("bert", {"dtype": {}}, "dtype"),
    ("bert", {"to_dict": 3}, "to_dict"),
    ("bert", {"id2label": "x"}, "id2label"),
    ("bert", {"id2label": {"a": "b"}}, "id2label"),
    ("bert", {"architectures": 3}, "architectures"),
    ("bert", {"model_type": 3}, "model_type"),
    ("bert", {"model_type": ["bert"]}, "model_type"),
    ("bert", {"auto_map": 3}, "auto_map"),
    ("bert", {"attn_implementation": 3}, "attn_implementation"),
    ("bert", {"quantization_config": 3}, "quantization_config"),
]


@pytest.mark.parametrize(("kind", "said", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_value_in_the_file_names_its_key(folders, tmp_path, kind, said, message):
    for path in folders[kind].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **said}))
    task = "text-classification" if kind == "bert" else "causal-lm"
    with pytest.raises(UserError, match=message):
        looked_at(tmp_path, task)


IN_THE_RUN = [
    w
    for w in WRONG
    if next(iter(w[1])) not in ("model_type", "auto_map", "to_dict", "architectures", "dtype", "num_labels")
]


@pytest.mark.parametrize(("kind", "said", "message"), IN_THE_RUN, ids=lambda value: str(value)[:40])
def test_a_wrong_value_in_the_run_names_its_key(folders, kind, said, message):
    with pytest.raises(UserError, match=message):
        looked_at(folders[kind], "text-classification" if kind == "bert" else "causal-lm", **said)


def test_a_pretrained_model_without_its_head_fits(folders):
    looked_at(folders["bert"], "text-classification")
    looked_at(folders["bert"], "token-classification")
    looked_at(folders["llama"], "text-classification")


@pytest.mark.parametrize("setting", ["hidden_size=33", "hidden_dropout_prob=2", "vocab_size=9", "intermediate_size=70"])
@pytest.mark.parametrize("verb", [["plan"], ["finetune", "llm"]], ids=lambda words: words[0])
def test_on_the_command_line(folders, tmp_path, monkeypatch, capsys, verb, setting):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    tiny.write_jsonl(tmp_path / "train.jsonl", tiny.reviews(8))
    (tmp_path / "run.yaml").write_text(
        f"task: text-classification\nmodel: {folders['bert']}\ndataset: {{path: {tmp_path}/train.jsonl}}\n"
        f"checkpoint: {{checkpoint_dir: {tmp_path}/out}}\n"
    )
    monkeypatch.setattr(sys, "argv", ["automodel", *verb, "-c", str(tmp_path / "run.yaml"), f"model.{setting}"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2, said
    assert setting.partition("=")[0] in said.out + said.err
    assert not (tmp_path / "out").exists()
