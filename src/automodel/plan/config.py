"""`RunConfig`: everything a user asked for. `Plan` (in plan.py) is what will be done about it.

The whole file is composed here, in the lowest room that needs all of it; every section belongs to its own room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from automodel.adapters.config import PeftConfig
from automodel.checkpoint.config import CheckpointConfig, EarlyStoppingConfig
from automodel.config.section import Batch, Count, CountOrZero, Positive, Section, Seed, WholeFile
from automodel.data.config import DataloaderConfig, DatasetConfig, PackedSequenceConfig
from automodel.distributed.config import DistributedConfig
from automodel.metrics.config import MlflowConfig, TensorboardConfig, WandbConfig
from automodel.models.config import Fp8Config, ModelConfig, QuantizationConfig
from automodel.optim.config import LRSchedulerConfig, OptimizerConfig
from automodel.tasks.loss_config import LossConfig
from automodel.tasks.registry import TaskName

Precision = Literal["auto", "fp32", "tf32", "bf16", "bf16-pure", "fp16"]


@dataclass(frozen=True, kw_only=True)
class StepSchedulerConfig(Section):
    """`step_scheduler:` how long, how large, how often."""

    ALIASES: ClassVar[dict[str, str]] = {
        "gradient_accumulation_steps": "grad_acc_steps",
        "num_train_epochs": "num_epochs",
    }

    grad_acc_steps: Batch | None = None
    """Micro-batches for each optimizer step; default 1, or what `global_batch_size` needs."""
    global_batch_size: Count | None = None
    """Examples for each optimizer step over all ranks; wins over `grad_acc_steps`."""
    local_batch_size: Batch | None = None
    """Examples for each micro-batch and rank; the same as `dataloader.batch_size`."""
    max_steps: Count | None = None
    """Stop after this many optimizer steps, whatever the epochs say."""
    num_epochs: Annotated[int, Ge(1), Le(10**6)] | None = None
    """Passes over the data; default 3, or as many as `max_steps` needs."""
    val_every_steps: Count | None = None
    """Evaluate every N steps; default once an epoch. There is always one at the end."""
    log_every_steps: Count = 10
    """Write a line every N steps."""
    ckpt_every_steps: Count | None = None
    """Save a resumable checkpoint every N steps; default: at every evaluation."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptimizations(Section):
    """`training_optimizations:` what changes speed, memory or stability rather than the task."""

    gradient_clipping: Positive | None = 1.0
    """Largest global gradient norm; null turns clipping off."""
    use_compile: bool | None = None
    """Short for `compile.enabled`."""
    precision: Precision = "auto"
    """`bf16` and `fp16` (with dynamic loss scaling) compute over fp32 master weights; `bf16-pure` holds everything in
    bf16; `tf32` is fp32 with TF32 products."""
    bf16: bool | None = None
    """Short for `precision: bf16`; false keeps `auto` from choosing it."""
    fp16: bool | None = None
    """Short for `precision: fp16`."""
    tf32: bool | None = None
    """TF32 for the products that are left in fp32: makes `precision: tf32` of fp32, and changes nothing in bf16."""
    capture: bool | None = None
    """Record steps as CUDA graphs; default: on a GPU, wherever it is possible. False runs them kernel by kernel."""
    gradient_checkpointing: bool | Literal["none", "selective", "full", "auto"] | None = None
    """Recompute activations in the backward pass: less memory, slower steps. `full` (true) keeps only what goes into
    each layer, `selective` does so in every other layer, `auto` takes the first of none, selective and full that fits
    the memory by the plan's estimate. Default: none where micro-batches can be halved instead; `auto` on a GPU where
    they cannot (one document, or a bin of `packed_sequence_size`)."""
    activation_offload: bool | None = None
    """With `gradient_checkpointing`: what goes into the recomputed layers waits in host memory, copied beside the
    layers. In captured steps. Default: where `auto` finds that nothing else fits."""


@dataclass(frozen=True, kw_only=True)
class CompileConfig(Section):
    """`compile:` torch.compile for the blocks of the model, on a GPU. `auto` decides whether the steps pay for it."""

    SHORTHAND: ClassVar[str | None] = "enabled"

    enabled: bool | Literal["auto"] = "auto"
    """True, false or `auto`. True compiles stock blocks, also where there are fused ones."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """torch.compile's mode. CUDA graphs record whole steps here, so `max-autotune` tunes without graphs of its own and
    `reduce-overhead` is `default`."""
    dynamic: bool | None = None
    """Compile once for every token count (default), or, if false, anew for each."""
    fullgraph: bool = False
    """Give up compiling where a block does not become one graph."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Section):
    """`benchmark:` defaults of `automodel benchmark`."""

    against: tuple[str, ...] = ("hf-trainer",)
    """Trainers to compare with."""
    warmup_steps: CountOrZero = 10
    """Steps left out of the steady state."""
    repeat: Annotated[int, Ge(1), Le(1000)] = 1
    """Runs of each side."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(WholeFile):
    """One fine-tuning run. Three lines are a valid file: `model`, `dataset`, and `task` where it cannot be inferred."""

    EXAMPLE: ClassVar[str] = """
model: distilbert-base-uncased
dataset: reviews.csv
task: text-classification
"""

    HOMES: ClassVar[dict[str, str]] = {
        "optim": "optimizer.name",
        "learning_rate": "optimizer.lr",
        "weight_decay": "optimizer.weight_decay",
        "lr_scheduler_type": "lr_scheduler.name",
        "lr_scheduler_kwargs": "lr_scheduler.lr_scheduler_kwargs",
        "warmup_ratio": "lr_scheduler.warmup_ratio",
        "warmup_steps": "lr_scheduler.warmup_steps",
        "gradient_checkpointing": "training_optimizations.gradient_checkpointing",
    }
    TWINS: ClassVar[tuple[tuple[str, str], ...]] = (("step_scheduler.local_batch_size", "dataloader.batch_size"),)

    model: ModelConfig
    dataset: DatasetConfig
    task: TaskName | None = None
    """`text-classification`, `token-classification`, `causal-lm` or `seq2seq`; inferred where possible."""
    seed: Seed = 42
    """Seeds initialisation, shuffling and dropout."""
    validation_dataset: DatasetConfig | None = None
    """Held-out data; same keys as `dataset`, whose column settings it inherits."""
    step_scheduler: StepSchedulerConfig = field(default_factory=StepSchedulerConfig)
    dataloader: DataloaderConfig = field(default_factory=DataloaderConfig)
    validation_dataloader: DataloaderConfig = field(default_factory=DataloaderConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    loss_fn: LossConfig = field(default_factory=LossConfig)
    training_optimizations: TrainingOptimizations = field(default_factory=TrainingOptimizations)
    compile: CompileConfig = field(default_factory=CompileConfig)
    packed_sequence: PackedSequenceConfig = field(default_factory=PackedSequenceConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    early_stopping: EarlyStoppingConfig | None = None
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    peft: PeftConfig | None = None
    quantization: QuantizationConfig | None = None
    fp8: Fp8Config | None = None
    wandb: WandbConfig | None = None
    mlflow: MlflowConfig | None = None
    tensorboard: TensorboardConfig | None = None
    benchmark: BenchmarkConfig | None = None
    provider: Literal["automodel", "unsloth", "huggingface"] | None = None
    """Of other tools' settings. This engine trains in any case; `huggingface` together with a `benchmark:` section has
    stock Trainer run the same training first, for comparison."""

    @property
    def compares_first(self) -> bool:
        """Whether stock Trainer runs before this engine. The data are never trained twice unless the config asks."""
        return self.provider == "huggingface" and self.benchmark is not None
