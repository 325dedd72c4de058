"""A tiny random model for every class that transformers maps: `tiny_model("bert", "text-classification")`.

The config is the class's own default config with its sizes made small by their names (`SIZES`), in nested configs too.
What a name does not tell stands in `EXCEPTIONS`, by model type. A class that cannot be made small this way raises, and
the sweep reports it: a new family of transformers appears there by itself.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 128
TEXT_IDS = range(5, 90)
"""Ids of words; the ids below are special tokens, those above stand for images and sounds."""
WIDTH = 32
HEADS = 4
POSITIONS = 128

TASKS = {
    "causal-lm": ("AutoModelForCausalLM", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "text-classification": (
        "AutoModelForSequenceClassification",
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    ),
    "token-classification": (
        "AutoModelForTokenClassification",
        modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    ),
    "seq2seq": ("AutoModelForSeq2SeqLM", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
}

SIZES: dict[str, Any] = {
    # words
    "vocab_size": VOCAB, "src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB, "decoder_vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB, "entity_vocab_size": 16, "t2u_vocab_size": VOCAB, "audio_vocab_size": 16,
    "char_vocab_size": VOCAB, "unit_hifi_gan_vocab_size": VOCAB, "pronunciation_vocab_size": VOCAB,
    "shape_vocab_size": VOCAB,
    # widths
    "hidden_size": WIDTH, "d_model": WIDTH, "n_embd": WIDTH, "dim": WIDTH, "emb_dim": WIDTH, "embedding_dim": WIDTH,
    "embedding_size": WIDTH, "input_embedding_size": 24, "output_embedding_size": 24, "word_embed_proj_dim": WIDTH,
    "prediction_head_size": WIDTH, "pooler_hidden_size": WIDTH, "hidden_size_global": WIDTH, "lru_width": WIDTH,
    "hidden_size_per_layer_input": 8, "attention_hidden_size": WIDTH, "d_embed": WIDTH, "entity_emb_size": 16,
    "shape_embed_dim": 16, "pronunciation_embed_dim": 16, "lang_embed_dim": 16, "spkr_embed_dim": 16,
    "unit_embed_dim": 16, "cross_attention_hidden_size": WIDTH, "out_hidden_size": WIDTH, "output_dim": WIDTH,
    "projector_input_dim": WIDTH, "projector_output_dim": WIDTH, "vision_output_dim": WIDTH,
    "encoder_hidden_size": WIDTH, "backbone_hidden_size": WIDTH, "router_hidden_size": 16, "laurel_rank": 8,
    # feed-forward
    "intermediate_size": 48, "d_ff": 48, "dff": 48, "ffn_dim": 48, "hidden_dim": 48, "dim_ff": 48, "d_inner": 48,
    "n_inner": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "ffn_hidden_size": 48, "mlp_dim": 48,
    "feed_forward_size": 48, "intermediate_size_mlp": 48, "moe_intermediate_size": 24, "dense_intermediate_size": 48,
    "shared_expert_intermediate_size": 24, "shared_intermediate_size": 24, "expert_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 24, "speech_encoder_intermediate_size": 48, "t2u_encoder_ffn_dim": 48,
    "t2u_decoder_ffn_dim": 48,
    # layers
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "num_blocks": 2, "depth": 2, "num_layers_per_stack": 2,
    "speech_encoder_layers": 2, "t2u_encoder_layers": 2, "t2u_decoder_layers": 2, "num_global_layers": 1,
    "conf_num_hidden_layers": 2,
    # heads
    "num_attention_heads": HEADS, "n_head": HEADS, "n_heads": HEADS, "num_heads": HEADS, "attention_heads": HEADS,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "num_encoder_attention_heads": HEADS,
    "num_decoder_attention_heads": HEADS, "speech_encoder_attention_heads": HEADS, "num_self_attention_heads": HEADS,
    "t2u_encoder_attention_heads": HEADS, "t2u_decoder_attention_heads": HEADS, "num_cross_attention_heads": HEADS,
    "conf_num_attention_heads": HEADS, "num_query_groups": HEADS, "swa_num_attention_heads": HEADS,
    "num_key_value_heads": 2, "num_kv_heads": 2, "kv_n_heads": 2, "swa_num_key_value_heads": 2,
    "head_dim": 8, "d_head": 8, "d_kv": 8, "dim_head": 8, "attention_head_dim": 8, "kv_channels": 8,
    "global_head_dim": 8, "swa_head_dim": 8, "attention_head_size": 8, "rotary_dim": 4,
    "q_lora_rank": 16, "kv_lora_rank": 16, "o_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "qk_head_dim": 16, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 64,
    "query_pre_attn_scalar": 8,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_topk": 2, "moe_top_k": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "num_expert_group": 1, "n_shared_experts": 1, "moe_num_shared_experts": 1, "zero_expert_num": 1,
    "first_k_dense_replace": 1, "expert_capacity": 64, "num_dense_layers": 1, "moe_layer_start_index": 0,
    "moe_layer_end_index": 1,
    # states
    "state_size": 8, "ssm_state_size": 8, "mamba_d_state": 8, "time_step_rank": 4, "mamba_dt_rank": 4,
    "mamba_n_heads": HEADS, "mamba_num_heads": HEADS, "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_headdim": 16,
    "n_mamba_heads": 2, "n_groups": 1, "chunk_size": 8, "mamba_chunk_size": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": HEADS, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_heads": HEADS,
    "linear_head_dim": 8, "mamba_d_ssm": 64, "adapter_rank": 8, "short_conv_kernel_size": 3,
    # lengths
    "max_position_embeddings": POSITIONS, "n_positions": POSITIONS, "n_ctx": POSITIONS, "max_seq_len": POSITIONS,
    "max_source_positions": POSITIONS, "max_target_positions": POSITIONS, "seq_length": POSITIONS,
    "max_encoder_position_embeddings": POSITIONS, "max_decoder_position_embeddings": POSITIONS,
    "max_2d_position_embeddings": POSITIONS, "context_length": POSITIONS, "model_max_length": POSITIONS,
    "sliding_window": 8, "sliding_window_size": 8, "attention_window_size": 8, "attention_chunk_size": 64,
    "local_attention": 8, "window_size": 8, "t2u_max_position_embeddings": POSITIONS,
    # pictures and sounds: present, never fed
    "image_size": 16, "patch_size": 8, "num_mel_bins": 16, "crop_size": 16, "num_position_embeddings": 16,
    "codebook_size": 16, "codebook_dim": 8, "input_feat_size": 16, "num_filters": 4, "input_size": 16,
    "num_latents": 8, "d_latents": 16, "mm_tokens_per_image": 4, "base_channels": WIDTH,
}  # fmt: skip
"""Small values by the name of a config's attribute; only numbers that the default config has are replaced."""

