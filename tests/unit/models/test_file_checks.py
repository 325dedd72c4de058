"""Files of a model are data: nothing in them chooses code, kernels, pickled weights or other files without trust."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny_runs as tiny
from architectures.tiny import tiny_model
from automodel.config.errors import UserError
from automodel.engine.prepare import prepare_run
from automodel.models import file_checks, same_base
from automodel.models.config import ModelConfig
from automodel.models.load import load_hf_config, load_model, load_tokenizer, read_hf_config
from automodel.models.source import Source
from automodel.models.streamed import open_weights
from automodel.plan.check import load_run_config
from automodel.tasks.registry import task_named
from hf_cache import HfCache

LM = "causal-lm"


@pytest.fixture
def folder(tmp_path):
    tiny.make_model_folder(tmp_path / "model", "llama")
    return tmp_path / "model"


def cfg(folder, **fields):
    return ModelConfig(pretrained_model_name_or_path=str(folder), **fields)


def write(folder, name, **keys):
    path = folder / name
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, **keys}))


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def weights_in_a_pickle(folder, index):
    """Moves the weights into pytorch_model.bin, which the index names."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "pytorch_model.bin")}))


@pytest.mark.parametrize("trust", [False, True])
def test_an_index_that_names_a_pickle(folder, monkeypatch, trust):
    weights_in_a_pickle(folder, "model.safetensors.index.json")
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("torch.load was called"))
    config = read_hf_config(cfg(folder))
    for load in (
        load_hf_config,
        lambda c, t: load_model(c, config, task_named(t).head),
        lambda c, t: open_weights(c, config, task_named(t).head),
    ):
        with pytest.raises(UserError, match="names pytorch_model.bin: only safetensors of the same folder are read"):
            load(cfg(folder, trust_remote_code=trust), LM)


@pytest.mark.parametrize(
    "name", ["../else.safetensors", "/etc/x.safetensors", "sub/x.safetensors", 3, None, "", "a.bin"]
)
def test_an_index_that_names_other_places(folder, name):
    (folder / "model.safetensors").rename(folder.parent / "else.safetensors")
    write(folder, "model.safetensors.index.json", weight_map={"lm_head.weight": name})
    with pytest.raises(UserError, match="safetensors"):
        load_hf_config(cfg(folder), task_named(LM).head)


@pytest.mark.parametrize("value", ["adapter_model.bin", "other.safetensors", "../x.safetensors"])
def test_another_file_of_weights(folder, value):
    write(folder, "config.json", transformers_weights=value)
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Payload(folder / "ran")))
    for trust in (False, True):
        with pytest.raises(UserError, match="transformers_weights: "):
            read_hf_config(cfg(folder, trust_remote_code=trust))
    assert not (folder / "ran").exists()


KEYS = {
    "attn_implementation": "publisher/kernel",
    "_attn_implementation": "publisher/kernel@main:forward",
    "experts_implementation": "sonicmoe",
    "configuration_files": ["config.5.0.0.json"],
    "use_pretrained_backbone": True,
    "backbone": "hf-hub:publisher/model",
    "model_args": {"checkpoint_path": "x.bin"},
    "tokenizer_class": "AutoModelForCausalLM",
    "torch_dtype": "load",
}


@pytest.mark.parametrize("depth", ["", "text_config", "list"])
@pytest.mark.parametrize("key", KEYS)
def test_keys_that_choose_code_or_files(folder, key, depth):
    said = {key: KEYS[key]}
    write(
        folder, "config.json", **{"": said, "text_config": {"text_config": {"a": said}}, "list": {"l": [said]}}[depth]
    )
    with pytest.raises(UserError, match=key):
        read_hf_config(cfg(folder))


@pytest.mark.parametrize("key", ["attn_implementation", "experts_implementation"])
def test_a_kernel_for_a_part_of_the_model(folder, key):
    write(folder, "config.json", **{key: {"": "eager", "vision_config": "publisher/kernel"}})
    with pytest.raises(UserError, match=rf"{key}: publisher/kernel; a kernel is code.*eager"):
        read_hf_config(cfg(folder))


def test_a_kernel_asked_for_by_the_run_needs_trust(folder):
    with pytest.raises(UserError, match=r"model\.attn_implementation: publisher/kernel; a kernel is code"):
        load_hf_config(cfg(folder, attn_implementation="publisher/kernel"), task_named(LM).head)
    load_hf_config(cfg(folder, attn_implementation="publisher/kernel", trust_remote_code=True), task_named(LM).head)


@pytest.mark.parametrize("key", ["subfolder", "gguf_file", "proxies", "code_revision", "_configuration_file", "token"])
def test_keywords_of_loading_are_no_attributes(folder, key):
    with pytest.raises(UserError, match=rf"model\.{key}: is a keyword of transformers' loading"):
        load_hf_config(cfg(folder, extra={key: ".."}), task_named(LM).head)


def test_flash_attention_that_is_not_here_is_not_fetched(folder):
    write(folder, "config.json", attn_implementation="flash_attention_2")
    config = load_hf_config(cfg(folder), task_named(LM).head)
    assert config._attn_implementation is None
    assert load_model(cfg(folder), config, task_named(LM).head).config._attn_implementation == "sdpa"


def test_words_of_quantisers_and_special_tokens_are_no_harm(folder):
    file_checks.check_keys({"quantization_config": {"dtype": "fp8"}}, str)
    with pytest.raises(UserError, match="which is no dtype"):
        file_checks.check_keys({"text_config": {"dtype": "fp8"}}, str)
    write(folder, "tokenizer_config.json", init_kwargs={"eos_token": "</s>"})
    file_checks.check_tokenizer(Source(str(folder)))


