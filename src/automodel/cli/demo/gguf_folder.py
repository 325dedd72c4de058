"""A Llama model in one GGUF file, written out as an ordinary Hugging Face folder.

A GGUF file holds everything: quantised weights, sizes, vocabulary, merges and chat template. Two things differ from a
Hugging Face folder beyond the names. Weights come in blocks of a few bits with a scale, which `gguf` expands. And the
rows of the query and key projections are stored in the order that llama.cpp's rotary embedding wants (pairs side by
side, where transformers keeps the two halves of a head apart), so they are put back:

    stored[head, i, half] = ours[head, half, i]        i < head_dim / 2,  half in {0, 1}

The result is plain bf16 safetensors that say nothing about their origin in four bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from automodel.config.errors import UserError

# GGUF name, ours; `{}` is the layer.
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INNER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
CONTROL_TOKEN = 3  # GGUF's token type of <|im_start|> and the like
PRE_TOKENIZERS = {"smollm": True, "gpt-2": False}  # whether every digit is a token of its own


def write_hf_folder(gguf_file: Path, folder: Path) -> None:
    """Converts; `folder` must exist and gets config, weights and tokenizer."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(
            "reading GGUF files needs the package gguf. Run\n  pip install 'automodel-finetune[demo]'"
        ) from error
    reader = GGUFReader(gguf_file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    if facts.get("general.architecture") != "llama":
        raise UserError(f"{gguf_file} holds a {facts.get('general.architecture')} model; only llama can be converted.")
    tensors = _tensors(reader, facts)
    _write_config(facts, tied="lm_head.weight" not in tensors, folder=folder)
    _write_weights(tensors, folder)
    _write_tokenizer(facts, folder)


def our_name(gguf_name: str) -> str:
    """The transformers name of a GGUF tensor."""
    if gguf_name in OUTER:
        return OUTER[gguf_name]
    prefix, _, rest = gguf_name.partition(".")
    layer, _, part = rest.partition(".")
    if prefix != "blk" or part not in INNER:
        raise UserError(f"the GGUF file has a tensor '{gguf_name}' that a Llama model does not have.")
    return f"model.layers.{layer}.{INNER[part]}"


def _tensors(reader: Any, facts: dict[str, Any]) -> dict[str, Any]:
    import torch
    from gguf.quants import dequantize

    heads = facts["llama.attention.head_count"]
    heads_of = {"attn_q": heads, "attn_k": facts.get("llama.attention.head_count_kv", heads)}
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        projection = tensor.name.split(".")[-2]
        if projection in heads_of:
            rows, columns = values.shape
            pairs = values.reshape(heads_of[projection], rows // heads_of[projection] // 2, 2, columns)
            values = pairs.swapaxes(1, 2).reshape(rows, columns)
        tensors[our_name(tensor.name)] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    return tensors


def _write_config(facts: dict[str, Any], *, tied: bool, folder: Path) -> None:
    from transformers import GenerationConfig, LlamaConfig

    llama = {name.removeprefix("llama."): value for name, value in facts.items() if name.startswith("llama.")}
    heads = llama["attention.head_count"]
    ids: dict[str, Any] = {
        f"{name}_token_id": facts.get(f"tokenizer.ggml.{long}_token_id") for name, long in SPECIAL_IDS.items()
    }
    ids.pop("unk_token_id")
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(facts["tokenizer.ggml.tokens"]),
        hidden_size=llama["embedding_length"],
        intermediate_size=llama["feed_forward_length"],
        num_hidden_layers=llama["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=llama.get("attention.head_count_kv", heads),
        max_position_embeddings=llama["context_length"],
        # GGUF keeps it as a 32-bit number; the model's own file says 1e-05.
        rms_norm_eps=float(f"{llama['attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": llama.get("rope.freq_base", 10_000.0)},
        tie_word_embeddings=tied,
        dtype="bfloat16",
        **ids,
    ).save_pretrained(folder)
    GenerationConfig(**ids).save_pretrained(folder)


SPECIAL_IDS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def _write_weights(tensors: dict[str, Any], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    """Byte-level BPE from the file's own vocabulary and merges; its control tokens become special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    family, splitting = facts["tokenizer.ggml.model"], facts.get("tokenizer.ggml.pre", "gpt-2")
    if family != "gpt2" or splitting not in PRE_TOKENIZERS:
        raise UserError(f"the GGUF file's tokenizer ({family}, {splitting}) is not one that can be converted.")
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if PRE_TOKENIZERS[splitting]:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    named = {f"{name}_token": facts.get(f"tokenizer.ggml.{long}_token_id") for name, long in SPECIAL_IDS.items()}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=facts["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **{name: tokens[i] for name, i in named.items() if i is not None},
    )
    fast.chat_template = facts.get("tokenizer.chat_template")
    fast.save_pretrained(folder)
