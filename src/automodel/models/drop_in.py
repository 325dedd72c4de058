"""A Hugging Face model that computes faster and is otherwise the model it was: `speed_up(model, head)`.

    from automodel import AutoModelForCausalLM          # instead of `from transformers import …`

The model keeps its class (by name, and by `isinstance`), parameters, state dict, `generate`, `save_pretrained` and
everything else. Only `forward` is new. It looks at a call, and where it can compute the same numbers faster, it does:

- padding is taken out (`unpad.py`), attention runs document by document, and logits are padded back;
- blocks are fused where kernels run: half precision on a GPU (`packed_call.py`, `fuse.py`), under autocast over rounded
  copies of the weights (`half_weights.py`);
- the loss of a language model in training makes its logits a few rows at a time, and the output makes all of them only
  if somebody looks (`lazy_logits.py`).

Outside of training the logits of tokens are what a caller looks at, padding included: there a batch with padding takes
the stock forward, unless the caller says that it wants the loss alone (`loss_alone`). In training the rows of padding
are zeros.

Every other call is the stock forward, exactly: with a key/value cache, embeddings for ids, attentions or hidden states
wanted, families that cannot be packed, several replicas, torch.compile, torch.func, eager attention, hooks inside the
model, another loss function, labels on padding. `path_taken(model)` tells what the last call did, and why it was stock.

Legend: B rows, S columns, T real tokens, R rows that carry a label, V words.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import (
    SequenceClassifierOutput,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)

from automodel.data.batch import IGNORE, PackedBatch
from automodel.kernels.linear_cross_entropy import CrossEntropy, linear_cross_entropy
from automodel.kernels.token_scores import TokenScores
from automodel.models.changed import as_made, own_loss, what_changed
from automodel.models.families import family_of, packing_support
from automodel.models.forward import make_forward, make_loss_forward
from automodel.models.fuse import will_fuse
from automodel.models.half_weights import Unit, half_weights, units_of
from automodel.models.head_form import head_form
from automodel.models.head_outputs import Unprojected
from automodel.models.lazy_logits import HeadThen, LazyCausalLMOutput, Promise, promised
from automodel.models.lm_head import is_plain
from automodel.models.packed_call import (
    Blocks,
    PackedCode,
    compute_dtype,
    has_hooks,
    kernels_run,
    make_blocks,
    neighbours,
    recomputed_layers,
    recomputes_by_saved_tensors,
    untouched,
)
from automodel.models.task_head import TaskHead, Wants
from automodel.models.unpad import Inputs, Rectangular, Unpadded, aligned_labels, unpad

logger = logging.getLogger(__name__)

_STATE = "_automodel_calls"
_CARRIED = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "labels")
_UNDERSTOOD = (*_CARRIED, "use_cache", "num_items_in_batch")
_STOCK_VALUES: dict[str, tuple[Any, ...]] = {
    "return_dict": (None, True),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "logits_to_keep": (0,),
}
"""Arguments that are understood as long as they ask for nothing."""
_ATTENTIONS = ("sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")


class Calls:
    """What calls of one model share. A copy of the model begins without."""

    def __init__(self, head: TaskHead, kernels: bool):
        self.head, self.kernels = head, kernels
        self.path, self.reason = "stock", "it was not called yet"
        self.said: set[str] = set()
        self.blocks: Blocks | None = None
        self.no_blocks_at: tuple[Any, ...] | None = None
        self.units: tuple[tuple[int, ...], list[Unit]] | None = None
        """Identities of parameters, and how they are copied under autocast (held, so that no id is given anew)."""
        self.as_made: tuple[tuple[type, ...], bool] | None = None
        """Classes of the modules, and whether transformers would make them."""
        self.forwards: dict[Any, Callable[..., Any]] = {}
        self.loss_alone = False
        """Whether the caller looks at the loss and at nothing else (`loss_alone`)."""
        self.tally: TokenScores | None = None
        """Counts entropy and right labels of language models (`counting_tokens`)."""

    def __deepcopy__(self, memo: Any) -> Calls:
        return Calls(self.head, self.kernels)

    def __reduce__(self) -> Any:
        return Calls, (self.head, self.kernels)

    def took(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        if reason not in self.said:
            self.said.add(reason)
            logger.info("%s forward: %s", path, reason)


def speed_up(model: Any, head: TaskHead, *, kernels: bool = True) -> Any:
    """Gives a transformers model the fast `forward`, in place. `kernels=False` keeps stock blocks."""
    if packing_support(model.config, head).packed and not hasattr(model, _STATE):
        model.__class__ = _fast_class(type(model))
        setattr(model, _STATE, Calls(head, kernels))
    return model


@contextmanager
def loss_alone(model: Any) -> Generator[None]:
    """Inside this block the caller reads the loss of the model's calls and no logits, so padding may be taken out of
    batches that are evaluated."""
    calls = getattr(model.get_base_model() if hasattr(model, "get_base_model") else model, _STATE, None)
    if calls is None:
        yield
        return
    before, calls.loss_alone = calls.loss_alone, True
    try:
        yield
    finally:
        calls.loss_alone = before


@contextmanager
def counting_tokens(model: Any, tally: TokenScores) -> Generator[None]:
    """Inside this block `tally` counts what the model's calls learn, where their loss is made without all logits."""
    calls = getattr(model.get_base_model() if hasattr(model, "get_base_model") else model, _STATE, None)
    if calls is None:
        yield
        return
    calls.tally = tally
    try:
        yield
    finally:
        calls.tally = None


