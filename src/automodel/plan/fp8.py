"""FP8: whether the run can have it, and the line that says for what.

It is opt-in, because it rounds: each number of a product keeps three bits of mantissa, in gradients two. Whoever asks
for it where it cannot run or cannot pay is told why, and gets no run that quietly computes in something else.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from automodel.config.errors import UserError
from automodel.kernels.fp8_linear import SMALLEST_WIDTH
from automodel.plan.config import RunConfig
from automodel.plan.facts import ModelFacts
from automodel.plan.plan import Decision

if TYPE_CHECKING:
    from automodel.models.config import Fp8Config
    from automodel.plan.hardware import Hardware  # which imports torch


def asked_fp8(cfg: RunConfig) -> tuple[str, Fp8Config] | None:
    """The section that asks for FP8, and where it stands."""
    for path, section in (("fp8", cfg.fp8), ("model.fp8_config", cfg.model.fp8_config)):
        if section is not None and section.enabled:
            return path, section
    return None


def decide_fp8(
    cfg: RunConfig,
    hardware: Hardware,
    model: ModelFacts,
    precision: str,
    lines: list[Decision],
    *,
    capture: bool,
    fused: bool,
    compiled: bool,
) -> bool:
    asked = asked_fp8(cfg)
    if asked is None:
        return False
    path, section = asked
    if hardware.device != "cuda" or not hardware.fp8:
        raise UserError(
            f"{path}: FP8 needs a GPU with FP8 tensor cores (compute capability 8.9 or newer: Ada, Hopper, Blackwell); "
            f"this is {hardware.name}. Remove the section."
        )
    if precision not in ("bf16", "bf16-pure"):
        raise UserError(
            f"{path}: FP8 products stand in for bf16 ones, but the precision is {precision}. "
            "Use training_optimizations.precision: bf16 (or bf16-pure), or remove the section."
        )
    if compiled:
        raise UserError(
            f"{path}: FP8 has kernels of its own, which torch.compile cannot look into. Set compile: false."
        )
    if not capture:
        raise UserError(
            f"{path}: FP8 is part of captured steps (see `step` in `automodel plan` without the section for what is in "
            "their way). Remove the section."
        )
    if cfg.peft is not None and not fused:
        raise UserError(f"{path}: under an adapter, FP8 is part of fused blocks (see `kernels`). Remove the section.")
    products = model.products_fused if fused else model.products
    chosen = [p for p in products if p.pays and not p.listed(section.filter_fqns)]
    if not chosen:
        raise UserError(f"{path}: {_nothing_to_gain(model, products, section)} Remove the section.")
    sizes = ", ".join(f"{size} ({count})" for size, count in Counter(map(str, chosen)).items())
    left = f"; {len(products) - len(chosen)} smaller or listed ones" if len(products) > len(chosen) else ""
    which = "frozen weights, rounded once" if cfg.peft is not None else "forward and both gradients"
    reason = f"{path} asks for it: {sizes}; {which}{left}; head, embeddings and norms stay bf16"
    lines.append(Decision("fp8", f"{len(chosen)} of {len(products)} products", reason))
    return True


def _nothing_to_gain(model: ModelFacts, products: tuple, section: Fp8Config) -> str:
    if not products:
        return f"no products of FP8 are built for {model.model_type}."
    if any(p.pays for p in products):
        return f"filter_fqns {', '.join(section.filter_fqns)} leaves no product."
    largest = max(products, key=lambda p: (min(p.inputs, p.outputs), p.outputs))
    return (
        f"the largest product of {model.name} is {largest}, and FP8 pays only from {SMALLEST_WIDTH} inputs and outputs "
        "on, in multiples of 16: below, rounding costs more time than the product saves."
    )
