"""The list of tiles that attention's backward pass works through (`attention_triton.py`)."""

import triton
import triton.language as tl

from automodel.kernels.triton_keys import settle_keys

LISTED_DOCUMENTS, LISTED_TILES = tl.constexpr(64), tl.constexpr(32)  # looked at together


@triton.jit
def tiles_of_documents(CU, documents, n_documents, BLOCK: tl.constexpr):
    exists = documents < n_documents
    length = tl.load(CU + documents + 1, mask=exists, other=0) - tl.load(CU + documents, mask=exists, other=0)
    return (length + BLOCK - 1) // BLOCK


@triton.jit
def list_tiles(
    CU, TILES, document, n_documents, n_tiles, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, OF_KEYS: tl.constexpr
):
    """The tiles of one document among those of all, (3, n_tiles): where its document begins, how long that is, where
    the tile begins in it. Those with the most to do come first. Causal: the first keys and the last queries of every
    document, then the next ones; else documents in their order. After the last one, places that are left: length 0."""
    others, ranks = tl.arange(0, LISTED_DOCUMENTS), tl.arange(0, LISTED_TILES)
    if document < n_documents:
        begin = tl.load(CU + document)
        length = tl.load(CU + document + 1) - begin
        count = (length + BLOCK - 1) // BLOCK
        for lowest in range(0, count, LISTED_TILES):
            rank = lowest + ranks
            place = rank * 0 if CAUSAL else rank
            for first in range(0, n_documents, LISTED_DOCUMENTS):
                tiles = tiles_of_documents(CU, first + others, n_documents, BLOCK)[None, :]
                earlier = (first + others < document)[None, :]
                if CAUSAL:
                    before = tl.minimum(tiles, rank[:, None]) + (earlier & (tiles > rank[:, None])).to(tl.int32)
                else:
                    before = tl.where(earlier & (rank >= 0)[:, None], tiles, 0)
                place += tl.sum(before, 1)
            at, mine = TILES + place, rank < count
            tl.store(at, begin + rank * 0, mask=mine)
            tl.store(at + n_tiles, length + rank * 0, mask=mine)
            tl.store(at + 2 * n_tiles, (rank if OF_KEYS or not CAUSAL else count - 1 - rank) * BLOCK, mask=mine)
    else:
        total = 0
        for first in range(0, n_documents, LISTED_DOCUMENTS):
            total += tl.sum(tiles_of_documents(CU, first + others, n_documents, BLOCK), 0)
        for first in range(total, n_tiles, LISTED_DOCUMENTS):
            tl.store(TILES + n_tiles + first + others, others * 0, mask=first + others < n_tiles)


@triton.jit
def tile_at(TILES, index, n_tiles):
    """(where its document begins, how long that is, where the tile begins in it)."""
    return tl.load(TILES + index), tl.load(TILES + n_tiles + index), tl.load(TILES + 2 * n_tiles + index)


settle_keys(globals())
