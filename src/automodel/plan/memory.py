"""What a run needs of the memory, in bytes, before a weight is loaded.

    total = weights + gradients + optimizer states + activations of the largest micro-batch + logits

Weights, gradients and states follow from the number of parameters and their types. Activations are what autograd keeps
for the backward pass, counted layer by layer from the model's config; `tests/unit/plan/test_memory.py` holds the
formulas against the tensors that torch really saves. Elements for each token and layer, for width N, Q and K of all
query and key heads, I of the MLP (gated: 2 products in, else 1), in the form that is computed with:

    attention          Q + 2K  query, key, value;  Q  its output
    MLP                2I      plain: the product and its activation
                       4I      gated: both products, the activation, what is multiplied out of them
    norm, torch's      2N      what it read and what it gave
    RMSNorm, stock     3N      what it read (in fp32), what was normalised, what it gave
    fused blocks       norms 2N, gated MLP 2I (ModernBERT, and where it is kept, 3I): the rest is computed again;
                       of decoders' norms in front of products N, where they are made again (`kernels/made_again.py`)

Under autocast the stream between layers is fp32 and every product keeps a 16-bit copy of what it reads. A checkpointed
layer keeps what it read, or three layers do where the rest is moved to the host; one such layer at a time is computed
again. All parts are added up, although gradients grow
while activations go: the sum is what memory has to be there for at worst. What is not counted: the allocator's gaps,
libraries' workspaces, the CUDA context. `FITS` leaves room for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from automodel.adapters.config import Packing
from automodel.optim.kinds import Kind

GIB = 2**30
FITS = 0.9
"""Share of the memory that an estimate may fill."""

Mode = Literal["none", "selective", "full"]
MODES: tuple[Mode, ...] = ("none", "selective", "full")
"""Of gradient checkpointing, from the fastest to the smallest."""

GATES_KEPT_TO = 2048
"""Tokens of the largest micro-batch: of few it is little."""
NORMS_AGAIN_FROM = 4096
"""Tokens of the largest micro-batch: few take little memory, and feel every launch."""
LOGIT_EXTRA = 12  # bytes beside the logit itself, at the worst moment: its log-probability and two gradients, in fp32
LARGEST_BUFFER = 2**30  # of logits, where they are made chunk by chunk

WEIGHTS_KEPT_TO = 512  # keys of a document whose weights a CPU keeps in bf16 (`kernels/cpu_attention_bf16.py`)
INPUTS_HERE = 3  # layers whose inputs are on the GPU where the others' wait on the host (`models/recompute.py`)

FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text", "glm4")
NORMS_AFTER = ("olmo2",)
HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2")
JOINED_QKV = ("modernbert", "phi3", "gpt2", "gpt_neox", "falcon")
JOINED_UP = ("modernbert", "phi3", "glm4")
GELU_IN_STEPS = ("gelu_new", "gelu_fast")  # five tensors instead of two
DROPOUT = ("hidden_dropout_prob", "dropout", "resid_pdrop", "dropout_rate", "residual_dropout", "hidden_dropout")
SCORES_KEPT = ("t5", "mt5", "umt5", "deberta", "deberta-v2", "mpnet")  # attention with a bias, computed in steps


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide on activations."""

    layers: int
    width: int
    queries: int
    """Width of all query heads together."""
    keys: int
    """Width of all key heads; values have the same."""
    heads: int
    inner: int
    """Width of the MLP; of a mixture of experts, of all that a token goes through."""
    vocabulary: int
    tied: bool = False
    """Whether the word table is the head as well."""
    rms: bool = False
    gated: bool = False
    norms: int = 2
    """Of a layer."""
    norms_before: int = 2
    """Those among them in front of products."""
    head_norms: bool = False
    joined_qkv: bool = False
    joined_up: bool = False
    projected: bool = False
    """Whether a product makes the stream out of narrower embeddings (ELECTRA): autocast then leaves it in 16 bits."""
    gelu_in_steps: bool = False
    scores_kept: bool = False
    dropout: bool = False
    attention_dropout: bool = False
    capped: bool = False
    """Whether attention's scores saturate: on the CPU that is computed in steps."""


