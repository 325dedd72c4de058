"""What FP8 pays for: `python benchmarks/kernels_fp8.py [--out rows.json] [--tokens 8192] [--no-torchao]` on a Hopper.

The four products of a Qwen3-8B layer at 8,192 tokens. For each, in one table:

    linear        forward and backward of the whole layer: bf16 (`kernels/linear.py`), FP8 (`kernels/fp8_linear.py`),
                  and torchao's float8 linear, whose casts are eager where nothing is compiled
    product       the three GEMMs alone, in bf16 and in FP8, with fast and with exact accumulation
    quantise      the kernels around them: largest magnitude, both copies, the transposed copy at a known scale; with
                  GB/s, and other tiles for the one that moves most

Then the layer as a sum (a step has 36 of them), and the error of every result against fp64 beside that of the torch
reference: they have to be the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from kernel_timing import relative_error, time_call

from automodel.kernels import fp8
from automodel.kernels.fp8 import E4M3, E5M2, product, quantise
from automodel.kernels.fp8_linear import fp8_joined_linear, fp8_linear_reference, fp8_swiglu_linear
from automodel.kernels.linear import joined_linear
from automodel.kernels.swiglu import swiglu_linear

SHAPES = {"qkv": (4096, 6144), "out": (4096, 4096), "gate+up": (4096, 24576), "down": (12288, 4096)}
LAYERS = 36
TILES = ((128, 64, 8), (64, 128, 8), (64, 64, 4), (64, 64, 8), (128, 128, 8), (128, 128, 16), (32, 128, 4))
Call = Callable[[], object]


def numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


def learned(make: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dy: torch.Tensor, *leaves) -> Call:
    """Forward and backward of a layer, down to the gradients of x and of its weights."""
    return lambda: torch.autograd.grad(make(x), [x, *leaves], dy)


def linears(name: str, tokens: int, torchao: bool) -> Iterator[tuple[str, Call]]:
    inputs, outputs = SHAPES[name]
    x, dy = numbers(tokens, inputs).requires_grad_(), numbers(tokens, outputs, scale=1e-3)
    weight = numbers(outputs, inputs, scale=0.02).requires_grad_()
    joined = weight.detach()
    yield "bf16", learned(lambda t: joined_linear(t, joined, [weight])[0], x, dy, weight)
    yield "fp8", learned(lambda t: fp8_joined_linear(t, joined, [weight])[0], x, dy, weight)
    if name == "down":
        wide = numbers(tokens, 2 * inputs).requires_grad_()
        # Its backward pass overwrites what it read, so each call gets a copy, both sides the same.
        yield "bf16 with SwiGLU", learned(lambda t: swiglu_linear(t * 1.0, weight), wide, dy, weight)
        yield "fp8 with SwiGLU", learned(lambda t: fp8_swiglu_linear(t * 1.0, weight), wide, dy, weight)
    if torchao:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        for recipe in ("tensorwise", "rowwise"):
            holder = torch.nn.Sequential(torch.nn.Linear(inputs, outputs, bias=False)).cuda().bfloat16()
            holder[0].weight.data.copy_(joined)
            model = convert_to_float8_training(holder, config=Float8LinearConfig.from_recipe_name(recipe))
            yield f"torchao {recipe}, eager", learned(model, x, dy, *model.parameters())


def gemms(name: str, tokens: int) -> Iterator[tuple[str, Call]]:
    inputs, outputs = SHAPES[name]
    x, w, dy = numbers(tokens, inputs), numbers(outputs, inputs, scale=0.02), numbers(tokens, outputs, scale=1e-3)
    yield "bf16 y", lambda: x @ w.t()
    yield "bf16 dx", lambda: dy @ w
    yield "bf16 dW", lambda: dy.t() @ x
    qx, qw = quantise(x, E4M3), quantise(w, E4M3)
    for kind, dtype in (("e5m2", E5M2), ("e4m3", E4M3)):
        d = quantise(dy, dtype)
        for fast in (True, False):
            how = {"dtype": torch.bfloat16, "fast": fast}
            label = f"fp8 {'fast' if fast else 'exact'}"
            if kind == "e5m2":
                yield f"{label} y", lambda how=how: product(qx.rows_TI, qw.rows_TI, qx.scale, qw.scale, **how)
            yield (
                f"{label} dx, {kind}",
                lambda d=d, how=how: product(d.rows_TI, qw.columns_IP, d.scale, qw.scale, **how),
            )
            yield (
                f"{label} dW, {kind}",
                lambda d=d, how=how: product(d.columns_IP, qx.columns_IP, d.scale, qx.scale, **how),
            )


def quantising(rows: int, columns: int) -> Iterator[tuple[str, float, Call]]:
    """(name, bytes moved, call)."""
    x = numbers(rows, columns)
    size, scale = x.numel(), quantise(x, E4M3).scale
    yield "amax", 2 * size, lambda: fp8._partial_maxima(x)
    yield "both copies", 6 * size, lambda: quantise(x, E4M3)
    yield "rows only", 5 * size, lambda: quantise(x, E4M3, columns=False)
    yield "both copies, known scale", 4 * size, lambda: quantise(x, E4M3, scale=scale)
    yield "transposed, known scale", 3 * size, lambda: quantise(x, E4M3, rows=False, scale=scale)


def tiles(rows: int, columns: int) -> Iterator[tuple[str, float, Call]]:
    x = numbers(rows, columns)
    scale, before = quantise(x, E4M3).scale, (fp8.TILE_ROWS, fp8.TILE_COLUMNS, fp8.TILE_WARPS)
    for tile in TILES:

        def call(tile=tile) -> None:
            fp8.TILE_ROWS, fp8.TILE_COLUMNS, fp8.TILE_WARPS = tile
            quantise(x, E4M3, scale=scale)
            fp8.TILE_ROWS, fp8.TILE_COLUMNS, fp8.TILE_WARPS = before

        yield f"tile {tile[0]}×{tile[1]}, {tile[2]} warps", 4 * x.numel(), call


def checks(tokens: int) -> Iterator[dict]:
    """Errors of y, dx and dW against fp64, ours and the reference's; odd rows have a padded end."""
    for rows in (min(tokens, 1024), 1000 - 3):
        x, w, dy = numbers(rows, 1024), numbers(1536, 1024, scale=0.02), numbers(rows, 1536, scale=1e-3)
        leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        y, _ = fp8_joined_linear(leaf, weight.detach(), [weight])
        dx, dw = torch.autograd.grad(y, [leaf, weight], dy)
        exact = [x.double() @ w.double().t(), dy.double() @ w.double(), dy.double().t() @ x.double()]
        for name, ours, theirs, truth in zip(("y", "dx", "dW"), (y, dx, dw), fp8_linear_reference(x, w, dy), exact):
            mine, reference = relative_error(ours, truth), relative_error(theirs, truth)
            passed = mine < 1.1 * reference + 3e-3
            yield {"op": f"fp8 {name}", "rows": rows, "error": mine, "reference": reference, "passed": passed}


