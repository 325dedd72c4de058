"""The engine behind a Trainer: plan, step and rows made from live objects instead of a config file.

`make_fast_path` reads what a Trainer holds (a model, arguments, a dataset, a collator) and answers with a plan and the
rows, or raises `NotStored` with the reason. `FastPath.begin` then makes the step: captured CUDA graphs on a
GPU, the plain packed step on the CPU. From there to `close` the model is the engine's: flat parameters, fused blocks.
Whoever wants to look at it in between (evaluation, a checkpoint) asks for `stock_model`, inside which it is an ordinary
transformers model with full-precision weights; after `close` it is one again for good.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from automodel.config.errors import UserError
from automodel.data.batch import StepBatch
from automodel.data.collate import PackedCollator
from automodel.data.config import DatasetConfig
from automodel.data.sizes import sizes_of
from automodel.engine.captured import CapturedStep
from automodel.engine.prepare import Prepared, model_facts
from automodel.engine.product_facts import product_facts
from automodel.engine.step import TrainStep
from automodel.engine.steps import make_captured_step, make_eager_forward, precision_around, tell_copies
from automodel.kernels import ahead
from automodel.models.config import ModelConfig
from automodel.models.families import packing_support
from automodel.models.forward import stock_attention, use_stock_attention
from automodel.models.fuse import unfuse
from automodel.optim.config import LRSchedulerConfig, OptimizerConfig
from automodel.optim.schedule import Schedule
from automodel.plan.batches import tokens_of_micro_batch
from automodel.plan.config import CompileConfig, RunConfig, StepSchedulerConfig, TrainingOptimizations
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts
from automodel.plan.hardware import Hardware, read_hardware
from automodel.plan.kernels_ahead import facts_of
from automodel.plan.plan import Plan
from automodel.tasks.loss import SupervisedLoss
from automodel.tasks.loss_config import LossConfig
from automodel.tasks.task import Task
from automodel.trainer.stored_rows import Held, NotStored, StoredRows

SCHEDULE_KEYS = {
    "num_cycles": "num_cycles",
    "power": "power",
    "lr_end": "min_lr",
    "min_lr": "min_lr",
    "min_lr_rate": "min_lr_ratio",
    "min_lr_ratio": "min_lr_ratio",
    "num_decay_steps": "decay_steps",
    "decay_type": "decay_type",
    "timescale": "timescale",
}
COMPARED_STEPS = 50  # of a schedule, spread over the run


class RatesFromOutside(TrainStep):
    """Trainer's scheduler sets the rates: groups of an optimizer that somebody made may have several."""

    def set_rate(self, index: int) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


