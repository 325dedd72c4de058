"""How the layers of decoder families come apart, as a table: what `fused_decoder.py` puts together again.

The families differ in where they normalise and how an RMSNorm rounds, in which layers have a window, which of them turn
their queries and keys, and in whether weights are already joined. A family is listed only if
`tests/parity/test_fused_decoders.py` holds its fused logits and gradients to stock transformers. Members of a family
that the blocks do not compute (another activation, dropout on the stream, heads that flash attention does not
take) are refused by their config, and keep stock blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from automodel.kernels.flat_parameters import BLOCK
from automodel.kernels.rms_norm import rms_norm
from automodel.kernels.rope_heads import Heads
from automodel.kernels.side_stream import SideStream

ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
"""transformers' names, and those of `kernels/swiglu.py`."""
WIDEST_HEAD = 256  # of flash attention


class Norm(NamedTuple):
    """An RMSNorm and the way its family computes it (`kernels/rms_norm.py`)."""

    module: Any
    """Its weight is looked up when it is needed: that of a sharded model is another tensor while it is gathered."""
    eps: float
    offset: float
    round_first: bool

    @property
    def weight(self) -> nn.Parameter:
        return self.module.weight

    def __call__(self, x: Tensor, residual: Tensor | None, side: SideStream | None) -> tuple[Tensor, Tensor]:
        return self._of(x, residual, self.weight, side)

    def again(self, h: Tensor) -> Callable[[], Tensor]:
        """Makes what the norm gives of the stream, with the weight of now: later it may be another tensor."""
        kept, weight = h.detach(), self.weight.detach()
        return lambda: self._of(kept, None, weight, None)[0]

    def _of(self, x: Tensor, residual: Tensor | None, weight: Tensor, side: SideStream | None) -> tuple[Tensor, Tensor]:
        return rms_norm(
            x, residual, weight, eps=self.eps, offset=self.offset, round_first=self.round_first, side=side
        )  # fmt: skip


class Norms(NamedTuple):
    """Where a block normalises; the places its family leaves out are None."""

    before_attention: Norm | None
    after_attention: Norm | None
    """Of the branch alone, before it is added to the stream."""
    before_mlp: Norm | None
    after_mlp: Norm | None


@dataclass(frozen=True)
class Parts:
    """One layer, taken apart."""

    qkv: tuple[nn.Linear, ...]
    """Query, key and value, or one layer for all three (Phi-3)."""
    out: nn.Linear
    gate_up: tuple[nn.Linear, ...]
    """Gate and up, or one layer for both (Phi-3)."""
    down: nn.Linear
    norms: Norms
    head_norms: tuple[Norm, Norm] | None
    """Of queries and keys: head by head (Qwen3, Gemma 3) or over all heads (OLMo2), by the length of the weight."""
    heads: Heads
    scaling: float
    window: int | None
    attention_dropout: float
    turns: bool
    """Whether queries and keys are rotated (SmolLM3 leaves it out in some layers)."""
    layer_type: str | None
    """Gemma 3 has other angles in layers with a window."""
    activation: str
    softcap: float = 0.0
    """Where scores saturate (Gemma 2); 0: they do not."""


@dataclass(frozen=True)
class Decoder:
    """What is particular about a family's layers."""

    norms: tuple[str | None, str | None, str | None, str | None]
    """Names of the layer's norms, in the order of `Norms`."""
    offset: float = 0.0
    round_first: bool = True
    window: Callable[[Any, Any], int | None] = lambda attention, config: getattr(attention, "sliding_window", None)
    """(attention module, config) to the layer's window."""
    activation: str = "hidden_act"
    """Name of the config's key."""

    def norm(self, module: Any) -> Norm:
        eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        return Norm(module, eps, self.offset, self.round_first)


def _no_window(attention: Any, config: Any) -> None:
    return None


def _window_of_config(attention: Any, config: Any) -> int | None:
    return getattr(config, "sliding_window", None)


_BEFORE = ("input_layernorm", None, "post_attention_layernorm", None)
_AFTER = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")

DECODERS: dict[str, Decoder] = {
    "llama": Decoder(_BEFORE, window=_no_window),
    "mistral": Decoder(_BEFORE, window=_window_of_config),
    "qwen2": Decoder(_BEFORE),
    "qwen3": Decoder(_BEFORE),
    "smollm3": Decoder(_BEFORE),
    "phi3": Decoder(_BEFORE, window=_window_of_config),
    "gemma": Decoder(_BEFORE, offset=1.0, round_first=False, window=_no_window),
    "gemma2": Decoder(_AROUND, offset=1.0, round_first=False, activation="hidden_activation"),
    "gemma3_text": Decoder(_AROUND, offset=1.0, round_first=False, activation="hidden_activation"),
    "olmo2": Decoder(_AFTER, round_first=False, window=_no_window),
}


def head_dim_of(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def fusable_decoder_config(config: Any) -> bool:
    """Whether models of this config have blocks of the known kind, as far as the config tells."""
    decoder = DECODERS.get(config.model_type)
    if decoder is None or getattr(config, decoder.activation) not in ACTIVATIONS:
        return False
    head_dim = head_dim_of(config)
    residual_dropout = getattr(config, "resid_pdrop", 0.0)  # Phi-3 has the key; published models leave it at 0
    capped = config.model_type != "gemma2" and getattr(config, "attn_logit_softcapping", None) is not None
    known = head_dim % 8 == 0 and head_dim <= WIDEST_HEAD and not residual_dropout and not capped
    # Weights that are joined where they lie have to fill their blocks of the flat buffer.
    rows = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim, config.intermediate_size)
    joins = config.model_type == "phi3" or all(n * config.hidden_size % BLOCK == 0 for n in rows)
    return known and joins


def decoder_parts(layer: Any, config: Any) -> Parts:
    decoder, attention, mlp = DECODERS[config.model_type], layer.self_attn, layer.mlp
    joined = hasattr(attention, "qkv_proj")
    head_norms = None
    if hasattr(attention, "q_norm"):
        head_norms = decoder.norm(attention.q_norm), decoder.norm(attention.k_norm)
    return Parts(
        qkv=(attention.qkv_proj,) if joined else (attention.q_proj, attention.k_proj, attention.v_proj),
        out=attention.o_proj,
        gate_up=(mlp.gate_up_proj,) if joined else (mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj,
        norms=Norms(*(None if name is None else decoder.norm(getattr(layer, name)) for name in decoder.norms)),
        head_norms=head_norms,
        heads=Heads(config.num_attention_heads, config.num_key_value_heads, attention.head_dim),
        scaling=attention.scaling,
        window=decoder.window(attention, config),
        attention_dropout=attention.attention_dropout,
        turns=bool(getattr(attention, "use_rope", True)),
        layer_type=getattr(attention, "layer_type", None),
        activation=ACTIVATIONS[getattr(config, decoder.activation)],
        softcap=getattr(attention, "attn_logit_softcapping", None) or 0.0,
    )
