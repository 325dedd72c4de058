"""Frozen weights in 4 or 8 bits: what was asked for, and whether they are kept expanded.

Packed weights are expanded for every product. Where memory allows they are expanded once and stay: the same numbers,
and the speed of bf16. `resident: auto`, the default, takes the first of the two that fits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from automodel.adapters.config import Packing
from automodel.config.errors import UserError
from automodel.plan.config import RunConfig
from automodel.plan.fp8 import asked_fp8
from automodel.plan.memory import in_words
from automodel.plan.plan import Decision

if TYPE_CHECKING:
    from automodel.distributed.layout import Layout
    from automodel.plan.fitting import Fitting


def packings(cfg: RunConfig) -> list[Packing | None]:
    """The forms of the frozen weights that may be used, the fastest first."""
    asked = cfg.quantization
    if asked is None:
        return [None]
    kind = "int8" if asked.load_in_8bit else asked.bnb_4bit_quant_type
    double = asked.bnb_4bit_use_double_quant and kind != "int8"
    residents = (True, False) if asked.resident == "auto" else (asked.resident,)
    return [Packing(kind, double, resident) for resident in residents]


def refuse_packed(cfg: RunConfig, layout: Layout, model_type: str) -> None:
    if cfg.quantization is None:
        return
    if layout.tp > 1:
        raise UserError("quantization: weights in few bits cannot be cut (distributed.tp_size). Remove one of the two.")
    if (fp8 := asked_fp8(cfg)) is not None:
        raise UserError(f"quantization: is another form of the frozen weights than {fp8[0]}. Keep one of the two.")
    if model_type == "gpt2":
        raise UserError("quantization: GPT-2's transposed layers are not packed. Remove the section for this model.")


def base_line(cfg: RunConfig, tried: list[Fitting], precision: str) -> Decision | None:
    """What the frozen weights are held in, and why."""
    chosen, asked = tried[-1], cfg.quantization
    if asked is None or chosen.packing is None:
        return None
    compute = "bf16" if precision == "bf16-pure" else precision
    if asked.resident != "auto":
        why = f"quantization.resident is {str(asked.resident).lower()}"
    elif chosen.packing.resident:
        why = "everything fits so"
    else:
        why = f"kept expanded, about {in_words(tried[0].estimate.total)} would be needed"
    held = chosen.packing.in_words()
    if chosen.packing.resident:
        held = f"{compute}, expanded from {held}"
        how = f"expanded once to {compute} and kept: the same numbers at full speed"
    else:
        how = f"expanded to {compute} for each product"
    wish = (asked.bnb_4bit_compute_dtype or "").removeprefix("torch.")
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    differs = f"; bnb_4bit_compute_dtype is {wish}, but the run computes in {compute}" if wish else ""
    differs = "" if names.get(wish, wish) == compute else differs
    return Decision("base", held, f"{how}; {why}{differs}; head and embeddings stay as they are")
