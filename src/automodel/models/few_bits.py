"""Checkpoints whose weights are in few bits already (`…-bnb-4bit`, GPTQ, AWQ): read to be asked, not to be trained.

Codes have no gradients, and what such a run would save could not be told from the original. Full weights are packed
while they are loaded (`quantization:`, adapters/packed_linear.py), so the model that the codes were made from does what
these are wanted for. MXFP4 and FP8 files are the originals of their models; transformers expands them where it has no
kernels for them, and then there is nothing to refuse.
"""

from __future__ import annotations

from typing import Any

from automodel.config.errors import UserError

EXPANDED = ("mxfp4", "fp8")
"""What transformers may expand while it loads."""


def refuse_few_bits(name: str, hf_config: Any, loaded: Any = None) -> None:
    """Before anything is read, by the config; with the model, by what became of it."""
    form = getattr(hf_config, "quantization_config", None)
    if form is None:
        return
    form = form if isinstance(form, dict) else form.to_dict()
    method = str(getattr(form.get("quant_method"), "value", form.get("quant_method") or "unnamed"))
    if method in EXPANDED and not getattr(loaded, "is_quantized", False):
        return
    raise UserError(
        f"model: the weights of '{name}' are in few bits already (quantization_config: {method}), which cannot be "
        "trained. Name the model that they were made from; with `peft:`, `quantization: {load_in_4bit: true}` packs it "
        "while it is loaded."
    )
