"""Evaluating between two of the engine's steps, with the step's own forward.

The same batches in the same order as Trainer's loop, and so the same mean of losses, arrays and metrics; but rows come
without padding from flat arrays, nothing waits for the device until the end, the weights are the ones the step computes
with, and a language model that is only asked for its loss never makes its logits. Everything that is not plain (logits
of tokens, inputs for metrics, own prediction steps) is left to Trainer's loop: `cannot` says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.trainer_pt_utils import EvalLoopContainer
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from automodel.data.batch import IGNORE
from automodel.data.collate import PackedCollator
from automodel.distributed.gpu_memory import free_bytes
from automodel.models.families import packing_support
from automodel.models.head_outputs import Unprojected
from automodel.trainer.fast_path import FastPath
from automodel.trainer.obstacles import own_method
from automodel.trainer.read_once import Listed
from automodel.trainer.stored_rows import NotStored, StoredRows, store_rows

MOST_TOKENS_AT_ONCE = 32_768
BYTES_A_TOKEN = 64  # times the hidden size: inner tensors of one layer, in half precision, with room
SHARE_OF_FREE_MEMORY = 0.1
OWN = ("prediction_step", "evaluation_loop", "get_eval_dataloader", "_get_eval_sampler", "get_test_dataloader")


def cannot(trainer: Any, fast: FastPath, ours: type, loss_only: bool) -> bool:
    """Whether Trainer's own loop must evaluate."""
    args = trainer.args
    asked = (
        (fast.task.rows.labels != "document" and not loss_only)
        or args.include_for_metrics
        or args.batch_eval_metrics
        or not args.eval_do_concat_batches
        or args.dataloader_drop_last
        or args.train_sampling_strategy == "group_by_length"
        or trainer.label_names != ["labels"]
        or _more_than_logits(fast.model.config)
    )
    return bool(asked) or any(own_method(trainer, name, ours) for name in OWN)


def _more_than_logits(config: Any) -> bool:
    """Whether the model's outputs, and so the predictions, have other parts, too."""
    return config.output_hidden_states or config.output_attentions or not getattr(config, "return_dict", True)


class Evaluations:
    """Evaluation data as flat arrays, kept from one evaluation to the next."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[Any, StoredRows]] = {}
        """With the dataset itself, or what watches it, so that no other one gets its identity."""

    def rows_of(self, trainer: Any, fast: FastPath, dataset: Any) -> StoredRows:
        """Raises `NotStored`."""
        key = getattr(dataset, "_fingerprint", None) or str(id(dataset))
        watched = self.rows[key][0] if key in self.rows else None
        if isinstance(watched, Listed) and watched.again():  # somebody changed it in place
            del self.rows[key]
        if key not in self.rows:
            rows = store_rows(dataset, trainer.data_collator, fast.task, fast.model.config, trainer.processing_class)
            labels, taught = rows.store.labels, fast.rows.store.labels
            of_documents = labels is not None and taught is not None  # not of tokens
            if of_documents and (labels.dtype != taught.dtype or labels.shape[1:] != taught.shape[1:]):
                raise NotStored("labels are not of the kind that the model learns")
            if int(rows.store.lengths.max()) > fast.plan.max_length:
                raise NotStored("a row is longer than all of the training data")
            size = trainer.args.eval_batch_size
            rows.evaluated_at_once = size * batches_at_once(fast, rows, size)
            rows.collator = PackedCollator(
                rows.store,
                place=fast.task.rows.labels,
                pool=packing_support(fast.model.config, fast.task.head).pooling or "first",
                bucket_tokens=fast.plan.bucket_tokens,
                bucket_reads=fast.plan.evaluated_reads,
                max_seqlen=fast.plan.max_length,
                micro_batch_size=rows.most_documents(rows.evaluated_at_once),
                sort_tokens=fast.plan.capture,
            )
            rows.counts_first = fast.rows.counts_first and trainer.counts_as_trained
            self.rows[key] = Listed(dataset) if type(dataset) is list else dataset, rows
        return self.rows[key][1]


def batches_at_once(fast: FastPath, rows: StoredRows, size: int) -> int:
    """How many of Trainer's batches one forward pass takes: at 16 documents a GPU waits for Python, launch by launch,
    and the mean over documents is the same. Losses of tokens are means of batches, so there batches stay apart."""
    if fast.task.rows.labels != "document" or fast.plan.device != "cuda":
        return 1
    room = free_bytes() * SHARE_OF_FREE_MEMORY / (BYTES_A_TOKEN * fast.model.config.hidden_size)
    largest = np.add.reduceat(rows.store.lengths, np.arange(0, len(rows), size)).max()
    return max(1, int(min(MOST_TOKENS_AT_ONCE, room) // largest))


@torch.no_grad()
def evaluate_rows(trainer: Any, fast: FastPath, rows: StoredRows, loss_only: bool, prefix: str) -> EvalLoopOutput:
    """All rows once, in their order."""
    size, count = trainer.args.eval_batch_size, len(rows)
    losses, weights, logits = [], [], EvalLoopContainer(do_nested_concat=True, padding_index=IGNORE)
    done, moved, moves = 0, 0, trainer.args.eval_accumulation_steps
    assert rows.collator is not None
    fast.model.eval()  # and so it stays until the next step, as in Trainer
    for start in range(0, count, rows.evaluated_at_once):
        chosen = list(range(start, min(start + rows.evaluated_at_once, count)))
        batch = rows.collate(chosen).batch
        documents, divisor = batch.num_documents, batch.num_labels
        batch = batch.to(fast.plan.device, non_blocking=True)
        with fast.step.compute():
            outputs = fast.step.forward(batch)
        scored = fast.loss.scores(outputs, batch, trainer.evaluated_scores)
        losses.append(scored.loss / divisor)
        weights.append(len(chosen))
        if not loss_only:
            made = outputs.logits() if isinstance(outputs, Unprojected) else outputs
            for part in _as_asked(trainer, made[:documents].float(), batch.labels_R[:documents]):
                logits.add(part)
        done += -(-documents // size)
        if not loss_only and moves and done - moved >= moves:
            logits.to_cpu_and_numpy()
            moved = done
        for _ in range(0, documents, size):
            trainer.control = trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)
    mean = float(np.average(torch.stack(losses).float().cpu().numpy(), weights=weights))
    predictions: Any = None if loss_only else logits.get_arrays()
    labels: Any = None if loss_only else np.asarray(rows.store.labels)
    metrics: dict[str, Any] = {}
    if trainer.compute_metrics is not None and predictions is not None:
        with fast.stock_model():  # it may look at the model
            metrics = trainer.compute_metrics(EvalPrediction(predictions=predictions, label_ids=labels))
    metrics = {**denumpify_detensorize(metrics), f"{prefix}_loss": mean}
    if hasattr(trainer, "model_preparation_time"):  # of an evaluation before training; Trainer repeats it
        metrics["model_preparation_time"] = trainer.model_preparation_time
    named = {key if key.startswith(f"{prefix}_") else f"{prefix}_{key}": value for key, value in metrics.items()}
    return EvalLoopOutput(predictions=predictions, label_ids=labels, metrics=named, num_samples=count)


def _as_asked(trainer: Any, logits: torch.Tensor, labels: torch.Tensor) -> list[Any]:
    """The logits, or what `preprocess_logits_for_metrics` makes of them batch by batch: one tensor or several."""
    asked, size = trainer.preprocess_logits_for_metrics, trainer.args.eval_batch_size
    if asked is None:
        return [logits]
    return [asked(*part) for part in zip(logits.split(size), labels.split(size))]