DROPOUT = ("dropout", "pdrop", "drop_rate", "drop_path_rate", "layerdrop", "router_jitter_noise")

_MIXED = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_BERT = {"model_type": "bert", "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 1,
         "num_attention_heads": HEADS, "intermediate_size": 48, "max_position_embeddings": POSITIONS,
         "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip

_INDEXED = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
            "indexer_compress_ratio": 4, "ngram_vocab_size_base": 64, "ple_embed_dim": 16}  # fmt: skip

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [2, 3],
        "patcher_config": {"num_hidden_layers": 1}, "cross_attn_k": 1,
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}, "ffn_config": {"moe_top_k": 2}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24,
        "norm_topk_prob": True, "sliding_window": None,
    },
    "encoder-decoder": {
        "encoder": _BERT, "decoder": {**_BERT, "is_decoder": True, "add_cross_attention": True},
        "decoder_start_token_id": 1, "pad_token_id": 0,
    },
    "esm": {"vocab_size": VOCAB, "mask_token_id": 3, "pad_token_id": 0},
    "falcon_h1": {"mamba_d_head": 16},
    "funnel": {"block_sizes": [1, 1], "block_repeats": [1, 1], "num_decoder_layers": 1},
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [48] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "granitemoehybrid": {**_MIXED, "layers_block_type": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {
        "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "use_mamba_kernels": False,
    },
    "layoutlmv3": {"coordinate_size": 5, "shape_size": 6, "input_size": 16},
    "led": {"attention_window": [8, 8]},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48},
    "longt5": {"decoder_start_token_id": 0, "local_radius": 7, "global_block_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "mistral4": {
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "original_max_position_embeddings": POSITIONS,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {
        "is_decoder": True, "axial_pos_embds_dim": [8, 24], "axial_pos_shape": [8, 16],
        "attn_layers": ["local", "local"], "local_attn_chunk_length": 8,
    },
    "switch_transformers": {
        "decoder_start_token_id": 0, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
    },
    "t5": {"decoder_start_token_id": 0},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "num_heads": 2, "chunk_size": 1},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "mamba_dt_rank": 4,
        "attention_head_dim": 16, "attention_hidden_size": 64,
    },
    "zamba2": {
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "hybrid_layer_ids": [1, 2], "n_mamba_heads": 4, "mamba_headdim": 16, "attention_head_dim": 16,
        "attention_hidden_size": 64,
    },
}  # fmt: skip
"""What a config needs beside `SIZES`, by model type; a nested dict for a nested config."""


