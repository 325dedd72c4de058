"""From a batch to logits that line up with its labels: the one door between the engine and a Hugging Face model.

`make_forward` returns a function of a batch. It never hands the batch's own labels to the model and reads no loss from
it: the losses room sums over the whole optimizer step and divides once.

- packed: the backbone runs over the flat stream, and the head only over `read_positions_R`: (R, C), or (R, V) for
  causal language models.
- padded: the stock forward: (B, C), (B, S, C), (B, S, V); for seq2seq (B, S_target, V) with the decoder inputs that the
  model itself derives from the labels.

Packing needs the model's attention switched on the instance (`use_packed_attention`). `stock_attention(model)` is the
way back, for as long as a `with` block lasts: generating text, saving, an ordinary call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from automodel.data.batch import Batch, PackedBatch, PaddedBatch
from automodel.models.families import (
    Family,
    family_of,
    packing_support,
    pooled_hidden_states,
    pooled_positions,
)
from automodel.models.head_outputs import Balanced, Outputs, Unprojected
from automodel.models.lm_head import unprojected_head
from automodel.models.packed_attention import PACKED_ATTENTION, register_packed_attention
from automodel.models.router import Router, router_of
from automodel.models.task_head import TaskHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from automodel.kernels.cpu_products import Bf16Copies

Forward = Callable[[Batch], Tensor]
LossForward = Callable[[Batch], Outputs]
"""For a loss that takes logits or what they would be made of."""

_STOCK_NAME = "_attention_before_packing"


def make_loss_forward(
    model: PreTrainedModel,
    head: TaskHead,
    path: Literal["packed", "padded"],
    swapped: bool = False,
    fused: bool = True,
    copies: Bf16Copies | None = None,
) -> LossForward:
    """As `make_forward`; with `fused`, a causal language model stops short of its head, where that is a plain product,
    and the loss makes the logits itself, a few rows at a time (`lm_head.py`). So does a swapped encoder that learns to
    classify texts (`fused_head.py`). `copies`: of matrices in bf16, on a CPU that makes products in it."""
    logits = make_forward(model, head, path, swapped)
    if fused and swapped and head.wants == "pooled":
        return _fused_head_forward(model, logits)
    router = router_of(model) if path == "padded" else None
    if router is not None:
        return _balanced_forward(model, head, router)
    project_later = unprojected_head(model, copies) if fused and head.next_token else None
    if project_later is None:
        return logits
    return _unprojected_forward(model, path, swapped, project_later)


def make_forward(
    model: PreTrainedModel, head: TaskHead, path: Literal["packed", "padded"], swapped: bool = False
) -> Forward:
    """A function from a batch to logits aligned with the batch's labels. `path="packed"` switches the model's
    attention. `swapped`: blocks of the model are swapped (`fuse.py`, `pooled_block.py`)."""
    if path == "padded":
        return _seq2seq_forward(model) if head.encoder_decoder else _padded_forward(model)
    support = packing_support(model.config, head, longest=0)  # whoever asks for it knows the lengths
    if not support.packed:
        raise ValueError(f"the packed path was asked for, but {support.reason}")
    use_packed_attention(model)
    if swapped and family_of(model.config).decoder:
        return _swapped_decoder_forward(model, head)
    if swapped:
        return _swapped_forward(model, head)
    return _packed_causal_lm_forward(model) if head.next_token else _packed_head_forward(model, head)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switches this instance to packed attention and remembers what it had."""
    current = model.config._attn_implementation
    if current == PACKED_ATTENTION:
        return
    model.set_attn_implementation(register_packed_attention())
    if model.config._attn_implementation != PACKED_ATTENTION:
        raise ValueError(f"{type(model).__name__} does not take its attention from transformers' attention interface")
    for config in attention_configs(model):
        config._attn_implementation_internal = PACKED_ATTENTION
    setattr(model, _STOCK_NAME, current)


def use_stock_attention(model: PreTrainedModel) -> None:
    """Gives the instance back the attention it had before `use_packed_attention`."""
    if model.config._attn_implementation == PACKED_ATTENTION:
        model.set_attn_implementation(getattr(model, _STOCK_NAME, "sdpa"))
        for config in attention_configs(model):
            config._attn_implementation_internal = model.config._attn_implementation


