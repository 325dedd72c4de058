"""Callbacks that look at the model find one that they know.

Between two of the engine's steps the model has packed attention, fused blocks and, in bf16, rounded weights. A callback
that samples text in `on_evaluate`, or counts weights in `on_step_end`, must not see that. So events whose callbacks
take the model are called with the stock model in place (`FastPath.stock_model`). Whether they do is read from their
code: a parameter or a name `model`, or `trainer`. Nobody else pays for it.
"""

from __future__ import annotations

from typing import Any

from automodel.trainer.fast_path import FastPath

EVERY_STEP = ("on_step_begin", "on_step_end", "on_prediction_step", "on_log")


def looks_at_model(callback: Any, event: str) -> bool:
    """Whether a callback's method for an event may touch the model."""
    function = getattr(type(callback), event, None)
    code = getattr(function, "__code__", None)
    if code is None:
        return function is not None
    if event in EVERY_STEP and type(callback).__module__.startswith("transformers."):
        return False  # they count and print
    words = {*code.co_varnames, *code.co_names, *code.co_freevars, *(c for c in code.co_consts if isinstance(c, str))}
    return any(word == "model" or "trainer" in word for word in words)


def watch_events(handler: Any, fast: FastPath) -> None:
    """Lets the handler put the stock model in place for whoever looks at it, until `unwatch_events`."""
    call = type(handler).call_event.__get__(handler)

    def call_event(event: str, *args: Any, **kwargs: Any) -> Any:
        if fast.step is None or not any(looks_at_model(callback, event) for callback in handler.callbacks):
            return call(event, *args, **kwargs)
        with fast.stock_model():
            return call(event, *args, **kwargs)

    handler.call_event = call_event


def unwatch_events(handler: Any) -> None:
    handler.__dict__.pop("call_event", None)
