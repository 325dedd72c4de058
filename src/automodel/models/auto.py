"""`AutoModelFor…`: Hugging Face's auto classes, with a faster forward and the reference's extra keywords.

Each class here is a subclass of the Hugging Face class of the same name, takes every keyword that class takes, and
returns a model that is the plain one (`isinstance`, parameters, `save_pretrained`, `generate`) with a `forward` that
takes padding out and runs fused blocks where it can (`drop_in.py`). Nothing is patched: the next model that
transformers loads is stock. The engine asks `class_for` instead and gets plain models, which it speeds up itself.

The extra keywords are honoured or refused, never swallowed:

- `attn_implementation`: as in transformers; a flash-attention that this machine lacks is mapped to torch's SDPA, which
  computes the same function, and a log line says so. `eager` asks for plain attention, and so for the stock forward.
- `use_sdpa_patching`: true (the default) leaves the fastest exact attention, false asks for plain `eager` attention.
- `use_liger_kernel`: fused blocks where they run, unless false.
- `HAS_LIGER_KERNEL`: whether this machine has fused steps, ours and not that package's (`kernels/obstacles.py`); the
  reference's documents ask it. It is looked up when it is read.
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
from automodel.models.task_head import NEXT_TOKEN, POOLED, TARGET, TOKENS, TaskHead

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

HAS_LIGER_KERNEL: bool
"""Whether this machine has fused steps."""

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
        _translate(kwargs, use_sdpa_patching, attn_implementation, torch_dtype)
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
        _translate(kwargs, use_sdpa_patching, attn_implementation, torch_dtype)
        return super().from_config(config, **kwargs)  # ty: ignore[missing-attribute]


class _DropIn(_Keywords):
    """Those keywords, and the fast forward for what comes out."""

    _head: TaskHead

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Loads a pretrained model; every keyword of transformers' `from_pretrained` works."""
        made = super().from_pretrained(*args, **kwargs)
        if isinstance(made, tuple):  # output_loading_info
            return cls._fast(made[0], kwargs), *made[1:]
        return cls._fast(made, kwargs)

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Builds a randomly initialised model from a config, or from the name of one."""
        return cls._fast(super().from_config(*args, **kwargs), kwargs)

    @classmethod
    def _fast(cls, model: Any, kwargs: dict[str, Any]) -> Any:
        from automodel.models.drop_in import speed_up

        return speed_up(model, cls._head, kernels=kwargs.get("use_liger_kernel") is not False)


class AutoModelForCausalLM(_DropIn, transformers.AutoModelForCausalLM):
    """`transformers.AutoModelForCausalLM`, faster, with the reference's keywords."""

    _head = NEXT_TOKEN


class AutoModelForSequenceClassification(_DropIn, transformers.AutoModelForSequenceClassification):
    """`transformers.AutoModelForSequenceClassification`, faster, with the reference's keywords."""

    _head = POOLED


class AutoModelForTokenClassification(_DropIn, transformers.AutoModelForTokenClassification):
    """`transformers.AutoModelForTokenClassification`, faster, with the reference's keywords."""

    _head = TOKENS


class AutoModelForSeq2SeqLM(_Keywords, transformers.AutoModelForSeq2SeqLM):
    """`transformers.AutoModelForSeq2SeqLM` with the reference's keywords; source and target cannot be packed."""


NeMoAutoModelForCausalLM = AutoModelForCausalLM
NeMoAutoModelForSequenceClassification = AutoModelForSequenceClassification
NeMoAutoModelForTokenClassification = AutoModelForTokenClassification
NeMoAutoModelForSeq2SeqLM = AutoModelForSeq2SeqLM


def __getattr__(name: str) -> Any:
    if name != "HAS_LIGER_KERNEL":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from automodel.kernels.obstacles import fused_obstacle

    return not fused_obstacle()


def _plain(auto_class: Any) -> Any:
    """As the engine wants it. A model that comes with code of its own says by the auto class's name which class to load
    (`auto_map`), so the name is kept."""
    return type(auto_class.__name__, (_Keywords, auto_class), {"__module__": __name__, "__doc__": auto_class.__doc__})


_PLAIN_CLASSES: dict[TaskHead, Any] = {
    POOLED: _plain(transformers.AutoModelForSequenceClassification),
    TOKENS: _plain(transformers.AutoModelForTokenClassification),
    NEXT_TOKEN: _plain(transformers.AutoModelForCausalLM),
    TARGET: AutoModelForSeq2SeqLM,
}


def class_for(head: TaskHead) -> Any:
    """The auto class that builds stock models with this head, with the reference's keywords."""
    return _PLAIN_CLASSES[head]


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
