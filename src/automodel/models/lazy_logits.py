"""The output of a language model whose logits are made when somebody looks at them.

Training reads the loss and, as a rule, nothing else, but the logits of 8,192 tokens and 128,256 words are 2 GiB in
bf16. So the output of a training step holds a promise. `output.logits`, `output["logits"]`, `output[1]` and
`to_tuple()` keep it: they give the tensor, with its graph, as stock transformers does. Code that rebuilds outputs item
by item (autocast wrappers, pytrees) passes the promise on unopened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast


class Promise:
    """A tensor that is made at most once."""

    def __init__(self, make: Callable[[], Tensor]):
        self._make: Callable[[], Tensor] | None = make
        self._made: Tensor | None = None

    def keep(self) -> Tensor:
        if self._make is not None:
            self._made, self._make = self._make(), None
        assert self._made is not None
        return self._made


@dataclass
class LazyCausalLMOutput(CausalLMOutputWithPast):
    """As its parent; `logits` may be given as a `Promise`."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return value.keep() if isinstance(value, Promise) else value

    def __getitem__(self, k: Any) -> Any:
        value = super().__getitem__(k)
        if isinstance(value, tuple):
            return tuple(part.keep() if isinstance(part, Promise) else part for part in value)
        return value.keep() if isinstance(value, Promise) else value
