"""The last product of a causal language model, taken out of it: the loss makes it (`head_outputs.py`).

A causal LM of transformers is a backbone and `lm_head`, a linear layer, mostly with the input embeddings as its weight.
For the families of `head_form.py` that is all, apart from a factor or a soft-cap, which the loss knows too. Every other
family keeps its logits, and so does a head that is more than a plain linear layer (an adapter, quantised weights, a
hook).

Legend: R rows, N width, V words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from automodel.kernels.cpu_products import Bf16Copies, as_copied
from automodel.kernels.vocabulary_parallel import VocabularyPart
from automodel.models.head_form import HeadForm, head_form
from automodel.models.head_outputs import Unprojected


def is_plain(head: Any) -> bool:
    """A linear layer, with nothing around it."""
    hooks = (getattr(head, name, None) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))
    return type(head) is nn.Linear and "forward" not in head.__dict__ and not any(hooks)


def _own_words(weight: Any, bias: Any) -> tuple[Tensor, Tensor | None, VocabularyPart]:
    """Of a head that is cut by words: this rank's part."""
    from automodel.distributed.shards import piece_of

    part = VocabularyPart(weight.device_mesh.get_group(), piece_of(weight).offsets[0], weight.shape[0])
    return weight.to_local(), None if bias is None else bias.to_local(), part


def unprojected_head(model: Any, copies: Bf16Copies | None = None) -> Callable[[Tensor], Unprojected] | None:
    """From hidden states (…, N) to what the loss takes; None where only the model itself can make its logits. `copies`:
    of matrices in bf16, on a CPU that makes products in it."""
    form, head = head_form(model.config), model.get_output_embeddings()
    if form is None or not is_plain(head):
        return None

    if copies is not None:
        return _copied_head(head, copies, form)

    def project_later(hidden: Tensor) -> Unprojected:
        # The loss is summed outside of autocast, so the dtype of the product is settled here, as autocast would.
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
        bias = None if head.bias is None else head.bias.to(dtype)
        weight, part = head.weight.to(dtype), None
        if hasattr(weight, "device_mesh"):  # tensor parallel: each rank has some of the words
            weight, bias, part = _own_words(weight, bias)
        return Unprojected(hidden.reshape(-1, hidden.shape[-1]).to(dtype), weight, bias, *form, part)

    return project_later


def _copied_head(head: nn.Linear, copies: Bf16Copies, form: HeadForm) -> Callable[[Tensor], Unprojected]:
    weight = copies.of(head.weight)
    bias = None if head.bias is None else copies.of(head.bias)

    def project_later(hidden: Tensor) -> Unprojected:
        rows_RN = hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype)
        bias_V = None if bias is None else as_copied(head.bias, bias)
        return Unprojected(rows_RN, as_copied(head.weight, weight), bias_V, *form)

    return project_later
