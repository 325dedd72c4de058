"""The output of a language model whose logits are made when somebody looks at them.

Training reads the loss and, as a rule, nothing else, but the logits of 8,192 tokens and 128,256 words are 2 GiB in
bf16. So the output of a training step holds a promise. `output.logits`, `output["logits"]`, `output.get("logits")`,
`output[1]` and `to_tuple()` keep it: they give the tensor, with its graph, as stock transformers does.

Code that rebuilds outputs item by item (accelerate, pytrees, DDP) passes the promise on unopened. It is a tensor by
type: whatever is done to it is done to the logits, which are made then. Its shape and dtype are told without, and
accelerate's `float()` is another promise.

Many loops step first and look at accuracies afterwards. So before an optimizer changes the head, outputs that are still
held take one copy of it together: 0.5 GiB for a width of 2,048, a quarter of the logits. A head that changes in any
other way is noticed, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only
from transformers.modeling_outputs import CausalLMOutputWithPast

_TOLD = [getattr(Tensor, name).__get__ for name in ("dtype", "shape", "device", "requires_grad", "grad_fn")]
"""What is known of logits before they are made (DDP asks for the last; they have none yet)."""
_PUT_OFF = (Tensor.float, Tensor.clone)
"""What accelerate and DDP do to outputs that nobody looks at."""
_SAMPLE = 256  # values of a head that are compared


class HeadThen:
    """Weight and bias of a head, as they were in one call."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self._tensors = [weight] if bias is None else [weight, bias]
        self._were = [(_version(t), _sample(t)) for t in self._tensors]
        _watch_optimizers()
        _WAITING.add(self)

    def tensors(self) -> tuple[Tensor, Tensor | None]:
        for tensor, (version, sample) in zip(self._tensors, self._were):
            # 8-bit optimizers and writes to `.data` leave the version as it is.
            if _version(tensor) != version or not torch.equal(_sample(tensor), sample):
                raise RuntimeError(
                    "output.logits are made when they are first read, from a head that was changed in the meantime. "
                    "Read them before lm_head changes: `logits = output.logits`, right after the call."
                )
        weight, *bias = self._tensors
        return weight, bias[0] if bias else None

    def take_copies(self, copies: dict[int, Tensor]) -> None:
        """Of what is about to change. `copies` are shared by all that wait."""
        for place, tensor in enumerate(self._tensors):
            if id(tensor) in copies and _version(tensor) == self._were[place][0]:
                if copies[id(tensor)] is tensor:
                    copies[id(tensor)] = _copy(tensor)
                self._tensors[place] = copies[id(tensor)]
                self._were[place] = _version(self._tensors[place]), self._were[place][1]


_WAITING: WeakSet[HeadThen] = WeakSet()


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _WAITING:
        stepping = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        for head in list(_WAITING):
            head.take_copies(stepping)


def _version(tensor: Tensor) -> int:
    """How often it was changed, as autograd counts; tensors of `torch.inference_mode()` are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _sample(tensor: Tensor) -> Tensor:
    values = tensor.detach().flatten()
    return values[:: max(1, len(values) // _SAMPLE)].clone()


class Later:
    """A tensor that is made at most once, with a graph if the call had one: whoever looks first may do so without."""

    def __init__(self, make: Callable[[], Tensor], grad: bool):
        self.make: Callable[[], Tensor] | None = make
        self.made: Tensor | None = None
        self.grad = grad

    def keep(self) -> Tensor:
        if self.make is not None:
            with torch.inference_mode(False), torch.set_grad_enabled(self.grad):
                self.made, self.make = self.make(), None
        assert self.made is not None
        return self.made


class Promise(Tensor):
    """Of logits, where a tensor is expected."""

    later: Later

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TOLD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _PUT_OFF and len(args) == 1 and not kwargs:
            return _put_off(func, args[0])
        args, kwargs = tree_map_only(Promise, keep, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args=(), kwargs=None) -> Any:  # ty: ignore[incompatible-method-override]
        """Below autograd, where only functions come that do not ask the other one."""
        args, kwargs = tree_map_only(Promise, lambda p: keep(p).detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


def promised(
    make: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device, grad: bool
) -> Promise:
    """`grad`: whether what is made has a graph."""
    how: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": grad}
    promise = Tensor._make_wrapper_subclass(Promise, shape, **how)
    promise.later = Later(make, grad)
    if grad:
        with torch._C.DisableTorchFunctionSubclass():
            promise.register_hook(_refuse)
    return promise


def _refuse(gradient: Tensor | None) -> None:
    """Autograd functions take a promise for a tensor without history; its gradient must not end here, unsaid."""
    if gradient is not None:  # DDP's has none
        raise RuntimeError(
            "logits out of output.items() or output.values() went into a torch.autograd.Function as they are; give it "
            "output.logits instead"
        )


def keep(promise: Promise) -> Tensor:
    return promise.later.keep()


def _put_off(func: Callable[[Tensor], Tensor], promise: Promise) -> Promise:
    later, dtype = promise.later, torch.float32 if func is Tensor.float else promise.dtype
    grad = later.grad and torch.is_grad_enabled()
    return promised(lambda: func(later.keep()), promise.shape, dtype, promise.device, grad)


@dataclass
class LazyCausalLMOutput(CausalLMOutputWithPast):
    """As its parent; `logits` may be given as a `Promise`."""

    def __getattribute__(self, name: str) -> Any:
        return _kept(super().__getattribute__(name))

    def __getitem__(self, k: Any) -> Any:
        value = super().__getitem__(k)
        return tuple(map(_kept, value)) if isinstance(value, tuple) else _kept(value)

    def get(self, key: Any, default: Any = None) -> Any:
        return _kept(super().get(key, default))


def _kept(value: Any) -> Any:
    return keep(value) if isinstance(value, Promise) else value
