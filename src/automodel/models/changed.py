"""What somebody changed in a model since transformers made it: what packing and fused blocks must not walk around.

Packing changes what goes through a model: one row of documents, without padding and without a mask. Where a document
ends is told to transformers' attention interface alone, and a head sees the tokens that it pools instead of whole rows.
An attention, a pooler or a layer of somebody's own knows nothing of that and would compute something else, silently. So
the modules of a packed model are transformers' and torch's own, or of libraries that change modules token by token
(adapters, quantised products). Linear layers may be anybody's: there is nothing to a linear layer but tokens.

Fused blocks go further. They take weights out of a layer and leave its modules alone, so what they replace must be what
the model's class makes from its config (`as_made`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from automodel.models.families import family_of
from automodel.models.forward import attention_configs
from automodel.models.task_head import TaskHead, Wants

LIBRARIES = {
    "automodel", "torch", "transformers", "accelerate", "peft", "liger_kernel", "apex", "transformer_engine",
    "bitsandbytes", "torchao", "awq", "gptqmodel", "auto_gptq", "hqq", "optimum", "eetq", "aqlm", "compressed_tensors",
}  # fmt: skip
"""Packages whose modules do to a token what they do, whatever stands beside it."""

_LOSSES: dict[Wants, str] = {
    "pooled": "ForSequenceClassificationLoss",
    "tokens": "ForTokenClassification",
    "vocabulary": "ForCausalLMLoss",
}
"""transformers' functions that score the labels of a head, by what it gives."""


def what_changed(model: Any, modules: Sequence[nn.Module] = ()) -> str | None:
    """Why this model is no longer one that can be packed, in words; None where it is. `modules`: the model's, from
    callers that have them at hand."""
    modules = modules or list(model.modules())
    config, family = model.config, family_of(model.config)
    if family.positions_after_padding and getattr(model, family.backbone).embeddings.padding_idx != config.pad_token_id:
        return "the config has another pad token than the one by which the model counts positions"
    others = {own._attn_implementation for own in attention_configs(model, modules)} - {config._attn_implementation}
    if others:
        return f"attention is {config._attn_implementation} in some layers and {min(others)} in others"
    if _moved_windows(model):
        return "some layer has another window than the config has for its place"
    return _foreign_code(model, modules)


def own_loss(model: Any, head: TaskHead) -> bool:
    """Whether stock code would score labels by another function than transformers' for this head: one that was set on
    the model, put into transformers' table of losses, or put in the place of the cross-entropy below them."""
    from transformers.loss import loss_utils

    usual, used = getattr(loss_utils, _LOSSES[head.wants]), model.loss_function
    return used is not usual or not (_from_library(used) and _from_library(loss_utils.fixed_cross_entropy))


def _foreign_code(model: Any, modules: Sequence[nn.Module]) -> str | None:
    """The first module whose code is somebody's own, in words; None where there is none. A `forward` on the instance of
    the model itself is around all that happens in here (accelerate's autocast), and whoever put it there called us."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for kind in type(model).__mro__[:2]:  # a fast class, and the stock one below it
        if hasattr(kind, "forward") and not _library_class(kind, kind.forward):
            return _in_words(kind, kind.__name__, "the model")
    for module in modules:
        if module is model or isinstance(module, nn.Linear):
            continue
        own = module.__dict__.get("forward")
        if not _library_class(type(module), type(module).forward) or (own is not None and not _from_library(own)):
            name = next(name for name, other in model.named_modules() if other is module)
            return _in_words(type(module), name, name)
    attention = ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation)
    if attention is not None and not _from_library(attention):
        return f"the attention named {model.config._attn_implementation} is somebody's own"
    return None


def _in_words(kind: type, name: str, place: str) -> str:
    if _home(kind) in LIBRARIES:
        return f"the forward of {name} is somebody's own"
    return f"{place} is a {kind.__name__}, which neither transformers nor a library of adapters has"


@lru_cache(maxsize=1024)
def _library_class(kind: type, forward: Callable[..., Any]) -> bool:
    """Both, because classes are subclassed and patched."""
    return _home(kind) in LIBRARIES and _from_library(forward)


def _home(thing: Any) -> str:
    return thing.__module__.partition(".")[0]


def _from_library(forward: Any) -> bool:
    """By the module that a function was written in, not by the one it says: `functools.wraps` lends that."""
    while forward is not None:
        function = forward.func if isinstance(forward, partial) else getattr(forward, "__func__", forward)
        written_in = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
        if written_in.partition(".")[0] not in LIBRARIES:
            return False
        forward = getattr(forward, "__wrapped__", None)
    return True


def _moved_windows(model: Any) -> bool:
    """Whether some layer of a decoder has another window than the config has for the place where it stands. Stock masks
    are made for places, packed attention asks the layer."""
    config, family = model.config, family_of(model.config)
    if not family.decoder:
        return False
    kinds = getattr(config, "layer_types", None) or ()
    for place, layer in enumerate(getattr(getattr(model, family.backbone), "layers", ())):
        outer = layer._modules.get("self_attn")  # an adapter may be around it
        within = () if outer is None else outer.modules()
        attention = next((module for module in within if "config" in module.__dict__), None)
        slides = place >= len(kinds) or kinds[place] == "sliding_attention"
        masked = getattr(config, "sliding_window", None) if slides else None
        if attention is not None and _window(attention) != masked:
            return True
    return False


def _window(attention: Any) -> int | None:
    """Of a layer: its own, or the one it looks up in its config whenever it runs."""
    own = vars(attention)  # attributes that a module does not have are slow to ask for
    if not own.get("is_sliding", True):
        return None
    return own["sliding_window"] if "sliding_window" in own else getattr(attention.config, "sliding_window", None)


def as_made(model: Any) -> bool:
    """Whether the backbone consists of the modules that the model's class makes from its config: as many, of the same
    classes, in the same places. Made again without weights, which takes 30 ms for 400 modules."""
    config = copy.deepcopy(model.config)
    config._attn_implementation_internal = "eager"  # nothing is computed, so nothing need be installed
    with torch.device("meta"):
        again = type(model)(config)
    backbones = (getattr(m, family_of(model.config).backbone) for m in (model, again))
    ours, theirs = ([type(module) for module in backbone.modules()] for backbone in backbones)
    return ours == theirs
