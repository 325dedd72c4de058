"""What packing needs to know about each model family, as a table.

A packed batch is one row of T tokens, so the head of a stock class (which pools `hidden[:, 0]`, or the last token of
each row) would read the wrong place. For each family the table says where the backbone is, which token of a document
is pooled, where positions start, and how the head looks once the pooled hidden states are gathered: the same modules
in the same order as the stock forward, dropout included. Causal language models need no head here: transformers' own
forward takes the positions to keep (`logits_to_keep`).

A family is listed only if `tests/parity/test_packed_*.py` holds its packed logits and gradients against stock
transformers, document by document. Everything else takes the padded path, and `packing_support` says why.

Legend: T tokens, R read positions, N hidden width, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from automodel.models.task_head import TaskHead

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Head = Callable[[Any, Tensor], Tensor]
"""(model, hidden_RN) -> logits_RC. The model is `Any`: each family has its own attributes."""


@dataclass(frozen=True)
class Family:
    """How one family is read when documents are packed."""

    backbone: str
    """Attribute of the model that holds the backbone."""
    pooling: Literal["first", "last"]
    """Token of a document that text classification reads."""
    classify: Head
    """Text classification: gathered hidden states to logits."""
    tag: Head
    """Token classification: gathered hidden states to logits."""
    decoder: bool = False
    """Causal attention, with a key/value cache to turn off."""
    positions_after_padding: bool = False
    """Positions start at `pad_token_id + 1` (RoBERTa), not at 0."""
    token_types: bool = False
    """Takes segment ids of text pairs."""
    embed_outside: bool = False
    """Pass embeddings rather than ids: GPT-2 inspects its ids for padding, which syncs with the host."""

    def position_offset(self, config: PreTrainedConfig) -> int:
        return config.pad_token_id + 1 if self.positions_after_padding else 0


@dataclass(frozen=True)
class PackingSupport:
    """Whether a model with a head can be packed, and why (not)."""

    packed: bool
    reason: str
    pooling: Literal["first", "last"] | None = None
    """Token the data room reads for text classification; none for the padded path."""


def _pooler_then_classifier(backbone: str) -> Head:
    def head(model: Any, hidden_RN: Tensor) -> Tensor:
        pooled = getattr(model, backbone).pooler(hidden_RN.unsqueeze(1))  # the pooler takes [:, 0]
        return model.classifier(model.dropout(pooled))

    return head


def _albert_classify(model: Any, hidden_RN: Tensor) -> Tensor:
    pooled = model.albert.pooler_activation(model.albert.pooler(hidden_RN))
    return model.classifier(model.dropout(pooled))


def _distilbert_classify(model: Any, hidden_RN: Tensor) -> Tensor:
    return model.classifier(model.dropout(nn.functional.relu(model.pre_classifier(hidden_RN))))


def _classification_head(model: Any, hidden_RN: Tensor) -> Tensor:
    return model.classifier(hidden_RN.unsqueeze(1))  # RoBERTa's and ELECTRA's head takes [:, 0]


def _modernbert_head(model: Any, hidden_RN: Tensor) -> Tensor:
    return model.classifier(model.drop(model.head(hidden_RN)))


def _score(model: Any, hidden_RN: Tensor) -> Tensor:
    return model.score(hidden_RN)


def _dropout_then_classifier(model: Any, hidden_RN: Tensor) -> Tensor:
    return model.classifier(model.dropout(hidden_RN))


def _dropout_then_score(model: Any, hidden_RN: Tensor) -> Tensor:
    return model.score(model.dropout(hidden_RN))


_BERT = Family("bert", "first", _pooler_then_classifier("bert"), _dropout_then_classifier, token_types=True)
_ROBERTA = Family(
    "roberta",
    "first",
    _classification_head,
    _dropout_then_classifier,
    token_types=True,
    positions_after_padding=True,
)
_DECODER = Family("model", "last", _score, _dropout_then_score, decoder=True)

FAMILIES: dict[str, Family] = {
    "bert": _BERT,
    "distilbert": Family("distilbert", "first", _distilbert_classify, _dropout_then_classifier),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "electra": Family("electra", "first", _classification_head, _dropout_then_classifier, token_types=True),
    "albert": Family("albert", "first", _albert_classify, _dropout_then_classifier, token_types=True),
    "modernbert": Family("model", "first", _modernbert_head, _modernbert_head),
    "gpt2": Family("transformer", "last", _score, _dropout_then_classifier, decoder=True, embed_outside=True),
    "gpt_neox": Family("gpt_neox", "last", _score, _dropout_then_classifier, decoder=True),
    "arcee": _DECODER,
    "cohere": _DECODER,
    "cohere2": _DECODER,
    "ernie4_5": _DECODER,
    "exaone4": _DECODER,
    "glm": _DECODER,
    "helium": _DECODER,
    "llama": _DECODER,
    "ministral": _DECODER,
    "mistral": _DECODER,
    "olmo": _DECODER,
    "olmo3": _DECODER,
    "phi": _DECODER,
    "seed_oss": _DECODER,
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "gemma": _DECODER,
    "gemma2": _DECODER,
    "gemma3_text": _DECODER,
    "glm4": _DECODER,
    "granite": _DECODER,
    "olmo2": _DECODER,
    "phi3": _DECODER,
    "smollm3": _DECODER,
    "starcoder2": _DECODER,
}

_WHY_PADDED = {
    "t5": "adds a relative position bias to attention",
    "mt5": "adds a relative position bias to attention",
    "umt5": "adds a relative position bias to attention",
    "mpnet": "adds a relative position bias to attention",
    "deberta": "has disentangled attention over relative positions",
    "deberta-v2": "has disentangled attention over relative positions",
    "xlnet": "has relative attention with a memory",
    "bloom": "adds ALiBi biases to attention",
    "falcon": "has attention code of its own, which takes no document boundaries",
    "mpt": "adds ALiBi biases to attention",
    "gpt_oss": "has attention sinks",
    "mamba": "carries a state from token to token",
    "mamba2": "carries a state from token to token",
}


def family_of(config: PreTrainedConfig) -> Family:
    """The table's row for a config; `packing_support` has been asked before."""
    return FAMILIES[config.model_type]


