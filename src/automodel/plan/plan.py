"""`Plan`: what a run will do and why, as a value.

`make_plan` (decide.py) builds it, `automodel plan` and `--dry-run` print it, the engine follows it, the run folder
keeps it as `plan.json`, the report shows it. A decision that is not in here is not made anywhere else.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from automodel.adapters.config import Packing
from automodel.config.written import as_written
from automodel.optim.kinds import Kind

ASKED = (
    "task", "model", "adapter", "data", "columns", "cut", "mixture", "note", "batch", "steps", "optimizer", "schedule",
    "validation", "checkpoints", "device", "ranks", "precision", "memory", "time",
)  # fmt: skip
"""Lines of the plan's first part, in their order: what was asked for. The second part is how it is done."""


@dataclass(frozen=True)
class Decision:
    """One line of the plan."""

    name: str
    """What was decided, e.g. `precision`."""
    value: Any
    """The decision, as it is shown."""
    reason: str
    """Why, in a few words."""

    @property
    def asked(self) -> bool:
        """Whether the line belongs to what was asked for."""
        return self.name in ASKED

    def __post_init__(self) -> None:
        """The plan is printed, saved and shown: values of variables stand in it as `${NAME}`."""
        object.__setattr__(self, "reason", as_written(self.reason))
        if isinstance(self.value, str):
            object.__setattr__(self, "value", as_written(self.value))


@dataclass(frozen=True)
class Plan:
    """Everything decided before the first weight is loaded."""

    task: str
    device: str
    """`cpu` or `cuda`."""
    precision: str
    """`fp32`, `tf32`, `bf16`, `bf16-pure` or `fp16`."""
    path: Literal["packed", "padded"]
    bucket_tokens: int
    """Token counts are rounded up to a multiple of this; 1 turns rounding off."""
    max_length: int
    micro_batch_size: int
    """Examples of a micro-batch; with `packed_sequence_size`, the most that a bin has room for."""
    grad_acc_steps: int
    """Micro-batches of a step, for each rank."""
    global_batch_size: int
    """Examples of a step; with `packed_sequence_size`, on average."""
    steps_per_epoch: int
    total_steps: int
    num_epochs: float
    val_every_steps: int
    """0: no validation data."""
    ckpt_every_steps: int
    """0: no checkpoints before the end."""
    capture: bool
    """Whether steps are recorded as CUDA graphs."""
    pooled_last_block: bool
    """Whether the last block runs for the pooled token of each document only."""
    fused_kernels: bool
    """Whether encoder blocks are swapped for fused ones, where the family has them."""
    late_update: bool
    """Whether layers are updated while the next step runs through the layers before them."""
    lazy_embeddings: bool
    """Whether the optimizer updates rows of the word table when they are read, not in every step."""
    compile: bool
    """Whether the blocks of the model are compiled."""
    compile_mode: str
    """torch.compile's mode."""
    num_workers: int
    pin_memory: bool
    parameters: int
    """All parameters of the model, counted from its config."""
    decisions: tuple[Decision, ...]
    """The lines a person reads, with reasons."""
    bucket_reads: int = 0
    """The same of the positions that the head reads; 0: as tokens."""
    fused_loss: bool = False
    """Whether a language model's logits are made inside the loss, a few rows at a time."""
    packed_sequence_size: int = 0
    """Tokens of a micro-batch where they are packed by size; 0: micro-batches count examples."""
    optimizer: Kind | None = None
    """The optimizer and the form of its state; none: the class that `_target_` names."""
    word_rows: int = 0
    """Rows of the word table that are trained, where it is only those that occur in the training data; 0: all."""
    own_products: bool = False
    """On a CPU: linear layers of the blocks are swapped for our own (`models/cpu_linears.py`)."""
    whole_layers: bool = False
    """Whether layers of encoders are one operation each, on the CPU."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Which layers compute their activations again in the backward pass."""
    offload: bool = False
    """Whether what goes into checkpointed layers waits in host memory."""
    fp8: bool = False
    """Whether large products are made in FP8."""
    packing: Packing | None = None
    """How frozen weights are held in few bits; none: they are not."""
    norms_again: bool = False
    """Whether decoders make what norms give once more in the backward pass."""
    gates_kept: bool = False
    """Whether decoders keep what goes into the last product of an MLP."""
    second_stream: bool = True
    """Whether a captured step may compute gradients of weights beside the backward pass."""
    memory_gib: float = 0.0
    """The need of memory, as estimated."""
    cannot_fit: str = ""
    """What to say where even the smallest batch needs more memory than there is; nothing: it may fit."""
    ranks: int = 1
    """Processes that train together, each with the whole model."""
    products: Literal["torch", "onednn"] = "torch"
    """The library of fp32 products on the CPU: torch's own, or oneDNN."""

    @property
    def evaluated_reads(self) -> int:
        """The same where nothing is recorded: filled up no further than tokens are."""
        return min(self.bucket_reads, self.bucket_tokens)

    @property
    def parts(self) -> tuple[list[Decision], list[Decision]]:
        """The lines of what was asked for, and those of how it is done."""
        asked = sorted((d for d in self.decisions if d.asked), key=lambda d: ASKED.index(d.name))
        return asked, [d for d in self.decisions if not d.asked]

    def to_json(self) -> dict[str, Any]:
        decisions = [{**dataclasses.asdict(d), "asked": d.asked} for part in self.parts for d in part]
        return {**dataclasses.asdict(self), "decisions": decisions}
