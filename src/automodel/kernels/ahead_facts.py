"""What decides which kernels a run will launch, read before torch is imported.

A Triton kernel is compiled for the widths, dtypes and options it is launched with. All of them follow from a few
numbers in the model's `config.json` and a few keys of the run: `Facts`. The file is read with plain json, because
importing transformers to read it takes longer than compiling the kernels. What a file leaves out has the default that
transformers gives it (`tests/unit/kernels/test_ahead_facts.py` compares them).

A wrong fact costs nothing but time: a kernel that was compiled for nothing, and one that the run compiles itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

HALF_PRECISIONS = ("bf16", "bf16-pure", "fp16")
FIRST_WITH_BF16 = 80  # Ampere; fused blocks are for these too
BLOCK, HEAD_SIZES = 2048, 8  # as in `flat_parameters.py`, and what flash attention takes


@dataclass(frozen=True)
class Shape:
    """What the kernels see of a model."""

    blocks: Literal["post-norm", "modernbert", "decoder", "stock"]
    """Which fused blocks it has; stock: none, only the optimizer's kernels are ours."""
    width: int = 0
    embedding_width: int = 0
    inner: int = 0
    """Width inside the MLP."""
    heads: int = 0
    token_types: bool = False
    """Whether it embeds the kind of each token."""
    pairs_have_types: bool = False
    """Whether text pairs come with token types."""
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    """On the attention weights."""
    window: int = -1
    """How far attention reaches in the layers where it does not reach everywhere; -1: there are none."""
    all_windowed: bool = False
    """Whether that is so in every layer."""
    out_dropout: float = 0.0
    """After attention."""
    down_dropout: float = 0.0
    """After the MLP."""
    pools: bool = False
    """Whether a classifier's last block may run for the pooled tokens alone."""
    head_function: str = ""
    """What a classifier's head does between its two products."""
    head_dropout: float = 0.0
    """After that."""
    head_drops_first: bool = False
    """Whether it drops out before the first product too."""
    # Decoders only:
    key_heads: int = 0
    head_dim: int = 0
    turning_dim: int = 0
    """Elements of a head that are rotated."""
    all_turn: bool = True
    """Whether heads are rotated in every layer."""
    norms: Literal["before", "after", "around"] = "before"
    """Where a block normalises."""
    head_norms: Literal["", "each", "all"] = ""
    """Norms of queries and keys: none, head by head, or over all heads."""
    norm_offset: float = 0.0
    round_first: bool = True
    activation: str = ""
    softcap: float = 0.0
    """Where attention's scores saturate; 0: they do not."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    def matrices(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of the products of a block."""
        own = self.blocks == "decoder"
        attended = self.heads * self.head_dim if own else self.width
        qkv = attended + 2 * (self.key_heads * self.head_dim if own else self.width)
        up = self.inner if self.blocks == "post-norm" else 2 * self.inner
        return [(qkv, self.width), (self.width, attended), (up, self.width), (self.width, self.inner)]


@dataclass(frozen=True)
class Head:
    """The last product of a language model, where the loss makes it (`linear_cross_entropy.py`)."""

    words: int = 0
    """0: the loss makes none."""
    tied: bool = False
    """Whether its weight is the word table."""
    logit_scale: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    counts: bool = False
    """Whether entropy and right labels are counted on the way (`token_scores.py`)."""


@dataclass(frozen=True)
class Facts:
    """One run, as far as its kernels depend on it."""

    shape: Shape
    precision: str = "auto"
    """As in the plan; `auto` is bf16 where the GPU has it, else fp32."""
    batch: int = 8
    """Examples of a micro-batch."""
    evaluation_batch: int = 0
    """Examples of a batch of the evaluation; 0: there is none."""
    accumulates: bool = False
    lazy: bool = False
    """Whether the word table is updated row by row."""
    groups: int = 2
    """Parameter groups of the optimizer."""
    head: Head = Head()
    classes: int = 0
    """Of a text classifier whose loss takes over the head's last product (`few_classes.py`); 0: it does not."""

    def on(self, capability: int) -> Facts:
        """What a GPU of this capability (90 for Hopper) makes of them: its precision, and whether blocks are fused."""
        precision = self.precision
        if precision == "auto":
            precision = "bf16" if capability >= FIRST_WITH_BF16 else "fp32"
        if precision in HALF_PRECISIONS and capability >= FIRST_WITH_BF16:
            return dataclasses.replace(self, precision=precision)
        return dataclasses.replace(self, precision=precision, shape=Shape("stock"), lazy=False)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Facts:
        values = json.loads(text)
        return cls(**(values | {"shape": Shape(**values["shape"]), "head": Head(**values["head"])}))