def path_taken(model: Any) -> tuple[str, str]:
    """(`fused`, `packed` or `stock`; why) of the last call."""
    calls = getattr(model, _STATE, None)
    return ("stock", "the family cannot be packed") if calls is None else (calls.path, calls.reason)


@functools.cache
def _fast_class(stock: Any) -> type:
    """The class with another `forward`, under the same name."""
    names = [name for name in inspect.signature(stock.forward).parameters if name != "self"]

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        elsewhere = (
            torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()
        )
        if elsewhere or "cu_seq_lens_q" in kwargs:  # the last: our own call, on its way to the stock code
            return stock.forward(self, *args, **kwargs)
        given = dict(zip(names, args)) | kwargs
        calls = self.__dict__.get(_STATE)
        if calls is None:  # made by the class itself, not by an auto class
            return stock.forward(self, *args, **kwargs)
        try:
            _check(self, calls, given)
            modules = list(self.modules())  # 0.2 ms for 28 layers, and many ask for them
            _check_model(self, calls, given, modules)
            return _fast_forward(self, calls, given, modules)
        except Rectangular as reason:
            calls.took("stock", str(reason))
        return stock.forward(self, *args, **kwargs)

    def reduced(self: Any, protocol: Any) -> Any:
        return _empty, (stock,), self.__dict__

    own = {"forward": forward, "__reduce_ex__": reduced, "__doc__": stock.__doc__}
    return type(stock.__name__, (stock,), {**own, "__module__": stock.__module__, "__qualname__": stock.__qualname__})


def _empty(stock: type) -> Any:
    """For pickle and copy, which cannot find a class that was made here by its name."""
    return object.__new__(_fast_class(stock))