def mapped() -> list[tuple[str, str]]:
    """Every (model type, task) that transformers maps a class to, sorted."""
    return sorted((kind, task) for task, (_, names) in TASKS.items() for kind in names)


PARTS = {
    "encoder-decoder": {
        "encoder": {"model_type": "bert"},
        "decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    },
    "musicgen": {
        "text_encoder": {"model_type": "t5"},
        "audio_encoder": {"model_type": "encodec"},
        "decoder": {"model_type": "musicgen_decoder"},
    },
    "musicgen_melody": {
        "text_encoder": {"model_type": "t5"},
        "audio_encoder": {"model_type": "encodec"},
        "decoder": {"model_type": "musicgen_melody_decoder"},
    },
}


def default_config(kind: str) -> PreTrainedConfig:
    """The default config of a model type. Where transformers 5.17 has none, its parts are those of later versions."""
    wanted = CONFIG_MAPPING[kind]
    if kind not in PARTS or not getattr(wanted, "has_no_defaults_at_init", False):
        return wanted()
    return wanted(**copy.deepcopy(PARTS[kind]))


def tiny_config(kind: str, **overrides: Any) -> PreTrainedConfig:
    """The default config of a model type with small sizes; `overrides` win."""
    default = default_config(kind)
    small = _small(default)
    _merge(small, EXCEPTIONS.get(kind, {}))
    _merge(small, overrides)
    return type(default)(**small)


def tiny_model(kind: str, task: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A randomly initialised model of the class that transformers maps, in eval mode; the same on every call."""
    import transformers

    config = tiny_config(kind, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, TASKS[task][0]).from_config(config)
        with torch.no_grad():  # zero biases and unit norms would hide a head that forgets them
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval()


def _small(config: PreTrainedConfig) -> dict[str, Any]:
    """Arguments that make a config of the same class small."""
    small: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            small[name] = {**_small(value), "model_type": value.model_type}
        elif any(part in name for part in DROPOUT) and isinstance(value, int | float) and not isinstance(value, bool):
            small[name] = type(value)(0)
        elif name == "classifier_dropout" and value is None:  # which the model may read as 0.1
            small[name] = 0.0
        elif name in SIZES and isinstance(value, int | float) and not isinstance(value, bool) and value:
            small[name] = SIZES[name] if value > SIZES[name] else value
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= VOCAB:
            small[name] = _special_id(name)
    _equal_key_heads(config, small)
    _layer_lists(config, small)
    takes_it = type(config).__name__ != "DbrxFFNConfig"  # which refuses names that it does not know in 5.17
    if takes_it and (getattr(config, "pad_token_id", None) is None or "pad_token_id" in small):
        small["pad_token_id"] = 0
    return small


def _special_id(name: str) -> int:
    """An id inside the small vocabulary for a special token: three of text, the others above the words."""
    text = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "mask_token_id": 3}
    return text.get(name, 100 + sum(map(ord, name)) % 28)


def _equal_key_heads(config: PreTrainedConfig, small: dict[str, Any]) -> None:
    """Multi-head attention stays multi-head, and one key head stays one."""
    heads = getattr(config, "num_attention_heads", None)
    keys = vars(config).get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(keys, int):
        small["num_key_value_heads"] = HEADS if heads == keys else min(keys, 2)


def _layer_lists(config: PreTrainedConfig, small: dict[str, Any]) -> None:
    """Lists with an entry a layer: one layer of each kind, at least two."""
    own = vars(config)
    depth = next((n for n in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(own.get(n), int)), None)
    if depth is None:
        return
    full = own[depth]
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == full and len(value) > 1
    }
    rows = list(zip(*lists.values())) if lists else []
    chosen = sorted({repr(row): i for i, row in reversed(list(enumerate(rows)))}.values())[:4] or [0]
    while len(chosen) < 2:
        chosen.append(full - 1)
    small[depth] = len(chosen)
    for name, value in lists.items():
        small[name] = [copy.deepcopy(value[i]) for i in chosen]


def _merge(into: dict[str, Any], extra: dict[str, Any]) -> None:
    for name, value in extra.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value
