"""The `peft:` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le

from automodel.config.section import PathText, Section, ShareBelowOne

DEFAULT_DIM = 8
DEFAULT_ALPHA = 32


@dataclass(frozen=True)
class Packing:
    """How frozen weights are held in few bits."""

    kind: str
    """`nf4`, `fp4` or `int8`."""
    double: bool = False
    """Whether scales of 4-bit weights are in 8 bits."""
    resident: bool = False
    """Whether they are kept expanded: the same numbers at the speed of bf16."""

    @property
    def bytes_each(self) -> float:
        """Of a packed weight, with its part of the scales."""
        if self.kind == "int8":
            return 1.0
        return 0.5 + ((1 + 4 / 256) / 64 if self.double else 4 / 64)

    def in_words(self) -> str:
        kind = {"nf4": "NF4", "fp4": "FP4", "int8": "8 bits"}[self.kind]
        return f"{kind}{', doubly quantised' if self.double else ''}"


@dataclass(frozen=True, kw_only=True)
class PeftConfig(Section):
    """`peft:` low-rank adapters (LoRA) beside frozen weights; an empty section turns them on. See docs/adapters.md."""

    SLOT: ClassVar[str | None] = "peft"
    ALIASES: ClassVar[dict[str, str]] = {
        "lora_r": "dim",
        "r": "dim",
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "adapter_path": "pretrained_adapter",
    }

    target: str | None = None
    """`nemo_automodel.components._peft.lora.PeftConfig` or nothing."""
    dim: Annotated[int, Ge(1), Le(16_384)] | None = None
    """Rank of the adapters; 8 where it is left out."""
    alpha: Annotated[int, Ge(1), Le(10**6)] | None = None
    """Scale of the adapters (alpha / dim); 32 where it is left out."""
    dropout: ShareBelowOne | None = None
    """Dropout before the adapters; where it is left out, that of `pretrained_adapter`, and none for new adapters."""
    target_modules: str | tuple[str, ...] | None = None
    """Modules that get adapters: names (`q_proj`), globs (`*.mlp.*`) or `all-linear`, the default. One text that is
    none of these is a regular expression for whole names, as in PEFT."""
    exclude_modules: tuple[str, ...] = ()
    """Modules that do not, in the same form."""
    modules_to_save: tuple[str, ...] = ()
    """More modules to train in full and save with the adapter; classification heads and poolers always are."""
    pretrained_adapter: PathText | None = None
    """A PEFT adapter folder to start from: its rank, scale and modules are taken over."""
    use_dora: bool = False
    """DoRA: lengths and directions of the weights' rows are trained apart. Slower; its blocks are not fused."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(dim)."""
    loraplus_lr_ratio: Annotated[float, Gt(0), Le(10**4)] | None = None
    """LoRA+: learning rate of B over that of A, e.g. 16."""
    use_triton: bool = False
    """Accepted from the reference: adapters stand inside fused blocks on a GPU anyway."""
