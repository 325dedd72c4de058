"""Optimizers by name: what each name means, before torch is imported.

The names are those of TrainingArguments' `optim`, with the same meaning, and a few shorter ones. Several names mean one
optimizer: whether AdamW is fused, and whose implementation it is, is not for the config to say.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["adamw", "adafactor", "lion", "muon", "sgd", "rmsprop", "adagrad"]

IN_WORDS: dict[str, str] = {
    "adamw": "AdamW",
    "adafactor": "Adafactor",
    "lion": "Lion",
    "muon": "Muon",
    "sgd": "SGD",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
}


@dataclass(frozen=True)
class Kind:
    """An optimizer and the form its state is kept in."""

    algorithm: Algorithm
    bits: int = 32
    """Of each number of the state; 8 is the block-wise form of Dettmers et al."""
    paged: bool = False
    """Whether the state may be moved to host memory by the driver where the GPU is full."""

    @property
    def plain(self) -> bool:
        """Whether the state is ordinary tensors beside the parameters."""
        return self.bits == 32 and not self.paged

    @property
    def in_words(self) -> str:
        form = [f"{self.bits}-bit"] * (self.bits != 32) + ["paged"] * self.paged
        return IN_WORDS[self.algorithm] + (f", {' and '.join(form)} states" if form else "")


ADAMW = Kind("adamw")
ADAMW_8BIT = Kind("adamw", bits=8)
CAPTURED = (ADAMW, ADAMW_8BIT)
"""What has a form of our own that CUDA graphs can record (`kernels/flat_adamw.py`, `kernels/adamw8.py`)."""

KINDS: dict[str, Kind] = {
    "adamw": ADAMW,
    "adamw_torch": ADAMW,
    "adamw_torch_fused": ADAMW,
    "adamw_hf": ADAMW,
    "adamw_apex_fused": ADAMW,
    "adamw_8bit": ADAMW_8BIT,
    "adamw_bnb_8bit": ADAMW_8BIT,
    "adamw_torch_8bit": ADAMW_8BIT,
    "paged_adamw": Kind("adamw", paged=True),
    "paged_adamw_32bit": Kind("adamw", paged=True),
    "paged_adamw_8bit": Kind("adamw", bits=8, paged=True),
    "lion": Kind("lion"),
    "lion_32bit": Kind("lion"),
    "lion_8bit": Kind("lion", bits=8),
    "paged_lion": Kind("lion", paged=True),
    "paged_lion_32bit": Kind("lion", paged=True),
    "paged_lion_8bit": Kind("lion", bits=8, paged=True),
    "adafactor": Kind("adafactor"),
    "muon": Kind("muon"),
    "sgd": Kind("sgd"),
    "rmsprop": Kind("rmsprop"),
    "adagrad": Kind("adagrad"),
}

INSTALL = "pip install 'automodel-finetune[quant]'"


def has_bitsandbytes() -> bool:
    """Whether the library of 8-bit and paged optimizers is installed; it is not imported for that."""
    return importlib.util.find_spec("bitsandbytes") is not None
