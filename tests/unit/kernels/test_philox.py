"""The dropout generator: published test vectors, and the statistics dropout needs."""

import pytest
import torch

from automodel.kernels.philox import drop_threshold, keep_mask, philox

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("rounds", "word", "expected"),
    [  # the known-answer vectors that come with Philox4x32: all bits clear, all bits set
        (7, 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (7, ONES, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (10, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (10, ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_published_vectors(rounds, word, expected):
    seed = torch.tensor(0 if word == 0 else -1)
    counter = tuple(torch.tensor([word]) for _ in range(4))
    assert tuple(int(w) for w in philox(seed, counter, rounds)) == expected


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_drop_rate(p):
    rows, cols = 512, 256
    dropped = (~keep_mask(torch.tensor([7]), 0, rows, cols, p)).double().mean().item()
    assert abs(dropped - p) < 4 * (p * (1 - p) / (rows * cols)) ** 0.5


def test_masks_of_seeds_sites_and_rows_are_independent():
    mask = keep_mask(torch.tensor([7]), 0, 64, 256, 0.5)
    others = [
        keep_mask(torch.tensor([8]), 0, 64, 256, 0.5),
        keep_mask(torch.tensor([7]), 1, 64, 256, 0.5),
        mask.roll(1, 0),
    ]
    for other in others:
        assert abs((mask == other).double().mean().item() - 0.5) < 0.02


def test_mask_depends_on_place_alone_not_on_the_shape():
    small, large = (keep_mask(torch.tensor([2**40 + 5]), 3, rows, cols, 0.3) for rows, cols in ((6, 33), (19, 64)))
    assert torch.equal(small, large[:6, :33])


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_impossible_probabilities_are_refused(p):
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        drop_threshold(p)