BERT = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "classifier_dropout": None,
}
ELECTRA = BERT | {"hidden_size": 256, "embedding_size": 128, "intermediate_size": 1024, "num_attention_heads": 4}
DISTILBERT = {
    "seq_classif_dropout": 0.2,
    "dim": 768,
    "hidden_dim": 3072,
    "n_heads": 12,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation": "gelu",
}
MODERNBERT = {
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_attention_heads": 12,
    "local_attention": 128,
    "attention_dropout": 0.0,
    "mlp_dropout": 0.0,
    "attention_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
    "hidden_activation": "gelu",
    "classifier_pooling": "cls",
}
DECODER = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "head_dim": None,
    "num_key_value_heads": None,
}
"""None: follows from the others."""
LLAMA = DECODER | {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
MISTRAL = LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096}
QWEN2 = LLAMA | {"intermediate_size": 22016, "num_key_value_heads": 32, "use_sliding_window": False}
QWEN3 = QWEN2 | {"head_dim": 128}
SMOLLM3 = LLAMA | {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "use_sliding_window": False,
}
PHI3 = LLAMA | {"hidden_size": 3072, "intermediate_size": 8192, "resid_pdrop": 0.0}
GEMMA = DECODER | {
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
}
GEMMA3 = GEMMA | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "attn_logit_softcapping": None,
}
GEMMA2 = GEMMA3 | {"attn_logit_softcapping": 50.0}
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
WIDEST_HEAD = 256
DISTILBERT_NAMES = {"hidden_size": "dim", "num_attention_heads": "n_heads"}
"""Names that transformers takes for others."""


def _post_norm(activation: str, width: int, heads: int) -> Literal["post-norm", "stock"]:
    """As `models/block_support.py` decides: weights that are joined where they lie have to fill their blocks."""
    fits = activation == "gelu" and width**2 % BLOCK == 0 and _flash_takes(width, heads)
    return "post-norm" if fits else "stock"


def _flash_takes(width: int, heads: int) -> bool:
    return width // heads % HEAD_SIZES == 0


def _bert(config: Mapping[str, Any]) -> Shape:
    dropout, kind = config["hidden_dropout_prob"], config["model_type"]
    function = "gelu" if kind == "electra" else "tanh"
    return Shape(
        blocks=_post_norm(config["hidden_act"], config["hidden_size"], config["num_attention_heads"]),
        width=config["hidden_size"],
        embedding_width=config.get("embedding_size", config["hidden_size"]),
        inner=config["intermediate_size"],
        heads=config["num_attention_heads"],
        token_types=True,
        pairs_have_types=kind in ("bert", "electra"),
        embedding_dropout=dropout,
        head_function=function,
        head_dropout=dropout if config["classifier_dropout"] is None else config["classifier_dropout"],
        head_drops_first=kind != "bert",
        attention_dropout=config["attention_probs_dropout_prob"],
        out_dropout=dropout,
        down_dropout=dropout,
        pools=True,
    )


def _distilbert(config: Mapping[str, Any]) -> Shape:
    config = {**config, **{name: config[alias] for alias, name in DISTILBERT_NAMES.items() if alias in config}}
    return Shape(
        blocks=_post_norm(config["activation"], config["dim"], config["n_heads"]),
        width=config["dim"],
        embedding_width=config["dim"],
        inner=config["hidden_dim"],
        heads=config["n_heads"],
        embedding_dropout=config["dropout"],
        head_function="relu",
        head_dropout=config["seq_classif_dropout"],
        attention_dropout=config["attention_dropout"],
        down_dropout=config["dropout"],
        pools=True,
    )


