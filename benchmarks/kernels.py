"""The fused kernels against torch eager, torch.compile and Liger, on one GPU.

    python benchmarks/kernels.py --out kernels.json [--no-compile] [--tune]

First every kernel is checked against a reference in fp64 on fresh random inputs, with NaN in the memory its outputs
will lie in; then forward + backward is timed. Each contender is captured into a CUDA graph, as it runs in a training
step, and `triton.testing.do_bench` times replays with a cold L2 cache, so what is compared is device time; `host_us` is
what the same call costs the host outside a graph. `floor_us` counts each tensor read and written once at 4.25 TB/s.
The optimizer's contenders are in `kernels_adamw.py`, the loss's in `kernels_loss.py`. --tune prints other launch shapes
instead.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from kernel_timing import floor_us, poison, relative_error, time_call
from kernels_adamw import adamw_checks, adamw_rows
from kernels_loss import loss_checks, loss_rows

from automodel.kernels import add_norm as add_norm_module
from automodel.kernels.add_norm import add_norm, add_norm_reference
from automodel.kernels.bias_gelu import bias_gelu, bias_gelu_reference, geglu, geglu_reference
from automodel.kernels.philox import keep_mask

COMPILE_UNTIL_S = 70  # after this, no more torch.compile contenders: the whole script shall take 90 s
BF16 = torch.bfloat16
START = time.perf_counter()


@dataclass
class Case:
    """One operation at one shape: its tensors, the bytes it must move, and who computes it."""

    op: str
    shape: str
    tensors: list[torch.Tensor]
    upstream: list[torch.Tensor]
    floor_bytes: float
    contenders: dict[str, Callable[..., Any]]
    compiled: Callable[..., Any] | None = None


def draw(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_(grad)


# Correctness


def check(name: str, dtype: torch.dtype, ours: Callable, reference: Callable, tensors: list[torch.Tensor]) -> dict:
    """Largest relative error over outputs and gradients."""
    exact_tensors = [t.detach().double().requires_grad_() for t in tensors]
    poison()
    outputs = ours(*tensors)
    expected = reference(*exact_tensors)
    upstream = [torch.randn_like(out) for out in outputs]
    poison()
    found = torch.autograd.grad(outputs, tensors, upstream)
    exact = torch.autograd.grad(expected, exact_tensors, [u.double() for u in upstream])
    errors = [relative_error(a, b) for a, b in zip((*outputs, *found), (*expected, *exact))]
    bound = 5e-6 if dtype == torch.float32 else 8e-3
    passed = all(e < bound for e in errors)  # NaN does not pass
    return {"op": name, "dtype": str(dtype), "error": max(errors), "bound": bound, "passed": passed}


def checks() -> Iterator[dict]:
    seed, p, site = torch.tensor([2**40 + 1], device="cuda"), 0.1, 3

    def normed(x, residual, weight, bias):
        return add_norm(x, residual, weight, bias, dropout_p=p, seed=seed, site=site, return_sum=True)

    def normed_reference(x, residual, weight, bias):
        keep = keep_mask(seed, site, *x.shape, p)
        return add_norm_reference(x, residual, weight, bias, dropout_p=p, keep=keep)

    for dtype in (torch.float32, BF16):
        for width in (256, 768, 1024, 2048, 8192):
            rows = [draw(1021, width, dtype=dtype) for _ in range(2)]
            weights = [draw(width, dtype=dtype) for _ in range(2)]
            yield check(f"add_norm D={width}", dtype, normed, normed_reference, rows + weights)
        for kind in ("none", "tanh"):
            yield check(
                f"bias_gelu {kind}", dtype,
                lambda x, b, kind=kind: [bias_gelu(x, b, kind)],
                lambda x, b, kind=kind: [bias_gelu_reference(x, b, kind)],
                [draw(1021, 3072, dtype=dtype), draw(3072, dtype=dtype)],
            )  # fmt: skip
            yield check(
                f"geglu {kind}", dtype,
                lambda x, kind=kind: [geglu(x, kind)],
                lambda x, kind=kind: [geglu_reference(x, kind)],
                [draw(1021, 2304, dtype=dtype)],
            )  # fmt: skip


# Timing


def forward_backward(function: Callable, tensors: list[torch.Tensor], upstream: list[torch.Tensor]) -> Callable:
    def call() -> Any:
        outputs = function(*tensors)
        outputs = outputs if isinstance(outputs, tuple | list) else [outputs]
        return torch.autograd.grad(outputs, tensors, upstream)

    return call


def time_case(case: Case, compile_too: bool) -> Iterator[dict]:
    contenders = dict(case.contenders)
    if case.compiled is not None and compile_too and time.perf_counter() - START < COMPILE_UNTIL_S:
        torch._dynamo.reset()
        contenders["torch.compile"] = torch.compile(case.compiled, dynamic=False)
    for provider, function in contenders.items():
        row = {"op": case.op, "shape": case.shape, "provider": provider, "mode": "forward+backward"}
        row["floor_us"] = floor_us(case.floor_bytes)
        try:
            yield row | time_call(forward_backward(function, case.tensors, case.upstream))
        except Exception as problem:  # a contender that cannot run is a row too, not the end of the table
            yield row | {"problem": f"{type(problem).__name__}: {problem}"[:300]}


def liger_layer_norm() -> Callable | None:
    try:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    except ImportError:
        return None
    return LigerLayerNormFunction.apply


def liger_geglu() -> Callable | None:
    try:
        from liger_kernel.ops.geglu import LigerGELUMulFunction
    except ImportError:
        return None
    return LigerGELUMulFunction.apply


def add_norm_case(rows: int, width: int, p: float, pre_norm: bool) -> Case:
    seed = torch.tensor([5], device="cuda")
    tensors = [draw(rows, width), draw(rows, width), draw(width), draw(width)]
    upstream = [draw(rows, width, grad=False) for _ in range(1 + pre_norm)]

    def ours(x, residual, weight, bias):
        return add_norm(x, residual, weight, bias, dropout_p=p, seed=seed, return_sum=pre_norm)

    def eager(x, residual, weight, bias, norm=None):
        h = residual + F.dropout(x, p)
        y = F.layer_norm(h, (width,), weight, bias, 1e-12) if norm is None else norm(h, weight, bias, 1e-12)
        return (y, h) if pre_norm else y

    contenders: dict[str, Callable] = {"automodel": ours, "torch eager": eager}
    if (liger := liger_layer_norm()) is not None:
        contenders["liger"] = lambda *tensors: eager(*tensors, norm=liger)
    # forward x, residual → h, y; backward dy, h (and dh) → dx, dresidual (one tensor without dropout)
    moved = (4 + 4 + pre_norm - (p == 0)) * rows * width * 2
    name = f"add_norm p={p}" + (" pre-norm" if pre_norm else "")
    return Case(name, f"{rows}x{width}", tensors, upstream, moved, contenders, compiled=eager)


def bias_gelu_case(rows: int, width: int) -> Case:
    tensors, upstream = [draw(rows, width), draw(width)], [draw(rows, width, grad=False)]

    class BiasInGemm(torch.autograd.Function):
        """What eager torch pays beyond the GEMM, whose epilogue adds the bias for free: GELU, and Σ dx for the bias."""

        @staticmethod
        def forward(ctx, x, bias):
            ctx.save_for_backward(x)
            return F.gelu(x)

        @staticmethod
        def backward(ctx, dy):
            dx = torch.ops.aten.gelu_backward(dy, *ctx.saved_tensors)
            return dx, dx.sum(0)

    contenders = {"automodel": bias_gelu, "torch eager": BiasInGemm.apply, "torch eager x+b": bias_gelu_reference}
    moved = 5 * rows * width * 2
    return Case("bias_gelu", f"{rows}x{width}", tensors, upstream, moved, contenders, bias_gelu_reference)


def geglu_case(rows: int, width: int) -> Case:
    tensors, upstream = [draw(rows, 2 * width)], [draw(rows, width, grad=False)]
    contenders: dict[str, Callable] = {"automodel": geglu, "torch eager": geglu_reference}
    if (liger := liger_geglu()) is not None:  # knows the tanh form only, on two tensors
        contenders["liger (tanh)"] = lambda x: liger(*(half.contiguous() for half in x.chunk(2, dim=-1)))
        contenders["automodel (tanh)"] = lambda x: geglu(x, "tanh")
    return Case("geglu", f"{rows}x{width}", tensors, upstream, 8 * rows * width * 2, contenders, geglu_reference)


def cases() -> list[Callable[[], Case]]:
    return [
        lambda: add_norm_case(2048, 768, 0.1, False),
        lambda: add_norm_case(8192, 768, 0.1, False),
        lambda: add_norm_case(8192, 1024, 0.0, False),
        lambda: add_norm_case(8192, 768, 0.0, True),
        lambda: bias_gelu_case(2048, 3072),
        lambda: bias_gelu_case(8192, 3072),
        lambda: geglu_case(8192, 1152),
    ]


def tune() -> Iterator[dict]:
    """Other launch shapes of add_norm at the two sizes that matter: (rows of a tile, warps, programs a processor)."""
    module, launch = add_norm_module, add_norm_module.Launch
    kept = module.forward_launch, module.backward_launch, module.BACKWARD_PROGRAMS_PER_PROCESSOR
    variants = [("default", *kept)]
    for rows, warps in ((4, 2), (4, 8), (1, 1), (1, 2), (1, 4)):
        shape = launch(1024, rows, warps)
        variants.append((f"forward {rows} w{warps}", lambda _, s=shape: s, *kept[1:]))
    for rows, warps, programs in (
        (4, 4, 1),
        (4, 4, 3),
        (4, 4, 4),
        (4, 8, 2),
        (4, 8, 3),
        (2, 2, 4),
        (2, 2, 6),
        (1, 1, 6),
        (1, 1, 8),
        (1, 1, 12),
        (1, 1, 16),
        (1, 2, 8),
        (1, 4, 6),
    ):
        shape = launch(1024, rows, warps)
        variants.append((f"backward {rows} w{warps} x{programs}", kept[0], lambda _, s=shape: s, programs))
    for rows, dropout in ((2048, 0.1), (8192, 0.1), (8192, 0.0)):  # the last one: ModernBERT's, which keeps the sum
        for name, *setting in variants:
            if dropout and "backward 2" in name:
                continue  # a draw is for four rows or one
            module.forward_launch, module.backward_launch, module.BACKWARD_PROGRAMS_PER_PROCESSOR = setting
            case = add_norm_case(rows, 768, dropout, not dropout)
            call = forward_backward(case.contenders["automodel"], case.tensors, case.upstream)
            row = {"op": case.op, "shape": case.shape, "provider": name, "floor_us": floor_us(case.floor_bytes)}
            yield row | time_call(call)


# Reporting


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def about() -> dict:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True)
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "liger": version("liger-kernel"),
        "commit": head.stdout.strip() or None,
        "date": time.strftime("%Y-%m-%d"),
        "command": "python " + " ".join(sys.argv),
    }


def print_table(rows: list[dict]) -> None:
    print(f"{'op':24}{'shape':>12}  {'provider':24}{'p20':>8}{'p50':>8}{'p80':>8} µs{'floor':>8}{'host':>9}{'MiB':>7}")
    for row in rows:
        start = f"{row['op']:24}{row['shape']:>12}  {row['provider']:24}"
        if "problem" in row:
            print(start + row["problem"].splitlines()[0][:70])
            continue
        quantiles = "".join(f"{row[q]:8.1f}" for q in ("us_p20", "us_p50", "us_p80"))
        print(f"{start}{quantiles}   {row['floor_us']:8.1f}{row['host_us']:9.0f}{row['peak_mib']:7.0f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--tune", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    checked = list(checks())
    if arguments.tune:
        rows = list(tune())
    else:
        checked += adamw_checks()
        rows = [row for make in cases() for row in time_case(make(), not arguments.no_compile)]
        rows += adamw_rows(not arguments.no_compile and time.perf_counter() - START < COMPILE_UNTIL_S)
        checked += loss_checks()
        rows += loss_rows(compile_too=False)
    failed = [c for c in checked if not c["passed"]]
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"about": about(), "checks": checked, "rows": rows}, indent=1) + "\n")
    for check_row in failed or checked:
        print(("ok  " if check_row["passed"] else "FAIL"), check_row)
    print_table(rows)
    print(f"{len(checked) - len(failed)} of {len(checked)} checks passed; {time.perf_counter() - START:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