def packing_support(hf_config: PreTrainedConfig, head: TaskHead, longest: int | None = None) -> PackingSupport:
    """Decides from the config whether documents can share a row. `longest`: tokens of the longest document, where that
    is known; some models turn short documents in the same way whatever stands beside them, but not long ones."""
    kind = hf_config.model_type
    obstacle = _obstacle(hf_config, head, longest)
    if obstacle:
        return PackingSupport(False, f"{kind} {obstacle}")
    family = FAMILIES[kind]
    pooling = family.pooling if head.wants == "pooled" else None
    return PackingSupport(True, f"{kind} reads each document exactly as if it were alone", pooling)


def _obstacle(config: PreTrainedConfig, head: TaskHead, longest: int | None) -> str | None:
    """What stops packing, as the rest of a sentence that starts with the model type."""
    kind = config.model_type
    if head.encoder_decoder or getattr(config, "is_encoder_decoder", False):
        return _WHY_PADDED.get(kind, "is an encoder-decoder: source and target are two streams")
    if kind not in FAMILIES:
        return _WHY_PADDED.get(kind, "is not among the families whose packing is tested")
    if getattr(config, "auto_map", None):
        return "comes with its own code, whose packing is not tested"
    family = FAMILIES[kind]
    if head.next_token and not family.decoder:
        return "is a bidirectional encoder"
    if not family.decoder and getattr(config, "is_decoder", False):
        return "is configured as a decoder (`is_decoder`), which is not tested packed"
    if getattr(config, "add_cross_attention", False):
        return "has cross-attention (`add_cross_attention`)"
    if family.decoder and not getattr(config, "is_causal", True):
        return "has its causal mask turned off (`is_causal: false`)"
    if getattr(config, "use_bidirectional_attention", False):
        return "has its causal mask turned off (`use_bidirectional_attention`)"
    if kind != "gemma2" and getattr(config, "attn_logit_softcapping", None) is not None:
        return "caps its attention scores (`attn_logit_softcapping`)"
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        return f"has `position_embedding_type: {config.position_embedding_type}`"
    rope_type, first = _rope_depends_on_length(config)
    if rope_type and (longest is None or longest > first):
        above = f" above {first:,} tokens" if first else ""
        return f"has `rope_type: {rope_type}`, which rescales with the longest document of a batch{above}"
    return None


