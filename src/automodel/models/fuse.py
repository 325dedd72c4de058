"""The door to fused blocks: swapping them in, and taking them out again.

Three files know how layers are computed: `fused_encoder.py` (post-norm encoders), `fused_modernbert.py` and
`fused_decoder.py`. All swap `forward` on the instances of embeddings and layers, after the parameters have moved into
the flat buffer. Names, parameters and the state dict stay as they are; only calls with a packed batch understand it, so
everything else (`generate`, saving) puts the stock code back for as long as it lasts (`stock_blocks`). Which configs
have fused blocks is told by `block_support.py`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from automodel.data.batch import PackedBatch
from automodel.kernels.side_stream import SideStream
from automodel.models.block_stream import UnusedAngles
from automodel.models.cheap_dropout import CheapDropout
from automodel.models.cpu_block import CpuBlock
from automodel.models.cpu_linears import CpuLinear
from automodel.models.decoder_parts import DECODERS
from automodel.models.fp8 import Fp8Linear
from automodel.models.fused_decoder import (
    FusedDecoderBlock,
    FusedDecoderTokens,
    FusedFinalNorm,
    fusable_decoder,
    fuse_decoder,
)
from automodel.models.fused_embeddings import FusedEmbeddings
from automodel.models.fused_encoder import FusedBlock, fuse_encoder, is_fusable, swapped_encoder
from automodel.models.fused_modernbert import FusedModernBlock, FusedModernFinalNorm, FusedTokens
from automodel.models.pooled_block import PooledBlock

SWAPS = (
    *(FusedBlock, FusedEmbeddings, FusedModernBlock, FusedModernFinalNorm, FusedTokens),
    *(FusedDecoderBlock, FusedDecoderTokens, FusedFinalNorm, UnusedAngles),
    *(PooledBlock, CpuBlock, CpuLinear, Fp8Linear, CheapDropout),
)
"""What takes the place of a `forward`."""


def will_fuse(model: Any) -> bool:
    """Whether `fuse` will swap this model's embeddings and layers, once its parameters are flat."""
    return fusable_decoder(model) if model.config.model_type in DECODERS else is_fusable(model)


def fuse_shards(model: Any, seed: Tensor, longest: int) -> int:
    """As `fuse`, for a decoder whose weights are gathered layer by layer (FSDP2): the same blocks, but what one product
    would make is made by each layer's own, since their weights lie anywhere."""
    # Tables of angles are made from it; where parts of the model are on the host, it is there, too.
    model.model.rotary_emb.to(seed.device)
    return fuse_decoder(model, seed, None, longest, apart=True)


def fuse(
    model: Any,
    seed: Tensor,
    side: SideStream | None = None,
    longest: int = 512,
    norms_again: bool = False,
    gates_kept: bool = False,
) -> int:
    """Swaps embeddings and layers and returns how many layers. Weights that one product reads (query, key and value;
    gate and up) must be neighbours in memory by now. Whoever passes `side` joins it after every backward pass. `seed`:
    the device tensor every dropout of the step reads. `longest` bounds the documents. `norms_again`: decoders keep
    less, where all of their weights are trained (`kernels/made_again.py`). `gates_kept`: they keep more
    (`kernels/swiglu.py`)."""
    if model.config.model_type in DECODERS:
        return fuse_decoder(model, seed, side, longest, norms_again=norms_again, gates_kept=gates_kept)
    return fuse_encoder(model, seed, side, longest)


def _swapped(model: nn.Module) -> list[nn.Module]:
    """The modules whose `forward` was swapped here (and not by some other library)."""
    return [module for module in model.modules() if isinstance(module.__dict__.get("forward"), SWAPS)]


def unfuse(model: Any) -> None:
    """Gives every module its own `forward` back."""
    for module in _swapped(model):
        del module.__dict__["forward"]


@contextmanager
def stock_blocks(model: Any) -> Generator[None]:
    """The model's own code inside the block, the swaps again after it."""
    swaps = [(module, module.__dict__["forward"]) for module in _swapped(model)]
    unfuse(model)
    try:
        yield
    finally:
        for module, forward in swaps:
            module.__dict__["forward"] = forward


def bind_batch(model: Any, batch: PackedBatch) -> None:
    """Tells the embeddings of the model, where they are fused, which batch is next."""
    bind = getattr(_embeddings_and_last_layer(model)[0].forward, "bind", None)
    if bind is not None:
        bind(batch)


def pools_inside(model: Any) -> bool:
    """Whether the last block is swapped for one that can return the rows that are read, alone."""
    return getattr(_embeddings_and_last_layer(model)[1].forward, "pools", False)


def layers_of(model: Any) -> list[nn.Module]:
    """The blocks of a model that `fuse` can swap, in the order they run."""
    if model.config.model_type in DECODERS:
        return list(model.model.layers)
    return swapped_encoder(model)[1]


def _embeddings_and_last_layer(model: Any) -> tuple[Any, Any]:
    if model.config.model_type in DECODERS:
        return model.model.embed_tokens, model.model.layers[-1]
    embeddings, layers = swapped_encoder(model)
    return embeddings, layers[-1]
