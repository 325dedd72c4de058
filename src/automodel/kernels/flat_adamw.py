"""The optimizer around `adamw_step`: a `torch.optim.Optimizer` whose whole step is a few launches and no host sync.

    optimizer = FlatAdamW(parameter_groups(model, cfg), lr=2e-5, max_norm=1.0, copy_dtype=torch.bfloat16)
    loss.backward(); optimizer.step(); optimizer.zero_grad()

The model must be on its device before, and is not to be moved afterwards: its parameters become views of the flat
buffers. Host values in `param_groups` (a torch scheduler's `lr`) are sent to the device when they change. A captured
step cannot do that; there, the learning rate follows `lr_factors`, a table with one factor per step that the device
indexes by itself.

Capture. Autograd leaves gradients at new addresses in every captured graph, so each capture gets its own table of
addresses; it can be written only when the capture is over:

    with torch.cuda.graph(graph): loss.backward(); optimizer.step(); optimizer.zero_grad()
    optimizer.finish_capture()

Until then the table is zero, which means "no gradients": a forgotten call trains nothing rather than reading wild
memory. With `flat_gradients=True` the gradients have fixed places, several graphs may accumulate into them, and `step`
zeroes them in the same pass.

Different from torch.optim.AdamW: all parameters share one step count (torch counts per parameter, which differs only
for parameters without a gradient in some steps), and clipping happens inside, so `.grad` keeps its unclipped values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from automodel.kernels.adamw import NO_STEP, AdamWState, adamw_step, late_update
from automodel.kernels.adamw8 import EightBitMoments
from automodel.kernels.flat_adamw_state import load_into, state_of
from automodel.kernels.flat_parameters import FlatParameters, Place
from automodel.kernels.lazy_rows import LazyRows

CAPTURES_AT_ONCE = 64
"""Tables of gradient addresses made ahead: this many graphs may be captured before the next `finish_capture`."""
ALIGNMENT = 16
_TORCH_GROUP_DEFAULTS = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip


def _refuse_together(lazy: bool, late: bool, flat_gradients: bool, eight_bit: bool, placed: bool) -> None:
    if placed and (lazy or flat_gradients):
        raise ValueError("gradients have one place: placed excludes lazy and flat_gradients")
    if (lazy or late) and flat_gradients:
        raise ValueError("updates can be put off only where a step is one batch: lazy or late exclude flat_gradients")
    if (lazy or late) and eight_bit:
        raise ValueError("8-bit moments are updated in every step, all at once: eight_bit excludes lazy and late")


class FlatAdamW(torch.optim.Optimizer):
    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_norm: float | None = None,
        copy_dtype: torch.dtype | None = None,
        flat_gradients: bool = False,
        lr_factors: torch.Tensor | None = None,
        initial_loss_scale: float | None = None,
        skip_nonfinite: bool = False,
        lazy: torch.nn.Parameter | None = None,
        late: Sequence[Sequence[torch.nn.Parameter]] = (),
        eight_bit: Sequence[torch.nn.Parameter] = (),
        placed: bool = False,
    ):
        """max_norm: clip the global norm, None for no clipping (and no norm). copy_dtype: the dtype the model computes
        in, while the weights here stay fp32. lr_factors: one factor per step. initial_loss_scale: dynamic loss scaling;
        multiply the loss by `self.loss_scale`. skip_nonfinite: a step with an infinite or NaN norm changes nothing.
        lazy: an embedding table whose rows are updated when they are read (`lazy_rows.py`); `settle` before reading it
        any other way. late: parts of the parameters that `step` leaves alone until `update_late` (`late_update.py`).
        eight_bit: parameters whose moments are kept in 8 bits (`adamw8.py`); those of all others are then fp32.
        placed: every gradient is brought to a fixed place by `collect` and read from there, so that somebody may sum
        whole buffers of them over ranks before `step`."""
        _refuse_together(lazy is not None, bool(late), flat_gradients, bool(eight_bit), placed)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **_TORCH_GROUP_DEFAULTS}
        super().__init__(params, defaults)
        self.flat = FlatParameters(self.param_groups, copy_dtype, lazy, late, with_moments=not eight_bit, placed=placed)
        self._have_gradients: set[int] = set()
        self.device_state = AdamWState.zeros(self.flat, len(self.param_groups))
        self.device_state.eight = EightBitMoments(self.flat, eight_bit) if eight_bit else None
        self._add_lazy_rows()
        self.skip_nonfinite = skip_nonfinite or initial_loss_scale is not None
        # Whether a gradient is finite shows in the norm, so skipping needs one even without clipping.
        self.max_norm = float("inf") if max_norm is None and self.skip_nonfinite else max_norm
        self._ask_for_squares(placed)
        if lr_factors is not None:
            self.device_state.lr_factors = lr_factors.to(self.flat.device, torch.float64)
        if initial_loss_scale is not None:
            self.device_state.loss_scale = torch.tensor([initial_loss_scale, 0.0], device=self.flat.device)
        self.gradient_buffers = self.flat.attach_gradients() if flat_gradients else []
        self._flat_addresses = [p.grad.data_ptr() for g in self.param_groups for p in g["params"] if flat_gradients]
        self._sent_hyper: list[list[float]] | None = None
        self._send_hyper()
        self._tables = self._new_tables()
        self._sent_addresses: list[int] | None = None
        self._captured: list[list[int]] = []
        self._finished: list[torch.Tensor] = []
        self._realigned: list[torch.Tensor] = []

    def _add_lazy_rows(self) -> None:
        state, flat = self.device_state, self.flat
        for place in flat.places:
            if place.lazy:
                copy = None if flat.copy is None or place.full_precision else place.view(flat.copy)
                own = (place.view(b) for b in (flat.weight, flat.exp_avg, flat.exp_avg_sq))
                rows = LazyRows(*own, copy, state.settings[place.group], state.step)
                state.lazy, state.lazy_group = rows, place.group
                place.parameter.lazy_rows = rows  # ty: ignore[missing-attribute]

    def _ask_for_squares(self, placed: bool) -> None:
        """Of whoever makes gradients that stay at their places until the norm is wanted; not of those that are summed
        over ranks before (`placed`)."""
        for place in self.flat.places:
            place.parameter.__dict__.pop("gradient_squares", None)  # an earlier optimizer's
            if place.late and not placed and self.max_norm is not None:
                place.parameter.gradient_squares = self.device_state.squares  # ty: ignore[missing-attribute]

    @property
    def lazy_rows(self) -> LazyRows | None:
        return self.device_state.lazy

    def settle(self) -> None:
        """Whatever was put off is done; now all weights and moments are those of plain AdamW."""
        for part in range(len(self.flat.late_parts)):
            self.update_late(part)
        self.device_state.settings[:, -1] = NO_STEP
        if self.device_state.lazy is not None:
            self.device_state.lazy.catch_up_all()

    def update_late(self, part: int, beside: bool = False) -> None:
        """The last step's update of one part of the parameters. Once for each step: a second call would repeat it.
        `beside`: others compute at the same time, and keep most of the processors."""
        late_update(self.flat, self.device_state, self.flat.late_parts[part], beside)

    def collect_late(self) -> None:
        """Gradients that were not written to their fixed places are copied there."""
        for part in self.flat.late_parts:
            for place, fixed in zip(part.places, part.gradients):
                self._bring(place)
                place.parameter.grad = fixed

    def collect(self, places: Iterable[Place]) -> list[torch.Tensor]:
        """Gradients of these parameters to their fixed places. Returns those that were elsewhere: who copies on another
        stream has to keep them until it is done."""
        places = list(places)
        self._have_gradients.update(id(p.parameter) for p in places if p.parameter.grad is not None)
        return [gradient for gradient in map(self._bring, places) if gradient is not None]

    def _bring(self, place: Place) -> torch.Tensor | None:
        """A gradient to its fixed place; zeros where there is none. Returns it where it was elsewhere."""
        gradient, fixed = place.parameter.grad, self.flat.fixed[id(place.parameter)]
        if gradient is None:
            fixed.zero_()
            return None
        if gradient.data_ptr() == fixed.data_ptr():
            return None
        place.parameter.grad = fixed.copy_(gradient)
        return gradient

    def hand_out(self) -> None:
        """`.grad` is what was collected, for `step` to read. A parameter that has never had a gradient has none, and is
        left alone."""
        for place in self.flat.places:
            known = place.late or not self._have_gradients or id(place.parameter) in self._have_gradients
            place.parameter.grad = self.flat.fixed[id(place.parameter)] if known else None

    # The device tensors a training loop reads, late and without waiting.

    @property
    def grad_norm(self) -> torch.Tensor:
        """Norm of the last step's gradients before clipping; (1,) on the device."""
        return self.device_state.norm

    @property
    def step_count(self) -> torch.Tensor:
        return self.device_state.step

    @property
    def loss_scale(self) -> torch.Tensor | None:
        """What to multiply the loss by; () on the device, or None."""
        return None if self.device_state.loss_scale is None else self.device_state.loss_scale[0]

    def full_precision_weights(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The fp32 weights by the model's parameter names, for saving."""
        self.settle()
        return self.flat.weights_by_name(model.named_parameters())

    # Stepping.

    def step(self, closure: None = None) -> None:  # ty: ignore[incompatible-method-override]
        if closure is not None:
            raise ValueError("FlatAdamW.step takes no closure: call loss.backward() first")
        self.collect_late()
        gradients = [place.parameter.grad for place in self.flat.places]
        if self.flat.device.type == "cuda":
            gradients, addresses = self._locate(gradients)
        else:
            gradients, addresses = self._locate_eagerly(gradients)
        adamw_step(
            self.flat,
            self.device_state,
            gradients,
            addresses,
            max_norm=self.max_norm,
            skip_nonfinite=self.skip_nonfinite,
            zero_gradients=bool(self.gradient_buffers),
            chosen=self.flat.blocks_at_once,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients; flat ones are already zero after a step and keep their place."""
        self.device_state.squares.begin()  # those of a pass that was given up
        if not self.gradient_buffers:
            super().zero_grad(set_to_none)
            if self.lazy_rows is not None:
                self.lazy_rows.gradients = None
            return
        for buffer in self.gradient_buffers:
            buffer.zero_()

    def finish_capture(self) -> None:
        """Write the address tables of the graphs captured since the last call. Call it before the first replay."""
        for row, addresses in enumerate(self._captured, start=1):
            # Pinned: the host goes on, and does not wait for the steps that are under way.
            sent = torch.tensor(addresses, dtype=torch.int64, pin_memory=self._tables.is_cuda)
            self._tables[row, : len(addresses)].copy_(sent, non_blocking=True)
        if self._captured:
            self._captured = []
            self._finished.append(self._tables)  # the graphs read these rows by address as long as they live
            self._tables = self._new_tables()
            self._sent_addresses = None

    def forget_captures(self) -> None:
        """All graphs that were captured so far are gone: nobody reads their tables any more."""
        self._finished.clear()

    def _new_tables(self) -> torch.Tensor:
        """Row 0 is for steps that run at once, the others for captures."""
        # An even number of columns: every row is aligned to 16 bytes, and there is one kernel for all of them.
        shape = (1 + CAPTURES_AT_ONCE, len(self.flat.places) + len(self.flat.places) % 2)
        return torch.zeros(shape, dtype=torch.int64, device=self.flat.device)

    def _locate(self, gradients: list[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        if not torch.cuda.is_current_stream_capturing():
            return self._locate_eagerly(gradients)
        if self._hyper_rows() != self._sent_hyper:
            raise RuntimeError(
                "hyper-parameters changed since the last step; call send_hyper_parameters() and recapture"
            )
        if len(self._captured) == CAPTURES_AT_ONCE:
            raise RuntimeError(
                f"{CAPTURES_AT_ONCE} steps captured without finish_capture(); call it after each capture"
            )
        gradients, addresses = self._aligned(gradients)
        self._captured.append(addresses)
        return gradients, self._tables[len(self._captured)]

    def _locate_eagerly(self, gradients: list[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        self.flat.check_in_place()
        self._send_hyper()
        gradients, addresses = self._aligned(gradients)
        if addresses != self._sent_addresses:
            self._tables[0, : len(addresses)].copy_(torch.tensor(addresses, dtype=torch.int64))
            self._sent_addresses = addresses
        return gradients, self._tables[0]

    def _aligned(self, gradients: list[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], list[int]]:
        """Gradients as the kernels want them: dense, contiguous, 16-byte aligned. The rare others are copied."""
        self._realigned, ready = [], []
        for gradient in gradients:
            if gradient is not None:
                if gradient.layout != torch.strided:
                    raise ValueError("FlatAdamW takes dense gradients only; set sparse=False on the embedding")
                if not gradient.is_contiguous() or gradient.data_ptr() % ALIGNMENT:
                    gradient = gradient.clone(memory_format=torch.contiguous_format)
                    self._realigned.append(gradient)  # alive until the launch has been queued
            ready.append(gradient)
        addresses = [0 if gradient is None else gradient.data_ptr() for gradient in ready]
        if self._flat_addresses and addresses != self._flat_addresses:
            raise RuntimeError(
                "with flat_gradients=True the gradients must stay in place: zero them, never replace .grad"
            )
        return ready, addresses

    # Hyper-parameters.

    def _hyper_rows(self) -> list[list[float]]:
        return [
            [float(g["lr"]), float(g["betas"][0]), float(g["betas"][1]), float(g["eps"]), float(g["weight_decay"])]
            for g in self.param_groups
        ]

    def _send_hyper(self) -> None:
        rows = self._hyper_rows()
        if rows != self._sent_hyper:
            self.device_state.hyper.copy_(torch.tensor(rows, dtype=torch.float64))
            self._sent_hyper = rows

    def send_hyper_parameters(self) -> None:
        """Send changed `param_groups` to the device; captured graphs use them from the next replay on."""
        self._send_hyper()

    # Saving and loading, in the layout of torch.optim.AdamW (`flat_adamw_state.py`).

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return state_of(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_into(self, state_dict)

    def moments_of(self, place: Place) -> dict[str, torch.Tensor]:
        """Views of what is kept of one parameter: two moments, or codes and scales (`adamw8.EIGHT_BIT_KEYS`)."""
        if self.device_state.eight is not None:
            return self.device_state.eight.tensors(place)
        return {"exp_avg": place.view(self.flat.exp_avg), "exp_avg_sq": place.view(self.flat.exp_avg_sq)}