def _value(config: Any, name: str) -> Any:
    """A size of the config; where layers differ in it (Gemma 4's heads, Gemma 3n's MLPs), the largest."""
    if name in (getattr(config, "per_layer_attributes", None) or ()):
        value = [getattr(layer, name) for layer in config.per_layer_config]
    else:
        value = getattr(config, name, None)
    if isinstance(value, list | tuple):
        return max((size for size in value if size is not None), default=None)
    return value


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := _value(config, name)) is not None), None)


SIZES = {
    "width": ("hidden_size", "d_model", "n_embd", "dim"),
    "layers": ("num_hidden_layers", "encoder_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "encoder_attention_heads", "n_head", "n_heads", "num_heads"),
}
"""What a config calls the sizes without which there is no estimate."""


def shape_or_why(config: Any) -> tuple[ModelShape | None, str]:
    """The sizes in a transformers config, or nothing and why not: an estimate must not stop a run."""
    text = getattr(config, "text_config", None) or config
    try:
        missing = [size for size, names in SIZES.items() if not isinstance(_first(text, *names), int)]
        if missing:
            return None, f"the config of {config.model_type} does not say its {' and '.join(missing)} by a usual name"
        shape = shape_of(text)
    except Exception as error:  # configs are as many as families, and some have their sizes in forms of their own
        return None, f"the config of {config.model_type} has its sizes in another form ({type(error).__name__})"
    least = {"layers": 1, "width": 1, "queries": 1, "keys": 1, "heads": 1, "inner": 1, "vocabulary": 0}
    odd = [name for name, low in least.items() if not isinstance(size := getattr(shape, name), int) or size < low]
    return (None, f"{odd[0]} is no size in the config of {config.model_type}") if odd else (shape, "")


def shape_of(config: Any) -> ModelShape:
    """The sizes in a transformers config that has them all."""
    kind = config.model_type
    width, layers, heads = (_first(config, *names) for names in SIZES.values())
    if getattr(config, "is_encoder_decoder", False):
        layers += _first(config, "decoder_layers", "num_decoder_layers") or layers
    inner = _first(config, "intermediate_size", "encoder_ffn_dim", "n_inner", "ffn_dim", "hidden_dim", "d_ff")
    experts = _first(config, "num_experts_per_tok", "num_experts_per_token")
    if experts:
        inner = (_first(config, "moe_intermediate_size") or inner or 4 * width) * experts
    head = _first(config, "head_dim", "d_kv") or width // heads
    rms = hasattr(config, "rms_norm_eps") or kind in ("t5", "mt5", "umt5")
    activation = _first(config, "hidden_act", "hidden_activation", "activation_function", "activation")
    return ModelShape(
        layers=layers,
        width=width,
        queries=heads * head,
        keys=(_first(config, "num_key_value_heads", "num_kv_heads") or heads) * head,
        heads=heads,
        inner=inner or 4 * width,
        vocabulary=getattr(config, "vocab_size", 0) or 0,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        rms=rms,
        gated=getattr(config, "is_gated_act", hasattr(config, "rms_norm_eps") or kind == "modernbert"),
        norms=4 if kind in FOUR_NORMS else 2,
        norms_before=0 if kind in NORMS_AFTER else 2,
        head_norms=kind in HEAD_NORMS,
        joined_qkv=kind in JOINED_QKV,
        joined_up=kind in JOINED_UP,
        projected=getattr(config, "embedding_size", width) != width,
        gelu_in_steps=activation in GELU_IN_STEPS,
        scores_kept=kind in SCORES_KEPT,
        dropout=bool(_first(config, *DROPOUT)),
        attention_dropout=bool(_first(config, "attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")),
        capped=getattr(config, "attn_logit_softcapping", None) is not None,
    )


@dataclass(frozen=True)
class Setting:
    """How a run computes, as far as memory is concerned."""

    precision: str
    captured: bool
    """Flat parameters with 16-bit copies, instead of autocast."""
    fused: bool
    kind: Kind | None
    """The optimizer; none: a class of the user's, counted as AdamW."""
    checkpointing: Mode
    tokens: int
    """Of the largest micro-batch."""
    rows: int
    """Rows whose logits are computed."""
    attended: float = 0.0
    """How many tokens a token attends to, on average."""
    device: str = "cpu"
    stored_logits: bool = True
    offload: bool = False
    """Whether inputs of checkpointed layers wait in host memory."""
    trained: int = 0
    """Parameters that are trained, where an adapter leaves the rest frozen; 0: all."""
    packing: Packing | None = None
    """Of frozen weights in few bits."""
    shards: int = 1
    """Ranks that share weights, gradients and states of one copy of the model."""
    norms_again: bool = False
    """Whether decoders' norms are made once more in the backward pass."""
    gates_kept: bool = False
    """Whether what goes into the last product of a decoder's MLP is not."""
    accumulates: bool = False
    """Whether a step has several micro-batches; gradients of shards are whole until the last."""


@dataclass(frozen=True)
class Estimate:
    """Bytes, part by part."""

    weights: float
    """Masters and 16-bit copies."""
    gradients: float
    states: float
    activations: float
    logits: float
    on_host: float = 0.0
    """Paged states, which are not in the total."""
    adapter: float = 0.0
    """Part of the weights: what is trained beside a frozen model."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.states + self.activations + self.logits

    def fits(self, memory_gib: float) -> bool:
        return self.total <= FITS * memory_gib * GIB


def estimate(shape: ModelShape | None, parameters: int, setting: Setting) -> Estimate:
    """The need of a run. Without a shape, activations and logits are left at nothing."""
    half = setting.precision in ("bf16", "fp16")
    held = 2 if setting.precision == "bf16-pure" else 4
    weights = parameters * (held + (2 if half else 0))
    gradients = parameters * (2 if half and setting.captured else held)
    states = parameters * _state_bytes(setting, held, shape, parameters)
    adapter = 0.0
    if setting.trained:
        adapter = setting.trained * (6 if half or setting.captured else 4)
        weights = frozen_bytes(shape, parameters, setting) + adapter
        gradients = setting.trained * (2 if half and setting.captured else 4)
        states = setting.trained * _state_bytes(setting, 4, None, parameters)
    if setting.shards > 1:
        weights = parameters * held / setting.shards + gathered_bytes(shape, parameters, setting)
        gradients, states = gradients / setting.shards, states / setting.shards
        gradients += (setting.trained or parameters) * 4 if setting.accumulates else 0
    paged = setting.kind is not None and setting.kind.paged
    logits = 0.0 if shape is None else logit_bytes(shape, setting)
    if setting.trained and shape is not None:
        logits = max(0.0, logits - passing_bytes(shape, setting))  # they are gone before the backward pass begins
    return Estimate(
        weights=weights,
        gradients=gradients,
        states=0.0 if paged else states,
        activations=0.0 if shape is None else activation_bytes(shape, setting),
        logits=logits,
        on_host=states if paged else 0.0,
        adapter=adapter,
    )


def frozen_bytes(shape: ModelShape | None, parameters: int, setting: Setting) -> float:
    """Of a model under an adapter. Products are held as they are computed, or in few bits, of which the largest is
    expanded at a time; the word table, which eager steps look up under autocast, as it was loaded."""
    size, held = _compute_size(setting), 2 if setting.precision == "bf16-pure" else 4
    if shape is None:
        return parameters * (size if setting.captured else held)
    up = (2 if shape.gated else 1) * shape.width * shape.inner
    joined = shape.width * (shape.queries + 2 * shape.keys)
    products = shape.layers * (joined + shape.queries * shape.width + up + shape.inner * shape.width)
    products = min(parameters, products)
    table = min(parameters - products, shape.vocabulary * shape.width)
    rest = (parameters - products - table) * size + table * (size if setting.captured else held)
    if setting.packing is None or setting.packing.resident:
        return products * size + rest
    return products * setting.packing.bytes_each + max(joined, up) * size + rest


def gathered_bytes(shape: ModelShape | None, parameters: int, setting: Setting) -> float:
    """Of a sharded model, what one rank has gathered at a time: tables and head, the running block and the next, and
    the gradients of one."""
    if shape is None:
        return 0.0
    tables = min(parameters, shape.vocabulary * shape.width * (1 if shape.tied else 2))
    block = (parameters - tables) / shape.layers
    return (2 * tables + 3 * block) * _compute_size(setting)


def _state_bytes(setting: Setting, held: int, shape: ModelShape | None, parameters: int) -> float:
    """Of the optimizer, for each parameter."""
    kind = setting.kind or Kind("adamw")
    count = {"adamw": 2, "lion": 1, "muon": 1, "sgd": 1, "rmsprop": 1, "adagrad": 1, "adafactor": 0}[kind.algorithm]
    table = 0.0 if shape is None else min(1.0, shape.vocabulary * shape.width / parameters)
    if kind.algorithm == "adafactor":  # a row and a column for each matrix
        return 8.0 / (shape.width if shape else 256)
    if kind.algorithm == "muon":  # AdamW for the tables
        return held * (1 + table)
    if kind.bits == 8:  # a scale for each block of 256; tables in 32 bits, unless a captured step knows them as heads
        table = 0.0 if setting.captured and shape is not None and shape.tied else table
        return count * ((1 - table) * (1 + 4 / 256) + table * 4)
    return count * (4 if kind.paged else held)


# Activations.


def can_norm_again(shape: ModelShape | None, setting: Setting) -> bool:
    """Whether fused blocks can make what norms give once more, and there is enough of it."""
    before = shape is not None and shape.norms_before > 0
    large = setting.checkpointing != "full" and setting.tokens >= NORMS_AGAIN_FROM
    return before and large and _own_products(shape, setting)


def can_keep_gates(shape: ModelShape | None, setting: Setting) -> bool:
    """Whether fused blocks can keep what goes into the last product of an MLP, and it is little."""
    little = setting.checkpointing == "none" and setting.tokens <= GATES_KEPT_TO
    return shape is not None and shape.gated and little and _own_products(shape, setting)


def _own_products(shape: ModelShape, setting: Setting) -> bool:
    """Of fused decoders. Under adapters and in shards products keep copies of their own."""
    return shape.rms and setting.fused and not setting.trained and setting.shards == 1


def layer_bytes(shape: ModelShape, setting: Setting, again: bool = False) -> float:
    """What one layer keeps of one token. `again`: while it is computed for the second time."""
    s = shape
    attention = 2 * s.queries + 2 * s.keys
    if setting.fused:
        size = _compute_size(setting)
        kept = setting.gates_kept and not again
        inner = 2 * s.inner if not s.gated or (s.rms and not kept) else 3 * s.inner
        norms = 4 * s.width + (s.norms - 2) * s.width
        if setting.norms_again and not again:
            norms -= s.norms_before * s.width
        heads = s.queries + 2 * s.keys if s.head_norms else 0
        return size * (attention + inner + norms + heads) + 4 * (s.heads + s.norms)
    size = _compute_size(setting)
    inner = (4 if s.gated else 5 if s.gelu_in_steps else 2) * s.inner
    if s.joined_qkv and (s.rms or s.gated):  # turned heads are new, and values keep the whole product
        attention += s.queries + s.keys
    kept = size * (attention + inner)
    if s.head_norms:
        kept += 2 * (s.queries + s.keys) * (4 if _autocast(setting) else size)
    if s.dropout:  # masks: torch's own kernel on a GPU writes a byte for each element
        kept += 2 * s.width * (1 if setting.device == "cuda" else size)
    kept += _score_bytes(s, setting)
    return kept + _norm_bytes(s, setting) + 4 * (s.heads + 2 * s.norms)


def _score_bytes(s: ModelShape, setting: Setting) -> float:
    """Of the scores and weights of a stock layer's attention; none where they are made again in the backward pass."""
    scores = s.heads * setting.attended
    if setting.device == "cpu" and setting.precision.startswith("bf16") and not (s.capped or s.scores_kept):
        if s.attention_dropout:  # weights and what they are multiplied with
            return 4 * scores
        return 2 * scores if setting.attended <= WEIGHTS_KEPT_TO else 0
    if setting.device == "cpu" and (s.attention_dropout or s.capped):  # in steps there: scores, mask, product
        return 12 * scores
    return 2 * _compute_size(setting) * scores if s.scores_kept else 0


def _compute_size(setting: Setting) -> int:
    return 4 if setting.precision in ("fp32", "tf32") else 2


def _autocast(setting: Setting) -> bool:
    return setting.precision in ("bf16", "fp16") and not setting.captured and not setting.fused


def _norm_bytes(s: ModelShape, setting: Setting) -> float:
    """Of a stock layer's norms, with the copies that products make of what they give."""
    size = _compute_size(setting)
    if _autocast(setting) and not s.projected:
        products = (1 if s.joined_qkv else 3) + (2 if s.gated and not s.joined_up else 1)
        return s.norms * s.width * (8 if s.rms else 4) + products * s.width * 2
    return s.norms * s.width * (4 + 2 * size if s.rms else 2 * size)


def activation_bytes(shape: ModelShape, setting: Setting) -> float:
    """What the forward pass of the largest micro-batch leaves for the backward pass, logits aside."""
    layer = layer_bytes(shape, setting)
    stream = _compute_size(setting) * shape.width
    if _autocast(setting) and not shape.projected:
        stream = 4 * shape.width
    elif setting.fused and shape.rms:
        stream *= 2  # a block hands on two tensors, to be added in the next
    checkpointed = {"none": 0, "selective": -(-shape.layers // 2), "full": shape.layers}[setting.checkpointing]
    inputs = min(checkpointed, INPUTS_HERE) if setting.offload else checkpointed
    kept = (shape.layers - checkpointed) * layer + inputs * stream
    # Embeddings and the final norm; a fused one keeps the sum of the two tensors it is handed, and what it gives.
    fused_end = setting.fused and shape.rms
    ends = stream if fused_end else _norm_bytes(shape, setting) / max(1, shape.norms) + stream
    return setting.tokens * (kept + ends) + passing_bytes(shape, setting)


def passing_bytes(shape: ModelShape, setting: Setting) -> float:
    """What there is of one layer at a time, in the backward pass: computed again, and, where an adapter is trained,
    what is written and forgotten. (Whole models have gradients that outweigh the latter.)"""
    again = layer_bytes(shape, setting, again=True) if setting.checkpointing != "none" else 0.0
    forgotten = (shape.inner + 3 * shape.width) * _compute_size(setting) if setting.trained else 0.0
    return setting.tokens * (again + forgotten)


def logit_bytes(shape: ModelShape, setting: Setting) -> float:
    """Of the rows that the head reads."""
    size = _compute_size(setting)
    stored = setting.rows * shape.vocabulary * (size + LOGIT_EXTRA)
    return stored if setting.stored_logits else min(stored, setting.rows * shape.vocabulary * size, LARGEST_BUFFER)


def largest_batch_tokens(lengths: np.ndarray, batch: int, batches: int, bucket: int = 1) -> int:
    """Tokens to expect of the largest of so many random batches: as many deviations above the mean as the largest of so
    many draws from a bell curve has; never more than the longest documents together."""
    deviations = math.sqrt(2 * math.log(max(2, batches)))
    expected = batch * lengths.mean() + deviations * lengths.std() * math.sqrt(batch)
    return -(-math.ceil(min(batch * lengths.max(), expected)) // bucket) * bucket


def mean_document(lengths: np.ndarray) -> float:
    """Length of the document that a token is in, on average over tokens."""
    return float((lengths.astype(np.float64) ** 2).sum() / max(1, lengths.sum()))


def in_words(size: float) -> str:
    """`540 MiB`, `12.3 GiB`, `141 GiB`."""
    if size < GIB:
        return f"{size / 2**20:.0f} MiB"
    return f"{size / GIB:.0f} GiB" if size >= 100 * GIB else f"{size / GIB:.1f} GiB"
