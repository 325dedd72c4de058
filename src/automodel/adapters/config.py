"""The `peft:` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from automodel.config.section import Count, Section, ShareBelowOne


@dataclass(frozen=True, kw_only=True)
class PeftConfig(Section):
    """`peft:` low-rank adapters. Understood today, built in a later release."""

    SLOT: ClassVar[str | None] = "peft"
    ALIASES: ClassVar[dict[str, str]] = {"lora_r": "dim", "r": "dim", "lora_alpha": "alpha", "lora_dropout": "dropout"}

    target: str | None = None
    """`nemo_automodel.components._peft.lora.PeftConfig` or nothing."""
    dim: Count = 8
    """Rank of the adapters."""
    alpha: Count = 32
    """Scale of the adapters (alpha / dim)."""
    dropout: ShareBelowOne = 0.0
    """Dropout before the adapters."""
    target_modules: str | tuple[str, ...] | None = None
    """Modules that get adapters: names, globs or `all-linear`."""
    exclude_modules: tuple[str, ...] = ()
    """Modules that do not."""
    modules_to_save: tuple[str, ...] = ()
    """Modules trained in full and saved with the adapter."""
    use_dora: bool = False
    """Weight-decomposed adapters."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(dim)."""
    use_triton: bool = False
    """Fused adapter kernels where they win."""