def attention_configs(model: Any, modules: Sequence[Any] = ()) -> list[Any]:
    """The config objects from which attention modules read what they run. It is one, until somebody copies a layer: the
    copy has a config of its own, which nothing that is done to the model's config reaches. `modules`: the model's, from
    callers that have them at hand."""
    found = {id(c): c for m in modules or model.modules() if (c := m.__dict__.get("config")) is not None}
    return [c for c in found.values() if hasattr(c, "_attn_implementation_internal")]


@contextmanager
def stock_attention(model: PreTrainedModel) -> Generator[None]:
    """Stock attention and stock blocks inside the block, whatever was on before after it."""
    from automodel.models.fuse import stock_blocks

    was_packed = model.config._attn_implementation == PACKED_ATTENTION
    use_stock_attention(model)
    try:
        with stock_blocks(model):
            yield
    finally:
        if was_packed:
            use_packed_attention(model)


def _stream(family: Family, model: Any, batch: PackedBatch) -> dict[str, Any]:
    """The packed batch as keyword arguments of a transformers model."""
    offset = family.position_offset(model.config)
    positions_T = batch.position_ids_T + offset if offset else batch.position_ids_T  # a kernel less, mostly
    inputs: dict[str, Any] = {
        "position_ids": positions_T.unsqueeze(0),
        "cu_seq_lens_q": batch.cu_seqlens_D,
        "cu_seq_lens_k": batch.cu_seqlens_D,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
    }
    if family.embed_outside:
        inputs["inputs_embeds"] = model.get_input_embeddings()(batch.input_ids_T.unsqueeze(0))
    else:
        inputs["input_ids"] = batch.input_ids_T.unsqueeze(0)
    if family.decoder:
        inputs["use_cache"] = False
    group = getattr(batch, "group", None)
    if group is not None:  # other ranks have the other tokens
        inputs["context_group"] = group
    if batch.token_type_ids_T is not None:
        if not family.token_types:
            raise ValueError(f"the batch carries token types, which {type(model).__name__} does not take")
        inputs["token_type_ids"] = batch.token_type_ids_T.unsqueeze(0)
    return inputs


def _packed_causal_lm_forward(model: Any) -> Forward:
    family = family_of(model.config)

    def forward(batch: Batch) -> Tensor:
        assert isinstance(batch, PackedBatch)
        return model(**_stream(family, model, batch), logits_to_keep=batch.read_positions_R).logits[0]

    return forward


def _packed_head_forward(model: Any, head: TaskHead) -> Forward:
    family = family_of(model.config)
    backbone = getattr(model, family.backbone)

    def forward(batch: Batch) -> Tensor:
        assert isinstance(batch, PackedBatch)
        hidden_TN = backbone(**_stream(family, model, batch)).last_hidden_state[0]
        if head.wants == "tokens":
            return family.tag(model, hidden_TN.index_select(0, batch.read_positions_R)).float()
        pooled_RN = pooled_hidden_states(
            model.config,
            hidden_TN,
            batch.input_ids_T,
            batch.position_ids_T,
            batch.cu_seqlens_D,
            batch.read_positions_R,
        )
        return family.classify(model, pooled_RN).float()

    return forward


def _swapped_forward(model: Any, head: TaskHead) -> Forward:
    """A swapped encoder. For text classification its last block may compute the pooled rows alone."""
    from automodel.models.fuse import bind_batch, pools_inside

    family = family_of(model.config)
    backbone = getattr(model, family.backbone)
    stock_head = _packed_head_forward(model, head)
    pooled_only = head.wants == "pooled" and pools_inside(model)

    def forward(batch: Batch) -> Tensor:
        assert isinstance(batch, PackedBatch)
        bind_batch(model, batch)
        if not pooled_only:
            return stock_head(batch)
        outputs = backbone(**_stream(family, model, batch), pooled_positions=batch.read_positions_R)
        # The backward of an index would write a zeroed copy.
        return family.classify(model, outputs.last_hidden_state.squeeze(0)).float()

    return forward


