"""The state of `FlatAdamW`, in the layout of torch.optim.AdamW.

    {"state": {index: {step, exp_avg, exp_avg_sq[, weight]}}, "param_groups": …, "extra": …}

torch.optim.AdamW loads it, unless moments are in 8 bits (`adamw8.EIGHT_BIT_KEYS`); `weight` is the fp32 weight, present
where the model holds a 16-bit copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from automodel.kernels.adamw8 import SIGNED_ZERO

if TYPE_CHECKING:
    from automodel.kernels.flat_adamw import FlatAdamW


def state_of(optimizer: FlatAdamW) -> dict[str, Any]:
    """Copies; nothing may be put off any more."""
    flat, device_state = optimizer.flat, optimizer.device_state
    step = device_state.step.to(torch.float32).reshape(()).cpu()
    state: dict[int, dict[str, torch.Tensor]] = {}
    for index, place in enumerate(flat.places):
        entry = {"step": step.clone()}
        entry |= {key: tensor.clone() for key, tensor in optimizer.moments_of(place).items()}
        if flat.copy is not None and not place.full_precision:
            entry["weight"] = place.view(flat.weight).clone()
        state[index] = entry
    groups, first = [], 0
    for group in optimizer.param_groups:
        indices = list(range(first, first + len(group["params"])))
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": indices})
        first += len(indices)
    scale = device_state.loss_scale
    extra = {"skipped": int(device_state.skipped), "loss_scale": None if scale is None else scale.cpu()}
    return {"state": state, "param_groups": groups, "extra": extra}


@torch.no_grad()
def load_into(optimizer: FlatAdamW, state_dict: dict[str, Any]) -> None:
    """From `state_of`, or from torch.optim.AdamW over the same parameters in the same groups."""
    flat, device_state, groups = optimizer.flat, optimizer.device_state, state_dict["param_groups"]
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in optimizer.param_groups]
    if sizes[0] != sizes[1]:
        raise ValueError(f"saved optimizer has groups of {sizes[0]} parameters, this one of {sizes[1]}")
    saved = [state_dict["state"].get(index) for group in groups for index in group["params"]]
    steps = {int(entry["step"]) for entry in saved if entry}
    if len(steps) > 1:
        raise ValueError(f"saved parameters differ in step count ({sorted(steps)}); FlatAdamW keeps one for all")
    optimizer.settle()  # an update that waits is of the time before
    for mine, loaded in zip(optimizer.param_groups, groups):
        mine.update({key: value for key, value in loaded.items() if key != "params"})
    for place, entry in zip(flat.places, saved):
        for name, view in optimizer.moments_of(place).items():
            if entry and name not in entry:
                raise ValueError(f"saved moments are {', '.join(entry)}, but this optimizer keeps {name}")
            view.copy_(entry[name]) if entry else view.fill_(SIGNED_ZERO if name == "exp_avg_code" else 0)
        if entry and "weight" in entry:
            place.view(flat.weight).copy_(entry["weight"])
            place.parameter.copy_(entry["weight"])
    betas = [group["betas"] for group in optimizer.param_groups]
    device_state.go_on_after(steps.pop() if steps else 0, betas)
    optimizer.send_hyper_parameters()
    extra = state_dict.get("extra", {})
    device_state.skipped.fill_(extra.get("skipped", 0))
    if device_state.loss_scale is not None and extra.get("loss_scale") is not None:
        device_state.loss_scale.copy_(extra["loss_scale"])
