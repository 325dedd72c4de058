"""The loss's part of `kernels.py`: the last product of a language model and its cross-entropy, forward and backward.

    python benchmarks/kernels_loss.py [--out loss.json] [--no-compile] [--tune]       by itself, under a minute

Contenders make the loss and the gradients of hidden states and weight from the same bf16 tensors. `torch eager` and
torch.compile hold all logits; `torch chunked` is `linear_cross_entropy` with its rows in torch operations. Each is
captured into a CUDA graph where it can be: Liger counts its labels on the host, so it is timed as it is. `floor_us` is
that of the three products at 789 TFLOP/s; the loss that reads and writes logits once each adds 4 bytes a logit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from kernel_timing import capture, host_us, peak_mib, poison, relative_error

from automodel.kernels import linear_cross_entropy as module
from automodel.kernels.linear_cross_entropy import (
    IGNORE,
    PLAIN,
    CrossEntropy,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_cross_entropy_scores,
)

SHAPES = ((1408, 2048, 128_256), (8192, 2048, 128_256), (2048, 4096, 151_936))
FLOPS = 789e12
BF16 = torch.bfloat16
COMPILED_ROWS = 1408  # torch.compile is timed at one shape: it takes longer than everything else here
BOUNDS = {torch.float32: 2e-5, BF16: 1e-2}


def draw(rows: int, width: int, words: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    hidden = torch.randn(rows, width, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(words, width, device="cuda") / width**0.5).to(dtype).requires_grad_()
    return [hidden, weight, torch.randint(0, words, (rows,), device="cuda")]


def loss_checks() -> Iterator[dict]:
    """Loss and gradients against fp64, with NaN in the memory they will lie in and every tenth row without a label."""
    forms = {
        "plain": PLAIN,
        "capped": CrossEntropy(softcap=3.0),
        "all": CrossEntropy(logit_scale=0.5, z_loss=1e-3, label_smoothing=0.1),
    }
    for dtype in (torch.float32, BF16):
        for name, form in forms.items():
            for words in (32_000, 50_257):
                hidden, weight, labels = draw(1021, 256, words, dtype)
                labels[::10] = IGNORE
                scale = torch.tensor(1 / 919, device="cuda")
                wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
                expected = linear_cross_entropy_reference(*wide, labels, scale=scale.double(), form=form)
                exact = (expected, *torch.autograd.grad(expected, wide))
                poison()
                loss = linear_cross_entropy(hidden, weight, labels, scale=scale, form=form, chunk_rows=512)
                found = (loss, *torch.autograd.grad(loss, (hidden, weight)))
                error = max(relative_error(a, b) for a, b in zip(found, exact))
                passed = error < BOUNDS[dtype]  # NaN does not pass
                yield {"op": f"linear_cross_entropy {name} V={words}", "dtype": str(dtype), "error": error,
                       "bound": BOUNDS[dtype], "passed": passed}  # fmt: skip
    hidden, weight, labels = draw(1021, 256, 50_257)
    labels[:500] = (hidden @ weight.t()).argmax(1)[:500]
    right = int(linear_cross_entropy_scores(hidden, weight, labels, chunk_rows=512).right)
    expected = int(((hidden @ weight.t()).argmax(1) == labels).sum())
    # torch's argmax on a GPU may take any of equal logits, and in bf16 the best two often are.
    passed = 0.9 * expected <= right <= 1.1 * expected
    yield {"op": "linear_cross_entropy scores", "dtype": str(BF16), "error": abs(right - expected), "bound": 50,
           "passed": passed}  # fmt: skip


def liger() -> Callable | None:
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    except ImportError:
        return None

    def loss(hidden, weight, labels):
        out = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels)
        return out[0] if isinstance(out, tuple) else out

    return loss


def chunked_in_torch(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    kept, module.runs_triton = module.runs_triton, lambda tensor: False
    try:
        return linear_cross_entropy(hidden, weight, labels, scale=1 / labels.shape[0], unit_upstream=True)
    finally:
        module.runs_triton = kept


def contenders(rows: int, compile_too: bool) -> Iterator[tuple[str, Callable, bool]]:
    """(provider, loss of hidden, weight and labels, whether it can be captured)."""
    scale = torch.tensor(1 / rows, device="cuda")

    def ours(hidden, weight, labels):
        return linear_cross_entropy(hidden, weight, labels, scale=scale, unit_upstream=True)

    def eager(hidden, weight, labels):
        return linear_cross_entropy_reference(hidden, weight, labels, scale=scale)

    yield "automodel", ours, True
    yield "torch chunked", chunked_in_torch, True
    yield "torch eager", eager, True
    if (fused := liger()) is not None:
        yield "liger, not captured", fused, False
        yield "automodel, not captured", ours, False
    if compile_too and rows == COMPILED_ROWS:
        torch._dynamo.reset()
        yield "torch.compile", torch.compile(eager, dynamic=False), True


def forward_backward(loss: Callable, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Callable:
    return lambda: torch.autograd.grad(loss(hidden, weight, labels), (hidden, weight))


def timed(call: Callable[[], Any], captured: bool) -> dict:
    from triton.testing import do_bench

    call()
    row = {"host_us": host_us(call, repeats=3), "peak_mib": peak_mib(call)}
    replay = capture(call, None) if captured else call
    p50, p20, p80 = do_bench(replay, warmup=50, rep=200, quantiles=[0.5, 0.2, 0.8])
    return row | {"us_p20": p20 * 1e3, "us_p50": p50 * 1e3, "us_p80": p80 * 1e3}


def loss_rows(compile_too: bool) -> Iterator[dict]:
    for rows, width, words in SHAPES:
        hidden, weight, labels = draw(rows, width, words)
        for provider, loss, captured in contenders(rows, compile_too):
            row = {"op": "linear_cross_entropy", "shape": f"{rows}x{width}x{words}", "provider": provider,
                   "mode": "forward+backward", "floor_us": 6 * rows * width * words / FLOPS * 1e6}  # fmt: skip
            try:
                yield row | timed(forward_backward(loss, hidden, weight, labels), captured)
            except Exception as problem:  # a contender that cannot run is a row too, not the end of the table
                yield row | {"problem": f"{type(problem).__name__}: {problem}"[:300]}
        torch.cuda.empty_cache()


def tune() -> Iterator[dict]:
    """The kernel over the rows alone, other launch shapes; the floor is one read and one write of the logits."""
    from kernel_timing import floor_us

    rows, words = 4096, 128_256
    logits = torch.randn(rows, words, device="cuda", dtype=BF16)
    labels = torch.randint(0, words, (rows,), device="cuda")
    scale, losses = torch.ones((), device="cuda"), torch.empty(rows, device="cuda")
    kept = module.launch_shape
    for warps, vec in ((32, 16), (32, 8), (32, 32), (16, 16), (16, 8), (8, 16), (8, 8)):
        module.launch_shape = lambda _, warps=warps, vec=vec: (32 * warps, vec, warps)
        row = {"op": "cross_entropy_rows", "shape": f"{rows}x{words}", "provider": f"warps {warps}, columns {vec}",
               "floor_us": floor_us(4 * rows * words)}  # fmt: skip
        yield row | timed(lambda: module._rows(logits, labels, 0, scale, PLAIN, losses, None, learns=True), True)
    module.launch_shape = kept


def main() -> int:
    from kernels import about, print_table

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--tune", action="store_true")
    arguments = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(0)
    checked = list(loss_checks())
    rows = list(tune() if arguments.tune else loss_rows(not arguments.no_compile))
    failed = [c for c in checked if not c["passed"]]
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"about": about(), "checks": checked, "rows": rows}, indent=1) + "\n")
    for check_row in failed or checked:
        print(("ok  " if check_row["passed"] else "FAIL"), check_row)
    print_table(rows)
    print(f"{len(checked) - len(failed)} of {len(checked)} checks passed; {time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