def test_what_ordinary_folders_say_is_no_harm(folder):
    write(
        folder, "config.json", _name_or_path="/home/a/b", attn_implementation="sdpa", torch_dtype="bfloat16",
        tokenizer_class="PreTrainedTokenizerFast", architectures=["LlamaForCausalLM"], transformers_weights=None,
    )  # fmt: skip
    write(folder, "tokenizer_config.json", tokenizer_file="/root/.cache/x/tokenizer.json", vocab_file=None)
    assert load_hf_config(cfg(folder), task_named(LM).head).model_type == "llama"
    assert load_tokenizer(cfg(folder)).vocab_size


TOKENIZER = {
    "tokenizer_class": "AutoModelForCausalLM",
    "fast_tokenizer_files": ["../tokenizer.1.0.json"],
    "mecab_kwargs": {"mecab_option": "-r /tmp/rc"},
    "sp_model_kwargs": {"model_file": "/etc/passwd"},
}


@pytest.mark.parametrize("key", TOKENIZER)
def test_a_tokenizer_that_chooses_code_or_files(folder, key):
    write(folder, "tokenizer_config.json", **{key: TOKENIZER[key]})
    with pytest.raises(UserError, match=key):
        load_tokenizer(cfg(folder))


@pytest.mark.parametrize("name", ["BertTokenizer", "BertTokenizerFast", "T5TokenizerFast", "NoSuchTokenizer"])
def test_names_of_tokenizers(folder, name):
    write(folder, "tokenizer_config.json", tokenizer_class=name)
    file_checks.check_tokenizer(Source(str(folder)))


def test_an_adapter_beside_the_weights_is_not_attached(folder):
    write(folder, "adapter_config.json", peft_type="LORA", base_model_name_or_path="publisher/base")
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Payload(folder / "ran")))
    with pytest.raises(UserError, match=r"holds an adapter \(adapter_config.json\)"):
        load_model(cfg(folder), read_hf_config(cfg(folder)), task_named(LM).head)
    assert not (folder / "ran").exists()


def test_an_adapter_is_no_model_to_train(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    write(folder, "adapter_config.json", peft_type="LORA", base_model_name_or_path="publisher/base")
    (tmp_path / "run.yaml").write_text(f"task: causal-lm\nmodel: {folder}\ndataset: {{path: {tmp_path}/none.jsonl}}\n")
    with pytest.raises(UserError, match=r"holds an adapter. Name its base there \(publisher/base\)"):
        prepare_run(load_run_config([tmp_path / "run.yaml"]))


def test_code_beside_the_weights_does_not_run(folder):
    """generate.py, modules of `auto_map` in every file, and templates that reach for Python."""
    code = f"import os\nos.mkdir({str(folder / 'ran')!r})\n"
    (folder / "custom_generate").mkdir()
    for name in ("custom_generate/generate.py", "code.py"):
        (folder / name).write_text(code)
    write(folder, "config.json", auto_map={"AutoModelForCausalLM": "code.Model"})
    write(folder, "generation_config.json", custom_generate="publisher/generate", trust_remote_code=True)
    write(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["code.Slow", "code.Fast"]})
    model = load_model(cfg(folder), load_hf_config(cfg(folder), task_named(LM).head), task_named(LM).head)
    tokenizer = load_tokenizer(cfg(folder))
    tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(Exception, match="unsafe"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    model.generate(torch.tensor([[5, 6]]), max_new_tokens=1)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "inside each other more than 60 times"),
        ("[1]", "should be a JSON object"),
        ('{"a": ', "not a valid JSON"),
    ],
    ids=["deep", "list", "cut"],
)
def test_files_that_are_no_objects(folder, name, content, message):
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(cfg(folder)) if name.startswith("tok") else read_hf_config(cfg(folder))


def test_a_file_of_any_size_is_not_read(folder, monkeypatch):
    monkeypatch.setattr(file_checks, "LARGEST", 100)
    with pytest.raises(UserError, match="config.json of .* has more than"):
        read_hf_config(cfg(folder))


def test_names_of_the_hub_are_looked_at_too(folder, tmp_path):
    write(folder, "config.json", attn_implementation="publisher/kernel")
    cache = HfCache(tmp_path / "hf")
    cache.add_model("publisher/model", folder)
    code = (
        "from automodel.models.config import ModelConfig\nfrom automodel.models.load import read_hf_config\n"
        "read_hf_config(ModelConfig(pretrained_model_name_or_path='publisher/model'))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=cache.env(), capture_output=True, text=True)
    assert (
        "UserError: model: config.json of 'publisher/model' says attn_implementation: publisher/kernel" in done.stderr
    )


@pytest.mark.parametrize("length", [2**62, 2**40, 10**9])
def test_a_header_cannot_ask_for_memory(folder, length):
    (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    assert same_base.sample_of(cfg(folder)) is None


LIES = (
    '{"a": {"data_offsets": [0, 99999999999999]}}', '{"a": {"data_offsets": ["x", null]}}', "[1]", "[" * 99999,
)  # fmt: skip


@pytest.mark.parametrize("header", LIES, ids=["outside", "words", "list", "deep"])
def test_a_header_that_lies(folder, header):
    text = header.encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert same_base.sample_of(cfg(folder)) is None


def test_a_cached_model_of_a_vision_tower_is_looked_at_inside(folder):
    model = tiny_model("llama", LM)
    model.save_pretrained(folder)
    write(folder, "config.json", vision_config={"model_type": "timm_wrapper", "architecture": "local-dir:/tmp/x"})
    with pytest.raises(UserError, match="vision_config.architecture: local-dir:/tmp/x, which names a place of files"):
        read_hf_config(cfg(folder))
