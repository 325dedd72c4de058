"""Packed attention as one operation that torch.compile neither looks into nor stops at.

A compiled block should be one graph: everything around attention is fused, attention itself stays the variable-length
kernel it is. torch's own operations do not allow that as they are: the memory-efficient kernel's backward cannot be
traced (its shape rule and its schema disagree in torch 2.11 and 2.13), and the reference on the CPU reads document
boundaries on the host. So under torch.compile `packed_attention` calls `attend` below, a custom operation with shape
rules, a backward operation and one implementation for each kind of device:

    out_THD, aux = attend(q_THD, k_TKD, v_TKD, cu_seqlens, longest, causal, window, scale, dropout)

- half precision on CUDA: flash attention; `aux` is the log-sum-exp and the dropout's random state.
- fp32 on CUDA: memory-efficient attention, the same.
- CPU, and CUDA where no kernel has the case: `packed_attention_reference`, once more in the backward pass; `aux` holds
  the seed of its dropout, so that both draw the same mask.

Every result is contiguous and none shares memory with an input, as custom operations promise. The operation is tagged
as random: nobody may run it twice or merge two calls.

Legend: T tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from automodel.models.packed_attention import packed_attention_reference, varlen_kernel

_RANDOM = (torch.Tag.nondeterministic_seeded,)
_CAUSAL_FROM_TOP_LEFT = 1  # `custom_mask_type` of the memory-efficient kernel


@torch.library.custom_op("automodel::attend", mutates_args=(), tags=_RANDOM)
def attend(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    causal: bool,
    window: int | None,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, log-sum-exp, random state, second random state)."""
    kernel = varlen_kernel(q_THD, window, longest)
    if kernel == "flash":
        left, right = _sides(window, causal)
        out, lse, state, _, _ = torch.ops.aten._flash_attention_forward(
            q_THD, k_TKD, v_TKD, cu_seqlens, cu_seqlens, longest, longest, dropout, causal, False,
            scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        if dropout == 0.0:  # nothing was drawn, and the kernel does not promise a shape
            state = torch.empty(2, dtype=torch.uint64, device=q_THD.device)
        return out.contiguous(), lse, state, state.new_empty(())
    if kernel == "efficient":
        longest = _within(longest, k_TKD)
        key, value = _for_each_query_head(q_THD, k_TKD, v_TKD)
        out, lse, seed, offset, _, _ = torch.ops.aten._efficient_attention_forward(
            q_THD[None], key[None], value[None], None, cu_seqlens, cu_seqlens, longest, longest, dropout,
            _CAUSAL_FROM_TOP_LEFT if causal else 0, True, scale=scale,
        )  # fmt: skip
        return out[0].contiguous(), lse, seed, offset
    seed = torch.randint(2**31, (), device="cpu")
    with _drawing_from(seed, q_THD):
        out = _reference(q_THD, k_TKD, v_TKD, cu_seqlens, causal, window, scale, dropout)
    none = q_THD.new_empty(0, dtype=torch.float32)
    return out.contiguous(), none, seed, none.clone()


@attend.register_fake
def _(q_THD, k_TKD, v_TKD, cu_seqlens, longest, causal, window, scale, dropout):
    tokens, heads, _ = q_THD.shape
    out = q_THD.new_empty(q_THD.shape)
    wide = {"dtype": torch.float32}
    kernel = varlen_kernel(q_THD, window, longest)
    if kernel == "flash":
        state = torch.empty(2, dtype=torch.uint64, device=q_THD.device)
        return out, q_THD.new_empty(heads, tokens, **wide), state, state.new_empty(())
    if kernel == "efficient":
        lse = q_THD.new_empty(cu_seqlens.shape[0] - 1, heads, (_within(longest, k_TKD) + 31) // 32 * 32, **wide)
        seed = q_THD.new_empty((), dtype=torch.int64)
        return out, lse, seed, seed.clone()
    none = q_THD.new_empty(0, **wide)
    return out, none, torch.empty((), dtype=torch.int64), none.clone()


@torch.library.custom_op("automodel::attend_backward", mutates_args=())
def attend_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    out_THD: Tensor,
    lse: Tensor,
    state: Tensor,
    second: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    causal: bool,
    window: int | None,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = varlen_kernel(q_THD, window, longest)
    grad_THD = grad_THD.contiguous()
    if kernel == "flash":
        left, right = _sides(window, causal)
        grads = torch.ops.aten._flash_attention_backward(
            grad_THD, q_THD, k_TKD, v_TKD, out_THD, lse, cu_seqlens, cu_seqlens, longest, longest, dropout, causal,
            state, second, scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
    elif kernel == "efficient":
        longest = _within(longest, k_TKD)
        key, value = _for_each_query_head(q_THD, k_TKD, v_TKD)
        grads = torch.ops.aten._efficient_attention_backward(
            grad_THD[None], q_THD[None], key[None], value[None], None, out_THD[None], cu_seqlens, cu_seqlens, longest,
            longest, lse, dropout, state, second, _CAUSAL_FROM_TOP_LEFT if causal else 0, False, scale=scale,
        )  # fmt: skip
        q, k, v = (g[0] for g in grads[:3])
        grads = (q, _over_query_heads(k, k_TKD), _over_query_heads(v, v_TKD))
    else:
        # Inside an operation autograd is off; a transform of its own is not.
        with _drawing_from(state, q_THD):
            again = partial(
                _reference, cu_seqlens=cu_seqlens, causal=causal, window=window, scale=scale, dropout=dropout
            )
            pull_back = torch.func.vjp(again, q_THD, k_TKD, v_TKD)[1]
        grads = pull_back(grad_THD)
    q, k, v = (g.contiguous() for g in grads)
    return q, k, v


@attend_backward.register_fake
def _(grad_THD, q_THD, k_TKD, v_TKD, *others):
    return tuple(t.new_empty(t.shape) for t in (q_THD, k_TKD, v_TKD))


def _save(ctx, inputs, output) -> None:
    *tensors, longest, causal, window, scale, dropout = inputs
    out, lse, state, second = output
    ctx.save_for_backward(*tensors, out, lse, state, second)
    ctx.mark_non_differentiable(lse, state, second)
    ctx.settings = (longest, causal, window, scale, dropout)


def _differentiate(ctx, grad_THD: Tensor, *unused: Tensor):
    q, k, v, cu_seqlens, out, lse, state, second = ctx.saved_tensors
    grads = attend_backward(grad_THD, q, k, v, out, lse, state, second, cu_seqlens, *ctx.settings)
    return (*grads, None, None, None, None, None, None)


attend.register_autograd(_differentiate, setup_context=_save)


def _within(longest: int, k_TKD: Tensor) -> int:
    """`longest` bounds the documents of a run; the memory-efficient kernel refuses more than a batch has tokens."""
    return min(longest, k_TKD.shape[0])


def _sides(window: int | None, causal: bool) -> tuple[int, int]:
    """How far flash attention looks to the left and to the right; -1 is everything."""
    left = -1 if window is None else window - 1
    return left, 0 if causal else left


def _for_each_query_head(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
    groups = q_THD.shape[1] // k_TKD.shape[1]
    if groups == 1:
        return k_TKD, v_TKD
    return k_TKD.repeat_interleave(groups, dim=1), v_TKD.repeat_interleave(groups, dim=1)


def _over_query_heads(grad_THD: Tensor, k_TKD: Tensor) -> Tensor:
    """The gradient of a key/value head is the sum over the query heads that share it."""
    if grad_THD.shape[1] == k_TKD.shape[1]:
        return grad_THD
    return grad_THD.unflatten(1, (k_TKD.shape[1], -1)).sum(2)


def _reference(q_THD, k_TKD, v_TKD, cu_seqlens, causal, window, scale, dropout) -> Tensor:
    q, k, v = (t.transpose(0, 1)[None] for t in (q_THD, k_TKD, v_TKD))
    return packed_attention_reference(q, k, v, cu_seqlens.tolist(), causal, window, scale, dropout)[0]


@contextmanager
def _drawing_from(seed: Tensor, like: Tensor) -> Generator[None]:
    """Random numbers from the seed while the block lasts, everybody else's as they were after it."""
    source = torch.cuda.default_generators[like.device.index] if like.is_cuda else torch.default_generator
    before = source.get_state()
    source.manual_seed(int(seed))
    try:
        yield
    finally:
        source.set_state(before)
