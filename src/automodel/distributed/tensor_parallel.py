"""Tensor parallelism: every matrix of a block is cut, by the table that the model's config brings along.

transformers' configs say for each product how it is cut (`base_model_tp_plan`): `colwise` by its outputs (each rank has
some of the heads, some of the inner units), `rowwise` by its inputs, whose products are then summed over the ranks.
Between the two nothing is exchanged. The table is applied with torch's DTensor styles, so parameters stay whole in
name and shape, and FSDP2 shards what is left of them.

Besides the table:

- What goes into attention and into the MLP is marked once as shared by the ranks, so that the gradients of query, key
  and value are summed together, once.
- The word table and the head are cut by words. The loss sees a part of the vocabulary on each rank and needs three
  numbers of each row from the others (`kernels/vocabulary_parallel.py`).
- Norms over heads (Qwen3) see other heads on each rank; their gradients are summed.
- `sequence_parallel`: outside of attention and MLP every rank keeps its part of the tokens, so norms and residuals are
  neither computed nor stored several times. The sum after a rowwise product leaves each rank its tokens, and the next
  block gathers them again: the same traffic, less memory.
"""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from automodel.config.errors import UserError
from automodel.distributed.adapted_styles import AdaptedColwise, AdaptedRowwise, has_adapter
from automodel.distributed.grid import Grid

HEADS = 2  # the dimension of heads where a norm over each of them sees them: (1, T, H, D)
TOKENS = 1


def apply_tensor_parallel(model: Any, grid: Grid) -> int:
    """Cuts the model's matrices on this rank; returns how many. `model`: a transformers model, with or without numbers
    in it; every rank of a group has the same."""
    assert grid.tensor is not None
    if has_adapter(model.get_output_embeddings()):
        raise UserError(
            "peft.target_modules: an adapter beside the head, which tp_size cuts by words, comes in a later release. "
            "Leave the head out, or use fsdp2 alone."
        )
    base = getattr(model, model.base_model_prefix)
    plan = _styles(base, model.config.base_model_tp_plan, grid.layout.sequence_parallel)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    parallelize_module(base, grid.tensor, plan)
    _cut_vocabulary(model, base, grid)
    for name in frozen:  # some of torch's styles make parameters anew, and learn from them
        model.get_parameter(name).requires_grad_(False)
    return sum(isinstance(parameter, DTensor) for parameter in model.parameters())


def _styles(base: nn.Module, table: dict[str, str], sequence: bool) -> dict[str, Any]:
    """Torch's style for each module of the model that the table names, and for those between them."""
    between = Shard(TOKENS) if sequence else Replicate()
    styles: dict[str, Any] = {}
    cut: set[str] = set()
    for name, module in base.named_modules():
        pattern = next((p for p in table if fnmatch.fnmatchcase(name, p)), None)
        if isinstance(module, nn.Embedding):  # some tables name it, some do not; it is cut below
            continue
        if pattern is not None:
            styles[name] = _style(name, table[pattern], between, has_adapter(module))
            parent = name.rpartition(".")[0]
            if table[pattern].startswith("colwise"):
                styles[parent] = _shared_input(between)
            if table[pattern] == "colwise":
                cut.add(parent)
    _refuse_forgotten_weights(base, cut, styles)
    blocks = {name.split(".self_attn")[0].split(".mlp")[0].split(".attention")[0] for name in styles}
    if sequence:
        for name, module in base.named_modules():
            outermost = "." not in name or name.rpartition(".")[0] in blocks
            if outermost and "norm" in type(module).__name__.lower() and name not in styles:
                styles[name] = SequenceParallel(sequence_dim=TOKENS, use_local_output=True)
        last = next(reversed([n for n in styles if "." not in n]), None)
        if last is None:
            raise UserError("distributed.sequence_parallel: this model has no last norm where its tokens could meet.")
        styles[last] = _NormThatGathers()
    return styles


def _refuse_forgotten_weights(base: nn.Module, cut: set[str], styles: dict[str, Any]) -> None:
    """Beside products that are cut by their outputs, every rank sees other heads, or other inner units. Weights there
    that the table does not name (norms that Phi and Cohere may have, Apertus's activation) would be trained by what
    each rank sees."""
    for parent in sorted(cut):
        for weight, _ in base.get_submodule(parent).named_parameters(prefix=parent):
            name = weight.rpartition(".")[0]
            if name == parent or not any(f"{name}.".startswith(f"{s}.") for s in styles if s != parent):
                raise UserError(
                    f"distributed.tp_size: transformers' plan for this model does not say how ranks share '{weight}'. "
                    "The nearest possible: tp_size: 1 (fsdp2 shards its weights instead)."
                )


def _style(name: str, kind: str, between: Any, adapted: bool) -> Any:
    column, row = (AdaptedColwise, AdaptedRowwise) if adapted else (ColwiseParallel, RowwiseParallel)
    styles = {
        "colwise": lambda: column(),
        "colwise_rep": lambda: column(output_layouts=Replicate()),
        "colwise_gather_output": lambda: column(output_layouts=Replicate()),
        "rowwise": lambda: row(output_layouts=between),
        "rowwise_rep": lambda: row(input_layouts=Replicate(), output_layouts=between),
        "rowwise_split_input": lambda: row(input_layouts=Replicate(), output_layouts=between),
        "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=HEADS, use_local_output=True),
    }
    if kind not in styles:
        raise UserError(
            f"distributed.tp_size: transformers' plan cuts '{name}' as '{kind}', which is not known here. The nearest "
            "possible: tp_size: 1."
        )
    return styles[kind]()


def _shared_input(between: Any) -> PrepareModuleInput:
    """Attention takes its input by name, an MLP by place."""
    return _Input(between)


class _Input(PrepareModuleInput):
    """The first input, wherever it stands, becomes one tensor that all ranks share."""

    def __init__(self, layout: Any):
        super().__init__(input_layouts=(layout,), desired_input_layouts=(Replicate(),))
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        def share(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            if args:
                return (self._share(args[0], device_mesh), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": self._share(kwargs["hidden_states"], device_mesh)}

        module.register_forward_pre_hook(share, with_kwargs=True)
        return module

    def _share(self, tensor: torch.Tensor, mesh: Any) -> DTensor:
        shared = DTensor.from_local(tensor, mesh, (self.layout,), run_check=False)
        return shared.redistribute(placements=(Replicate(),))


class _NormThatGathers(SequenceParallel):
    """The last norm: tokens of each rank in, all tokens out."""

    def __init__(self):
        super().__init__(sequence_dim=TOKENS, use_local_output=False)

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        module = super()._apply(module, device_mesh)

        def gather(_: nn.Module, inputs: Any, output: DTensor) -> torch.Tensor:
            return output.redistribute(placements=(Replicate(),)).to_local()

        module.register_forward_hook(gather)
        return module


def _cut_vocabulary(model: Any, base: nn.Module, grid: Grid) -> None:
    """The word table and the head, by words. A head that is the table stays it."""
    assert grid.tensor is not None
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is table.weight
    between = Shard(TOKENS) if grid.layout.sequence_parallel else Replicate()
    name = next(name for name, module in base.named_modules() if module is table)
    parallelize_module(base, grid.tensor, {name: RowwiseParallel(input_layouts=Replicate(), output_layouts=between)})
    if head is None:
        return
    if tied:
        head.weight = table.weight
    for key, parameter in list(head.named_parameters(recurse=False)):
        if parameter is table.weight:
            continue
        cut = nn.Parameter(distribute_tensor(parameter.detach(), grid.tensor, [Shard(0)]), parameter.requires_grad)
        head.register_parameter(key, cut)