def _modernbert(config: Mapping[str, Any]) -> Shape:
    unfused = ("attention_bias", "mlp_bias", "norm_bias", "mlp_dropout")
    plain = config["hidden_activation"] == "gelu" and not any(config[name] for name in unfused)
    plain = plain and _flash_takes(config["hidden_size"], config["num_attention_heads"])
    return Shape(
        blocks="modernbert" if plain else "stock",
        width=config["hidden_size"],
        embedding_width=config["hidden_size"],
        inner=config["intermediate_size"],
        heads=config["num_attention_heads"],
        attention_dropout=config["attention_dropout"],
        window=config["local_attention"] // 2,
        out_dropout=config["attention_dropout"],
        pools=config["classifier_pooling"] == "cls",
    )


def _decoder(config: Mapping[str, Any], **particular: Any) -> Shape:
    """As `models/fused_decoder.py` decides; `particular`: what its family does differently from Llama."""
    width, inner, heads = (config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
    head_dim, key_heads = config["head_dim"] or width // heads, config["num_key_value_heads"] or heads
    kind, softcap = config["model_type"], config.get("attn_logit_softcapping")
    activation = ACTIVATIONS.get(config["hidden_activation" if kind in ("gemma2", "gemma3_text") else "hidden_act"])
    plain = not config.get("resid_pdrop") and (softcap is None or kind == "gemma2")
    fills = all(n * width % BLOCK == 0 for n in (heads * head_dim, key_heads * head_dim, inner))
    fits = head_dim % HEAD_SIZES == 0 and head_dim <= WIDEST_HEAD and (fills or config["model_type"] == "phi3")
    angles = {**(config.get("rope_parameters") or {}), **config}
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    biased = bool(config["attention_bias"]) and config["model_type"] not in ("mistral", "phi3", "qwen2")
    known: dict[str, Any] = {
        "blocks": "decoder" if activation and plain and fits else "stock",
        "width": width,
        "embedding_width": width,
        "inner": inner,
        "heads": heads,
        "pools": not softcap,
        "attention_dropout": config["attention_dropout"],
        "window": -1 if window is None else window - 1,
        "key_heads": key_heads,
        "head_dim": head_dim,
        "turning_dim": int(head_dim * angles.get("partial_rotary_factor", 1.0)),
        "activation": activation or "",
        "softcap": softcap or 0.0,
        "qkv_bias": biased,
        "out_bias": biased,
        "mlp_bias": bool(config["mlp_bias"]) and config["model_type"] in ("llama", "smollm3"),
    }
    return Shape(**(known | particular))


FAMILIES: dict[str, tuple[dict[str, Any], Callable[[Mapping[str, Any]], Shape]]] = {
    "bert": (BERT, _bert),
    "roberta": (BERT, _bert),
    "xlm-roberta": (BERT, _bert),
    "camembert": (BERT, _bert),
    "electra": (ELECTRA, _bert),
    "distilbert": (DISTILBERT, _distilbert),
    "modernbert": (MODERNBERT, _modernbert),
    "llama": (LLAMA, partial(_decoder, window=-1)),
    "mistral": (MISTRAL, partial(_decoder, all_windowed=True)),
    "qwen2": (QWEN2, partial(_decoder, qkv_bias=True)),
    "qwen3": (QWEN3, partial(_decoder, head_norms="each")),
    "smollm3": (SMOLLM3, partial(_decoder, all_turn=False)),
    "phi3": (PHI3, partial(_decoder, all_windowed=True)),
    "gemma": (GEMMA, partial(_decoder, window=-1, norm_offset=1.0, round_first=False)),
    "gemma2": (GEMMA2, partial(_decoder, norms="around", norm_offset=1.0, round_first=False)),
    "gemma3_text": (
        GEMMA3,
        partial(_decoder, norms="around", head_norms="each", norm_offset=1.0, round_first=False),
    ),
    "olmo2": (LLAMA, partial(_decoder, window=-1, norms="after", head_norms="all", round_first=False)),
}
"""Model type: what transformers assumes where the file is silent, and how to read it. All fused families."""


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape of a model, from the contents of its `config.json`."""
    defaults, read = FAMILIES.get(config.get("model_type", ""), ({}, lambda _: Shape("stock")))
    return read({**defaults, **config})
