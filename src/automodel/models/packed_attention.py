"""Attention over a flat stream of documents, plugged into transformers' attention interface.

A packed batch reaches the model as one row of T tokens. Everything in a transformer but attention works on each token
alone, so packing is exact as soon as no query sees a key of another document. `packed_attention` does that from the
document boundaries, which travel under transformers' own names for them (`cu_seq_lens_q`, `max_length_q`).

    out_t = sum over s of softmax_s(scale * q_t . k_s) v_s,   s in the document of t, s <= t if causal,
                                                              |t - s| < window where the layer has a window

- `packed_attention_reference` is the definition: torch's SDPA, document by document. It is the truth of the tests, and
  runs where nothing else does. Adjacent documents of equal length share one call; tensors are split once and joined
  once, because the backward of a slice writes a full-size gradient for every document while the backward of a split is
  one concatenation.
- On the CPU in bf16, and in fp32 where every token of a document is seen or weights are dropped, all documents of a
  layer are one operation (`kernels/cpu_attention.py`).
- On CUDA, variable-length flash attention (half precision) or memory-efficient attention (fp32) takes the boundaries as
  a device tensor: no host sync, the same shapes every step.
- Scores that saturate (Gemma 2) are another operation (`capped_attention.py`).
- Under torch.compile it is one opaque operation with the same kernels inside (`attention_op.py`).

The name is registered only in the attention interface. transformers builds no mask for an attention it has no mask
function for, so no dense mask is made and its search for packed sequences (a host sync) never runs.

Legend: H query heads, K key/value heads, T tokens, D head dimension.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel.distributed.context_parallel import all_heads_of_some_tokens, all_tokens_of_some_heads
from automodel.kernels.attention import Attention, varlen_flash
from automodel.kernels.cpu_attention import Documents, Reach, document_attention
from automodel.models.capped_attention import capped_attention
from automodel.models.gathered_attention import Gathers, gathered_attention

PACKED_ATTENTION = "automodel_packed"

ATTENDS_IN = "_attends_in"
"""The name under which an attention module keeps the dtype that is read, where that is not the inputs' own."""

_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_MAX_HEAD_DIM = 256
_CAUSAL_FROM_TOP_LEFT = 1  # `custom_mask_type` of the memory-efficient kernel

# Arguments that change the result of attention and that this function does not know: refused when they carry a value.
_UNSUPPORTED = ("s_aux", "position_bias", "sinks", "head_mask")


def register_packed_attention() -> str:
    """Makes `packed_attention` known to transformers (once) and returns its name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if PACKED_ATTENTION not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)
    return PACKED_ATTENTION


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q (1, H, T, D), k and v (1, K, T, D) in, (1, T, H, D) out."""
    if cu_seq_lens_q is None or max_length_q is None:
        raise RuntimeError(
            "this model is switched to packed attention, but was called without document boundaries; "
            "wrap ordinary calls (generate, predict) in `automodel.models.forward.stock_attention(model)`"
        )
    if attention_mask is not None:
        raise RuntimeError("packed attention takes document boundaries, not an attention mask")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"packed attention does not implement {name!r}; this model needs the padded path")

    dtype = _compute_dtype(module, value)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    group = kwargs.get("context_group")
    if isinstance(group, Gathers):
        assert softcap is None  # `distributed/layout.py` refuses it
        return gathered_attention(query, key, value, group, causal, sliding_window, scale, dropout), None
    if group is not None:
        query, key, value = (all_tokens_of_some_heads(x, group) for x in (query, key, value))
    if softcap is not None:
        how = Attention(query.shape[1], key.shape[1], query.shape[3], scale, causal, dropout=dropout, softcap=softcap)
        out = capped_attention(query, key, value, cu_seq_lens_q, max_length_q, sliding_window, how)
        return (out if group is None else all_heads_of_some_tokens(out, group)), None
    if torch.compiler.is_compiling():
        from automodel.models.attention_op import attend

        documents = (cu_seq_lens_q, max_length_q, causal, sliding_window, scale, dropout)
        return attend(*(x[0].transpose(0, 1) for x in (query, key, value)), *documents)[0].unsqueeze(0), None
    if query.is_cuda:
        out = _packed_attention_cuda(
            query, key, value, cu_seq_lens_q, max_length_q, causal, sliding_window, scale, dropout
        )
    else:
        boundaries = cu_seq_lens_q.tolist()
        how = boundaries, causal, sliding_window, scale, dropout
        own = _has_own_operation(query, key, max_length_q, causal, sliding_window, dropout)
        out = (_packed_attention_cpu if own else packed_attention_reference)(query, key, value, *how)
    if group is not None:
        out = all_heads_of_some_tokens(out, group)
    return out, None


