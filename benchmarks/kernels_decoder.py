"""The kernels of decoder blocks against torch eager, torch.compile and Liger, on one GPU.

    python benchmarks/kernels_decoder.py --out kernels_decoder.json [--no-compile]

As `kernels.py`: checked against fp64 first, then forward + backward as a CUDA graph with a cold cache. The gated MLP
and the heads work in the memory of a product, so their cases begin with that product, the same for every contender;
`floor_us` then counts only the bytes that are moved around it, and is no floor of the whole case.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from kernels import Case, about, check, draw, print_table, time_case

from automodel.kernels.rms_norm import rms_norm, rms_norm_reference
from automodel.kernels.rope import rope_table
from automodel.kernels.rope_heads import HeadNorms, Heads, rope_heads, rope_heads_reference, rope_joined
from automodel.kernels.swiglu import swiglu_linear, swiglu_linear_reference


def liger(module: str, name: str) -> Callable | None:
    try:
        return getattr(__import__(f"liger_kernel.ops.{module}", fromlist=[name]), name).apply
    except (ImportError, AttributeError):
        return None


def checks() -> Iterator[dict]:
    for dtype in (torch.float32, torch.bfloat16):
        for width in (896, 1024, 2048, 4096, 8192):
            tensors = [draw(1021, width, dtype=dtype), draw(1021, width, dtype=dtype), draw(width, dtype=dtype)]
            yield check(f"rms_norm D={width}", dtype, rms_norm, rms_norm_reference, tensors)
        for activation in ("silu", "gelu_tanh"):
            yield check(
                f"swiglu_linear {activation}", dtype,
                lambda x, w, a=activation: [swiglu_linear(x * 1.0, w, None, a)],
                lambda x, w, a=activation: [swiglu_linear_reference(x, w, None, a)],
                [draw(1021, 6144, dtype=dtype), draw(256, 3072, dtype=dtype)],
            )  # fmt: skip


def rms_norm_case(rows: int, width: int) -> Case:
    tensors = [draw(rows, width), draw(rows, width), draw(width)]
    upstream = [draw(rows, width, grad=False) for _ in range(2)]

    def torchs_own(x: Tensor, residual: Tensor, weight: Tensor):
        h = x + residual
        return F.rms_norm(h, (width,), weight, 1e-6), h

    contenders: dict[str, Callable] = {"automodel": rms_norm, "stock eager": rms_norm_reference}
    contenders["F.rms_norm"] = torchs_own
    if (fused := liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")) is not None:
        contenders["liger fused"] = lambda x, residual, weight: fused(x, residual, weight, 1e-6)
    # forward x, residual → h, y; backward dy, dh, h → dx, which is dresidual too
    return Case("rms_norm", f"{rows}x{width}", tensors, upstream, 8 * rows * width * 2, contenders, rms_norm_reference)


def mlp_case(rows: int, width: int, inner: int) -> Case:
    tensors = [draw(rows, width), draw(2 * inner, width), draw(width, inner)]
    upstream = [draw(rows, width, grad=False)]

    def ours(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return swiglu_linear(F.linear(x, gate_up), down)

    def eager(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (F.linear(x, w) for w in gate_up.chunk(2))
        return F.linear(F.silu(gate) * up, down)

    contenders: dict[str, Callable] = {"automodel": ours, "stock eager": eager}
    if (fused := liger("swiglu", "LigerSiLUMulFunction")) is not None:
        contenders["liger"] = lambda x, gate_up, down: F.linear(
            fused(*(F.linear(x, w) for w in gate_up.chunk(2))), down
        )
    # around the products: gate, up → a; da, gate, up → dgate, dup, a
    moved = 9 * rows * inner * 2
    return Case("gated mlp", f"{rows}x{width}x{inner}", tensors, upstream, moved, contenders, eager)


def heads_case(rows: int, width: int, heads: Heads, normed: bool) -> Case:
    table = rope_table(1.0 / 1e4 ** (torch.arange(heads.dim // 2, device="cuda") / (heads.dim // 2)), 512)
    positions = torch.arange(rows, device="cuda") % 241
    columns = (heads.queries + 2 * heads.keys) * heads.dim
    tensors = [draw(rows, width), draw(columns, width)] + [draw(heads.dim) for _ in range(2 * normed)]

    def norms(weights: tuple[Tensor, ...]) -> HeadNorms | None:
        return HeadNorms(*weights, 1e-6) if normed else None

    def joined(x: Tensor, weight: Tensor, *weights: Tensor):
        return rope_joined(F.linear(x, weight), positions, table, heads, norms(weights))

    def apart(x: Tensor, weight: Tensor, *weights: Tensor):
        return torch.cat(rope_heads(F.linear(x, weight), positions, table, heads, norms(weights)), 1).flatten(1)

    def eager(x: Tensor, weight: Tensor, *weights: Tensor):
        made = rope_heads_reference(F.linear(x, weight), positions, table, heads, norms(weights))
        return torch.cat(made, 1).flatten(1)

    contenders = {"automodel joined": joined, "automodel apart + cat": apart, "stock eager + cat": eager}
    name = "heads, normed" if normed else "heads"
    shape = f"{rows}x{heads.queries}/{heads.keys}x{heads.dim}"
    moved = (4 + 2 * normed) * rows * heads.turning * heads.dim * 2
    return Case(name, shape, tensors, [draw(rows, columns, grad=False)], moved, contenders, eager)


def cases() -> list[Callable[[], Case]]:
    return [
        lambda: rms_norm_case(4096, 1024),
        lambda: rms_norm_case(8192, 2048),
        lambda: rms_norm_case(8192, 4096),
        lambda: mlp_case(4096, 1024, 3072),
        lambda: mlp_case(8192, 2048, 8192),
        lambda: heads_case(4096, 1024, Heads(16, 8, 128), True),
        lambda: heads_case(8192, 2048, Heads(32, 8, 64), False),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    checked = list(checks())
    rows = [row for make in cases() for row in time_case(make(), not arguments.no_compile)]
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"about": about(), "checks": checked, "rows": rows}, indent=1) + "\n")
    failed = [c for c in checked if not c["passed"]]
    for row in failed or checked:
        print(("ok  " if row["passed"] else "FAIL"), row)
    print_table(rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
