"""Pieces of a LoRA step by themselves: `python benchmarks/kernels_lora.py` on a GPU, about half a minute.

For Qwen3-8B at 8,192 tokens, rank 16: adapters inside the products of an MLP against passes of their own, thin
products, and expanding NF4 weights. µs, and the speed of the bytes that have to move (a copy has about 4.2 TB/s on an
H200).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from automodel.kernels import swiglu
from automodel.kernels.frozen import Below, Beside, Held
from automodel.kernels.packed import pack

T, WIDE, INNER, RANK = 8192, 4096, 12_288, 16


def microseconds(work: Callable[[], object], repeat: int = 20) -> float:
    for _ in range(3):
        work()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeat):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeat * 1e3


def show(name: str, work: Callable[[], object], moved: float) -> None:
    try:
        taken = microseconds(work)
    except Exception as error:  # a shape that does not compile or fit is a result, too
        print(f"{name:44} {type(error).__name__}: {str(error).splitlines()[0][:70]}", flush=True)
        return
    print(f"{name:44} {taken:8.1f} us  {moved / taken / 1e6:5.2f} TB/s", flush=True)


def made(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.1


def activation() -> None:
    x, da, h, ud = made(T, 2 * INNER), made(T, INNER), made(T, 2 * RANK), made(T, RANK)
    bg, ad = made(INNER, RANK), made(RANK, INNER)
    show("swiglu forward", lambda: swiglu._forward(x, "silu"), 3 * T * INNER * 2)
    show("swiglu backward", lambda: swiglu._backward_in_place(x, da, "silu", again=True), 6 * T * INNER * 2)
    half = x[:, :INNER]
    show("gate += h B (one of two)", lambda: half.addmm_(h[:, :RANK], bg.t()), 2 * T * INNER * 2)
    both = made(2 * INNER, 2 * RANK)
    show("gate and up += h B, one product of rank 32", lambda: x.addmm_(h, both.t()), 4 * T * INNER * 2)
    show("u of gate and up, one product of rank 32", lambda: x @ both, 2 * T * INNER * 2)
    show("dB of gate and up, one product", lambda: x.t() @ h, 2 * T * INNER * 2)
    show("da += u A", lambda: da.addmm_(ud, ad), 2 * T * INNER * 2)
    show("u = dgate B (one of two)", lambda: half @ bg, T * INNER * 2)
    show("dB = dgate' h (one of two)", lambda: half.t() @ h[:, :RANK], T * INNER * 2)
    show("dA = u' a", lambda: ud.t() @ da, T * INNER * 2)
    show("h = a A'", lambda: da @ ad.t(), T * INNER * 2)


def thin_products() -> None:
    x, dy, qkv = made(T, WIDE), made(T, WIDE), made(T, 6144)
    a, b, h = made(3 * RANK, WIDE), made(WIDE, RANK), made(T, 3 * RANK)
    show("h = x A' (rank 48)", lambda: x @ a.t(), T * WIDE * 2)
    show("y += h B (4096)", lambda: dy.addmm_(h[:, :RANK], b.t()), 2 * T * WIDE * 2)
    show("q += h B inside qkv", lambda: qkv[:, :WIDE].addmm_(h[:, :RANK], b.t()), 2 * T * WIDE * 2)
    show("u = dy B (4096)", lambda: dy @ b, T * WIDE * 2)
    show("dB = dy' h (4096)", lambda: dy.t() @ h[:, :RANK], T * WIDE * 2)
    show("dA = u' x (rank 48)", lambda: h.t() @ x, T * WIDE * 2)


def inside_products() -> None:
    """Adapters that are part of the frozen products, against the products alone (floating point, not bytes, counts)."""
    x, dy, weights, down = made(T, WIDE), made(T, WIDE), (made(INNER, WIDE), made(INNER, WIDE)), made(WIDE, INNER)
    a, b, thin = made(2 * RANK, WIDE), made(INNER, RANK), (made(WIDE, RANK), made(RANK, INNER))
    alone = Held(torch.cat(weights))
    show("x W' (gate and up)", lambda: alone.times(x, None), 0.0)
    beside = Beside(weights, 2 * RANK)
    places = [(slice(i * INNER, (i + 1) * INNER), slice(i * RANK, (i + 1) * RANK), b) for i in range(2)]
    show("[x h] [W B]' (gate and up)", lambda: beside.times_both(x, a, 2.0, places, None), 0.0)
    show("dy W (down)", lambda: Held(down).back(dy), 0.0)
    below = Below(down, RANK)
    show("[dy u] [W; A] (down)", lambda: below.back_both(dy, *thin, 2.0), 0.0)


def expanding() -> None:
    for rows in (6144, 2 * INNER):
        packed = pack(made(rows, WIDE), "nf4", True)
        out = torch.empty(rows, WIDE, dtype=torch.bfloat16, device="cuda")
        show(f"expand NF4 ({rows}, {WIDE})", lambda: packed.expand(torch.bfloat16, out), 2.5 * rows * WIDE)  # noqa: B023


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.manual_seed(0)
    activation()
    inside_products()
    thin_products()
    expanding()


if __name__ == "__main__":
    main()
