"""Which samples make which optimizer step: a pure function of (seed, epoch), and of nothing else.

One step draws `micro_batch_size × grad_acc_steps` samples together and then splits them, so the samples of step 17 do
not depend on how a step is cut into micro-batches, on the number of workers, or on where a run was interrupted.

`StepOrder` counts samples. `BinOrder` (bins.py) counts tokens, and its epochs may differ by a few steps. Both answer
the same questions, and a run needs no others:

    steps_in(epoch)              how many steps an epoch has
    locate(position)             epoch and step of the position-th step of the run
    micro_batches(epoch, step)   the samples of each micro-batch
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from automodel.config.errors import UserError
from automodel.data.mixture import Mixture

MEGA_BATCHES = (
    50  # group_by_length: steps sorted together, as in the stock Trainer (also at most a quarter of the data)
)


def samples_of(
    epoch: int, count: int, seed: int, shuffle: bool, mixture: Mixture | None = None
) -> tuple[np.ndarray, np.random.Generator]:
    """The samples of an epoch in order, and the generator for whatever else the epoch has to draw."""
    # Philox keyed by both numbers: neighbouring seeds and epochs are independent streams, on every platform.
    generator = np.random.Generator(np.random.Philox(key=[seed % 2**64, epoch]))
    if mixture is None:
        return (generator.permutation(count) if shuffle else np.arange(count)), generator
    drawn = mixture.epoch(epoch, seed, shuffle)
    return (drawn[generator.permutation(len(drawn))] if shuffle else drawn), generator


@dataclass
class StepOrder:
    """Samples of every step of every epoch."""

    lengths: np.ndarray
    micro_batch_size: int
    grad_acc_steps: int = 1
    seed: int = 42
    shuffle: bool = True
    drop_last: bool = False
    group_by_length: bool = False
    sort_within_step: bool = False
    """Sort a step's samples by length before splitting it into micro-batches. The step's gradient is the same sum;
    padded micro-batches of similar lengths hold less padding."""
    mixture: Mixture | None = None
    """Where an epoch is not every sample once."""
    _cached: tuple[int, np.ndarray] | None = field(default=None, repr=False)

    def __post_init__(self):
        if self.steps_per_epoch == 0:
            raise UserError(
                f"dataloader.drop_last: the data has {self.samples_per_epoch} samples, one optimizer step takes "
                f"{self.samples_per_step} (batch size {self.micro_batch_size} × {self.grad_acc_steps} accumulation "
                "steps), so dropping the last, smaller step leaves none. Set drop_last: false or a smaller batch size."
            )

    @property
    def samples_per_step(self) -> int:
        return self.micro_batch_size * self.grad_acc_steps

    @property
    def samples_per_epoch(self) -> int:
        return len(self.lengths) if self.mixture is None else self.mixture.total

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.samples_per_epoch, self.samples_per_step)
        return whole if self.drop_last or not rest else whole + 1

    def steps_in(self, epoch: int) -> int:
        return self.steps_per_epoch

    def locate(self, position: int) -> tuple[int, int]:
        """Epoch and step in it of the position-th step of a run."""
        return divmod(position, self.steps_per_epoch)

    def micro_batches(self, epoch: int, step: int) -> list[np.ndarray]:
        """Sample numbers of each micro-batch of a step."""
        first = step * self.samples_per_step
        chosen = self.permutation(epoch)[first : first + self.samples_per_step]
        if self.sort_within_step and self.grad_acc_steps > 1:
            chosen = chosen[np.argsort(-self.lengths[chosen], kind="stable")]
        size = self.micro_batch_size
        return [chosen[start : start + size] for start in range(0, len(chosen), size)]

    def permutation(self, epoch: int) -> np.ndarray:
        """All samples in the order of one epoch."""
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._permutation(epoch))
        return self._cached[1]

    def _permutation(self, epoch: int) -> np.ndarray:
        order, generator = samples_of(epoch, len(self.lengths), self.seed, self.shuffle, self.mixture)
        if not self.group_by_length:
            return order
        return _grouped(order, self.lengths, self.samples_per_step, generator, self.shuffle)

    def describe(self) -> dict[str, Any]:
        """What a position is only valid for."""
        return {
            "micro_batch_size": self.micro_batch_size,
            "grad_acc_steps": self.grad_acc_steps,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "group_by_length": self.group_by_length,
            "packed_sequence_size": None,  # as in checkpoints from before it could be anything else
            "mixture": None if self.mixture is None else self.mixture.describe(),
        }


def _grouped(order, lengths, step, generator, shuffle: bool) -> np.ndarray:
    """Steps of similar lengths: sort within mega-batches, then shuffle the steps. The longest step comes first, so a
    run that does not fit into memory fails at once and not in its third hour."""
    mega = step * max(1, min(len(order) // (step * 4), MEGA_BATCHES))
    parts = [order[start : start + mega] for start in range(0, len(order), mega)]
    ordered = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])
    if not shuffle:
        return ordered
    whole = len(ordered) // step
    steps = ordered[: whole * step].reshape(whole, step)
    if whole:
        steps = steps[generator.permutation(whole)]
        longest = int(np.argmax(lengths[steps].max(axis=1)))
        steps[[0, longest]] = steps[[longest, 0]]
    rest = ordered[whole * step :]  # stays last: it is the step that may be smaller, or dropped
    return np.concatenate([steps.reshape(-1), rest])