def _fused_head_forward(model: Any, logits: Forward) -> LossForward:
    """With the head's last product left to the loss while the model learns, where its last block pools."""
    from automodel.models.fuse import bind_batch, pools_inside
    from automodel.models.fused_head import fused_head

    family = family_of(model.config)
    head = None if family.decoder or not pools_inside(model) else fused_head(model)
    if head is None:
        return logits
    backbone = getattr(model, family.backbone)

    def forward(batch: Batch) -> Outputs:
        if not model.training:
            return logits(batch)
        assert isinstance(batch, PackedBatch)
        bind_batch(model, batch)
        outputs = backbone(**_stream(family, model, batch), pooled_positions=batch.read_positions_R)
        return head(outputs.last_hidden_state.squeeze(0))

    return forward


def _swapped_decoder_forward(model: Any, head: TaskHead) -> Forward:
    """A fused decoder. Its last block returns the rows that are read, in their order, and the head takes them all."""
    from automodel.models.fuse import bind_batch

    family = family_of(model.config)
    backbone = getattr(model, family.backbone)

    def forward(batch: Batch) -> Tensor:
        assert isinstance(batch, PackedBatch)
        bind_batch(model, batch)
        stream = _stream(family, model, batch)
        if head.next_token:
            return model(**stream, read_positions=batch.read_positions_R).logits.squeeze(0)
        if head.wants == "tokens":
            hidden_RN = backbone(**stream, read_positions=batch.read_positions_R).last_hidden_state.squeeze(0)
            return family.tag(model, hidden_RN).float()
        pooled_R = pooled_positions(model.config, batch.input_ids_T, batch.position_ids_T, batch.read_positions_R)
        hidden_RN = backbone(**stream, pooled_positions=pooled_R).last_hidden_state.squeeze(0)
        return family.classify(model, hidden_RN).float()

    return forward


def _unprojected_forward(model: Any, path: str, swapped: bool, project_later: Callable[[Tensor], Unprojected]):
    """The backbone of a causal language model, to the rows whose logits are wanted."""
    from automodel.models.fuse import bind_batch

    backbone = getattr(model, model.base_model_prefix)

    def padded(batch: Batch) -> Unprojected:
        assert isinstance(batch, PaddedBatch)
        return project_later(backbone(**_rectangle(batch), use_cache=False).last_hidden_state)

    def packed(batch: Batch) -> Unprojected:
        assert isinstance(batch, PackedBatch)
        stream, rows_R = _stream(family_of(model.config), model, batch), batch.read_positions_R
        if swapped:
            bind_batch(model, batch)
            return project_later(backbone(**stream, read_positions=rows_R).last_hidden_state)
        return project_later(backbone(**stream).last_hidden_state[0].index_select(0, rows_R))

    return padded if path == "padded" else packed


def _rectangle(batch: PaddedBatch) -> dict[str, Tensor]:
    inputs = {"input_ids": batch.input_ids_BS, "attention_mask": batch.attention_mask_BS}
    if batch.token_type_ids_BS is not None:
        inputs["token_type_ids"] = batch.token_type_ids_BS
    return inputs


def _padded_forward(model: Any) -> Forward:
    call = _padded_call(model)
    return lambda batch: call(batch).logits


def _balanced_forward(model: Any, head: TaskHead, router: Router) -> LossForward:
    call = _seq2seq_call(model) if head.encoder_decoder else _padded_call(model)

    def forward(batch: Batch) -> Outputs:
        assert isinstance(batch, PaddedBatch)
        outputs = call(batch)
        loads = router.loads(outputs, batch.attention_mask_BS)
        return Balanced(outputs.logits, loads, router.weight) if loads else outputs.logits

    return forward


def _padded_call(model: Any) -> Callable[[Batch], Any]:
    """From a batch to all that the model puts out."""
    no_cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def call(batch: Batch) -> Any:
        assert isinstance(batch, PaddedBatch)
        return model(**_rectangle(batch), **no_cache)

    return call


def _seq2seq_forward(model: Any) -> Forward:
    call = _seq2seq_call(model)
    return lambda batch: call(batch).logits


def _seq2seq_call(model: Any) -> Callable[[Batch], Any]:
    """The decoder reads the target moved by one place, as the model's own code moves it: in a method, or inside its
    forward, which does so where it is given labels. FSMT's method writes into the labels, so it gets a copy of them."""
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)

    def call(batch: Batch) -> Any:
        assert isinstance(batch, PaddedBatch)
        labels = batch.labels.clone()
        target = {"labels": labels} if shift is None else {"decoder_input_ids": shift(labels=labels)}
        return model(**_rectangle(batch), **target, use_cache=False)

    return call
