"""AdamW of one layer while the layer before it computes.

An update moves 28 bytes a parameter and computes next to nothing; a forward pass computes a lot and moves little. One
after the other, each leaves half of the GPU idle. But nobody reads the weights of layer 5 before layer 5 of the next
step, so its update may wait until then, and run beside layers 1 to 4.

`step` at the end of a step then finds the norm, the clip coefficient and the settings as ever, and updates what has no
layer; the matrices of the layers keep their gradients at fixed places. The next step begins with `LateUpdates.begin`,
which queues the updates of all layers on a second stream; before each layer, the main stream waits for its own. The
arithmetic is the same, the order of everything that depends on each other is the same: the numbers are the same.

Side by side is not for free: a product takes whole processors, and both read through the same cache. An update by as
many programs as there are blocks takes as long beside a forward pass as after it (524 and 519 µs a layer of Llama 1B at
1,400 tokens, pure bf16; 763 and 759 with fp32 weights). With two processors in five for a few programs that walk, and
the others for the products, it is 495 and 680.

Whoever looks at weights between two steps calls `FlatAdamW.settle` first, as for rows that wait (`lazy_rows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from automodel.kernels.flat_adamw import FlatAdamW

SMALLEST = 1 << 16  # parameters of a matrix that is worth putting off


def late_parameters(layers: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """The matrices of each layer."""
    return [[p for p in layer.parameters() if p.ndim == 2 and p.numel() >= SMALLEST] for layer in layers]


class LateUpdates:
    """Queues the updates of the layers and makes each layer wait for its own."""

    def __init__(self, optimizer: FlatAdamW, layers: Sequence[nn.Module], stream: torch.cuda.Stream):
        self.optimizer, self.stream = optimizer, stream
        self.done: list[torch.cuda.Event | None] = [None] * len(layers)
        self.hooks: list[Any] = [
            layer.register_forward_pre_hook(self._enters(index)) for index, layer in enumerate(layers)
        ]

    def begin(self) -> None:
        """At the start of a step, before the first layer."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for index in range(len(self.done)):
                self.optimizer.update_late(index, beside=index > 0)  # beside the first, nobody has begun
                self.done[index] = self.stream.record_event()

    def _enters(self, index: int) -> Any:
        def enter(*_: Any) -> None:
            event, self.done[index] = self.done[index], None
            if event is not None:
                torch.cuda.current_stream().wait_event(event)

        return enter

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()
