"""Clipping, AdamW and the bf16 copy of the weights, for a whole model in a few launches.

    norm  = ‖all gradients‖₂ / scale                    c = min(1, max_norm / (norm + 1e-6)) / scale
    p    ← p · (1 − lr·wd)
    m    ← m + (1 − β₁)(c·g − m)                        v ← β₂·v + (1 − β₂)(c·g)²
    p    ← p − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)
    copy ← bf16(p)

The semantics of `torch.nn.utils.clip_grad_norm_` followed by `torch.optim.AdamW`. Everything a step needs besides the
gradients lies in device memory: learning rate (with an optional table of factors, one per step), β's, the step count,
the clip coefficient. A captured CUDA graph therefore advances by itself on replay, and nothing waits for the host.

1. `square_sums`: one partial sum of g² per program, fp32. Long gradients are walked over as they lie, at 4.5 TB/s;
   where each block has to be looked up in tables, half of that is left.
2. `prepare`: one program adds them up in fp64, and turns hyper-parameters and step count into eight numbers per group.
   1 − β₂ᵗ is formed in fp64 from a running product: in fp32 the first step's 0.001 would be wrong in the fifth digit.
3. `update`: one pass over p, m, v and g.

The floor is memory: 12 bytes read and 12 written for p, m, v, 2 for the gradient, 2 for the copy, and 2 more to read
the gradient for the norm: 30 bytes a parameter. For the 67.0 M of DistilBERT 2.01 GB, 0.47 ms at 4.25 TB/s (0.03 of
them the norm). Gradients that were summed up over micro-batches are fp32 (4 bytes more) and zeroed in the same pass
(4 more), which saves a launch.

With `skip_nonfinite`, a step whose norm is not finite changes nothing and is counted; without it NaN spreads as in
torch. A dynamic loss scale (fp16) lives in the same place: halved after a non-finite step, doubled after
`GROWTH_INTERVAL` good ones, read by the loss and undone in c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from automodel.kernels.adamw8 import EightBitMoments, launch_update
from automodel.kernels.dispatch import power_of_two_above, processors, runs_triton
from automodel.kernels.flat_parameters import BLOCK, FlatParameters, LatePart, Run
from automodel.kernels.lazy_rows import RING, LazyRows
from automodel.kernels.square_sums import SquareSums, run_programs, sum_run, whole_units

HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay")
"""Columns of the fp64 table the host fills, one row per group."""
SETTINGS = ("shrink", "step_size", "one_minus_beta1", "beta2", "one_minus_beta2", "inv_sqrt_correction2", "eps", "clip")
"""Columns of the fp32 table `prepare` derives from it; clip −1 means: skip this step."""

NO_STEP = -1.0
"""In the column `clip`: change nothing."""
NORM_EPS = 1e-6
GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000
UPDATE_WARPS = 8
NORM_BLOCKS_PER_PROGRAM, NORM_WARPS = 4, 8
NORM_PROGRAMS_PER_PROCESSOR = 4
UPDATE_BYTES = 16
"""Of each load of a thread, in the update of a long piece."""
BESIDE_WARPS = 32
"""One program fills a processor: beside products, which need whole processors, a few of them are the update's. Alone, a
program for each 16 bytes of its threads is faster (204 and 217 µs for a layer of Llama 1B in bf16)."""
SHARE_BESIDE = 2 / 5
"""Of the processors, for an update that others compute beside. Of 32 to 264 programs on an H200, 48 to 56 are best at
1,400 tokens, for fp32 and for bf16 weights; at 8,000 tokens they are within 5 % of each other."""


@dataclass
class AdamWState:
    """What a step reads and writes besides the parameters, all on their device."""

    hyper: torch.Tensor
    """(groups, 5) fp64, columns `HYPER`."""
    powers: torch.Tensor
    """(groups, 2) fp64: β₁ᵗ and β₂ᵗ."""
    step: torch.Tensor
    """(1,) int64: steps taken."""
    skipped: torch.Tensor
    """(1,) int64: steps skipped because the norm was not finite."""
    settings: torch.Tensor
    """(groups, 8) fp32, columns `SETTINGS`: this step's numbers."""
    norm: torch.Tensor
    """(1,) fp32: norm of the last step's gradients, before clipping."""
    squares: SquareSums
    """Of the gradients, for their norm."""
    lr_factors: torch.Tensor | None = None
    """(steps,) fp64: the group's learning rate is multiplied by element `step + skipped`, the last one ever after. A
    schedule goes on in a step that is skipped, as it does for whoever counts batches."""
    loss_scale: torch.Tensor | None = None
    """(2,) fp32: the scale, and good steps since it last changed."""
    lazy: LazyRows | None = None
    """A table that is updated row by row."""
    lazy_group: int = 0
    """The group it belongs to."""
    eight: EightBitMoments | None = None
    """The moments, where most of them are kept in 8 bits; then the flat buffers have none."""

    @classmethod
    def zeros(cls, flat: FlatParameters, groups: int) -> AdamWState:
        def new(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=flat.device)

        return cls(
            hyper=new(groups, len(HYPER), dtype=torch.float64),
            powers=new(groups, 2, dtype=torch.float64).fill_(1.0),
            step=new(1, dtype=torch.int64),
            skipped=new(1, dtype=torch.int64),
            settings=new(groups, len(SETTINGS), dtype=torch.float32).fill_(NO_STEP),
            norm=new(1, dtype=torch.float32),
            squares=_square_sums(flat),
        )

    def go_on_after(self, steps: int, betas: Sequence[tuple[float, float]]) -> None:
        """As after so many steps, with the β's of each group."""
        self.step.fill_(steps)
        if self.lazy is not None:
            self.lazy.settled_at(steps)
        powers = [[_power(beta, steps) for beta in of_group] for of_group in betas]
        self.powers.copy_(torch.tensor(powers, dtype=torch.float64))


