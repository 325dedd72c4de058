"""Every kernel compiles for Hopper and Ampere without a GPU in sight, within its registers and with wide loads."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.fixture(scope="module")
def report():
    script = Path(__file__).with_name("compiled_for.py")
    done = subprocess.run([sys.executable, script, "90", "80"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_kernel_compiles_for_both(report):
    names = {row["kernel"] for row in report}
    assert len(names) >= 20
    # Ampere has neither FP8 nor an engine that loads tiles.
    newer = {name for name in names if name.startswith(("quantise_kernel", "weight_gradient_kernel"))}
    assert len(newer) == 4 + 2
    assert len(report) == 2 * len(names) - len(newer)


def test_nothing_spills_below_the_widest_rows(report):
    """Attention's tiles are chosen on Hopper; on Ampere its backward pass spills a little of what it holds. Tiles of
    several heads do so on Hopper too, and are faster than those that do not, most of all heads of 128 in two stages."""

    def allowed(row):
        if not row["kernel"].startswith("attention"):
            return 0
        if row["kernel"].startswith("attention_delta"):
            return 8  # a counter of the list of tiles, once a program
        return 96 if row["capability"] == 80 else 128 if "on Hopper" in row["kernel"] else 0

    rows = [
        r for r in report if "D=8192" not in r["kernel"] and not ("on Hopper" in r["kernel"] and r["capability"] < 90)
    ]
    assert [(r["kernel"], r["capability"], r["spilled_bytes"]) for r in rows if r["spilled_bytes"] > allowed(r)] == []


def test_attention_fits_the_gpu_of_a_desktop(report):
    """Which gives a program 99 kB of shared memory; Hopper has 227."""
    needed = {r["kernel"]: r["shared_bytes"] for r in report if r["kernel"].startswith("attention")}
    assert len(needed) >= 10
    assert {name: size for name, size in needed.items() if size > 99 * 1024} == {}


def test_gradients_of_weights_are_products_of_whole_tiles(report):
    """Four stages of tiles and half a result are what fits into the 227 kB of a program on Hopper, and their
    accumulators into its registers."""
    rows = [r for r in report if r["kernel"].startswith("weight_gradient_kernel")]
    assert len(rows) == 2
    assert all(r["shared_bytes"] <= 227 * 1024 and r["registers"] <= 255 for r in rows)
    assert all(r["products"] >= 4 and r["conversions"] == 0 for r in rows), rows


def test_no_load_is_narrower_than_a_word(report):
    """Masks and raw addresses easily cost Triton its proof of alignment; then it loads element by element. The loss
    reads one logit by itself, the label's; the pooled token's row is shorter than a word for each thread. The scale of
    a group of 4-bit weights is one byte."""
    allowed = {"cross_entropy_rows_kernel": 1, "pooled_backward_kernel": 2, "expand_kernel": 1}
    narrow = {r["kernel"]: r["narrow_loads"] for r in report}
    assert {name: loads for name, loads in narrow.items() if loads > allowed.get(name.split()[0], 0)} == {}


def test_the_optimizer_moves_nothing_between_threads(report):
    updates = [r for r in report if r["kernel"].startswith("update_kernel")]
    updates += [r for r in report if r["kernel"].startswith("update_run_kernel")]
    assert len(updates) == 6 + 8  # three mixtures of dtypes, and two of long pieces in two ways, on two kinds of GPU
    assert all(r["barriers"] == 0 and r["shared_bytes"] == 0 for r in updates)