def _check(model: Any, calls: Calls, given: dict[str, Any]) -> None:
    """Raises `Rectangular` for calls that only the stock forward answers, whatever the model's modules are."""
    ids = given.get("input_ids")
    for name, value in given.items():
        if name not in _UNDERSTOOD and value is not None:
            usual = _STOCK_VALUES.get(name)
            if usual is None or isinstance(value, Tensor) or value not in usual:
                raise Rectangular(f"{name} was given")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise Rectangular("input_ids are not a rectangle")
    if ids.device.type not in ("cpu", "cuda"):
        raise Rectangular(f"packed attention is not tried out on {ids.device.type}")
    for name in ("attention_mask", "token_type_ids", "labels", "position_ids"):
        value = given.get(name)
        flat = name == "labels" and calls.head.wants == "pooled"
        rows = (1, len(ids)) if name == "position_ids" else (len(ids),)
        if value is None or flat:
            continue
        if (
            not isinstance(value, Tensor)
            or value.dim() != 2
            or value.shape[0] not in rows
            or value.shape[1] != ids.shape[1]
        ):
            raise Rectangular(f"{name} has another shape than input_ids")
        if value.device != ids.device:
            raise Rectangular(f"{name} lies on another device")
    if given.get("token_type_ids") is not None and not family_of(model.config).token_types:
        raise Rectangular("token_type_ids were given to a family without them")
    _check_cache(model, calls, given)
    if ids.device.type == "cpu" and (given.get("attention_mask") is None or bool(given["attention_mask"].all())):
        raise Rectangular("on the CPU, a batch without padding gains nothing")


def _check_model(model: Any, calls: Calls, given: dict[str, Any], modules: Sequence[Any]) -> None:
    """The same for models, which may change between two calls."""
    config = model.config
    if model.device.type == "meta":
        raise Rectangular("weights are fetched when their module is called (accelerate's offloading)")
    if model.__dict__.get("_is_replica") or len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise Rectangular("the model is spread over devices")
    chosen_for_it = config.model_type == "gemma2" and config._attn_implementation == "eager"  # SDPA has no cap
    if config._attn_implementation not in _ATTENTIONS and not chosen_for_it:
        raise Rectangular(f"attention is {config._attn_implementation}")
    if given.get("labels") is not None and own_loss(model, calls.head):
        raise Rectangular("the model has a loss function of its own")
    if config.output_hidden_states or config.output_attentions or not getattr(config, "return_dict", True):
        raise Rectangular("the config asks for other outputs")
    if given["input_ids"].is_cuda and getattr(config, "sliding_window", None) and compute_dtype(model) == torch.float32:
        raise Rectangular("no kernel has windows over documents of unequal lengths in fp32")
    if has_hooks(model, modules):
        raise Rectangular("there are hooks inside the model")
    changed = what_changed(model, modules)
    if changed is not None:
        raise Rectangular(changed)


def _caches(model: Any, given: dict[str, Any]) -> bool:
    use_cache = given.get("use_cache")
    return bool(getattr(model.config, "use_cache", False) if use_cache is None else use_cache)


def _check_cache(model: Any, calls: Calls, given: dict[str, Any]) -> None:
    """A language model that is only asked for logits also gives its cache, and a loop that generates reads it."""
    if given.get("use_cache"):
        raise Rectangular("use_cache was given")
    wants_cache = calls.head.next_token and _caches(model, given)
    if wants_cache and not model.training and given.get("labels") is None:
        raise Rectangular("the cache may be wanted; use_cache=False says it is not")


def _fast_forward(model: Any, calls: Calls, given: dict[str, Any], modules: Sequence[Any]) -> Any:
    labels = given.get("labels")
    inputs = Inputs(*(given.get(name) for name in _CARRIED), caches=_caches(model, given))  # ty: ignore[invalid-argument-type]
    batch = unpad(inputs, calls.head, model.config)
    _check_padding_is_unread(model, calls, batch, labels)
    rows_R = None
    if labels is not None and calls.head.next_token:
        aligned_T = batch.take(aligned_labels(labels, calls.head))
        rows_R = (aligned_T != IGNORE).nonzero().squeeze(1)
        if not len(rows_R):
            raise Rectangular("no token has a label")
        batch = replace(batch, packed=replace(batch.packed, labels_R=aligned_T))
    layers = recomputed_layers(model, modules)
    with _weights(model, calls, layers, modules):
        blocks = _blocks(model, calls, batch.packed.max_seqlen, layers, modules)
        # Drawn only where a kernel reads it: stock blocks draw as they always did.
        draws = model.training and blocks is not None
        seed = torch.randint(2**62, (1,), device=model.device) if draws else None
        with PackedCode(model, blocks, batch.packed, seed, layers, modules).call():
            output = _ANSWERS[calls.head.wants](model, calls, batch, given, rows_R, blocks is not None)
    if blocks is not None:
        calls.took("fused", "padding taken out, blocks fused")
    else:
        calls.took("packed", "padding taken out, stock blocks")
    return output


