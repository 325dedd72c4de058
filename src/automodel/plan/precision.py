"""The precision of a run, and the library that makes its fp32 products on a CPU.

What the config asks for is never changed. Where it leaves the choice open, a GPU with native bf16 computes in bf16. On
a CPU a resumed run goes on in the precision that it began with. For a new one the run's own products were timed
(`kernels/product_speed.py`), and bf16 is chosen where it makes them clearly faster, with the casts counted that a step
needs around them:

    stock modules        autocast casts every matrix in every micro-batch, and every gradient back
    layers of our own    the optimizer writes bf16 copies: one cast of every matrix a step
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from automodel.config.errors import UserError
from automodel.plan.asked import asked_precision
from automodel.plan.config import RunConfig
from automodel.plan.facts import ProductFacts
from automodel.plan.plan import Decision

if TYPE_CHECKING:
    from automodel.kernels.product_speed import ProductSpeed
    from automodel.plan.hardware import Hardware  # which imports torch

CLEARLY_FASTER = 1.15
"""Times that bf16 must be faster than fp32 in a step's products: they are about seven tenths of a step, so less would
be lost in what differs from run to run, and fp32 is more exact."""
FASTER_LIBRARY = 1.1
"""The same for oneDNN's fp32 products beside those of torch's own library, which are as exact."""

Library = Literal["torch", "onednn"]


def decide_precision(
    cfg: RunConfig, hardware: Hardware, products: ProductFacts, lines: list[Decision], *, own_layers: bool, packed: bool
) -> str:
    """`own_layers`: whether the run's layers are our own, whose bf16 copies the optimizer writes. `packed`: whether
    attention is our own."""
    asked, key = asked_precision(cfg)
    if asked == "auto":
        value, reason = _chosen(cfg, hardware, products, own_layers, packed)
    else:
        value, reason = asked, _checked(asked, key, hardware, products, own_layers)
    if value == "fp32" and cfg.training_optimizations.tf32 and hardware.tf32:
        value, reason = "tf32", "training_optimizations.tf32: fp32 numbers, whose products are computed in TF32"
    lines.append(Decision("precision", value, reason))
    return value


def _chosen(
    cfg: RunConfig, hardware: Hardware, products: ProductFacts, own_layers: bool, packed: bool
) -> tuple[str, str]:
    """Where the config leaves it open, with the reason. Stock attention in bf16 takes many times as long on a CPU."""
    allowed = cfg.training_optimizations.bf16 is not False
    begun = products.begun_precision
    if hardware.device == "cpu" and (begun == "fp32" or (begun == "bf16" and allowed)):
        known = f"; {speed_in_words(products.speed, own_layers)}" if products.speed is not None else ""
        return begun, f"as the run began{known}"
    if hardware.device == "cpu" and (own_layers or packed):
        return _chosen_by_speed(allowed, products, own_layers)
    if hardware.bf16 and allowed:
        return "bf16", "bf16 compute over fp32 master weights: native here and safe"
    if hardware.bf16:
        return "fp32", "bf16 is turned off"
    if hardware.device == "cpu":
        return "fp32", "stock layers over padded batches: bf16 is chosen for them on processors with AMX alone"
    return "fp32", "this GPU has no native bf16; precision: fp16 is faster where it has tensor cores"


def _chosen_by_speed(allowed: bool, products: ProductFacts, own_layers: bool) -> tuple[str, str]:
    speed = products.speed
    if not allowed:
        return "fp32", "bf16 is turned off"
    if speed is None:
        return "fp32", f"bf16 was not measured: {products.not_measured or 'the products of this run are not known'}"
    if not speed.bf16:
        why = "torch makes no products in bf16 here" if speed.onednn else "torch has no oneDNN here"
        return "fp32", f"{why}; {speed_in_words(speed, own_layers)}"
    gain = gain_of_bf16(products, own_layers)
    if gain >= CLEARLY_FASTER:
        return "bf16", f"over fp32 master weights; {speed_in_words(speed, own_layers)}"
    casts = " with the casts around them" if gain < CLEARLY_FASTER <= speed.bf16 / _fp32(speed, own_layers) else ""
    gained = f"bf16 would make a step's products{casts} {gain:.2f} times as fast"
    return "fp32", f"{gained}; {speed_in_words(speed, own_layers)}"


def _checked(asked: str, key: str, hardware: Hardware, products: ProductFacts, own_layers: bool) -> str:
    """The reason of a precision that the config asks for. Raises `UserError` where this machine has none of it."""
    if asked.startswith("bf16") and hardware.device == "cuda" and not hardware.bf16:
        raise UserError(
            f"{key} asks for bf16, but {hardware.name} has no native bf16. "
            "Use training_optimizations.precision: fp32, or fp16 on GPUs with tensor cores."
        )
    if asked == "fp16" and hardware.device == "cpu":
        raise UserError(f"{key} asks for fp16, which needs a GPU. Use fp32 (or bf16) on the CPU.")
    if asked == "tf32" and not hardware.tf32:
        raise UserError(f"{key} asks for tf32, which needs an Ampere or newer GPU. Use fp32 here.")
    reason = f"{key} asks for it"
    if asked == "bf16":
        reason += "; master weights and optimizer states stay fp32"
    if asked.startswith("bf16") and hardware.device == "cpu" and products.speed is not None:
        reason += f"; {speed_in_words(products.speed, own_layers)}"
    elif asked == "bf16" and hardware.device == "cpu" and not hardware.bf16:
        reason += "; how fast its products are here was not measured"
    return reason


def gain_of_bf16(products: ProductFacts, own_layers: bool) -> float:
    """How many times as fast a micro-batch's products are in bf16, casts counted. Stock modules cast the matrices, and
    the gradients of those that are trained back; our own layers cast matrices after an update, and never where there is
    none."""
    speed = products.speed
    assert speed is not None
    if not speed.bf16:
        return 0.0
    operations = 2 * products.passes * products.weights * products.tokens
    if not operations:
        return speed.bf16 / _fp32(speed, own_layers)
    trained = products.passes == 3
    times = int(trained) if own_layers else 1 + int(trained)
    casts = times * products.weights / speed.casts if speed.casts else 0.0
    return operations / _fp32(speed, own_layers) / (operations / speed.bf16 + casts)


def precision_of_answers(wish: str, products: ProductFacts) -> tuple[str, Library]:
    """Of a saved model that is asked on a CPU, with layers of our own: the precision, and the library of fp32 products.
    `wish`: fp32, bf16 or auto."""
    gain = 0.0 if products.speed is None else gain_of_bf16(products, own_layers=True)
    if wish == "bf16" or (wish == "auto" and gain >= CLEARLY_FASTER):
        return "bf16", "torch"
    return "fp32", library_of(products.speed)


def decide_products(
    hardware: Hardware, products: ProductFacts, precision: str, lines: list[Decision], *, own_layers: bool
) -> Library:
    """The library of fp32 products. Only layers of our own can choose it."""
    if hardware.device != "cpu" or precision != "fp32" or not own_layers:
        return "torch"
    if products.begun_precision == "fp32":
        chosen, reason = products.begun_products or "torch", "as the run began"
    else:
        chosen, reason = library_of(products.speed), ""
    if chosen != "onednn":
        return "torch"
    lines.append(Decision("products", "oneDNN", reason or _libraries_in_words(products.speed)))
    return "onednn"


def library_of(speed: ProductSpeed | None) -> Library:
    """The faster of the two for fp32 products; torch's own, where the difference is small."""
    return "onednn" if speed is not None and speed.onednn >= FASTER_LIBRARY * speed.fp32 else "torch"


def speed_in_words(speed: ProductSpeed, own_layers: bool) -> str:
    """Both precisions, that of fp32 by the library that would make its products."""
    fp32 = f"{_fp32(speed, own_layers):,.0f}"
    both = f"{speed.bf16:,.0f} GFLOP/s in bf16, {fp32} in fp32" if speed.bf16 else f"{fp32} GFLOP/s in fp32"
    return f"products of this run: {both}; measured on this machine"


def _libraries_in_words(speed: ProductSpeed | None) -> str:
    if speed is None:
        return ""
    both = f"{speed.onednn:,.0f} GFLOP/s by oneDNN, {speed.fp32:,.0f} by torch's own library"
    return f"fp32 products of this run: {both}; measured on this machine"


def _fp32(speed: ProductSpeed, own_layers: bool) -> float:
    """Of the library that makes fp32 products; stock modules have torch's own."""
    return speed.onednn if own_layers and library_of(speed) == "onednn" else speed.fp32
