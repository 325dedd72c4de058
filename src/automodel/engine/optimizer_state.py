"""AdamW's state as a checkpoint holds it: one form, whichever step wrote it.

The plain step keeps it in `torch.optim.AdamW`, the captured one in flat buffers on the device (`FlatAdamW`). On the
disk both are the two moments of every parameter by its name, the number of steps taken, and the loss scale where there
is one. So a run that was started on a GPU goes on on a CPU, and the other way round. With 8-bit moments, a captured
step writes codes and scales as they are (`kernels/adamw8.py`); they go back exactly, and nowhere else: a run with
another optimizer refuses them by name, as it refuses its own form in their place. Other optimizers exist only in the
plain step; their state is kept as torch has it, and only the same optimizer takes it back.

Versions: 2 is this form. Version 1 had no number and two forms, torch's (with a step count for every parameter) and the
flat one; both are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from automodel.config.errors import UserError
from automodel.kernels.adamw8 import EIGHT_BIT_KEYS
from automodel.kernels.flat_adamw import FlatAdamW

Named = dict[str, Tensor]

VERSION = 2
ADAMW, ADAMW_8BIT = "adamw", "adamw-8bit"
IN_WORDS = {ADAMW: "AdamW with 32-bit moments", ADAMW_8BIT: "our AdamW with 8-bit moments"}
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = tuple(f"{key}/" for key in EIGHT_BIT_KEYS if key.endswith("_scale"))  # one for each strip of a parameter
RESUME_ELSEWHERE = "Resume with the version of automodel that wrote it, or start again with --overwrite."


@dataclass(frozen=True)
class AdamWRecord:
    """AdamW between two steps."""

    moments: Named
    """`exp_avg/<name>` and `exp_avg_sq/<name>`; parameters that never had a gradient may be missing."""
    steps: int
    """Updates made."""
    own_steps: dict[str, int] = field(default_factory=dict)
    """Parameters that took part in fewer (they had no gradient in some); only torch counts them one by one."""
    skipped: int = 0
    """Steps that changed nothing because fp16 gradients overflowed."""
    loss_scale: tuple[float, float] | None = None
    """fp16: the scale, and good steps since it last changed."""
    dropout_seed: int | None = None
    """The captured step's own counter; the plain step draws from torch's generators."""
    form: str = ADAMW
    """`ADAMW_8BIT`: most moments are codes and scales (`adamw8.EIGHT_BIT_KEYS`)."""

    def to_disk(self) -> tuple[Named, dict[str, Any]]:
        values = {
            "version": VERSION,
            "form": self.form,
            "steps": self.steps,
            "own_steps": self.own_steps,
            "skipped": self.skipped,
            "loss_scale": list(self.loss_scale) if self.loss_scale else None,
            "dropout_seed": self.dropout_seed,
        }
        return self.moments, values

    @classmethod
    def from_disk(cls, tensors: Named, values: Mapping[str, Any]) -> AdamWRecord:
        """Refuses the state of another optimizer, and one that a later release wrote."""
        version = values.get("version", 1)
        if version > VERSION:
            raise UserError(
                f"The checkpoint's optimizer state is of version {version}; this automodel reads versions 1 to "
                f"{VERSION}. {RESUME_ELSEWHERE}"
            )
        if version == 1:
            return _first_version(tensors, values)
        if values["form"] not in IN_WORDS:
            raise _not_adamw(values["form"])
        scale = values["loss_scale"]
        return cls(
            tensors,
            values["steps"],
            values["own_steps"],
            values["skipped"],
            (scale[0], scale[1]) if scale else None,
            values["dropout_seed"],
            values["form"],
        )

    def check_form(self, own: str) -> None:
        """Refuses moments of another form than this run's optimizer keeps."""
        if self.form != own:
            raise _not_adamw(IN_WORDS[self.form], IN_WORDS[own])


def _not_adamw(form: str, own: str = "AdamW") -> UserError:
    return UserError(
        f"The checkpoint holds the state of {form}, but this run's optimizer is {own}. Resume with the config the run "
        "was started with (run/config.yaml)."
    )


def _first_version(tensors: Named, values: Mapping[str, Any]) -> AdamWRecord:
    if "dropout_seed" in values:  # the captured step
        scale = values.get("loss_scale")
        scale = (scale[0], scale[1]) if scale else None
        return AdamWRecord(tensors, values["step"], {}, values["skipped"], scale, values["dropout_seed"])
    if not tensors or {path.split("/", 1)[0] for path in tensors} != {*MOMENTS, "step"}:
        raise _not_adamw("another optimizer")
    counts = {path.removeprefix("step/"): int(t) for path, t in tensors.items() if path.startswith("step/")}
    moments = {path: t for path, t in tensors.items() if not path.startswith("step/")}
    return _counted(moments, counts, loss_scale=_scale_of(values["scaler"]))


def _counted(moments: Named, counts: Mapping[str, int], **more: Any) -> AdamWRecord:
    """One number for the steps, and the exceptions."""
    steps = max(counts.values(), default=0)
    return AdamWRecord(moments, steps, {name: n for name, n in counts.items() if n != steps}, **more)


