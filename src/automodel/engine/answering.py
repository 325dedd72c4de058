"""The forward pass of a saved model that answers: in which precision, and on a CPU by which products.

On a CPU the model's own products are timed once and the speeds kept (`engine/product_facts.py`); bf16 is chosen where
it is clearly faster, as in training. The choice follows from the model and the machine, never from how much is asked: a
text gets the same answer alone and among a thousand others, to within the rounding of the precision. A run that asked
for a precision is answered in it, and `--precision` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from automodel.adapters.attach import adapter_of
from automodel.data.batch import Batch
from automodel.engine.product_facts import product_facts
from automodel.engine.saved import SavedModel
from automodel.kernels.cpu_products import Bf16Copies, make_products
from automodel.models.block_support import can_pool, whole_layers
from automodel.models.cpu_linears import use_cpu_products
from automodel.models.forward import make_forward
from automodel.models.pooled_block import pool_last_block
from automodel.models.task_head import TaskHead
from automodel.plan.asked import asked_precision
from automodel.plan.hardware import read_hardware
from automodel.plan.precision import precision_of_answers

Precision = Literal["auto", "fp32", "bf16"]
TOKENS = 512
"""Of a batch, for which products are timed."""


def load_for_answers(saved: SavedModel, device: str, precision: Precision, *, packed: bool) -> Any:
    """The model with its weights. On a CPU its products are swapped for the fastest, and where documents are packed its
    layers for layers that are one operation, the last one of a classifier for the pooled token alone."""
    wish = precision
    if wish == "auto" and saved.run is not None:
        asked = asked_precision(saved.run)[0]
        wish = "bf16" if asked.startswith("bf16") else "fp32" if asked in ("fp32", "tf32") else "auto"
    if device != "cpu":
        kept = {"auto": saved.saved_dtype(), "fp32": torch.float32, "bf16": torch.bfloat16}
        return saved.load(device, kept[precision])
    model = saved.load(device, torch.float32)
    if packed and _pools(model, saved.task.head):  # first: what is swapped below are the products inside
        pool_last_block(model)
    if adapter_of(model) is not None:
        return model
    chosen, library = precision_of_answers(wish, product_facts(read_hardware(), model, TOKENS, passes=1))
    if (chosen, library) == ("fp32", "torch"):
        return model
    copies = Bf16Copies() if chosen == "bf16" else None
    whole = packed and whole_layers(saved.hf_config)
    use_cpu_products(model, make_products(chosen, library), copies, whole_layers=whole, linears=True)
    if copies is not None:
        copies.refresh()
    return model


def forward_for_answers(model: Any, head: TaskHead, *, packed: bool) -> Callable[[Batch], Tensor]:
    """From a batch to its logits."""
    return make_forward(model, head, "packed" if packed else "padded", swapped=packed and _pools(model, head))


def _pools(model: Any, head: TaskHead) -> bool:
    """Whether a classifier's last block runs for the token alone that it pools, which is exact."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    return on_cpu and head.wants == "pooled" and can_pool(model.config, fused=False)
