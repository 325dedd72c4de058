"""Tiny random Hugging Face models for tests: every family with two layers of width 32, seeded, dropout off.

    config, model = tiny("bert", "text-classification", num_labels=3)

Overrides go to the config, so a test can turn dropout on or shorten a sliding window. Import it by path:
`tests/` is not a package, and pytest runs with `--import-mode=importlib`.
"""

from __future__ import annotations

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from automodel.models.auto import class_for
from automodel.tasks.registry import task_named

VOCAB = 99

_ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}
_ROBERTA = {**_ENCODER, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1}
_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "classifier_dropout": 0.0,  # transformers' token classifiers default to 0.1
}
_PLAIN_HEADS = {name: value for name, value in _DECODER.items() if name != "head_dim"}
_WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_SEQ2SEQ_BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}

SETTINGS: dict[str, dict] = {
    "bert": _ENCODER,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "electra": {**_ENCODER, "embedding_size": 24},
    "albert": {**_ENCODER, "embedding_size": 24, "classifier_dropout_prob": 0.0},
    "mpnet": {**_ENCODER, "pad_token_id": 1},
    "deberta-v2": {
        **_ENCODER,
        "relative_attention": True,
        "position_buckets": 8,
        "pos_att_type": ["p2c", "c2p"],
        "pooler_dropout": 0.0,
        "pooler_hidden_size": 32,
    },
    "distilbert": {
        "vocab_size": VOCAB,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 37,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
        "pad_token_id": 0,
    },
    "modernbert": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 37,
        "max_position_embeddings": 64,
        "local_attention": 8,  # shorter than the documents of the tests
        "global_attn_every_n_layers": 3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "gpt2": {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "classifier_dropout": 0.0,
    },
    "gpt_neox": {
        **{name: value for name, value in _DECODER.items() if name not in ("head_dim", "num_key_value_heads")},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "falcon": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "llama": _DECODER,
    "mistral": {**_DECODER, "sliding_window": None},
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "gemma": _DECODER,
    "gemma2": {
        **_DECODER,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "attn_logit_softcapping": 0.02,  # low, or the small scores of a tiny model would never reach it
        "final_logit_softcapping": 0.5,
        "query_pre_attn_scalar": 8,
        "attn_implementation": "eager",  # transformers 5.17 would take SDPA, which leaves the cap out
    },
    "gemma3_text": {**_DECODER, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "arcee": _DECODER,
    "cohere": _PLAIN_HEADS,
    "cohere2": {**_DECODER, **_WINDOWS},
    "ernie4_5": _DECODER,
    "exaone4": {**_PLAIN_HEADS, **_WINDOWS},
    "glm": _DECODER,
    "helium": _DECODER,
    "ministral": {**_DECODER, **_WINDOWS},
    "olmo": _PLAIN_HEADS,
    "olmo3": {**_PLAIN_HEADS, **_WINDOWS},
    "phi": {**_PLAIN_HEADS, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "seed_oss": {**_DECODER, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "glm4": _DECODER,
    "granite": _DECODER,
    "olmo2": _DECODER,
    "phi3": {**_DECODER, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "smollm3": _DECODER,
    "starcoder2": {**_DECODER, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "t5": {
        "vocab_size": VOCAB,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 37,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    },
    "bart": _SEQ2SEQ_BART,
}


def tiny_config(model_type: str, **overrides) -> PreTrainedConfig:
    """A small config of the family; overrides win."""
    return AutoConfig.for_model(model_type, **{**SETTINGS[model_type], **overrides})


def tiny(model_type: str, task: str, seed: int = 0, **overrides) -> tuple[PreTrainedConfig, PreTrainedModel]:
    """(config, randomly initialised model in eval mode), the same on every call."""
    config = tiny_config(model_type, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = class_for(task_named(task).head).from_config(config)
        with torch.no_grad():  # zero biases and unit norms would hide a head that forgets them
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return config, model.eval()
