"""Triton, imported so that its own functions can be interpreted: the kernels on CPU tensors, where there is no GPU.

Triton decides that when it is first imported, and torch imports it on all kinds of occasions. So it is imported here,
before anything else, in every test process. What is interpreted is still asked for test by test (`TRITON_INTERPRET`).
"""

import importlib
import importlib.util
import os
import sys

INSTALLED = importlib.util.find_spec("triton") is not None


def _import_interpreted() -> bool:
    import torch

    if not INSTALLED or torch.cuda.is_available() or "triton" in sys.modules:
        return False
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.language")
    del os.environ["TRITON_INTERPRET"]
    return True


INTERPRETED = _import_interpreted()
