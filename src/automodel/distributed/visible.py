"""How many GPUs this process may use, found without importing torch where there is nothing to find.

`automodel finetune` asks before anything heavy is imported: with one GPU, or none, the answer must not cost the second
that importing torch takes, in which the command opens the GPU's context and compiles kernels. So the device files are
counted first; only where there may be several is torch asked, which knows CUDA_VISIBLE_DEVICES in all its forms.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

DEVICE_FILE = re.compile(r"nvidia\d+")
OTHER_DRIVERS = ("dxg", "kfd")
"""Device files of GPUs that have none of their own in /dev: under Windows, and AMD's."""


def visible_gpus() -> int:
    """GPUs that torch would show this process. No CUDA context is made."""
    most = _at_most()
    if most < 2:
        return most
    import torch

    return torch.cuda.device_count()


def _at_most(devices: Path = Path("/dev")) -> int:
    """No more than these; several where it is not known."""
    if not _built_for_gpus():
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = 64 if visible is None else len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    if any((devices / name).exists() for name in OTHER_DRIVERS):
        return named
    return min(named, sum(bool(DEVICE_FILE.fullmatch(path.name)) for path in devices.glob("nvidia*")))


def _built_for_gpus() -> bool:
    found = find_spec("torch")
    libraries = Path(found.origin).parent / "lib" if found and found.origin else Path("/nowhere")
    return any((libraries / f"libtorch_{kind}.so").exists() for kind in ("cuda", "hip"))