def _check_padding_is_unread(model: Any, calls: Calls, batch: Unpadded, labels: Tensor | None) -> None:
    """A prediction has logits for padding, too, and a metric may count them: they must be the stock model's."""
    learns = model.training and torch.is_grad_enabled()
    if calls.head.wants == "pooled" or learns or batch.places_T is None:
        return
    if labels is None or not calls.loss_alone:
        raise Rectangular("outside of training, logits on padding may be read")


def _weights(model: Any, calls: Calls, layers: list[Any], modules: Sequence[Any]) -> AbstractContextManager:
    """Under autocast, weights that fused blocks can read; nothing where there are none, or where the model computes
    without. Layers that are computed again would find the parameters in their places."""
    autocasts = compute_dtype(model) != model.dtype
    if not autocasts or layers or not torch.is_grad_enabled() or not _can_fuse(model, calls, modules):
        return nullcontext()
    identities = tuple(map(id, model.parameters()))
    if calls.units is None or calls.units[0] != identities:
        calls.units = identities, units_of(model, neighbours(model))
    return half_weights(model, calls.units[1], compute_dtype(model))


def _can_fuse(model: Any, calls: Calls, modules: Sequence[Any]) -> bool:
    able = calls.kernels and kernels_run(model) and will_fuse(model)
    return able and untouched(model, modules) and _as_made(model, calls, modules)


def _as_made(model: Any, calls: Calls, modules: Sequence[Any]) -> bool:
    """Asked again only when some module is of another class."""
    classes = tuple(map(type, modules))
    if calls.as_made is None or calls.as_made[0] != classes:
        calls.as_made = classes, as_made(model)
    return calls.as_made[1]


def _blocks(model: Any, calls: Calls, longest: int, layers: list[Any], modules: Sequence[Any]) -> Blocks | None:
    """Fused blocks, made once for weights that stay where they are."""
    if not calls.kernels or not kernels_run(model) or not recomputes_by_saved_tensors(layers):
        return None
    if compute_dtype(model) != model.dtype:
        return None  # autocast, and no copies of the weights were made
    if not isinstance(next(model.parameters()), torch.nn.Parameter):
        calls.forwards.clear()
        return make_blocks(model, longest, laid=True)  # over copies, which are there for this call only
    if not untouched(model, modules) or not _as_made(model, calls, modules):
        return None
    trained = tuple(p.requires_grad for p in model.parameters())
    if calls.blocks is not None and all(trained) and calls.blocks.fit(model, longest):
        return calls.blocks
    state = (trained, tuple(map(id, modules)), tuple(p.data_ptr() for p in model.parameters()))
    if calls.no_blocks_at == state:
        return None
    calls.forwards.clear()
    calls.blocks = make_blocks(model, longest)
    calls.no_blocks_at = state if calls.blocks is None else None
    return calls.blocks


def _forward(model: Any, calls: Calls, fused: bool, for_loss: bool = False) -> Callable[[PackedBatch], Any]:
    """The engine's forward over packed batches (`forward.py`), made while the code it runs on is switched."""
    head = head_form(model.config), is_plain(model.get_output_embeddings())  # both may change between two calls
    key = (fused, for_loss, tuple(id(m) for m in model.children()), head)
    if key not in calls.forwards:
        make = make_loss_forward if for_loss else make_forward
        calls.forwards[key] = make(model, calls.head, "packed", swapped=fused)
    return calls.forwards[key]


