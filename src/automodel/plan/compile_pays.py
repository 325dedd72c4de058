"""Does torch.compile pay for itself in this run? The arithmetic, and the line of the plan that tells it.

Compiling fuses the small kernels around matrix products and attention. What that saves grows with the run; what it
costs is paid once, at the start:

    steps × micro-batches × saved seconds   against   PAYS × seconds of compiling

    saved seconds of a micro-batch = blocks × (BLOCK_S + tokens × width × BYTES / BANDWIDTH)

The first term of a block is kernels that need not be launched, the second memory that need not be read and written
again. Matrix products and attention take as long as before, so the number of parameters does not matter, and ALBERT,
which runs one block twelve times, counts twelve.

Where the blocks have fused kernels of our own, those are what compiling would make, and start at once. Forced on, the
stock blocks are compiled instead of them. The times of earlier compiles of the same model on the same machine are kept
beside torch's own cache (`compile_record.py`) and take the place of the constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from automodel.plan.config import RunConfig
from automodel.plan.plan import Decision

if TYPE_CHECKING:
    from automodel.plan.hardware import Hardware  # which imports torch

# From the captured prototype of DistilBERT on one H200: 4.7 ms a step without and 3.7 with compiled blocks at 1,930
# tokens, 10.7 and 8.2 at 7,700 (six blocks of width 768). `benchmarks/compile_probe.py` measures them again.
BLOCK_S = 83e-6
BYTES = 240  # for each token and unit of width, in half precision; twice that in fp32
BANDWIDTH = 4.25e12  # of that GPU. A slower one saves more than is counted here

# Not measured yet on a GPU: `benchmarks/compile_probe.py` does.
COLD_S = 25.0
WARM_S = 8.0
AUTOTUNE = 3.0  # times as long where every matrix product is tuned

PAYS = 1.5  # an estimate should be wrong by this much before a run gets slower for it

CUDA_GRAPH_MODES = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


@dataclass(frozen=True)
class CompileFacts:
    """What the estimate needs to know."""

    blocks: int = 0
    """How often a step runs a block."""
    width: int = 0
    """Width of the hidden states."""
    obstacle: str = ""
    """What this machine lacks, as the rest of a sentence."""
    cold_s: float | None = None
    """Seconds that the first compile of this model took on this machine."""
    warm_s: float | None = None
    """Seconds that the last one took, with its cache on disk."""
    begun: bool | None = None
    """What the run that is being resumed does."""


NOTHING_KNOWN = CompileFacts()


def asked_compile(cfg: RunConfig) -> bool | None:
    """Whether the config forces it on or off; none leaves it to the plan."""
    if cfg.training_optimizations.use_compile is not None:
        return cfg.training_optimizations.use_compile
    return None if cfg.compile.enabled == "auto" else cfg.compile.enabled


def used_mode(asked: str) -> tuple[str, str]:
    """The mode blocks are compiled with, and why it is not the one that was asked for."""
    used = CUDA_GRAPH_MODES.get(asked, asked)
    return used, "" if used == asked else f"mode {used} for {asked}: CUDA graphs record whole steps here, not blocks"


def saved_seconds(facts: CompileFacts, tokens: float, precision: str) -> float:
    """What compiled blocks save in one micro-batch."""
    bytes_ = BYTES * (2 if precision in ("fp32", "tf32") else 1)
    return facts.blocks * (BLOCK_S + tokens * facts.width * bytes_ / BANDWIDTH)


def compile_seconds(facts: CompileFacts, mode: str) -> tuple[float, str]:
    """What compiling will cost, and how that is known."""
    times = AUTOTUNE if mode.startswith("max-autotune") else 1.0
    if facts.warm_s is not None:
        return facts.warm_s, " with its cache on disk, as measured here"
    if facts.cold_s is not None:
        return min(facts.cold_s, WARM_S), " with its cache on disk"
    return COLD_S * times, ""


@dataclass(frozen=True)
class Estimate:
    """Both sides of the question."""

    saved_s: float
    cost_s: float
    words: str

    @property
    def pays(self) -> bool:
        return self.saved_s > PAYS * self.cost_s


def estimate(
    facts: CompileFacts, mode: str, *, steps: int, accumulation: int, tokens: float, precision: str
) -> Estimate | None:
    """None where too little is known."""
    if not (facts.blocks and facts.width and tokens):
        return None
    each = saved_seconds(facts, tokens, precision)
    saved = steps * accumulation * each
    cost, known = compile_seconds(facts, mode)
    parts = f" × {accumulation} micro-batches" if accumulation > 1 else ""
    words = (
        f"{steps:,} steps{parts} × {each * 1e3:.2g} ms saved = {_seconds(saved)}; compiling costs about "
        f"{_seconds(cost)}{known}"
    )
    return Estimate(saved, cost, words)


def decide_compile(
    cfg: RunConfig,
    hardware: Hardware,
    facts: CompileFacts,
    *,
    steps: int,
    accumulation: int,
    tokens: float,
    precision: str,
    capture: bool,
    fused: bool,
    lines: list[Decision],
) -> str | None:
    """The mode to compile blocks with, or none; the plan gets its line."""
    if cfg.peft is not None:
        but = "asked for, but " if asked_compile(cfg) else ""
        lines.append(Decision("compile", "off", f"{but}blocks with adapters are not compiled yet"))
        return None
    mode, remark = used_mode(cfg.compile.mode)
    guess = estimate(facts, mode, steps=steps, accumulation=accumulation, tokens=tokens, precision=precision)
    on, reason = _verdict(asked_compile(cfg), hardware.device, facts, guess, capture=capture, fused=fused)
    if not on:
        lines.append(Decision("compile", "off", reason))
        return None
    reason += f"; {remark}" if remark else ""
    if cfg.compile.dynamic is False:
        reason += "; dynamic is false: every token count is compiled anew"
    lines.append(Decision("compile", "on" if mode == "default" else f"on, {mode}", reason))
    return mode


def _verdict(
    wish: bool | None, device: str, facts: CompileFacts, guess: Estimate | None, *, capture: bool, fused: bool
) -> tuple[bool, str]:
    if wish is False:
        return False, "turned off"
    but = "asked for, but " if wish else ""
    if device == "cpu":
        # docs/log.md: a profile puts 60 % of a step on two cores into products and 14 % into attention.
        return False, f"{but}on the CPU matrix products and attention, which stay as they are, are most of a step"
    if facts.obstacle:
        return False, but + facts.obstacle
    if wish:
        return True, f"asked for; {guess.words}" if guess else "asked for"
    if fused:
        return False, "the fused kernels are what compiling would make, and they start at once"
    if not capture:
        return False, "steps run kernel by kernel, for which nothing was measured; compile.enabled: true compiles them"
    if facts.begun is not None:
        return facts.begun, "as in the part of the run that is being continued"
    if guess is None:
        return False, "the model's config does not tell enough to say whether it pays"
    return guess.pays, f"{guess.words} and must pay {PAYS:g} times over"


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.1f} s"
