"""Configs, tokenizers and weights in: what is loaded, what is said, and every way a name or checkpoint can be wrong."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM, BertForMaskedLM

from automodel.config.errors import UserError
from automodel.models import source
from automodel.models.config import ModelConfig
from automodel.models.forward import make_forward
from automodel.models.load import (
    count_parameters,
    load_hf_config,
    load_model,
    load_tokenizer,
    model_limits,
)
from automodel.models.match_tokenizer import match_tokenizer
from automodel.models.task_head import NEXT_TOKEN, TARGET
from automodel.tasks.registry import task_named

spec = importlib.util.spec_from_file_location("tiny_models", Path(__file__).parents[2] / "tiny_models.py")
tiny_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny_models)

TEXT = "text-classification"


def cfg(name, **fields) -> ModelConfig:
    return ModelConfig(pretrained_model_name_or_path=str(name), **fields)


@pytest.fixture
def bert_folder(tmp_path):
    """A masked-LM checkpoint, as pretrained encoders come."""
    AutoModelForMaskedLM.from_config(tiny_models.tiny_config("bert")).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(source, "hub_answers", lambda: False)
    return str(tmp_path / "cache")


def loaded(folder, task=TEXT, **fields):
    config = cfg(folder, **fields)
    return load_model(
        config,
        load_hf_config(config, task_named(task).head, num_labels=fields.get("num_labels")),
        task_named(task).head,
    )


# --- configs


def test_labels_and_extra_attributes_reach_the_config(bert_folder):
    config = load_hf_config(
        cfg(bert_folder, extra={"hidden_dropout_prob": 0.3}),
        task_named(TEXT).head,
        label_names=["bad", "fine", "good"],
        problem_type="single_label_classification",
    )
    assert config.num_labels == 3
    assert config.id2label == {0: "bad", 1: "fine", 2: "good"}
    assert config.label2id == {"bad": 0, "fine": 1, "good": 2}
    assert config.hidden_dropout_prob == 0.3
    assert config.problem_type == "single_label_classification"


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({"extra": {"hidden_dropout": 0.1}}, {}, "model.hidden_dropout: .*did you mean 'hidden_dropout_prob'"),
        ({"extra": {"zzz": 1}}, {}, "model.zzz: bert models have no attribute of this name$"),
        ({"extra": {"hidden_size": "wide"}}, {}, "hidden_size.*expected int"),
        ({"num_labels": 3}, {"label_names": ["a", "b"]}, "3 classes, but there are 2 class names"),
    ],
)
def test_a_wrong_attribute_is_refused(bert_folder, fields, arguments, message):
    with pytest.raises(UserError, match=message):
        load_hf_config(cfg(bert_folder, **fields), task_named(TEXT).head, **arguments)


@pytest.mark.parametrize(
    ("kind", "given", "angles"),
    [
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, {"rope_type": "linear", "factor": 4.0}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, {"rope_type": "yarn", "factor": 2.0}),
        ("llama", {"rope_theta": 5e5}, {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e5}),
        ("llama", {"rope_parameters": {"factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
        ("llama", {"rope_scaling": None}, {"rope_type": "default"}),
        (
            "gpt_neox",
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5},
        ),
    ],
)
def test_angles_keep_what_is_not_given(tmp_path, kind, given, angles):
    """transformers replaces all of them, and ended in a TypeError for want of a base."""
    own = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e3}
    settings = {} if kind == "gpt_neox" else {"rope_parameters": own}
    tiny_models.tiny_config(kind, **settings).save_pretrained(tmp_path)
    config = load_hf_config(cfg(tmp_path, extra=given), NEXT_TOKEN)
    assert config.rope_parameters == {"rope_theta": 1e4 if kind == "gpt_neox" else 1e3, **angles}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rope_scaling": 4}, "model.rope_scaling is 4, but must be a section"),
        ({"rope_scaling": {"type": "lineer", "factor": 4.0}}, "no rope_type 'lineer'; there are default, dynamic, "),
        ({"rope_parameters": {"rope_type": "yarn"}}, "model.rope_parameters: rope_type yarn needs a factor"),
    ],
)
def test_angles_that_there_are_not(tmp_path, given, message):
    tiny_models.tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message):
        load_hf_config(cfg(tmp_path, extra=given), NEXT_TOKEN)


def test_a_missing_folder_is_named_with_the_place_it_was_looked_for():
    with pytest.raises(UserError, match=r"there is no folder './nowhere' \(looked from"):
        load_hf_config(cfg("./nowhere"), task_named(TEXT).head)


@pytest.mark.parametrize("name", ["org/llama@main", "Llama 3.2 1B", "org/llama:latest"])
def test_a_name_that_nobody_can_have_is_refused_in_words(name):
    """It was huggingface_hub's traceback."""
    with pytest.raises(UserError, match=r"is no folder here .* A branch, tag or commit goes into model\.revision"):
        load_hf_config(cfg(name), task_named(TEXT).head)


def test_a_folder_without_a_config_says_what_it_holds(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UserError, match=r"holds no config.json.*it holds: notes.txt"):
        load_hf_config(cfg(tmp_path), task_named(TEXT).head)


