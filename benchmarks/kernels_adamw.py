"""The optimizer's part of `kernels.py`: clip, AdamW and the bf16 copy for the 67.0 M parameters of DistilBERT.

Contenders do the same work from bf16 gradients to bf16 weights with fp32 masters. torch has no such optimizer, so
`torch fused` is what a careful user writes with foreach operations around the fused AdamW, `torch fused fp32` the
autocast way (fp32 gradients, no copy), and torch.compile gets one flat tensor, its best case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from kernel_timing import floor_us, time_call

from automodel.kernels.adamw8 import SMALLEST
from automodel.kernels.flat_adamw import FlatAdamW
from automodel.optim.build import parameter_groups
from automodel.optim.config import OptimizerConfig

BETAS, EPS, LR, DECAY = (0.9, 0.999), 1e-8, 2e-5, 0.01
Steps = tuple[Callable[[], None], Callable[[], None] | None]
"""A step, and what must happen after it has been captured."""


def distilbert_shapes(layers: int = 6, vocabulary: int = 30522) -> list[tuple[int, ...]]:
    square, vector = (768, 768), (768,)
    layer = [square, vector] * 4 + [vector] * 2 + [(3072, 768), (3072,), (768, 3072), vector] + [vector] * 2
    return [(vocabulary, 768), (512, 768), vector, vector, *layer * layers, square, vector, (2, 768), (2,)]


class Holder(torch.nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32):
        super().__init__()
        weights = [torch.randn(shape, device="cuda", dtype=dtype) * 0.02 for shape in shapes]
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(w) for w in weights])


def with_gradients(model: torch.nn.Module) -> None:
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(torch.randn_like(p) * 1e-3)


def adamw_checks() -> list[dict]:
    """Twenty steps against torch.optim.AdamW and clip_grad_norm_ in fp64 on the same gradients."""
    results = []
    for copy_dtype in (None, torch.bfloat16):
        torch.manual_seed(1)
        shapes = distilbert_shapes(layers=1, vocabulary=1000)
        ours = Holder(shapes)
        exact = [p.detach().double().requires_grad_() for p in ours.parameters()]
        optimizer = FlatAdamW(ours.parameters(), lr=1e-3, weight_decay=0.1, max_norm=1.0, copy_dtype=copy_dtype)
        reference = torch.optim.AdamW(exact, lr=1e-3, weight_decay=0.1)
        norms = []
        for _ in range(20):
            with_gradients(ours)
            for p, q in zip(ours.parameters(), exact):
                q.grad = p.grad.double()
            norm = torch.nn.utils.clip_grad_norm_(exact, 1.0)
            optimizer.step()
            reference.step()
            norms.append(abs(optimizer.grad_norm.item() / norm.item() - 1))
        weights = [place.view(optimizer.flat.weight) for place in optimizer.flat.places]
        errors = [((w.double() - q).norm() / q.norm()).item() for w, q in zip(weights, exact)]
        rounded = all(torch.equal(p, w.to(p.dtype)) for p, w in zip(ours.parameters(), weights))
        worst = max(*errors, *norms)
        results.append({"op": "adamw", "dtype": str(copy_dtype), "error": worst, "bound": 2e-6,
                        "passed": worst < 2e-6 and rounded})  # fmt: skip
    return results


def fused_step(narrow: bool) -> Steps:
    """torch's own tools; with `narrow`, fp32 masters behind bf16 weights and gradients."""
    masters = list(Holder(distilbert_shapes()).parameters())
    lr = torch.tensor(LR, device="cuda")
    optimizer = torch.optim.AdamW(masters, lr=lr, weight_decay=DECAY, fused=True, capturable=True)
    model = [p.detach().bfloat16() for p in masters]
    gradients = [torch.randn_like(p) * 1e-3 for p in (model if narrow else masters)]
    for p in masters:
        p.grad = torch.randn_like(p) * 1e-3

    def step() -> None:
        if narrow:
            torch._foreach_copy_([p.grad for p in masters], gradients)
        torch.nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        optimizer.step()
        if narrow:
            torch._foreach_copy_(model, [p.detach() for p in masters])

    return step, None


def compiled_step() -> Steps:
    numel = sum(math.prod(shape) for shape in distilbert_shapes())
    p, m, v = (torch.randn(numel, device="cuda").abs() * 1e-3 for _ in range(3))
    gradient = (torch.randn(numel, device="cuda") * 1e-3).bfloat16()
    copy, step_count = p.bfloat16(), torch.zeros((), device="cuda")

    def step(p, m, v, gradient, copy, t):
        t.add_(1)
        g = gradient.float()
        g = g * torch.clamp(1.0 / (g.square().sum().sqrt() + 1e-6), max=1.0)
        m.lerp_(g, 1 - BETAS[0])
        v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
        denominator = v.sqrt() / (1 - BETAS[1] ** t).sqrt() + EPS
        p.mul_(1 - LR * DECAY).sub_(LR / (1 - BETAS[0] ** t) * m / denominator)
        copy.copy_(p)

    compiled = torch.compile(step, dynamic=False)
    return lambda: compiled(p, m, v, gradient, copy, step_count), None


def flat_step(dtype: torch.dtype = torch.float32, eight_bit: bool = False, **options) -> Steps:
    model = Holder(distilbert_shapes(), dtype)
    if eight_bit:
        options["eight_bit"] = [p for p in model.parameters() if p.numel() >= SMALLEST]
    optimizer = FlatAdamW(parameter_groups(model, OptimizerConfig(weight_decay=DECAY)), lr=LR, **options)
    with_gradients(model)
    return optimizer.step, optimizer.finish_capture


def adamw_rows(compile_too: bool) -> Iterator[dict]:
    bf16 = torch.bfloat16
    numel = sum(math.prod(shape) for shape in distilbert_shapes())
    contenders: dict[str, tuple[int, Callable[[], Steps]]] = {
        "automodel": (30, lambda: flat_step(max_norm=1.0, copy_dtype=bf16)),
        "automodel, no clip": (28, lambda: flat_step(copy_dtype=bf16)),
        "automodel, zeroing": (38, lambda: flat_step(max_norm=1.0, copy_dtype=bf16, flat_gradients=True)),
        "automodel fp32": (32, lambda: flat_step(max_norm=1.0)),
        "automodel pure bf16": (16, lambda: flat_step(bf16, max_norm=1.0)),
        "automodel pure bf16, 8-bit moments": (12, lambda: flat_step(bf16, max_norm=1.0, eight_bit=True)),
        "automodel, 8-bit moments": (18, lambda: flat_step(max_norm=1.0, copy_dtype=bf16, eight_bit=True)),
        "torch fused": (30, lambda: fused_step(narrow=True)),
        "torch fused fp32": (32, lambda: fused_step(narrow=False)),
    }
    if compile_too:
        contenders["torch.compile, flat"] = (30, compiled_step)
    for provider, (bytes_each, make) in contenders.items():
        row = {"op": "clip+adamw+copy", "shape": f"{numel / 1e6:.1f}M", "provider": provider, "mode": "step"}
        row["floor_us"] = floor_us(bytes_each * numel)
        try:
            call, after_capture = make()
            yield row | time_call(call, after_capture)
        except Exception as problem:
            yield row | {"problem": f"{type(problem).__name__}: {problem}"[:300]}