def _rope_depends_on_length(config: PreTrainedConfig) -> tuple[str | None, int]:
    """The rope type if its frequencies depend on the batch's longest sequence, and up to which length they do not."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for values in (parameters, *parameters.values()):  # one dict, or one for each layer type
        if isinstance(values, dict) and values.get("rope_type") in ("dynamic", "longrope"):
            limit = config.max_position_embeddings if values["rope_type"] == "dynamic" else 0
            return values["rope_type"], values.get("original_max_position_embeddings") or limit
    return None, 0


def pooled_hidden_states(
    config: PreTrainedConfig,
    hidden_TN: Tensor,
    input_ids_T: Tensor,
    position_ids_T: Tensor,
    cu_seqlens_D: Tensor,
    read_positions_R: Tensor,
) -> Tensor:
    """The vector that stock transformers pools for each document whose first (or last) token is a read position."""
    if getattr(config, "classifier_pooling", "cls") == "mean":
        return _document_means(hidden_TN, cu_seqlens_D).index_select(0, _document_of(read_positions_R, cu_seqlens_D))
    return hidden_TN.index_select(0, pooled_positions(config, input_ids_T, position_ids_T, read_positions_R))


def pooled_positions(
    config: PreTrainedConfig, input_ids_T: Tensor, position_ids_T: Tensor, read_positions_R: Tensor
) -> Tensor:
    """The token that stock transformers pools of each document whose first (or last) token is a read position."""
    if family_of(config).pooling == "first" or config.pad_token_id is None:
        return read_positions_R
    return _last_token_that_is_not_pad(input_ids_T, position_ids_T, read_positions_R, config.pad_token_id)


def _document_of(positions: Tensor, cu_seqlens_D: Tensor) -> Tensor:
    """Index of the document each position lies in."""
    return torch.searchsorted(cu_seqlens_D[1:].contiguous(), positions.to(cu_seqlens_D.dtype), right=True)


def _document_means(hidden_TN: Tensor, cu_seqlens_D: Tensor) -> Tensor:
    """(D, N) means over each document; empty slots give zeros."""
    tokens = torch.arange(hidden_TN.shape[0], device=hidden_TN.device)
    lengths_D = cu_seqlens_D.diff().clamp(min=1)
    sums = hidden_TN.new_zeros(lengths_D.shape[0], hidden_TN.shape[1])
    sums = sums.index_add(0, _document_of(tokens, cu_seqlens_D), hidden_TN)
    return sums / lengths_D.unsqueeze(1).to(hidden_TN.dtype)


def _last_token_that_is_not_pad(
    input_ids_T: Tensor, position_ids_T: Tensor, last_R: Tensor, pad_token_id: int
) -> Tensor:
    """Stock decoder classifiers pool the rightmost token that is not the pad token, or the first if all are. It matters
    where the pad token is a real token too (pad = end-of-text) and documents end with it."""
    index_T = torch.arange(input_ids_T.shape[0], device=input_ids_T.device)
    real_T = torch.where(input_ids_T == pad_token_id, torch.full_like(index_T, -1), index_T)
    last_real_T = real_T.cummax(0).values
    first_R = last_R - position_ids_T.index_select(0, last_R)
    return torch.maximum(last_real_T.index_select(0, last_R), first_R)