def _language(
    model: Any, calls: Calls, batch: Unpadded, given: dict[str, Any], rows_R: Tensor | None, fused: bool
) -> LazyCausalLMOutput:
    if rows_R is None:
        return _output(logits=batch.pad(_forward(model, calls, fused)(batch.packed)))
    outputs = _forward(model, calls, fused, for_loss=True)(batch.packed)
    count = given.get("num_items_in_batch")
    count = torch.as_tensor(len(rows_R) if count is None else count, dtype=torch.float32, device=rows_R.device)
    labels_R = batch.packed.labels_R.index_select(0, rows_R)
    if isinstance(outputs, Tensor):
        loss = torch.nn.functional.cross_entropy(outputs.float().index_select(0, rows_R), labels_R, reduction="sum")
        return _output(loss=loss / count, logits=batch.pad(outputs))
    hidden_RN = outputs.hidden_RN.index_select(0, rows_R)
    form = CrossEntropy(outputs.logit_scale, outputs.softcap)
    with torch.autocast(hidden_RN.device.type, enabled=False):  # dtypes are settled (`lm_head.py`)
        loss = linear_cross_entropy(
            hidden_RN, outputs.weight_VN, labels_R, scale=count.reciprocal(), bias=outputs.bias_V, form=form,
            tally=calls.tally,
        )  # fmt: skip
    made = _output(loss=loss)
    made["logits"] = _logits_later(batch, outputs)
    if not model.training and not calls.loss_alone:
        made["logits"] = made.logits  # whoever evaluates looks at them, item by item
    return made


def _output(**values: Any) -> LazyCausalLMOutput:
    return LazyCausalLMOutput(**values)  # transformers' annotations say FloatTensor, which bf16 is not


def _logits_later(batch: Unpadded, outputs: Unprojected) -> Promise:
    hidden_RN, head = outputs.hidden_RN, HeadThen(outputs.weight_VN, outputs.bias_V)

    def logits() -> Tensor:
        weight_VN, bias_V = head.tensors()
        with torch.autocast(hidden_RN.device.type, enabled=False):
            return batch.pad(replace(outputs, weight_VN=weight_VN, bias_V=bias_V).logits())

    learns = any(t is not None and t.requires_grad for t in (hidden_RN, outputs.weight_VN, outputs.bias_V))
    shape = (*batch.shape, len(outputs.weight_VN))
    return promised(logits, shape, hidden_RN.dtype, hidden_RN.device, torch.is_grad_enabled() and learns)


def _classes(
    model: Any, calls: Calls, batch: Unpadded, given: dict[str, Any], rows_R: Tensor | None, fused: bool
) -> SequenceClassifierOutput | SequenceClassifierOutputWithPast:
    from transformers.loss.loss_utils import ForSequenceClassificationLoss

    logits_BC = _forward(model, calls, fused)(batch.packed)
    if logits_BC.dim() != 2:
        raise Rectangular("the head does not answer once a row")
    logits_BC = logits_BC.to(compute_dtype(model))
    loss: Any = None
    if given.get("labels") is not None:
        loss = ForSequenceClassificationLoss(given["labels"], logits_BC.float(), model.config)
    values: dict[str, Any] = {"loss": loss, "logits": logits_BC}
    if family_of(model.config).decoder:
        return SequenceClassifierOutputWithPast(**values)
    return SequenceClassifierOutput(**values)


def _tags(
    model: Any, calls: Calls, batch: Unpadded, given: dict[str, Any], rows_R: Tensor | None, fused: bool
) -> TokenClassifierOutput:
    from transformers.loss.loss_utils import ForTokenClassification

    logits_TC = _forward(model, calls, fused)(batch.packed)
    logits_BSC = batch.pad(logits_TC.to(compute_dtype(model)))
    loss: Any = None
    if given.get("labels") is not None:
        loss = ForTokenClassification(logits_BSC, given["labels"], model.config)
    values: dict[str, Any] = {"loss": loss, "logits": logits_BSC}
    return TokenClassifierOutput(**values)


_ANSWERS: dict[Wants, Callable[..., Any]] = {
    "vocabulary": _language,
    "pooled": _classes,
    "tokens": _tags,
}
