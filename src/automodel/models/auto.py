"""`AutoModelFor…`: Hugging Face's auto classes with the reference's extra keywords.

Each class here is a subclass of the Hugging Face class of the same name, takes every keyword that class takes, and
returns the plain model class (`BertForSequenceClassification`, …), so `save_pretrained`, `generate` and everything else
work unchanged. Nothing is patched: what is fast about a run comes from the engine, which packs batches and switches
attention on the instance it trains.

The extra keywords are honoured or refused, never swallowed:

- `attn_implementation`: as in transformers; a flash-attention that this machine lacks is mapped to torch's SDPA, which
  computes the same function, and a log line says so.
- `use_sdpa_patching`: true (the default) leaves the fastest exact attention, false asks for plain `eager` attention.
- `use_liger_kernel`: true asks for fused kernels where they win. None is shipped in this release, and a log line says
  that the model runs on torch's own kernels.
- `torch_dtype`: a dtype, its name (`bfloat16`, `torch.bfloat16`, `bf16`) or `auto`; the older spelling of `dtype`.
"""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig

from automodel.config.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

HAS_LIGER_KERNEL = find_spec("liger_kernel") is not None

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float64": torch.float64,
}
_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


class _Keywords:
    """The reference's keywords, in front of a Hugging Face auto class. Named parents come second, so `super()` is
    transformers' own method."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *model_args: Any,
        use_liger_kernel: bool | None = None,
        use_sdpa_patching: bool | None = None,
        attn_implementation: str | dict | None = None,
        torch_dtype: torch.dtype | str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Loads a pretrained model; every keyword of transformers' `from_pretrained` works."""
        _translate(kwargs, use_liger_kernel, use_sdpa_patching, attn_implementation, torch_dtype)
        return super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)  # ty: ignore[missing-attribute]

    @classmethod
    def from_config(
        cls,
        config: PreTrainedConfig | str,
        *,
        use_liger_kernel: bool | None = None,
        use_sdpa_patching: bool | None = None,
        attn_implementation: str | dict | None = None,
        torch_dtype: torch.dtype | str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Builds a randomly initialised model from a config, or from the name of one."""
        if isinstance(config, str):
            config = AutoConfig.from_pretrained(config, trust_remote_code=kwargs.get("trust_remote_code"))
        _translate(kwargs, use_liger_kernel, use_sdpa_patching, attn_implementation, torch_dtype)
        return super().from_config(config, **kwargs)  # ty: ignore[missing-attribute]


class AutoModelForCausalLM(_Keywords, transformers.AutoModelForCausalLM):
    """`transformers.AutoModelForCausalLM` with the reference's keywords."""


class AutoModelForSequenceClassification(_Keywords, transformers.AutoModelForSequenceClassification):
    """`transformers.AutoModelForSequenceClassification` with the reference's keywords."""


class AutoModelForTokenClassification(_Keywords, transformers.AutoModelForTokenClassification):
    """`transformers.AutoModelForTokenClassification` with the reference's keywords."""


class AutoModelForSeq2SeqLM(_Keywords, transformers.AutoModelForSeq2SeqLM):
    """`transformers.AutoModelForSeq2SeqLM` with the reference's keywords."""


NeMoAutoModelForCausalLM = AutoModelForCausalLM
NeMoAutoModelForSequenceClassification = AutoModelForSequenceClassification
NeMoAutoModelForTokenClassification = AutoModelForTokenClassification
NeMoAutoModelForSeq2SeqLM = AutoModelForSeq2SeqLM

_CLASS_FOR_TASK: dict[str, Any] = {
    "text-classification": AutoModelForSequenceClassification,
    "token-classification": AutoModelForTokenClassification,
    "causal-lm": AutoModelForCausalLM,
    "seq2seq": AutoModelForSeq2SeqLM,
}


def class_for_task(task: str) -> Any:
    """The auto class that builds models for a task."""
    return _CLASS_FOR_TASK[task]


def dtype_named(name: torch.dtype | str) -> torch.dtype | str:
    """The dtype behind `bf16`, `bfloat16` or `torch.bfloat16`; `auto` and dtypes pass through."""
    if isinstance(name, torch.dtype) or name == "auto":
        return name
    dtype = _DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise UserError(f"torch_dtype: {name!r} is not a dtype known here; use one of {', '.join(_DTYPES)} or auto")
    return dtype


def _translate(
    kwargs: dict[str, Any],
    use_liger_kernel: bool | None,
    use_sdpa_patching: bool | None,
    attn_implementation: str | dict | None,
    torch_dtype: torch.dtype | str | None,
) -> None:
    """Turns the reference's keywords into transformers' own, in place."""
    if torch_dtype is not None:
        dtype = dtype_named(torch_dtype)
        if kwargs.get("dtype") not in (None, torch_dtype, dtype):
            raise UserError(f"torch_dtype={torch_dtype!r} and dtype={kwargs['dtype']!r} disagree; give one of them")
        kwargs["dtype"] = dtype
    attention = attention_to_use(attn_implementation, use_sdpa_patching)
    if attention is not None:
        kwargs["attn_implementation"] = attention
    if use_liger_kernel:
        logger.warning(
            "use_liger_kernel=True: this release ships no fused kernel that wins over torch's own; nothing was swapped"
        )


def attention_to_use(attn_implementation: str | dict | None, use_sdpa_patching: bool | None) -> str | dict | None:
    """transformers' `attn_implementation` for what was asked; None leaves the choice to transformers (SDPA where the
    model has it)."""
    if use_sdpa_patching is False:
        if attn_implementation not in (None, "eager"):
            raise UserError(
                f"use_sdpa_patching=False asks for plain attention, attn_implementation={attn_implementation!r} for "
                "another; drop one of them"
            )
        return "eager"
    if attn_implementation in _FLASH and not _flash_attention_installed(str(attn_implementation)):
        logger.warning(
            "attn_implementation=%s is mapped to sdpa (the same function): flash-attn is not installed or there is no "
            "CUDA device",
            attn_implementation,
        )
        return None
    return attn_implementation


def _flash_attention_installed(name: str) -> bool:
    package = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}.get(
        name, "flash_attn.cute"
    )
    try:
        return torch.cuda.is_available() and find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False
