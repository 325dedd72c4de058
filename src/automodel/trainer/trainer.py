"""`Trainer`: transformers' own, on the engine.

    from automodel import Trainer, TrainingArguments         # instead of `from transformers import …`

It is a subclass. Constructor, callbacks, state, logging, checkpoints, evaluation, the hub and hyper-parameter search
are transformers' code, so whatever a script asks of them it gets. What is replaced is what is slow:

- where nothing of the user's own happens inside a step (`obstacles.py`) and the rows can be kept as flat arrays
  (`stored_rows.py`), an epoch is a loop over the engine's steps: packed batches, one CUDA-graph replay each on a GPU,
  losses read only when a log line is due. Which rows a batch has is still decided by Trainer's sampler, when to log,
  evaluate, save or stop by its callbacks;
- everywhere else Trainer's own steps run, over a model whose forward takes padding out (`models/drop_in.py`).

Which of the two, and why, is said on stderr when training starts, and kept in `trainer.acceleration`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import transformers

from automodel.config.errors import UserError
from automodel.kernels import ahead
from automodel.kernels.token_scores import TokenScores
from automodel.models.drop_in import loss_alone, speed_up
from automodel.trainer.acceleration import Acceleration
from automodel.trainer.fast_evaluation import Evaluations, cannot, evaluate_rows
from automodel.trainer.fast_path import FastPath, check_schedule, compile_ahead, make_fast_path
from automodel.trainer.held_rows import held_rows
from automodel.trainer.obstacles import own_method, task_of, why_stock
from automodel.trainer.optimizers import (
    RateOnly,
    StateOnly,
    for_torch,
    hand_over,
    load_moments,
    shift_rates,
    take_rates,
    trial_scheduler,
)
from automodel.trainer.raw_rows import evaluated, tokenise_datasets
from automodel.trainer.start_checks import check_start
from automodel.trainer.stored_rows import Held, NotStored
from automodel.trainer.watched_events import unwatch_events, watch_events

logger = logging.getLogger(__name__)
ahead.import_kernels()  # now, beside the script's own imports and data: a second that `train()` would take longer

MOST_UNREAD = 1000  # losses that may wait on the device for a log line
FROZEN_BY_PYTHON = 1000  # objects; 3.12 begins with some hundreds. More were frozen by the script, and stay so


class Trainer(transformers.Trainer):
    """`transformers.Trainer` on the engine. Every argument and method is transformers'."""

    acceleration: Acceleration | None = None
    """What the last `train()` call did, and why."""
    watchers: ClassVar[list[Callable[[Trainer], None]]] = []
    """Called when training starts and its path is known (`stand_in.py`)."""
    optimizer: Any
    lr_scheduler: Any
    model: Any
    _fast: FastPath | None = None
    token_scores: TokenScores | None = None
    """Counts entropy and right labels of what is trained, where a subclass logs them."""
    evaluated_scores: TokenScores | None = None
    """Counts entropy and right labels of what is evaluated."""
    metrics_beside_loss: tuple[str, ...] = ()
    """What evaluations have besides, without a `compute_metrics`."""
    counts_tokens: ClassVar[bool] = False
    """Whether it has `token_scores`."""
    counts_as_trained: ClassVar[bool] = True
    """Whether an evaluated batch is divided by the count of labels that a trained one would be."""

    @classmethod
    def ours(cls) -> type:
        """The class of this house whose methods a script's subclass may have replaced."""
        return Trainer

    def __init__(self, model: Any = None, args: Any = None, *more: Any, tokenizer: Any = None, **given: Any):
        if tokenizer is not None:  # its name until version 5
            if given.get("processing_class", tokenizer) is not tokenizer:
                raise UserError("Trainer: tokenizer is the old name of processing_class; give one of them.")
            given["processing_class"] = tokenizer
        super().__init__(model, args, *more, **given)
        self._given_optimizer = self.optimizer is not None or self.lr_scheduler is not None
        self._speed_up(self.model)
        task = task_of(self.model)
        tokenise_datasets(self, task)
        if task is not None and self.args.device.type == "cuda" and why_stock(self, self.ours()) is None:
            compile_ahead(self.model, self.args, task, self.counts_tokens)
            ahead.load_libraries(self.args.device)

    @staticmethod
    def _speed_up(model: Any) -> None:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's models have one inside
        task = task_of(inner)
        if task is not None:
            speed_up(inner, task.head)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        check_start(self)
        return super().train(*args, **kwargs)

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        self._speed_up(model)
        return model

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._fast = self._try_fast()
        if self.is_world_process_zero():
            print(f"automodel: {self.acceleration}", file=sys.stderr)
        for watch in self.watchers:
            watch(self)
        self._froze = self._fast is not None and gc.get_freeze_count() < FROZEN_BY_PYTHON
        if self._froze:
            gc.freeze()  # accelerate looks through every object of the process for garbage: up to half a second
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._thaw()
            if self._fast is not None:  # an error ended the loop: the model must be usable all the same
                self._close_fast()

    def _thaw(self) -> None:
        if self._froze:
            gc.unfreeze()
            self._froze = False

    def _try_fast(self) -> FastPath | None:
        self._evaluations = Evaluations()
        reason = why_stock(self, self.ours())
        if reason is None:
            try:
                fast = self._make_fast()
            except NotStored as obstacle:
                reason = str(obstacle)
            else:
                for line in fast.plan.decisions:
                    logger.info("%s: %s (%s)", line.name, line.value, line.reason)
                how = "captured" if fast.plan.capture else "packed"
                self.acceleration = Acceleration(
                    how, f"{fast.plan.precision}, {len(fast.rows):,} rows held without padding"
                )
                return fast
        self.acceleration = Acceleration("stock", reason)
        return None

    def _make_fast(self) -> FastPath:
        task = task_of(self.model)
        assert task is not None
        rows = held_rows(self, task)
        if self.args.dataloader_drop_last and len(rows) < self.args.train_batch_size:
            raise NotStored("there is not one full batch")
        loader = self._rows_loader(rows)
        fast = make_fast_path(self, task, rows, self.set_initial_training_values(self.args, loader)[-1])
        check_schedule(fast, trial_scheduler(self, fast.plan.total_steps))
        return fast

    def _rows_loader(self, rows: Any) -> Any:
        """Trainer's loader, with its sampler and its workers, over numbers of rows."""
        collator = self.data_collator
        self.data_collator = rows.collate

        def sampler(_: Any) -> Any:
            return self._get_train_sampler(rows.origin)

        columns, self.args.remove_unused_columns = self.args.remove_unused_columns, False
        try:
            return self._get_dataloader(rows, "Training", self._train_batch_size, sampler, is_training=True)
        finally:
            self.data_collator, self.args.remove_unused_columns = collator, columns

    def get_train_dataloader(self) -> Any:
        if self._fast is not None and self._fast.step is None:
            return self._rows_loader(self._fast.rows)
        return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return super().get_eval_dataloader(evaluated(self, eval_dataset, task_of(self.model)))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return super().get_test_dataloader(evaluated(self, test_dataset, task_of(self.model)))

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        fast = self._fast
        if fast is None:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._thaw()
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        earlier = self.optimizer
        if fast.plan.capture:
            flat: Any = fast.begin(None, self.state.global_step, train_dataloader)
            self.optimizer = flat
            if earlier is not None:  # a second call of train() goes on with its moments
                load_moments(flat, earlier.state_dict())
                shift_rates(flat, self.state.global_step)
            rates = RateOnly([g["params"] for g in flat.param_groups], self.args.learning_rate)
        else:
            self.create_optimizer()
            rates = self.optimizer
            fast.begin(self.optimizer)
        self.create_scheduler(max_steps, optimizer=rates)
        self.model_wrapped = self.model
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        self.callback_handler.model, self.callback_handler.optimizer = self.model, rates
        self.callback_handler.lr_scheduler = self.lr_scheduler
        self.callback_handler.train_dataloader = self.get_train_dataloader()  # theirs has batches, ours row numbers
        watch_events(self.callback_handler, fast)
        return self.model, train_dataloader

    # One epoch.

    def _run_epoch(self, *args: Any, **given: Any) -> None:
        if self._fast is None:
            super()._run_epoch(*args, **given)
        else:
            self._run_fast_epoch(self._fast, *args, **given)

    def _run_fast_epoch(
        self, fast: FastPath, *, epoch: int, train_dataloader: Any, steps_in_epoch: int, trial: Any, start_time: float,
        num_update_steps_per_epoch: int, ignore_keys_for_eval: Any, resume_from_checkpoint: Any, epochs_trained: int,
        steps_trained_in_current_epoch: int, model: Any,
    ) -> None:  # fmt: skip
        fast.check_trained()
        fast.keep_gradients()
        fast.rows.follow()
        begun, accumulation = 0, self.args.gradient_accumulation_steps
        resumes = epoch == epochs_trained and resume_from_checkpoint is not None
        if resumes and steps_trained_in_current_epoch:
            from accelerate import skip_first_batches  # not above: who has no accelerate is told so by transformers

            train_dataloader = skip_first_batches(train_dataloader, steps_trained_in_current_epoch)
            begun = steps_trained_in_current_epoch // accumulation
        elif resumes:
            self._load_rng_state(resume_from_checkpoint)
        if hasattr(train_dataloader, "set_epoch"):
            train_dataloader.set_epoch(epoch)
        batches, rest = iter(train_dataloader), (trial, epoch, ignore_keys_for_eval, start_time)
        for update in range(begun, num_update_steps_per_epoch):
            held = list(itertools.islice(batches, accumulation))
            if resumes and begun and update == begun:
                self._load_rng_state(resume_from_checkpoint)
            micro_batches_done = min((update + 1) * accumulation, steps_in_epoch)
            self._fast_step(fast, held, epoch, num_update_steps_per_epoch)
            self.state.epoch = epoch + micro_batches_done / steps_in_epoch
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            self._log_save_evaluate(fast, *rest)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._log_save_evaluate(fast, *rest)

    def _fast_step(self, fast: FastPath, held: list[Held], epoch: int, steps_in_epoch: int) -> None:
        """One optimizer step and everything that Trainer counts with it."""
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        if not self.model.training:  # an evaluation came between
            self.model.train()
        if fast.plan.capture:
            left = fast.plan.total_steps - self.state.global_step
            take_rates(self.optimizer, self.lr_scheduler, self.args.learning_rate, left)
        self._last_result = fast.step(self.state.global_step, fast.step_batch(held, epoch, steps_in_epoch))
        has_labels = any(h.batch.num_labels for h in held)
        fast.losses.append(
            self._last_result.loss if has_labels else self._last_result.loss * math.nan
        )  # a mean of none
        self._last_lr = self.lr_scheduler.get_last_lr()[0]
        self.lr_scheduler.step()
        self.current_flos += float(self._flos_per_token * sum(h.rows * h.width for h in held))
        self.state.global_step += 1
        if len(fast.losses) >= MOST_UNREAD:
            self._read_losses(fast)

    @property
    def _flos_per_token(self) -> int:
        """As `model.floating_point_ops` counts, which wants a padded batch."""
        if self._flos is None:
            self._flos = 6 * self.model.num_parameters(exclude_embeddings=True)
        return self._flos

    _flos: int | None = None

    def _log_save_evaluate(self, fast: FastPath, trial: Any, epoch: int, ignore_keys: Any, start_time: float) -> None:
        control = self.control
        if not (control.should_log or control.should_evaluate or control.should_save):
            return
        norm = None
        if control.should_log:
            self._read_losses(fast)
            norm = self._last_result.grad_norm.detach()
        self._maybe_log_save_evaluate(
            self._tr_loss, norm, self.model, trial, epoch, ignore_keys, start_time, learning_rate=self._last_lr
        )

    def _read_losses(self, fast: FastPath) -> None:
        """Adds the losses that wait on the device to Trainer's sum; as there, one that is no number counts as the mean
        of those before it since the last log line."""
        if not fast.losses:
            return
        first = self.state.global_step - len(fast.losses)
        total = float(self._tr_loss)
        for index, loss in enumerate(torch.stack(fast.losses).tolist()):
            if self.args.logging_nan_inf_filter and not math.isfinite(loss):
                loss = total / (1 + first + index - self._globalstep_last_logged)
            total += loss
        fast.losses.clear()
        self._tr_loss.fill_(total)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._fast is not None:
            self._read_losses(self._fast)
            self._close_fast()
        return super()._finalize_training(*args, **kwargs)

    def _close_fast(self) -> None:
        fast, self._fast = self._fast, None
        assert fast is not None
        unwatch_events(self.callback_handler)
        captured = fast.plan.capture and fast.step is not None
        fast.close()
        self._wrap_for_evaluation()
        if captured:
            flat, self.optimizer = self.optimizer, None
            hand_over(flat, self.create_optimizer())
            self.callback_handler.optimizer = self.optimizer

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        rest = (description, prediction_loss_only, ignore_keys, metric_key_prefix)
        fast = self._fast
        if fast is None:
            return super().evaluation_loop(dataloader, *rest)
        rows = None
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if ignore_keys is None and not fast.is_stock and not cannot(self, fast, self.ours(), loss_only):
            with contextlib.suppress(NotStored):
                rows = self._evaluations.rows_of(self, fast, dataloader.dataset)
        if rows is not None:
            self.callback_handler.eval_dataloader = dataloader
            return evaluate_rows(self, fast, rows, loss_only, metric_key_prefix)
        with fast.stock_model():
            self._wrap_for_evaluation()
            try:
                return super().evaluation_loop(dataloader, *rest)
            finally:
                self.accelerator._models.clear()  # its wrapper is gone with the block

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        own_loss = self.compute_loss_func is not None or own_method(self, "compute_loss", self.ours())
        with loss_alone(self.model) if prediction_loss_only and not own_loss else contextlib.nullcontext():
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _wrap_for_evaluation(self) -> None:
        """accelerate's autocast around the model, which a trained model has in Trainer."""
        self.accelerator._models.clear()
        self.accelerator.prepare_model(self.model, evaluation_mode=True)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        if self._fast is None:
            super().save_model(*args, **kwargs)
            return
        with self._fast.stock_model():
            super().save_model(*args, **kwargs)

    # The optimizer's state, in torch's own form whoever wrote it.

    def _rate(self) -> float:
        return self.lr_scheduler.get_last_lr()[0] if self.lr_scheduler is not None else self.args.learning_rate

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        fast = self._fast
        if fast is None or not fast.plan.capture:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        own = self.optimizer
        self.optimizer = for_torch(own.state_dict(), self._rate(), self.args.learning_rate)
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = own

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        fast = self._fast
        if fast is None or not fast.plan.capture or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        own, loaded = self.optimizer, StateOnly({})
        self.optimizer = loaded
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        finally:
            self.optimizer = own
        for group, rate in zip(self.lr_scheduler.optimizer.param_groups, self.lr_scheduler.get_last_lr()):
            group["lr"] = rate  # which torch's optimizers have in their state
        if loaded.values:
            load_moments(own, loaded.values)
