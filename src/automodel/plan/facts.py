"""What the plan needs to know of a model and of the data, read before a weight is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

    from automodel.data.mixture import Mixture
    from automodel.data.sizes import Sizes
    from automodel.data.stats import Cut
    from automodel.kernels.product_speed import ProductSpeed
    from automodel.models.fp8 import Product
    from automodel.plan.memory import ModelShape


@dataclass(frozen=True)
class ModelFacts:
    """What the plan needs to know of the model, read from its config."""

    name: str
    model_type: str
    parameters: int
    can_pack: bool
    packing_reason: str
    can_fuse: bool = False
    """Whether there are fused blocks for it."""
    fused_in_words: str = ""
    """What those join."""
    decoder: bool = False
    """Whether those are a decoder's, which can do without flat parameters."""
    can_pool: bool = False
    """Whether its last block can run for the pooled token alone, as plain modules."""
    can_pool_fused: bool = False
    """The same for its fused blocks."""
    whole_layers: bool = False
    """Whether a layer of it can be one operation on the CPU."""
    pooled_saving: float = 0.0
    """Share of the encoder's multiplications that this saves."""
    read_saving: float = 0.0
    """Share of the blocks' multiplications that fused blocks make only for tokens that are read."""
    head_words: int = 0
    """Words of a language model's head, where that is a plain product that the loss can make itself."""
    shape: ModelShape | None = None
    """Its sizes, where the config has the usual ones."""
    no_shape: str = ""
    """Why there are none, as the rest of a sentence after `because`."""
    word_rows: int = 0
    """Rows of its word table, where that is a plain one that nothing else reads; 0: it is not, or nobody asked."""
    products: tuple[Product, ...] = ()
    """The matrix products of its stock blocks, where FP8 is asked for."""
    products_fused: tuple[Product, ...] = ()
    """Those of its fused blocks."""
    dropout: str | None = None
    """The key of its config that lets layers drop something at random."""
    trained: int = 0
    """Parameters that are trained, where an adapter leaves the rest frozen; 0: all."""
    adapter_in_words: str = ""
    """That adapter."""
    experts: int = 0
    """Parameters in stacks of experts, which are no linear layers."""
    balance: float = 0.0
    """The weight of the balance loss of its routers; 0: there is none."""


@dataclass(frozen=True)
class DataFacts:
    """What the plan needs to know of the data."""

    rows: int
    """Examples of an epoch."""
    tokens: int
    longest: int
    """Tokens of the longest sample, after it was cut or split."""
    max_length: int
    has_validation: bool
    longest_whole: int = 0
    """Tokens of the longest document, before it was cut or split; 0: as `longest`."""
    cuts: tuple[tuple[str, Cut], ...] = ()
    """What was cut, each with the section of the config that it is of."""
    validation_tokens: int = 0
    """Tokens that an evaluation reads."""
    splits: bool = False
    """Whether what is longer than `max_length` goes on in further samples; otherwise it is cut."""
    notes: tuple[str, ...] = ()
    """What a person should know about the data."""
    columns: str = ""
    """What is read and what is learned, e.g. `text → label`."""
    labels: str = ""
    """The classes in words, where there are any."""
    lengths: np.ndarray | None = field(default=None, compare=False, repr=False)
    """Tokens of each sample; needed to pack by size."""
    sizes: Callable[[], Sizes] | None = field(default=None, compare=False, repr=False)
    """Looks at some samples; none: nobody can."""
    word_rows: int = 0
    """Rows of the word table that its tokens name; 0: not counted."""
    learned: float = 1.0
    """Share of the tokens that a language model learns."""
    mixture: Mixture | None = None
    """Where an epoch is not every sample once."""


@dataclass(frozen=True)
class ProductFacts:
    """What the plan needs to know of the matrix products of a run on a CPU."""

    speed: ProductSpeed | None = None
    """None: not measured."""
    not_measured: str = ""
    """Why, as the rest of a sentence after `not measured:`."""
    weights: float = 0.0
    """Numbers in the matrices of the model's linear layers."""
    tokens: float = 0.0
    """Of a micro-batch, on average."""
    passes: Literal[1, 2, 3] = 3
    """Products for each matrix: the layer's own, that of its inputs' gradient, and that of its own gradient."""
    begun_precision: str = ""
    """The precision of the run that is resumed on a device of this kind; nothing: the run is new."""
    begun_products: str = ""
    """The library of that run's fp32 products."""


NO_PRODUCTS = ProductFacts()
