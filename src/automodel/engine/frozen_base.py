"""The model of a run, with its weights: read in the dtype it needs, packed where it is asked for, an adapter beside it.

Frozen weights need no masters: they are read and held in the dtype they are computed in. Those that are packed are read
from their files and cross to the device one at a time (`adapters/packed_linear.py`); where the files are not as the
model is (`models/streamed.py`), the host holds the whole for a moment.
"""

from __future__ import annotations

from typing import Any

import torch

from automodel.adapters.attach import attach
from automodel.adapters.packed_linear import pack_layers
from automodel.engine.prepare import Prepared
from automodel.models.few_bits import refuse_few_bits
from automodel.models.load import load_model
from automodel.models.match_tokenizer import match_tokenizer
from automodel.models.streamed import open_weights


def load_trainable(prepared: Prepared) -> Any:
    """Weights, then few bits, then the adapter."""
    cfg, plan, adapter = prepared.cfg, prepared.plan, prepared.adapter
    dtype, model = _loaded_in(prepared), None
    if plan.packing is not None:
        model = _packed(prepared, dtype)
    elif plan.device == "cuda" and not cfg.model.trust_remote_code:  # whose model may want to be loaded its own way
        model = _streamed(prepared, dtype)
    if model is None:
        model = load_model(
            cfg.model, prepared.hf_config, prepared.task.head, dtype=dtype, device=plan.device, seed=cfg.seed
        )
    refuse_few_bits(cfg.model.pretrained_model_name_or_path, prepared.hf_config, model)
    match_tokenizer(model, prepared.tokenizer)
    model.train()
    if adapter is not None:
        attach(model, adapter, seed=cfg.seed, hold=half_of(prepared), everything=plan.capture)
    return model


def _streamed(prepared: Prepared, dtype: torch.dtype) -> Any:
    """The model, from its files straight to the GPU; None where the files are not as the model is."""
    weights = open_weights(prepared.cfg.model, prepared.hf_config, prepared.task.head, dtype, prepared.cfg.seed)
    if weights is None:
        return None
    weights.place(prepared.plan.device)
    return weights.model


def _packed(prepared: Prepared, dtype: torch.dtype) -> Any:
    """The model with its layers in few bits."""
    cfg, plan, adapter = prepared.cfg, prepared.plan, prepared.adapter
    assert plan.packing is not None
    assert adapter is not None, "weights in few bits are frozen"
    wide = torch.bfloat16 if plan.precision == "bf16-pure" else half_of(prepared) or torch.float32
    source = (cfg.model, prepared.hf_config, prepared.task.head)
    weights = open_weights(*source, dtype, cfg.seed)
    if weights is None:
        model: Any = load_model(*source, dtype=dtype, device="cpu", seed=cfg.seed)
        pack_layers(model, plan.packing, plan.device, wide, adapter.saved)
        return model
    names = pack_layers(
        weights.model, plan.packing, plan.device, wide, adapter.saved, lambda name: weights.read(name).to(dtype)
    )
    weights.without([f"{name}.{kind}" for name in names for kind in ("weight", "bias")]).place(plan.device)
    return weights.model


def half_of(prepared: Prepared) -> torch.dtype | None:
    """The 16-bit dtype that a step computes in over fp32 masters. Adapters are small: theirs are always fp32."""
    plan = prepared.plan
    if plan.precision == "bf16-pure" and prepared.adapter is not None and plan.capture:
        return torch.bfloat16
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(plan.precision)


def loraplus_ratio(prepared: Prepared) -> float:
    """LoRA+: how many times faster B learns than everything else."""
    section = prepared.cfg.peft
    return (section.loraplus_lr_ratio or 1.0) if section is not None else 1.0


def _loaded_in(prepared: Prepared) -> torch.dtype:
    """The dtype that weights are read in: that of the masters, or, of a frozen model, what it is computed in."""
    plan, adapter = prepared.plan, prepared.adapter
    if plan.precision == "bf16-pure":
        return torch.bfloat16
    frozen = adapter is not None and not adapter.saved  # modules trained in full begin with all their bits
    return (half_of(prepared) or torch.float32) if frozen and plan.capture else torch.float32