@cache
def _power(beta: float, steps: int) -> float:
    """As `prepare` makes it, factor by factor: `beta**steps` is another number in its last digits."""
    power = 1.0
    for _ in range(steps):
        power *= beta
    return power


def _square_sums(flat: FlatParameters) -> SquareSums:
    """With room for the blocks that are summed up by table, and for each gradient that may have a piece of its own."""
    own = len(flat.long) + sum(place.late for place in flat.places)
    return SquareSums(_short_programs(flat) + own * run_programs(flat.device), flat.device)


def _short_programs(flat: FlatParameters) -> int:
    most = NORM_PROGRAMS_PER_PROCESSOR * processors(flat.device)
    short = flat.n_blocks if flat.short_blocks is None else len(flat.short_blocks)
    return whole_units(min(most, -(-short // NORM_BLOCKS_PER_PROGRAM)))


def prepare_reference(
    state: AdamWState, gradients: list[torch.Tensor | None], max_norm: float | None, skip_nonfinite: bool
) -> None:
    """The norm, the clip coefficient, the step count and each group's settings."""
    scale = 1.0 if state.loss_scale is None else float(state.loss_scale[0])
    clip, go = 1.0, True
    if max_norm is not None:
        squares = [g.float().square().sum().double() for g in gradients if g is not None]
        rows = None if state.lazy is None else state.lazy.square_sums()
        squares += [] if rows is None else [rows.sum().double()]
        norm = sum(squares, torch.zeros((), dtype=torch.float64, device=state.norm.device)).sqrt() / scale
        state.norm.copy_(norm)
        ratio = max_norm / (float(norm) + NORM_EPS)
        clip = 1.0 if ratio > 1.0 else ratio
        go = not skip_nonfinite or float(norm) < float("inf")
        state.skipped += 0 if go else 1
    if state.loss_scale is not None:
        good = float(state.loss_scale[1]) + 1.0 if go else 0.0
        grows = good >= GROWTH_INTERVAL
        state.loss_scale[0] = scale * ((GROWTH if grows else 1.0) if go else BACKOFF)
        state.loss_scale[1] = 0.0 if grows else good
    lr, beta1, beta2, eps, decay = state.hyper.unbind(1)
    if state.lr_factors is not None:
        lr = lr * state.lr_factors[min(int(state.step) + int(state.skipped), len(state.lr_factors) - 1)]
    before = int(state.step)
    if go:
        state.step += 1
        state.powers *= state.hyper[:, 1:3]
    correction1, correction2 = (1.0 - state.powers).unbind(1)
    columns = (1 - lr * decay, lr / correction1, 1 - beta1, beta2, 1 - beta2, correction2.rsqrt(), eps)
    state.settings.copy_(torch.stack([*columns, torch.full_like(lr, clip / scale if go else -1.0)], dim=1))
    if go and state.lazy is not None:
        shrink, step_size, _, _, _, inv_sqrt_correction2, _, _ = state.settings[state.lazy_group]
        state.lazy.history[before % RING] = torch.stack([shrink, step_size, inv_sqrt_correction2])


def update_reference(
    weight: torch.Tensor, gradient: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, settings: list[float]
) -> None:
    """AdamW of one parameter in place, in fp32 whatever the dtypes."""
    shrink, step_size, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, clip = settings
    p, m, v = weight.float(), exp_avg.float(), exp_avg_sq.float()
    g = gradient.float() * clip
    p.mul_(shrink)
    m.lerp_(g, one_minus_beta1)
    v.mul_(beta2).addcmul_(g, g, value=one_minus_beta2)
    p.addcdiv_(m, v.sqrt().mul_(inv_sqrt_correction2).add_(eps), value=-step_size)
    for stored, computed in ((weight, p), (exp_avg, m), (exp_avg_sq, v)):
        if stored is not computed:
            stored.copy_(computed)


@torch.no_grad()
def adamw_reference(
    flat: FlatParameters,
    state: AdamWState,
    gradients: list[torch.Tensor | None],
    *,
    max_norm: float | None = None,
    skip_nonfinite: bool = False,
    zero_gradients: bool = False,
) -> None:
    """The whole step in torch. Reads numbers back to the host: not for a captured graph."""
    prepare_reference(state, gradients, max_norm, skip_nonfinite)
    settings = state.settings.tolist()
    for place, gradient in zip(flat.places, gradients):
        if gradient is None or place.late:
            continue
        mine = settings[place.group]
        if mine[-1] != -1.0:
            weight = place.view(flat.weight)
            if state.eight is None:
                update_reference(weight, gradient, place.view(flat.exp_avg), place.view(flat.exp_avg_sq), mine)
            else:
                moments = state.eight.read(place)
                update_reference(weight, gradient, *moments, mine)
                state.eight.write(place, *moments)
            if flat.copy is not None:
                place.view(flat.copy).copy_(weight)
        if zero_gradients:
            gradient.zero_()
    if state.lazy is not None:
        state.lazy.update()


_TRITON_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def _launch(
    flat: FlatParameters,
    state: AdamWState,
    gradients: list[torch.Tensor | None],
    addresses: torch.Tensor,
    max_norm: float | None,
    skip_nonfinite: bool,
    zero_gradients: bool,
    chosen: torch.Tensor | None,
) -> None:
    from automodel.kernels.adamw_triton import prepare_kernel

    partial = None if max_norm is None else _summed_squares(flat, state.squares, gradients, addresses)
    groups, lazy = len(state.hyper), state.lazy
    rows = None if lazy is None or partial is None else lazy.square_sums()
    prepare_kernel[(1,)](
        partial, rows, None if lazy is None else lazy.history,
        state.hyper, state.powers, state.step, state.skipped, state.lr_factors, state.loss_scale,
        state.settings, state.norm, 0 if partial is None else len(partial), 0 if rows is None else len(rows), groups,
        0 if state.lr_factors is None else len(state.lr_factors), max_norm or 0.0,
        GROUPS=power_of_two_above(groups), BLOCK=1024, SKIP=skip_nonfinite, LAZY_GROUP=state.lazy_group, RING=RING,
        num_warps=8,
    )  # fmt: skip
    if state.eight is None:
        # Where layers are put off, what is left are tables of words, which are long, and little else.
        tables = [] if chosen is None or zero_gradients else flat.long
        _update(flat, state, addresses, flat.short_blocks if tables else chosen, zero_gradients)
        for index in tables:
            if (gradient := gradients[index]) is not None:
                _update_run(flat, state, flat.run_of(index, gradient))
    else:
        launch_update(flat, state, addresses, zero_gradients, _gradient_kinds(flat))
    if lazy is not None:
        lazy.update()
    state.squares.begin()


def _summed_squares(
    flat: FlatParameters, squares: SquareSums, gradients: list[torch.Tensor | None], addresses: torch.Tensor
) -> torch.Tensor:
    """All pieces of this pass: those that products have left, and here those of all other gradients."""
    from automodel.kernels.adamw_triton import square_sums_kernel

    chosen, runs = flat.short_blocks, run_programs(flat.device)
    count = flat.n_blocks if chosen is None else len(chosen)
    if count:
        programs = _short_programs(flat)
        square_sums_kernel[(programs,)](
            addresses, flat.blocks, chosen, squares.take(programs), flat.n_blocks, count,
            PER_PROGRAM=NORM_BLOCKS_PER_PROGRAM, num_warps=NORM_WARPS, **_gradient_kinds(flat),
        )  # fmt: skip
    long = (gradients[index] for index in flat.long)
    for gradient in (*(g.view(-1) for g in long if g is not None), *flat.late_gradients(without=squares.known)):
        sum_run(gradient, squares.take(runs))
    return squares.taken


def _gradient_kinds(flat: FlatParameters) -> dict[str, Any]:
    import triton.language as tl

    dtypes = flat.gradient_dtypes
    narrow = [getattr(tl, _TRITON_NAMES[dtype]) for dtype in dtypes if dtype != torch.float32]
    return {"BLOCK": BLOCK, "NARROW": narrow[0] if narrow else None, "WIDE": torch.float32 in dtypes}


def _update(
    flat: FlatParameters,
    state: AdamWState,
    addresses: torch.Tensor,
    chosen: torch.Tensor | None,
    zero_gradients: bool,
) -> None:
    from automodel.kernels.adamw_triton import update_kernel

    count = flat.n_blocks if chosen is None else len(chosen)
    if not count:
        return
    update_kernel[(count,)](
        flat.weight, flat.exp_avg, flat.exp_avg_sq, flat.copy, addresses, flat.blocks, chosen, state.settings,
        flat.n_blocks, ZERO=zero_gradients, num_warps=UPDATE_WARPS, **_gradient_kinds(flat),
    )  # fmt: skip


def _update_run(flat: FlatParameters, state: AdamWState, run: Run, beside: bool = False) -> None:
    from automodel.kernels.adamw_triton import update_run_kernel

    copy = None if flat.copy is None else run.of(flat.copy)
    warps = BESIDE_WARPS if beside else UPDATE_WARPS
    walk = 32 * warps * UPDATE_BYTES // flat.weight.element_size()
    programs = max(1, int(SHARE_BESIDE * processors(flat.device))) if beside else -(-run.blocks * BLOCK // walk)
    update_run_kernel[(programs,)](
        run.of(flat.weight), run.of(flat.exp_avg), run.of(flat.exp_avg_sq), copy, run.gradient,
        state.settings[run.group], run.blocks, BLOCK=BLOCK, WALK=walk, num_warps=warps,
    )  # fmt: skip


@torch.no_grad()
def late_update(flat: FlatParameters, state: AdamWState, part: LatePart, beside: bool = False) -> None:
    """The update of one part of the parameters with the settings of the last step: the half of `adamw_step` that was
    put off (`late_update.py`). `beside`: others compute at the same time."""
    if runs_triton(flat.weight):
        for run in part.runs:
            _update_run(flat, state, run, beside)
        return
    settings = state.settings.tolist()
    for place, gradient in zip(part.places, part.gradients):
        mine = settings[place.group]
        if mine[-1] != -1.0:
            weight = place.view(flat.weight)
            update_reference(weight, gradient, place.view(flat.exp_avg), place.view(flat.exp_avg_sq), mine)
            if flat.copy is not None:
                place.view(flat.copy).copy_(weight)


def adamw_step(
    flat: FlatParameters,
    state: AdamWState,
    gradients: list[torch.Tensor | None],
    addresses: torch.Tensor,
    *,
    max_norm: float | None = None,
    skip_nonfinite: bool = False,
    zero_gradients: bool = False,
    chosen: torch.Tensor | None = None,
) -> None:
    """One step for all parameters. `gradients` in the order of `flat.places`, None where there is none (left alone);
    `addresses` their data pointers, int64 on the device, 16-byte aligned, 0 for None. `chosen`: blocks to update now;
    the others get theirs from `late_update`, with the settings that this step leaves."""
    if runs_triton(flat.weight):
        _launch(flat, state, gradients, addresses, max_norm, skip_nonfinite, zero_gradients, chosen)
    else:
        adamw_reference(
            flat, state, gradients, max_norm=max_norm, skip_nonfinite=skip_nonfinite, zero_gradients=zero_gradients
        )
