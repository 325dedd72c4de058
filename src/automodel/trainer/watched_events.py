"""Callbacks that look at the model find one that they know.

Between two of the engine's steps the model has packed attention, fused blocks and, in bf16, rounded weights. A callback
that samples text in `on_evaluate`, or counts weights in `on_step_end`, must not see that. So events whose callbacks
take the model are called with the stock model in place (`FastPath.stock_model`). Whether they do is read from their
code (`reach.py`): a name `model` or `trainer`, `**kwargs` that are handed on, or anything that holds one. Nobody else
pays for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer

from automodel.trainer.fast_path import FastPath
from automodel.trainer.reach import Reach, holds, passes_keywords_on, reach

EVERY_STEP = ("on_step_begin", "on_step_end", "on_prediction_step", "on_log")
MODELS = (torch.nn.Module, Trainer)


class Looks:
    """Which callbacks may touch the model; what their code says is read once."""

    def __init__(self) -> None:
        self.code: dict[Callable[..., Any], tuple[bool, Reach]] = {}

    def at_model(self, callback: Any, event: str) -> bool:
        """Whether a callback's method for an event may."""
        method = getattr(callback, event, None)
        function: Any = getattr(method, "__func__", method)
        if getattr(function, "__code__", None) is None:
            return function is not None
        if event in EVERY_STEP and type(callback).__module__.startswith("transformers."):
            return False  # they count and print
        if function not in self.code:
            self.code[function] = _by_name(function), reach(function, type(callback))
        by_name, code = self.code[function]
        held = [value for name, value in vars(callback).items() if name in code.words]
        held += [value for _, value in code.values()]
        return by_name or _names_a_model(code.words) or any(holds(value, MODELS) for value in held)


def _by_name(function: Any) -> bool:
    """By the words of the method itself, whose code may be a library's."""
    code = function.__code__
    words = {*code.co_varnames, *code.co_names, *code.co_freevars, *(c for c in code.co_consts if isinstance(c, str))}
    return _names_a_model(words) or passes_keywords_on(function)


def _names_a_model(words: Any) -> bool:
    return any(word == "model" or "trainer" in word for word in words)


def watch_events(handler: Any, fast: FastPath) -> None:
    """Lets the handler put the stock model in place for whoever looks at it, until `unwatch_events`."""
    call, looks = type(handler).call_event.__get__(handler), Looks()

    def call_event(event: str, *args: Any, **kwargs: Any) -> Any:
        if fast.step is None or not any(looks.at_model(callback, event) for callback in handler.callbacks):
            return call(event, *args, **kwargs)
        with fast.stock_model():
            return call(event, *args, **kwargs)

    handler.call_event = call_event


def unwatch_events(handler: Any) -> None:
    handler.__dict__.pop("call_event", None)
