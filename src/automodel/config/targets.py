"""The targets that are known by name, slot by slot: they pass without importing anything.

A slot is a place in the config that takes a `_target_`. Most slots take only the names listed here. Three are open:
`optimizer` to torch's other optimizers, and `model`, `dataset` and `optimizer` to packages trusted on the command
line; `kind` then decides whether what was found there is the right kind of thing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

TRUSTED_ROOTS = ("automodel", "nemo_automodel", "torch.optim", "torchdata", "transformers", "datasets")

TASK_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForSeq2SeqLM",
)

# Where the reference imports its model classes from; its private name among them.
_NEMO_MODELS = ("nemo_automodel", "nemo_automodel.components._transformers.auto_model")

_ADAM = frozenset(
    "lr betas eps weight_decay amsgrad foreach maximize capturable differentiable fused".split()  # noqa: SIM905
)
_SGD = frozenset("lr momentum dampening weight_decay nesterov maximize foreach differentiable fused".split())  # noqa: SIM905


UNFIT_OPTIMIZERS = {
    "LBFGS": "it runs the model several times for each step",
    "SparseAdam": "it takes sparse gradients only, and there are none here",
    "Muon": "it takes matrices only; `name: muon` gives the other parameters to AdamW",
}
"""Torch's optimizers that do not fit the training loop, and why. What is derived from them does not either."""


@dataclass(frozen=True)
class Slot:
    """What a place in the config takes as `_target_`."""

    expects: str
    """In words, for the error message."""
    known: Mapping[str, str]
    """Accepted spellings, each with its canonical name."""
    kind: Callable[[Any], bool] | None = None
    """Whether an imported object will do; None where only the known names will."""
    roots: tuple[str, ...] = ()
    """Trusted packages, besides those of the command line, in which `kind` may look."""
    supplied: frozenset[str] = frozenset()
    """Arguments the engine passes itself."""
    unfit: Callable[[Any], str | None] = lambda found: None
    """Why an object of the right kind still cannot work here; None where it can."""
    arguments: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The arguments of known targets that take more than the section's own keys."""


def _is_task_class_method(found: Any) -> bool:
    owner = getattr(found, "__self__", None)
    if not inspect.isclass(owner) or getattr(found, "__name__", "") not in ("from_pretrained", "from_config"):
        return False
    import transformers

    return issubclass(owner, tuple(getattr(transformers, name) for name in TASK_CLASSES))


def _is_optimizer_class(found: Any) -> bool:
    import torch

    return inspect.isclass(found) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer


def unfit_optimizer(found: type) -> str | None:
    """Why an optimizer cannot work here, whatever name it was found by; None where it can."""
    import torch

    for name, reason in UNFIT_OPTIMIZERS.items():
        unfit = getattr(torch.optim, name, None)
        if unfit is not None and issubclass(found, unfit):
            return reason
    return None


def _is_dataset_maker(found: Any) -> bool:
    return inspect.isclass(found) or inspect.isfunction(found)


def _model_names() -> dict[str, str]:
    names = {}
    for task_class in TASK_CLASSES:
        for method in ("from_pretrained", "from_config"):
            ours = f"automodel.{task_class}.{method}"
            names[ours] = ours
            names[f"automodel.NeMo{task_class}.{method}"] = ours
            for package in _NEMO_MODELS:
                names[f"{package}.NeMo{task_class}.{method}"] = ours
            names[f"transformers.{task_class}.{method}"] = f"transformers.{task_class}.{method}"
    return names


def _same(canonical: str, *spellings: str) -> dict[str, str]:
    return dict.fromkeys((canonical, *spellings), canonical)


