"""Pieces of a LoRA step by themselves: `python benchmarks/kernels_lora.py` on a GPU, about half a minute.

For Qwen3-8B at 8,192 tokens, rank 16: the joined activation kernels in several launch shapes against the pieces they
stand for, the thin products, and expanding NF4 weights. µs, and the share of the bytes that have to move (copy speed is
about 4.2 TB/s on an H200).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from automodel.kernels import lora_mlp, swiglu
from automodel.kernels.lora_mlp import Launch, _activate, _back_in_place, _Thin
from automodel.kernels.packed import pack

T, WIDE, INNER, RANK = 8192, 4096, 12_288, 16
SHAPES = [
    Launch(32, 128, 8), Launch(32, 64, 4), Launch(64, 64, 4), Launch(64, 64, 8), Launch(64, 128, 8), Launch(16, 128, 4),
    Launch(16, 256, 8), Launch(32, 32, 2), Launch(64, 32, 4), Launch(128, 64, 8), Launch(32, 128, 4), Launch(16, 64, 2),
]  # fmt: skip


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
    bg, bu, ad = made(INNER, RANK), made(INNER, RANK), made(RANK, INNER)
    thin = _Thin(bg, bu, (2.0, 2.0), RANK, RANK)
    forward, backward = 3 * T * INNER * 2, 6 * T * INNER * 2
    show("swiglu forward", lambda: swiglu._forward(x, "silu"), forward)
    show("swiglu backward", lambda: swiglu._backward_in_place(x, da, "silu", again=True), backward)
    for shape in SHAPES:
        lora_mlp.FORWARD = lora_mlp.BACKWARD = shape
        show(f"joined forward {tuple(shape)}", lambda: _activate(x, h, thin, "silu"), forward)
        show(f"joined backward {tuple(shape)}", lambda: _back_in_place(x, h, thin, ad, da, ud, "silu"), backward)
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


def expanding() -> None:
    for rows in (6144, 2 * INNER):
        packed = pack(made(rows, WIDE), "nf4", True)
        out = torch.empty(rows, WIDE, dtype=torch.bfloat16, device="cuda")
        show(f"expand NF4 ({rows}, {WIDE})", lambda: packed.expand(torch.bfloat16, out), 2.5 * rows * WIDE)  # noqa: B023
    weight, x = made(2 * INNER, WIDE), made(T, WIDE)
    show("x W' (gate and up)", lambda: x @ weight.t(), 0.0)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.manual_seed(0)
    activation()
    thin_products()
    expanding()


if __name__ == "__main__":
    main()
