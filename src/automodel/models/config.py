"""The `model:` section, and the `fp8:` and `quantization:` sections that change how weights are held."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from automodel.config.section import PathText, Section, ShareBelowOne


@dataclass(frozen=True, kw_only=True)
class Fp8Config(Section):
    """FP8 matrix products (`fp8:` or `model.fp8_config:`) inside the blocks of a large model, in captured bf16 steps on
    a GPU with FP8 tensor cores. An empty section turns it on."""

    SLOT: ClassVar[str | None] = "fp8"

    target: str | None = None
    """`nemo_automodel.components.quantization.fp8.FP8Config` or nothing."""
    enabled: bool = True
    """Use FP8 for the matrix products with at least 4096 inputs and outputs."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """`tensorwise`, the default: one scale a tensor. `rowwise` and `rowwise_with_gw_hp` come in a later release."""
    filter_fqns: tuple[str, ...] = ()
    """Modules to leave in the compute precision: parts of their names, e.g. `[down_proj, layers.0.]`."""


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig(Section):
    """`quantization:` holds the frozen weights under an adapter (`peft:`) in 4 or 8 bits, in the number formats of
    bitsandbytes, which need not be installed. See docs/adapters.md."""

    SLOT: ClassVar[str | None] = "quantization"

    target: str | None = None
    """`transformers.BitsAndBytesConfig` or nothing."""
    load_in_4bit: bool = False
    """Hold the base weights in 4 bits (NF4 by default)."""
    load_in_8bit: bool = False
    """Hold the base weights in 8 bits, one scale a row. Activations are not rounded."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """The 4-bit number format."""
    bnb_4bit_compute_dtype: str | None = None
    """The dtype the weights are expanded to, e.g. `bfloat16`."""
    bnb_4bit_use_double_quant: bool = False
    """Quantise the quantisation constants too."""
    resident: bool | Literal["auto"] = "auto"
    """Keep the weights expanded: the same numbers at the speed of bf16. `auto`: where memory allows by the plan's
    estimate."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """`model:` which model to fine-tune. A bare name is `pretrained_model_name_or_path`."""

    SLOT: ClassVar[str | None] = "model"
    SHORTHAND: ClassVar[str | None] = "pretrained_model_name_or_path"
    EXTRA: ClassVar[dict[str, Any]] = {
        ".*(dropout|pdrop|drop_rate|drop_prob|drop_path|layerdrop).*": ShareBelowOne | bool | None
    }
    ALIASES: ClassVar[dict[str, str]] = {
        "name": "pretrained_model_name_or_path",
        "path": "pretrained_model_name_or_path",
        "model_name_or_path": "pretrained_model_name_or_path",
        "dtype": "torch_dtype",
    }

    pretrained_model_name_or_path: PathText
    """A Hugging Face hub name or a local folder."""
    target: str | None = None
    """The auto class, e.g. `automodel.AutoModelForSequenceClassification.from_pretrained` (or `.from_config`)."""
    num_labels: Annotated[int, Ge(1), Le(10**7)] | None = None
    """Number of classes; taken from the data where it is left out."""
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    """How labels are read; inferred from the label column where it is left out."""
    torch_dtype: str | None = None
    """Compute dtype: `torch.bfloat16` means bf16 compute over fp32 master weights; see `precision`."""
    attn_implementation: str | None = None
    """`flash_attention_2`, `sdpa` and `eager` are all mapped to the exact packed attention; the plan says so."""
    use_liger_kernel: bool | None = None
    """Fused kernels: true asks for them where they win, false forbids them."""
    use_sdpa_patching: bool | None = None
    """Accepted for compatibility: the fastest exact attention is always chosen; false asks for plain attention."""
    tokenizer: PathText | None = None
    """Tokenizer name or folder, when it is not the model's own."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    cache_dir: PathText | None = None
    """Where hub files are kept; default is Hugging Face's cache."""
    local_files_only: bool = False
    """Never reach for the network."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Needs `--trust remote_code` on the command line as well."""
    fp8_config: Fp8Config | None = None
    """The reference's place for the `fp8:` section."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Any other attribute of the model's own config (`hidden_dropout_prob: 0.0`); misspelt ones are refused."""