class FastPath:
    """One `train()` call on the engine."""

    def __init__(
        self,
        model: Any,
        task: Task,
        rows: StoredRows,
        cfg: RunConfig,
        plan: Plan,
        loss: SupervisedLoss,
        sums: bool = False,
    ):
        self.model, self.task, self.rows, self.cfg, self.plan, self.loss = model, task, rows, cfg, plan, loss
        self.sums_batch_means = sums
        self.schedule = Schedule(cfg.lr_scheduler, plan.total_steps)
        self.step: Any = None
        self.is_stock = False
        """Whether somebody looks at the model at this moment: a callback that evaluates does so with what it sees."""
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        """Places that accumulating gradients must keep."""
        self.losses: list[torch.Tensor] = []
        """Of steps whose loss nobody has read yet; on the device."""

    def begin(
        self, optimizer: torch.optim.Optimizer | None, steps_done: int = 0, loader: Any = None
    ) -> torch.optim.Optimizer:
        """Makes the step, and gives back its optimizer. `optimizer`: Trainer's own, for plain steps. `steps_done`: of a
        run that is resumed, and `loader` what its micro-batches come from."""
        self.model.train()
        _unwrap(self.model)
        if self.plan.capture:
            self.step = make_captured_step(self._prepared(), self.model)
            ahead.wait_for_imports()
            ahead.wait()
            self.step.seed += passes_of(steps_done, loader, self.plan.grad_acc_steps)  # dropout counts them
            self._gradients = [(p, p.grad) for p in self.model.parameters() if p.grad is not None]
            return self.step.optimizer
        assert optimizer is not None
        forward, copies = make_eager_forward(self.model, self.task.head, self.plan)
        tell_copies(optimizer, copies)
        self.step = RatesFromOutside(
            self.model,
            forward,
            self.loss,
            optimizer,
            self.schedule,
            peak_lr=self.cfg.optimizer.lr,
            max_norm=self.cfg.training_optimizations.gradient_clipping,
            precision=precision_around(self.plan),
            device=self.plan.device,
        )
        return optimizer

    def _prepared(self) -> Prepared:
        """The parts of a prepared run that a step is made of; there is no dataset section behind it."""
        nothing: Any = None
        return Prepared(
            self.cfg, self.task, self.model.config, nothing, nothing, nothing,
            packing_support(self.model.config, self.task.head), self.loss, "loss", "min", read_hardware(), self.plan,
            (), lambda cfg: self.plan,
        )  # fmt: skip

    def keep_gradients(self) -> None:
        """Puts gradients back into their places: Trainer's `model.zero_grad()` before the first step drops them."""
        for parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                gradient.zero_()
                parameter.grad = gradient

    def check_trained(self) -> None:
        """Recorded steps train what was trained when they were recorded; whoever froze something since must know."""
        frozen = next((name for name, p in self.model.named_parameters() if not p.requires_grad), None)
        if self.plan.capture and frozen is not None:
            raise UserError(
                f"{frozen} was frozen after training began, which steps on the GPU cannot follow. Freeze it before "
                "train(), or set requires_grad in the code of a callback's own method: then Trainer's steps run."
            )

    def step_batch(self, held: list[Held], epoch: int, steps_in_epoch: int) -> StepBatch:
        """What one optimizer step consumes, with the number its loss is divided by."""
        batches = [h.batch for h in held]
        if self.sums_batch_means and len(batches) > 1:
            share: Any = 1 / len(batches)  # a count that is no whole number
            batches = [dataclasses.replace(b, num_labels=b.num_labels * share) for b in batches]
        if not any(b.num_labels for b in batches):  # no gradient; a division by zero would make it no number
            batches[0] = dataclasses.replace(batches[0], num_labels=1)
        return StepBatch(tuple(batches), epoch, 0, steps_in_epoch)

    @contextmanager
    def stock_model(self) -> Generator[None]:
        """The model as transformers knows it, with full-precision weights, for as long as the block lasts."""
        if self.step is None or self.is_stock:
            yield
            return
        was_training, self.is_stock = self.model.training, True
        with stock_attention(self.model), _full_precision(self.step), _without_hooks(self.step):
            try:
                yield
            finally:
                _unwrap(self.model)
                self.is_stock = False
        self.model.train(was_training)

    def close(self) -> None:
        """The model is transformers' own again."""
        if self.step is not None:
            self.step.finish()
            unfuse(self.model)
            use_stock_attention(self.model)
            if self.plan.capture:
                for parameter in self.model.parameters():  # each its own memory again, as whoever saves them expects
                    parameter.data = parameter.data.clone()
            self.step = None


