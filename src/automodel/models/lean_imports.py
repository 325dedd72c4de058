"""transformers without what a run never touches.

Importing a model class of transformers pulls in scikit-learn (for one function of assisted generation), scipy (for the
losses of object detectors), torchao (for quantised checkpoints), sympy, torch's compiler, FSDP and accelerate: more
than half of the seconds between Enter and the first step. A run on one device calls none of them.

So the `automodel` command imports transformers through `stand_ins.py`: the names below, in the files of the packages
below, are bound to stand-ins, which become the real thing when they are used. Everything else is imported as ever; a
newer transformers or torch that imports other names starts slower, not wrongly. Two more things cost a second and are
replaced while transformers is being imported: the search through the files of every installed package
(`_Distributions`), and the reading of its 3,000 model files (`model_files.py`).

It is for the command alone: a script that imports `automodel` keeps Python's own imports. `AUTOMODEL_PLAIN_IMPORTS=1`
turns it off there too.
"""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from automodel.models.model_files import ModelFiles
from automodel.models.stand_ins import Answer, Rules, StandInImports

logger = logging.getLogger(__name__)

TRANSFORMERS = (
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.masking_utils",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
"""What every run needs of transformers; a model's own file follows when the model is known, and imports little more."""


def import_transformers() -> None:
    """Imports torch and transformers' modelling code, leanly. Changes how this process imports from now on."""
    if os.environ.get("AUTOMODEL_PLAIN_IMPORTS") == "1" or "transformers" in sys.modules:
        return
    collects = gc.isenabled()
    gc.disable()  # a few hundred thousand objects come to stay; looking for garbage among them takes a second
    try:
        import_module("torch")
        _import_leanly()
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def _import_leanly() -> None:
    files = ModelFiles()
    imports = StandInImports(rules(), files.watch)
    imports.install()
    try:
        with imports.compiler.as_attribute_of_torch(), _Distributions.in_place(), files.remembered():
            for name in TRANSFORMERS:
                import_module(name)
    except Exception as error:  # something in these packages is not as we know it: the plain way always works
        imports.withdraw()
        logger.warning("lean imports failed (%s: %s); importing everything", type(error).__name__, error)


def rules() -> Rules:
    """What is stood in for: functions, and classes that are only called or compared with."""
    sizes = _answers_about_sizes()
    return Rules(
        names={
            "accelerate": {"PartialState", "dispatch_model"},
            "accelerate.hooks": {"AlignDevicesHook", "add_hook_to_module"},
            "accelerate.utils": {
                "extract_model_from_parallel",
                "get_balanced_memory",
                "get_max_memory",
                "infer_auto_device_map",
                "reduce",
            },
            "accelerate.utils.modeling": {"clean_device_map", "get_max_layer_size"},
            "scipy.optimize": {"linear_sum_assignment"},
            "sklearn.metrics": {"roc_curve"},
            "torch._dynamo._trace_wrapped_higher_order_op": {"TransformGetItemToIndex"},
            "torch._dynamo.utils": {"is_compile_supported"},
            "torch.distributed._composable.fsdp": {"fully_shard"},
            "torch.distributed.checkpoint.hf_storage": {"HuggingFaceStorageReader", "HuggingFaceStorageWriter"},
            "torch.distributed.fsdp": {"CPUOffloadPolicy", "FullyShardedDataParallel", "MixedPrecisionPolicy"},
            "torch.distributed.fsdp.fully_sharded_data_parallel": {"FullyShardedDataParallel"},
            "torch.fx.experimental.symbolic_shapes": {"GuardOnDataDependentSymNode", "guard_size_oblivious", *sizes},
            "torchao.prototype.safetensors.safetensors_support": {
                "flatten_tensor_state_dict",
                "unflatten_tensor_state_dict",
            },
            # Annotations of what processes pictures and films, mostly; they import torchvision.
            "transformers.image_transforms": {"center_to_corners_format", "corners_to_center_format"},
            "transformers.image_utils": {
                "ChannelDimension",
                "ImageInput",
                "PILImageResampling",
                "is_vision_available",
                "make_flat_list_of_images",
            },
            "transformers.video_utils": {"VideoInput", "VideoMetadataType", "make_batched_videos"},
        },
        answers={
            **sizes,
            "extract_model_from_parallel": _inside_of_a_bare_model,
            "is_vision_available": lambda: sys.modules["transformers.utils"].is_vision_available(),  # the same function
        },
        packages=("transformers.", "accelerate.", "torchvision.", "torch.distributed.tensor."),
        # These make tensors without memory, as models are before their weights come.
        files={"torch", "torch._meta_registrations", "torch._prims", "torch._prims_common", "torch._refs"},
        ask_the_compiler={"torch._compile", "torch.compiler", "torch.optim.optimizer"},
    )


def _answers_about_sizes() -> dict[str, Answer]:
    """torch's questions about sizes that may be formulas, answered where they are numbers."""

    def if_all(kind: type, answer: Callable[..., Any], count: int | None = 1) -> Answer:
        def answered(*args: Any, **kwargs: Any) -> Any:
            plain = not kwargs and count in (None, len(args)) and all(type(arg) is kind for arg in args)
            return answer(*args) if plain else NotImplemented

        return answered

    def equal(*args: Any, **kwargs: Any) -> Any:
        flat = [size for arg in args for size in (arg if type(arg) is tuple else (arg,))]
        plain = not kwargs and len(args) == 2 and all(type(size) is int for size in flat)
        return args[0] == args[1] if plain else NotImplemented

    itself = if_all(bool, lambda known: known)
    return {
        "expect_true": itself,
        "guard_or_false": itself,
        "guard_or_true": itself,
        "guarding_hint_or_throw": if_all(int, lambda size: size),
        "has_guarding_hint": if_all(int, lambda size: True),
        "has_hint": if_all(int, lambda size: True),
        "is_nested_int": if_all(int, lambda size: False),
        "size_hint": if_all(int, lambda size: size),
        "statically_known_true": itself,
        "sym_and": if_all(bool, lambda *known: all(known), count=None),
        "sym_eq": equal,
        "sym_or": if_all(bool, lambda *known: any(known), count=None),
    }


def _inside_of_a_bare_model(model: Any, *args: Any, **kwargs: Any) -> Any:
    """accelerate takes a model out of its wrappers; one of transformers itself, not compiled, is in none."""
    base = sys.modules.get("transformers.modeling_utils")
    bare = base is not None and isinstance(model, base.PreTrainedModel) and "torch._dynamo" not in sys.modules
    return model if bare and not args and not kwargs else NotImplemented


class _Distributions(Mapping[str, list[str]]):
    """`importlib.metadata.packages_distributions()`, which reads the file list of every installed package, on demand.
    transformers asks it for the versions of packages that are called what they are imported as."""

    SAME_NAME = ("torch", "transformers", "tokenizers", "accelerate", "torchao", "peft", "bitsandbytes")

    def __init__(self, read: Callable[[], Mapping[str, list[str]]]):
        self._read = read
        self._all: Mapping[str, list[str]] | None = None

    @classmethod
    @contextmanager
    def in_place(cls) -> Generator[None]:
        read = importlib.metadata.packages_distributions
        importlib.metadata.packages_distributions = lambda: cls(read)  # ty: ignore[invalid-assignment]
        try:
            yield
        finally:
            importlib.metadata.packages_distributions = read

    def _everything(self) -> Mapping[str, list[str]]:
        if self._all is None:
            self._all = self._read()
        return self._all

    def __getitem__(self, name: str) -> list[str]:
        if self._all is None and name in self.SAME_NAME:
            try:
                importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                pass
            else:
                return [name]
        return self._everything()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._everything())

    def __len__(self) -> int:
        return len(self._everything())
