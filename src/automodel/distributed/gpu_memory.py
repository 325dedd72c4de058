"""What this process may take of a GPU's memory, which is not what the driver says that the GPU has."""

from __future__ import annotations

import torch


def share_of(device: torch.device | int | None = None) -> float:
    """Of the whole memory, as `torch.cuda.set_per_process_memory_fraction` or PYTORCH_ALLOC_CONF limit it. Allocators
    other than torch's own know no limit, and say so with an error or a number beyond all memory."""
    try:
        return min(1.0, torch.cuda.get_per_process_memory_fraction(device))
    except RuntimeError:
        return 1.0


def free_bytes(device: torch.device | None = None) -> int:
    """What nobody has, up to the share."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, min(free, int(total * share_of(device)) - torch.cuda.memory_reserved(device)))