def passes_of(steps: int, loader: Any, accumulation: int) -> int:
    """Micro-batches of so many optimizer steps. The last step of an epoch may have fewer; a loader that does not know
    its length is not expected to end."""
    try:
        epoch = len(loader)
    except TypeError:
        return steps * accumulation
    of_epoch = max(1, -(-epoch // accumulation))  # whoever reads a loader without batches says so
    epochs, rest = divmod(steps, of_epoch)
    return epochs * epoch + rest * accumulation


def _unwrap(model: Any) -> None:
    """Takes accelerate's autocast off, which an evaluation before this training left around the model."""
    if "_original_forward" in model.__dict__:
        model.__dict__.pop("forward", None)
        model.__dict__.pop("_original_forward")


@contextmanager
def _full_precision(step: Any) -> Generator[None]:
    """Master weights in the places of the copies that a captured step computes with."""
    if not isinstance(step, CapturedStep):
        yield
        return
    step.settle()
    masters = step.optimizer.full_precision_weights(step.model)
    copies = [(p, p.data, masters[name]) for name, p in step.model.named_parameters() if name in masters]
    for parameter, _, master in copies:
        parameter.data = master
    try:
        yield
    finally:
        for parameter, copy, _ in copies:
            parameter.data = copy


@contextmanager
def _without_hooks(step: Any) -> Generator[None]:
    """Hooks that make layers wait for their updates; there are none to wait for."""
    late = getattr(step, "late", None)
    taken = []
    for handle in late.hooks if late is not None else ():
        hooks = handle.hooks_dict_ref()
        taken.append((hooks, handle.id, hooks.pop(handle.id)))
    try:
        yield
    finally:
        for hooks, key, hook in taken:
            hooks[key] = hook


def make_fast_path(trainer: Any, task: Task, rows: StoredRows, steps: int) -> FastPath:
    """Plan and loss for a Trainer's run of so many steps. Raises `NotStored` where the plan has no fast step for it."""
    model, args = trainer.model, trainer.args
    problem = problem_type(model.config, rows.store.labels) if task.rows.labels == "document" else None
    loss = task.loss(LossConfig(), problem, getattr(model.config, "num_labels", None))
    loss = dataclasses.replace(loss, tally=trainer.token_scores)
    cfg = run_config(args, task, steps, model.dtype)
    hardware = hardware_of(args.device)
    lengths = rows.store.lengths
    of_rows = lengths if rows.firsts is None else rows.widths
    facts = model_facts(cfg, task, model.config, packing_support(model.config, task.head), model, None, None)
    data = DataFacts(
        rows=len(rows), tokens=int(lengths.sum()), longest=int(of_rows.max()), max_length=int(lengths.max()),
        has_validation=trainer.eval_dataset is not None, lengths=of_rows,
        sizes=partial(
            sizes_of, rows.store, task.rows.labels, shuffled=args.train_sampling_strategy != "sequential",
            grouped=args.train_sampling_strategy == "group_by_length",
        ) if rows.firsts is None else None,
    )  # fmt: skip
    try:
        products = product_facts(hardware, model, tokens_of_micro_batch(cfg, data, ranks=1))
        plan = make_plan(cfg, task, hardware, facts, data, products=products)
    except UserError as error:  # in the words of a config file, which nobody here has written
        raise NotStored(str(error).split(". ")[0]) from error
    if plan.path != "packed":
        raise NotStored("the plan pads these batches")
    if hardware.device == "cuda" and not plan.capture:
        raise NotStored(next((d.reason for d in plan.decisions if d.name == "step"), "steps cannot be captured"))
    if task.rows.labels == "document" and model.config.problem_type is None:
        model.config.problem_type = problem  # as transformers' first forward would
    sums = _sums_batch_means(trainer, task, rows)
    counts = trainer.model_accepts_loss_kwargs and not trainer._loss_shifts_labels
    rows.counts_first = task.head.next_token and counts
    rows.collator = PackedCollator(
        rows.store,
        place=task.rows.labels,
        pool=packing_support(model.config, task.head).pooling or "first",
        bucket_tokens=plan.bucket_tokens,
        bucket_reads=plan.bucket_reads,
        max_seqlen=plan.max_length,
        micro_batch_size=rows.most_documents(plan.micro_batch_size),
        sort_tokens=plan.capture,
        longest_first=plan.capture,
    )
    return FastPath(model, task, rows, cfg, plan, loss, sums)


def _sums_batch_means(trainer: Any, task: Task, rows: StoredRows) -> bool:
    """Whether a step's loss is the sum of its batches' means: what Trainer makes of gradient accumulation where a
    model's forward takes any keyword, but its loss does not look at `num_items_in_batch`. Raises `NotStored` where
    batches of unequal sizes would then weigh differently."""
    if trainer.args.gradient_accumulation_steps == 1 or task.rows.labels != "document":
        return False
    if len(rows) % trainer.args.train_batch_size and not trainer.args.dataloader_drop_last:
        raise NotStored("with gradient accumulation Trainer averages batch by batch, and the last batch is smaller")
    if not trainer.model_accepts_loss_kwargs:
        return False
    return not _counts_items(trainer.model)


@torch.no_grad()
def _counts_items(model: Any) -> bool:
    """Whether a classifier's loss is divided by `num_items_in_batch`: asked of its stock forward, with two tokens."""
    kind = type(model)
    stock = kind.__mro__[1] if kind.__mro__[1].__name__ == kind.__name__ else kind  # beneath the drop-in's own class
    problem, device = model.config.problem_type, model.device
    shape = (1, model.config.num_labels) if problem == "multi_label_classification" else (1,)
    dtype = torch.int64 if problem == "single_label_classification" else torch.float32
    given = {
        "input_ids": torch.ones((1, 2), dtype=torch.int64, device=device),
        "labels": torch.zeros(shape, dtype=dtype, device=device),
    }
    was_training = model.training
    model.eval()
    try:
        losses = [stock.forward(model, **given, num_items_in_batch=count).loss for count in (1, 1000)]
    finally:
        model.train(was_training)
    return not torch.equal(*losses)


def compile_ahead(model: Any, args: Any, task: Task, counts: bool = False) -> None:
    """Begins to compile the kernels of captured steps, in a process beside the script, which is still reading data.
    `counts`: the loss counts entropy and right labels on its way."""
    with contextlib.suppress(NotStored, KeyError, TypeError, ValueError):  # it decides nothing, so it may fail
        facts = facts_of(run_config(args, task, max(1, args.max_steps), model.dtype), model.config.to_dict())
        if facts is not None:
            ahead.start(dataclasses.replace(facts, head=dataclasses.replace(facts.head, counts=counts)))


def problem_type(config: Any, labels: Any) -> str:
    """What transformers' classifiers make of labels."""
    if config.problem_type is not None:
        return config.problem_type
    if config.num_labels == 1:
        return "regression"
    return "single_label_classification" if labels.dtype.kind == "i" else "multi_label_classification"


def run_config(args: Any, task: Task, steps: int, dtype: torch.dtype) -> RunConfig:
    """`TrainingArguments` in the words of a config file, as far as a step depends on them."""
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32" if dtype == torch.float32 else "bf16-pure"
    return RunConfig(
        model=ModelConfig(pretrained_model_name_or_path="the model of the Trainer"),
        dataset=DatasetConfig(path="the dataset of the Trainer"),
        task=task.name,  # ty: ignore[invalid-argument-type]
        seed=args.seed,
        step_scheduler=StepSchedulerConfig(
            local_batch_size=args.train_batch_size, grad_acc_steps=args.gradient_accumulation_steps, max_steps=steps
        ),
        optimizer=OptimizerConfig(
            lr=args.learning_rate,
            weight_decay=args.weight_decay,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
        ),
        lr_scheduler=_schedule(args, steps),
        training_optimizations=TrainingOptimizations(
            gradient_checkpointing=False,  # whoever wants it says so in TrainingArguments, and gets stock steps
            gradient_clipping=args.max_grad_norm or None,
            precision=precision,
        ),
        compile=CompileConfig(enabled=False),
    )


def _schedule(args: Any, steps: int) -> LRSchedulerConfig:
    given = dict(args.lr_scheduler_kwargs or {})
    unknown = [key for key in given if key not in SCHEDULE_KEYS]
    if unknown:
        raise NotStored(f"lr_scheduler_kwargs has {unknown[0]}")
    options: dict[str, Any] = {SCHEDULE_KEYS[key]: value for key, value in given.items()}
    return LRSchedulerConfig(
        name=args.lr_scheduler_type.value, warmup_steps=args.get_warmup_steps(steps), **options
    )  # fmt: skip


def check_schedule(fast: FastPath, scheduler: Any) -> None:
    """Refuses a schedule whose rates are not those that the step will use."""
    if type(scheduler) is not LambdaLR:
        raise NotStored(f"the learning rate follows {type(scheduler).__name__}, which is no function of the step")
    total, peak = fast.plan.total_steps, fast.cfg.optimizer.lr
    for step in range(0, total, max(1, total // COMPARED_STEPS)):
        own = fast.schedule.lr_at(step, peak) / peak
        if any(abs(factor(step) - own) > 1e-6 for factor in scheduler.lr_lambdas):
            raise NotStored(f"the scheduler has another learning rate at step {step} than its name says")


def hardware_of(device: torch.device) -> Hardware:
    """The machine, or its CPU alone where the arguments say so."""
    hardware = read_hardware()
    if device.type == "cpu" and hardware.device == "cuda":
        return dataclasses.replace(hardware, device="cpu", name="CPU", gpus=0, bf16=False, tf32=False, fp8=False)
    return hardware