def test_a_file_is_not_a_folder(bert_folder):
    with pytest.raises(UserError, match="is a file; give the folder"):
        load_hf_config(cfg(bert_folder / "model.safetensors"), task_named(TEXT).head)


def test_an_unreachable_hub_is_an_error_at_once(no_hub):
    with pytest.raises(
        UserError, match=r"'some/model' is neither a local folder nor in the cache.*hf download some/model"
    ):
        load_hf_config(cfg("some/model", cache_dir=no_hub), task_named(TEXT).head)


def test_local_files_only_is_named_as_the_reason(tmp_path):
    with pytest.raises(UserError, match="`local_files_only` is set"):
        load_hf_config(cfg("some/model", cache_dir=str(tmp_path), local_files_only=True), task_named(TEXT).head)


def test_a_cached_model_loads_without_the_hub(no_hub, bert_folder, monkeypatch):
    """And without asking for it, as transformers does for an adapter's config where PEFT is: half a minute."""
    asked = []

    def no_connection(url, **_):
        asked.append(url)
        raise ConnectionError(url)

    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", no_connection)
    snapshot = Path(no_hub) / "models--some--model" / "snapshots" / "0123456789012345678901234567890123456789"
    shutil.copytree(bert_folder, snapshot)
    refs = Path(no_hub) / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    config = cfg("some/model", cache_dir=no_hub)
    model = load_model(config, load_hf_config(config, task_named(TEXT).head, num_labels=2), task_named(TEXT).head)
    assert model.config.hidden_size == 32
    assert asked == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{broken", "could not be read.*not a valid JSON"),
        ('{"model_type": "zork"}', "not a model transformers knows.*zork"),
        ('{"hidden_size": 3}', "not a model transformers knows.*model_type"),
    ],
)
def test_a_config_that_is_no_config(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        load_hf_config(cfg(tmp_path), task_named(TEXT).head)


# --- weights


def test_a_new_head_is_said_and_depends_only_on_the_seed(bert_folder, caplog):
    config = cfg(bert_folder)
    hf_config = load_hf_config(config, task_named(TEXT).head, num_labels=3)
    with caplog.at_level(logging.INFO):
        first = load_model(config, hf_config, task_named(TEXT).head, seed=1)
    assert "newly initialised: bert.pooler" in caplog.text
    assert "classifier.weight" in caplog.text
    torch.rand(7)  # other work between two loads
    again, other = (load_model(config, hf_config, task_named(TEXT).head, seed=seed) for seed in (1, 2))
    assert torch.equal(first.classifier.weight, again.classifier.weight)
    assert not torch.equal(first.classifier.weight, other.classifier.weight)
    pretrained = BertForMaskedLM.from_pretrained(bert_folder)
    assert torch.equal(
        first.bert.encoder.layer[0].output.dense.weight, pretrained.bert.encoder.layer[0].output.dense.weight
    )


def test_two_models_of_one_config_do_not_share_it(bert_folder):
    config = cfg(bert_folder)
    hf_config = load_hf_config(config, task_named(TEXT).head, num_labels=2)
    first = load_model(config, hf_config, task_named(TEXT).head)
    make_forward(first, task_named(TEXT).head, "packed")
    assert load_model(config, hf_config, task_named(TEXT).head).config._attn_implementation == "sdpa"
    assert hf_config._attn_implementation != first.config._attn_implementation


def test_the_random_state_of_the_process_is_left_alone(bert_folder):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    loaded(bert_folder)
    assert torch.equal(torch.rand(3), expected)


def test_a_head_with_other_classes_is_replaced_and_said(tmp_path, caplog):
    _, model = tiny_models.tiny("bert", TEXT, num_labels=5)
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        assert loaded(tmp_path, num_labels=3).classifier.out_features == 3
    assert "the checkpoint's head has other classes: classifier.bias, classifier.weight" in caplog.text


def test_missing_backbone_weights_are_an_error(tmp_path):
    tiny_models.tiny("bert", TEXT)[1].save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(UserError, match=r"lacks 16 weights that a BertForSequenceClassification needs.*layer\.2"):
        loaded(tmp_path)


def test_a_language_model_without_its_head_is_an_error(tmp_path):
    _, model = tiny_models.tiny("llama", "causal-lm")
    model.model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"lacks 1 weights that a LlamaForCausalLM needs: lm_head\.weight"):
        loaded(tmp_path, "causal-lm")


def test_sizes_that_do_not_fit_are_an_error(bert_folder):
    with pytest.raises(UserError, match=r"do not fit the config.*\(99, 32\) in the checkpoint, \(120, 32\) here"):
        loaded(bert_folder, extra={"vocab_size": 120})


def test_pickled_weights_are_not_opened(bert_folder):
    (bert_folder / "model.safetensors").unlink()
    (bert_folder / "pytorch_model.bin").write_bytes(b"os.system('boom')")
    with pytest.raises(UserError, match="only pickled weights.*not loaded.*save_pretrained"):
        loaded(bert_folder)


def test_a_folder_without_weights(bert_folder):
    (bert_folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="the weights of .* could not be read.*model.safetensors"):
        loaded(bert_folder)


