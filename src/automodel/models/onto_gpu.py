"""Numbers from the host's memory, or a mapped file, onto a GPU.

A plain copy out of memory that is not page-locked goes through the driver's own small buffers: about a GB a second on
some machines, where the bus carries fifty. Here the numbers pass through two page-locked seats: one is filled while the
other is under way. What has another dtype on the device is converted there, after it has crossed the bus as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

SEAT = 1 << 24  # bytes; page-locking more takes longer than it saves


class Way:
    """For one thread. Copies are complete once the current stream has waited for `stream`."""

    def __init__(self, device: torch.device):
        torch.cuda.set_device(device)  # of this thread; page-locking would open a context on the first
        self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.default_stream(device))  # whatever lay in the targets' memory has been read
        self.seats = [torch.empty(SEAT, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.left = [torch.cuda.Event() for _ in self.seats]
        self.turn = 0

    @torch.no_grad()
    def carry(self, target: Tensor, source: Tensor) -> None:
        """Queues `target.copy_(source)`, target contiguous on the device. Returns when the source has been read."""
        to, of = target.view(-1), source.reshape(-1)  # a view: a copy would be filled in its place
        step = SEAT // of.element_size()
        for start in range(0, len(of), step):
            part = of[start : start + step]
            seat, left = self.seats[self.turn][: part.nbytes].view(part.dtype), self.left[self.turn]
            self.turn = (self.turn + 1) % len(self.seats)
            left.synchronize()
            seat.copy_(part)
            with torch.cuda.stream(self.stream):
                sent = seat if seat.dtype == to.dtype else seat.to(to.device, non_blocking=True)
                to[start : start + step].copy_(sent, non_blocking=True)
                left.record()