def measured(rows: list[dict], op: str, shape: str, provider: str, call: Call, **more) -> float:
    row = {"op": op, "shape": shape, "provider": provider, **more}
    try:
        row |= time_call(call)
    except Exception as problem:  # one that does not run says why and leaves the others alone
        row["problem"] = f"{type(problem).__name__}: {problem}"[:300]
    rows.append(row)
    time_us = row.get("us_p50", float("nan"))
    rate = ""
    if "bytes" in more:
        rate = f"  {more['bytes'] / time_us / 1e3:6.0f} GB/s"
    elif "flop" in more:
        rate = f"  {more['flop'] / time_us / 1e6:6.0f} TFLOP/s"
    print(f"{op:9} {shape:10} {provider:28} {time_us:9.1f} µs{rate}  {row.get('problem', '')}", flush=True)
    return time_us


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--no-torchao", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    found = list(checks(options.tokens))
    for check in found:
        print(json.dumps(check))
    rows: list[dict] = []
    sums: dict[str, float] = {}
    for name, (inputs, outputs) in SHAPES.items():
        work = 2 * options.tokens * inputs * outputs
        for provider, call in linears(name, options.tokens, not options.no_torchao):
            time_us = measured(rows, "linear", name, provider, call, flop=3 * work)
            if provider in ("bf16", "fp8"):
                sums[provider] = sums.get(provider, 0.0) + time_us
        for provider, call in gemms(name, options.tokens):
            measured(rows, "product", name, provider, call, flop=work)
        sizes = {"x": (options.tokens, inputs), "dy": (options.tokens, outputs), "W": (outputs, inputs)}
        for tensor, size in sizes.items():
            for provider, moved, call in quantising(*size):
                measured(rows, "quantise", f"{name} {tensor}", provider, call, bytes=moved)
        torch.cuda.empty_cache()
    for provider, moved, call in tiles(options.tokens, 4096):
        measured(rows, "quantise", "qkv x", provider, call, bytes=moved)
    gain = sums["bf16"] / sums["fp8"]
    each = {kind: time_us / 1e3 for kind, time_us in sums.items()}
    print(f"layer: bf16 {each['bf16']:.2f} ms, fp8 {each['fp8']:.2f} ms, {gain:.2f} times; "
          f"{LAYERS} layers save {LAYERS * (each['bf16'] - each['fp8']):.0f} ms a step")  # fmt: skip
    if options.out is not None:
        options.out.write_text(json.dumps({"checks": found, "rows": rows, "layer_ms": each}, indent=1))
    return 0 if all(check["passed"] for check in found) else 1


if __name__ == "__main__":
    sys.exit(main())