def test_damaged_weights(bert_folder):
    (bert_folder / "model.safetensors").write_bytes(b"123")
    with pytest.raises(UserError, match="are damaged .*; download or save them again"):
        loaded(bert_folder)
    (bert_folder / "run" / "steps" / "step-00000004").mkdir(parents=True)
    with pytest.raises(UserError, match=rf"again: automodel finetune llm -c {bert_folder}/run/config.yaml --resume"):
        loaded(bert_folder)


def test_from_config_starts_from_seeded_random_weights(bert_folder, caplog):
    (bert_folder / "model.safetensors").unlink()
    target = "automodel.AutoModelForSequenceClassification.from_config"
    with caplog.at_level(logging.INFO):
        first, again = (loaded(bert_folder, target=target) for _ in range(2))
    assert "random weights" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters()))


def test_flash_attention_is_mapped_and_said(bert_folder, caplog):
    model = loaded(bert_folder, attn_implementation="flash_attention_2")
    assert model.config._attn_implementation == "sdpa"
    assert "flash_attention_2 is mapped to sdpa" in caplog.text


# --- tokenizers


def make_tokenizer(folder, vocabulary, **special):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def test_a_decoder_without_a_pad_token_gets_one_without_growing(tmp_path, caplog):
    folder = make_tokenizer(tmp_path, ["<unk>", "<eos>", "a", "b"], eos_token="<eos>", unk_token="<unk>")
    with caplog.at_level(logging.INFO):
        tokenizer = load_tokenizer(cfg("m", tokenizer=str(folder)))
    assert (tokenizer.pad_token, len(tokenizer)) == ("<eos>", 4)
    assert "has no pad token: '<eos>' is used" in caplog.text


def test_an_unused_pad_token_of_the_vocabulary_is_preferred(tmp_path):
    folder = make_tokenizer(tmp_path, ["<unk>", "<eos>", "a", "<pad>"], eos_token="<eos>", unk_token="<unk>")
    assert load_tokenizer(cfg("m", tokenizer=str(folder))).pad_token_id == 3


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    folder = make_tokenizer(tmp_path, ["<unk>", *map(str, range(200))], unk_token="<unk>", pad_token="<unk>")
    with pytest.raises(UserError, match="has 201 tokens, but the model's embedding only 99"):
        load_tokenizer(cfg("m", tokenizer=str(folder)), tiny_models.tiny_config("bert"))


@pytest.mark.parametrize(("kind", "tokens"), [("Qwen2Tokenizer", 22), ("LlamaTokenizer", 256), ("T5Tokenizer", 2)])
def test_a_tokenizer_of_listed_tokens_alone_is_refused(tmp_path, kind, tokens):
    """Without its vocabulary, transformers makes one of what tokenizer_config.json lists, which reads nothing of a
    text: a run learned chat templates around empty messages."""
    added = {str(i): {"content": f"<|{i}|>", "special": i % 2 == 0} for i in range(3, tokens)}
    about = {"tokenizer_class": kind, "eos_token": "</s>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    tiny_models.tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds no vocabulary"):
        load_tokenizer(cfg(tmp_path))


def test_a_folder_without_tokenizer_files_is_refused(bert_folder):
    with pytest.raises(UserError, match=r"model\.tokenizer.*tokenizer"):
        load_tokenizer(cfg(bert_folder))


def test_the_pad_token_is_written_into_a_decoder_but_not_over_an_encoders(tmp_path):
    folder = make_tokenizer(tmp_path, ["<unk>", "<eos>", "a"], eos_token="<eos>", unk_token="<unk>", pad_token="<eos>")
    tokenizer = load_tokenizer(cfg("m", tokenizer=str(folder)))
    _, decoder = tiny_models.tiny("llama", TEXT)
    match_tokenizer(decoder, tokenizer)
    assert decoder.config.pad_token_id == 1
    assert decoder.model.embed_tokens.padding_idx is None
    _, encoder = tiny_models.tiny("roberta", TEXT, pad_token_id=3)
    match_tokenizer(encoder, tokenizer)
    assert encoder.config.pad_token_id == 3


# --- limits and counts


def test_limits_count_the_positions_roberta_never_uses():
    roberta = model_limits(tiny_models.tiny_config("roberta", max_position_embeddings=514))
    assert (roberta.max_positions, roberta.type_vocab_size) == (512, 1)
    assert model_limits(tiny_models.tiny_config("bert")).type_vocab_size == 2
    assert model_limits(tiny_models.tiny_config("distilbert")).type_vocab_size == 0
    assert model_limits(tiny_models.tiny_config("gpt2"), NEXT_TOKEN).max_positions == 64
    assert model_limits(tiny_models.tiny_config("t5"), TARGET).max_positions is None


@pytest.mark.parametrize(("kind", "task"), [("bert", TEXT), ("gpt2", "causal-lm"), ("t5", "seq2seq")])
def test_parameters_are_counted_without_building_them(kind, task):
    config, model = tiny_models.tiny(kind, task)
    assert count_parameters(config, task_named(task).head) == sum(p.numel() for p in model.parameters())
