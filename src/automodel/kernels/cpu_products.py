"""Matrix products of layers on a CPU: in which precision, and by which library.

    y = x Wᵀ + b        dx = dy W        dW = dyᵀ x        db = Σ_t dy_t

| | x, dy | made by | GFLOP/s for 1,840 × 384 × 1,536 |
|---|---|---|---|
| `Fp32Products` | fp32 | torch's own library (MKL in wheels for x86) | 223, 220, 217 |
| `OnednnProducts` | fp32 | oneDNN | 481, 480, 370 |
| `Bf16Products` | bf16 | oneDNN, which torch's bf16 products go to | 979, 964, 960 |

(y, dx and dW; two cores of an AMD Zen 5. On Intel's processors the first two are alike. Which is the fastest on this
machine is measured: `product_speed.py`.)

Sums and results: fp32 products accumulate in fp32. bf16 products accumulate in fp32 and are rounded when they are
stored; gradients of weights and biases are handed on in fp32.

In bf16 a product reads a copy of its matrix that was rounded once, after the last update (`Bf16Copies`), where autocast
rounds every matrix in every pass. oneDNN's own layout of a matrix would make products 5 % faster, but to bring a matrix
into it, once for y and once for dx, takes 23 % of the time of a product, every step: measured, and not done.

Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Library = Literal["torch", "onednn"]


class Fp32Products:
    """By torch's own library. Matrices are (outputs, inputs), as `nn.Linear` has them."""

    dtype = torch.float32

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        return F.linear(x_TI, weight_OI, bias_O)

    def add_linear(self, onto_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        """onto + x Wᵀ + b, in fp32; `onto` stays as it is."""
        return torch.add(onto_TO, bias_O).addmm_(x_TI, weight_OI.t())

    def input_gradient(self, dy_TO: Tensor, weight_OI: Tensor) -> Tensor:
        return dy_TO @ weight_OI

    def add_input_gradient(self, onto_TI: Tensor, dy_TO: Tensor, weight_OI: Tensor) -> Tensor:
        """`onto`, in fp32, to which dy W was added in place."""
        return onto_TI.addmm_(dy_TO, weight_OI)

    def weight_gradient(self, dy_TO: Tensor, x_TI: Tensor) -> Tensor:
        """In fp32."""
        return dy_TO.t() @ x_TI

    def bias_gradient(self, dy_TO: Tensor) -> Tensor:
        """In fp32."""
        return dy_TO.sum(0)

    def rounded(self, x: Tensor) -> Tensor:
        """As products take it."""
        return x


class OnednnProducts(Fp32Products):
    """By oneDNN. torch calls it for fp32 products only by names of its own, which the compiler uses."""

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        return _onednn(x_TI, weight_OI, bias_O)

    def add_linear(self, onto_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        return _onednn(x_TI, weight_OI, bias_O).add_(onto_TO)

    def input_gradient(self, dy_TO: Tensor, weight_OI: Tensor) -> Tensor:
        return _onednn(dy_TO, weight_OI.t(), None)

    def add_input_gradient(self, onto_TI: Tensor, dy_TO: Tensor, weight_OI: Tensor) -> Tensor:
        return onto_TI.add_(_onednn(dy_TO, weight_OI.t(), None))

    def weight_gradient(self, dy_TO: Tensor, x_TI: Tensor) -> Tensor:
        return _onednn(dy_TO.t(), x_TI.t(), None)


class Bf16Products(Fp32Products):
    """Matrices and biases are copies in bf16."""

    dtype = torch.bfloat16

    def add_linear(self, onto_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        return torch.add(onto_TO, F.linear(x_TI, weight_OI, bias_O))

    def add_input_gradient(self, onto_TI: Tensor, dy_TO: Tensor, weight_OI: Tensor) -> Tensor:
        return onto_TI.add_(dy_TO @ weight_OI)

    def weight_gradient(self, dy_TO: Tensor, x_TI: Tensor) -> Tensor:
        return (dy_TO.t() @ x_TI).float()

    def bias_gradient(self, dy_TO: Tensor) -> Tensor:
        return dy_TO.sum(0).float()

    def rounded(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)


Products = Fp32Products | OnednnProducts | Bf16Products


def make_products(precision: str, library: Library) -> Products:
    """Those of a run in this precision; `library` makes fp32 products."""
    if precision == "bf16":
        return Bf16Products()
    return OnednnProducts() if library == "onednn" else Fp32Products()


def has_onednn() -> bool:
    """Whether torch was built with oneDNN and has the names under which it makes fp32 products."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _onednn(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")


class Bf16Copies:
    """Matrices and biases of a model, rounded to bf16.

    A copy is written anew when its parameter has changed. torch counts changes in place, but its fused optimizers do
    not: an optimizer says so itself (`forget`, from its hook).
    """

    def __init__(self) -> None:
        self._of: dict[tuple[int, ...], Tensor] = {}
        self._places: list[Tensor] = []
        self._parameters: list[Tensor] = []
        self._written: list[tuple[int, int]] = []
        """Address and count of changes of each parameter, as its copy has it."""

    def of(self, *parameters: Tensor) -> Tensor:
        """One tensor of these parameters, one below the other. It stays the same tensor."""
        key = tuple(id(p) for p in parameters)
        if key not in self._of:
            rows = [len(p) for p in parameters]
            whole = torch.empty((sum(rows), *parameters[0].shape[1:]), dtype=torch.bfloat16)
            self._of[key] = whole
            self._places += whole.split(rows)
            self._parameters += parameters
            self._written += [(0, -1)] * len(rows)
        return self._of[key]

    def forget(self) -> None:
        """Parameters have changed."""
        self._written = [(0, -1)] * len(self._written)

    @torch.no_grad()
    def refresh(self) -> None:
        """Call it before every forward pass."""
        for number, (place, parameter) in enumerate(zip(self._places, self._parameters)):
            state = parameter.data_ptr(), parameter._version
            if state != self._written[number]:
                place.copy_(parameter)
                self._written[number] = state


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, used_OI: Tensor, products: Products
    ) -> Tensor:
        rounded_TI = products.rounded(x_TI)
        ctx.products = products
        ctx.save_for_backward(rounded_TI, used_OI)
        if products.dtype == torch.float32:
            return products.linear(rounded_TI, used_OI, bias_O)
        y_TO = products.linear(rounded_TI, used_OI, None)
        return y_TO.float() if bias_O is None else torch.add(bias_O, y_TO)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TO: Tensor):
        x_TI, used_OI = ctx.saved_tensors
        products, (x, weight, bias) = ctx.products, ctx.needs_input_grad[:3]
        rounded_TO = products.rounded(dy_TO)
        return (
            products.input_gradient(rounded_TO, used_OI).float() if x else None,
            products.weight_gradient(rounded_TO, x_TI) if weight else None,
            dy_TO.sum(0) if bias else None,
            None,
            None,
        )


def cpu_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, used_OI: Tensor, products: Products) -> Tensor:
    """x Wᵀ + b in fp32, for x (…, I) in fp32. `used_OI`: the weight as products take it."""
    y_TO = _Linear.apply(x.reshape(-1, x.shape[-1]), weight_OI, bias_O, used_OI, products)
    return y_TO.view(*x.shape[:-1], y_TO.shape[-1])


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        return copy.view_as(copy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):
        return gradient.float(), None


def as_copied(parameter: Tensor, copy: Tensor) -> Tensor:
    """The copy of a parameter, whose gradient goes to the parameter."""
    return _Copied.apply(parameter, copy)