def packed_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: list[int],
    causal: bool,
    window: int | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """The definition, in torch: SDPA within each document. `boundaries` are cumulative lengths starting at 0."""
    grouped = query.shape[1] != key.shape[1]
    runs = _runs_of_equal_length(boundaries)
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1).split([n * length for n, length in runs]) for x in (query, key, value))
    outputs = []
    for (count, length), q, k, v in zip(runs, q_THD, k_THD, v_THD):
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
        mask = None
        if window is not None and window < length:
            mask = _window_mask(length, window, causal, query.device)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=causal and mask is None,
            scale=scale,
            enable_gqa=grouped,
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)


def _has_own_operation(
    query: Tensor, key: Tensor, longest: int, causal: bool, window: int | None, dropout: float
) -> bool:
    """Whether the CPU has one operation for all documents. In fp32 SDPA is faster where it can leave out half of the
    scores, but not where it draws random numbers."""
    if query.dtype == torch.bfloat16:
        return True
    sees_all = not causal and (window is None or window >= longest)
    return query.dtype == torch.float32 and query.shape[1] == key.shape[1] and (sees_all or dropout > 0.0)


def _packed_attention_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: list[int],
    causal: bool,
    window: int | None,
    scale: float,
    dropout: float,
) -> Tensor:
    lengths = [end - start for start, end in pairwise(boundaries)]
    within = window if window is not None and window < max(lengths) else None
    reach = Reach(causal, within) if causal or within is not None else None
    documents = Documents(lengths, lengths, scale, dropout, reach)
    return document_attention(*(x[0].transpose(0, 1) for x in (query, key, value)), documents).unsqueeze(0)


def varlen_kernel(query: Tensor, window: int | None, longest: int) -> Literal["flash", "efficient"] | None:
    """Torch's variable-length kernel for these queries (last dimension D); None where only the reference will do."""
    head_dim = query.shape[-1]
    if not query.is_cuda:
        return None
    # Turing has fp16, but torch's flash attention begins with Ampere.
    modern = torch.cuda.get_device_capability(query.device) >= (8, 0)
    if modern and query.dtype in _FLASH_DTYPES and head_dim <= _FLASH_MAX_HEAD_DIM and head_dim % 8 == 0:
        return "flash"
    aligned = head_dim * query.element_size() % 16 == 0
    return "efficient" if aligned and (window is None or window >= longest) else None


def _packed_attention_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    causal: bool,
    window: int | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """Variable-length kernels of torch; the boundaries stay on the device."""
    kernel = varlen_kernel(query, window, max_seqlen)
    q_1THD, k_1TKD, v_1TKD = (x.transpose(1, 2) for x in (query, key, value))
    if kernel == "flash":
        reach = -1 if window is None else window - 1
        how = Attention(query.shape[1], key.shape[1], query.shape[3], scale, causal, reach, dropout)
        heads = q_1THD[0], k_1TKD[0], v_1TKD[0]
        return varlen_flash(*heads, (cu_seqlens, cu_seqlens), (max_seqlen, max_seqlen), how).unsqueeze(0)
    if kernel == "efficient":
        max_seqlen = min(max_seqlen, key.shape[2])  # a bound of the run; the kernel wants one of the batch
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            k_1TKD, v_1TKD = (x.repeat_interleave(groups, dim=2) for x in (k_1TKD, v_1TKD))
        return torch.ops.aten._efficient_attention_forward(
            q_1THD,
            k_1TKD,
            v_1TKD,
            None,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            dropout,
            _CAUSAL_FROM_TOP_LEFT if causal else 0,
            True,  # the log-sum-exp, which the backward pass needs
            scale=scale,
        )[0]
    # fp32 with a sliding window, or an odd head size: no variable-length kernel has it, so this reads the boundaries on
    # the host.
    return packed_attention_reference(query, key, value, cu_seqlens.tolist(), causal, window, scale, dropout)


def _compute_dtype(module: nn.Module, value: Tensor) -> torch.dtype:
    """One dtype for all three, as autocast gives SDPA; rotary embeddings may have promoted queries and keys to fp32. On
    a CPU with products in bf16 (`cpu_linears.py`) the module has it."""
    kind = value.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return module.__dict__.get(ATTENDS_IN, value.dtype)


def _runs_of_equal_length(boundaries: list[int]) -> list[tuple[int, int]]:
    """(how many, length) of neighbouring documents of equal length; empty slots are dropped."""
    lengths = (end - start for start, end in pairwise(boundaries))
    return [(len(list(run)), length) for length, run in groupby(n for n in lengths if n)]


@lru_cache(maxsize=32)
def _window_mask(length: int, window: int, causal: bool, device: torch.device) -> Tensor:
    """(length, length) bool, true where a query may look: fewer than `window` tokens away, backwards only if causal."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window) if causal else distance.abs() < window