def _scale_of(scaler: Mapping[str, Any]) -> tuple[float, float] | None:
    return (scaler["scale"], float(scaler["_growth_tracker"])) if scaler else None


# The plain step.


def is_plain_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is AdamW and nothing more: a third moment (amsgrad) has no place in the common form."""
    return type(optimizer) is torch.optim.AdamW and not any(group["amsgrad"] for group in optimizer.param_groups)


def record_of_torch(
    optimizer: torch.optim.Optimizer, model: nn.Module, scaler: torch.amp.GradScaler, skipped: int
) -> AdamWRecord:
    """What `torch.optim.AdamW` knows."""
    moments: Named = {}
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter)
        if state:
            counts[name] = int(state["step"])
            moments |= {f"{key}/{name}": state[key] for key in MOMENTS}
    return _counted(moments, counts, skipped=skipped, loss_scale=_scale_of(scaler.state_dict()))


def load_into_torch(
    record: AdamWRecord,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    scaler: torch.amp.GradScaler,
    place: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> None:
    """Puts a record back, exactly where it came from `torch.optim.AdamW` of the same precision. `place`: makes of a
    moment and its parameter what is kept beside it, where that is not the whole moment."""
    record.check_form(ADAMW)
    parameters = _checked(record, model)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")  # where torch keeps the count as well
        for parameter in group["params"]:
            name = parameters[parameter]
            if f"exp_avg/{name}" in record.moments:
                steps = record.own_steps.get(name, record.steps)
                device = parameter.device if on_device else "cpu"
                state = optimizer.state[parameter]
                state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=device)
                for key in MOMENTS:
                    moment = record.moments[f"{key}/{name}"]
                    state[key] = (
                        place(moment, parameter) if place else moment.to(parameter.device, parameter.dtype, copy=True)
                    )
    if scaler.is_enabled() and record.loss_scale:
        scale, good = record.loss_scale
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale, "_growth_tracker": int(good)})


# The captured step.


def record_of_flat(optimizer: FlatAdamW, model: nn.Module, dropout_seed: int) -> AdamWRecord:
    """What `FlatAdamW` knows. The moments are views of its buffers, not copies."""
    optimizer.settle()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    flat, device = optimizer.flat, optimizer.device_state
    moments: Named = {}
    for place in flat.places:
        name = names[id(place.parameter)]
        moments |= {f"{key}/{name}": tensor for key, tensor in optimizer.moments_of(place).items()}
    scale = None if device.loss_scale is None else device.loss_scale.tolist()
    return AdamWRecord(
        moments,
        int(device.step),
        skipped=int(device.skipped),
        loss_scale=(scale[0], scale[1]) if scale else None,
        dropout_seed=dropout_seed,
        form=_form_of(optimizer),
    )


def _form_of(optimizer: FlatAdamW) -> str:
    return ADAMW if optimizer.device_state.eight is None else ADAMW_8BIT


@torch.no_grad()
def load_into_flat(record: AdamWRecord, optimizer: FlatAdamW, model: nn.Module) -> None:
    """Puts a record into the flat buffers. All parameters share one count there: one that took part in fewer steps has
    its bias correction from the common count."""
    record.check_form(_form_of(optimizer))
    names = _checked(record, model)
    optimizer.settle()
    flat, device = optimizer.flat, optimizer.device_state
    for place in flat.places:
        name = names[place.parameter]
        kept = {key: f"{key}/{name}" for key in optimizer.moments_of(place)}
        if record.form == ADAMW_8BIT and not all(path in record.moments for path in kept.values()):
            raise UserError(
                f"The checkpoint's optimizer has no {', '.join(kept)} for '{name}': it kept other parameters in 8 bits "
                f"than this run does. {RESUME_ELSEWHERE}"
            )
        for key, view in optimizer.moments_of(place).items():
            saved = record.moments.get(kept[key])
            view.zero_() if saved is None else view.copy_(saved)
    device.go_on_after(record.steps, [group["betas"] for group in optimizer.param_groups])
    device.skipped.fill_(record.skipped)
    if device.loss_scale is not None and record.loss_scale:
        device.loss_scale.copy_(torch.tensor(record.loss_scale))


def _checked(record: AdamWRecord, model: nn.Module) -> dict[Tensor, str]:
    """Names of the model's parameters; refuses a record that has others, or other shapes."""
    parameters = dict(model.named_parameters())
    for path, tensor in record.moments.items():
        name = path.split("/", 1)[1]
        if name not in parameters:
            problem = "which this model does not have"
        elif parameters[name].shape != tensor.shape and not path.startswith(SCALES):
            problem = f"of shape {tuple(tensor.shape)}, but the model's is {tuple(parameters[name].shape)}"
        else:
            continue
        raise UserError(
            f"The checkpoint's optimizer has state for '{name}', {problem}. "
            "Resume with the config the run was started with (run/config.yaml)."
        )
    moments = Counter(path.split("/", 1)[1] for path in record.moments)
    halves = [name for name, count in moments.items() if count % len(MOMENTS)]
    if halves:
        raise UserError(f"The checkpoint's optimizer has only one of two moments for '{halves[0]}'. {RESUME_ELSEWHERE}")
    return {parameter: name for name, parameter in parameters.items()}