SLOTS: dict[str, Slot] = {
    "model": Slot(
        expects="an auto class's `from_pretrained` or `from_config`, e.g. "
        "`automodel.AutoModelForSequenceClassification.from_pretrained`",
        known=_model_names(),
        kind=_is_task_class_method,
    ),
    "dataset": Slot(
        expects="a dataset, e.g. `automodel.TextClassificationDataset` or `datasets.load_dataset`",
        known=_same(
            "automodel.TextClassificationDataset",
            "nemo_automodel.components.datasets.llm.text_classification.TextClassificationDataset",
        )
        | _same(
            "automodel.make_squad_dataset",
            "nemo_automodel.components.datasets.llm.squad.make_squad_dataset",
        )
        | _same("datasets.load_dataset")
        | _same("datasets.load_from_disk"),
        kind=_is_dataset_maker,
        supplied=frozenset({"tokenizer"}),
        arguments={
            "datasets.load_dataset": frozenset({"data_dir", "token", "storage_options"}),
            "datasets.load_from_disk": frozenset(),
        },
    ),
    "optimizer": Slot(
        expects="an optimizer class, e.g. `torch.optim.AdamW`",
        known=_same("torch.optim.AdamW", "torch.optim.adamw.AdamW")
        | _same("torch.optim.Adam", "torch.optim.adam.Adam")
        | _same("torch.optim.SGD", "torch.optim.sgd.SGD"),
        kind=_is_optimizer_class,
        roots=("torch.optim",),
        supplied=frozenset({"params"}),
        unfit=unfit_optimizer,
        arguments={
            "torch.optim.AdamW": _ADAM,
            "torch.optim.Adam": _ADAM | {"decoupled_weight_decay"},
            "torch.optim.SGD": _SGD,
        },
    ),
    "dataloader": Slot(
        expects="`torchdata.stateful_dataloader.StatefulDataLoader`",
        known=_same("torchdata.stateful_dataloader.StatefulDataLoader")
        | _same("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"),
    ),
    "distributed": Slot(
        expects="`nemo_automodel.components.distributed.fsdp2.FSDP2Manager`",
        known=_same("nemo_automodel.components.distributed.fsdp2.FSDP2Manager"),
    ),
    "loss_fn": Slot(
        expects="a cross-entropy, e.g. `nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy`",
        known=_same(
            "automodel.tasks.loss_config.LossConfig",
            "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy",
            "nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy",
            "nemo_automodel.components.loss.chunked_ce.ChunkedCrossEntropy",
            "nemo_automodel.components.loss.te_parallel_ce.TEParallelCrossEntropy",
        ),
    ),
    "peft": Slot(
        expects="`nemo_automodel.components._peft.lora.PeftConfig`",
        known=_same("automodel.adapters.config.PeftConfig", "nemo_automodel.components._peft.lora.PeftConfig"),
    ),
    "quantization": Slot(
        expects="`transformers.BitsAndBytesConfig`",
        known=_same("transformers.BitsAndBytesConfig"),
    ),
    "fp8": Slot(
        expects="`nemo_automodel.components.quantization.fp8.FP8Config`",
        known=_same("automodel.models.config.Fp8Config", "nemo_automodel.components.quantization.fp8.FP8Config"),
    ),
}

# `optimizer.name` for `_target_`: the same arguments are taken.
OPTIMIZER_NAMES = {
    **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "torch.optim.AdamW"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "AdamW8bit"),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "PagedAdamW"),
    **dict.fromkeys(("lion", "lion_32bit", "lion_8bit", "paged_lion", "paged_lion_32bit", "paged_lion_8bit"), "Lion"),
    "adafactor": "Adafactor",
    "muon": "Muon",
    "sgd": "torch.optim.SGD",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
}

# Optimizers that are chosen by name, not by `_target_`, and the keys each takes.
NAMED_ARGUMENTS = {
    "AdamW8bit": frozenset({"lr", "betas", "eps", "weight_decay"}),
    "PagedAdamW": frozenset({"lr", "betas", "eps", "weight_decay"}),
    "Lion": frozenset({"lr", "betas", "weight_decay"}),
    "Adafactor": frozenset({"lr", "weight_decay", "clip_threshold", "decay_rate", "beta1", "scale_parameter"}),
    "Muon": frozenset({"lr", "muon_lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "ns_steps"}),
    "RMSprop": frozenset({"lr", "eps", "weight_decay", "alpha", "momentum", "centered", "foreach", "maximize"}),
    "Adagrad": frozenset({"lr", "eps", "weight_decay", "lr_decay", "initial_accumulator_value", "foreach"}),
}
