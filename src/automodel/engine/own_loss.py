"""What the model's own code would learn, compared with what a run computes, before the first step.

Models in the table of `models/families.py` are tested class by class. Of every other model two things are tried on a
loaded one, with two short documents of the run's data: whether the loss that its own forward returns is the one that a
step would minimise (Bamba can add a z-loss, ProphetNet learns several tokens ahead), and, of a causal language model,
whether a later token moves an earlier logit (XLNet sees the whole text, and would learn to copy it). Where either is
so, the run ends here, by the model's name. It takes six forward passes over some dozens of tokens, and leaves no
trace: random generators, buffers and modes are as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from automodel.checkpoint import randomness
from automodel.config.errors import UserError
from automodel.data.batch import IGNORE, PaddedBatch
from automodel.data.collate import PaddedCollator
from automodel.data.store import TokenStore
from automodel.engine.prepare import Prepared
from automodel.models.forward import LossForward, make_loss_forward
from automodel.models.head_outputs import Balanced
from automodel.plan.plan import Decision
from automodel.tasks.loss import SupervisedLoss
from automodel.tasks.task import Task

ALLOWED = 1e-5
"""Of the loss, in fp32: rounding is a hundredth of it, and a z-loss with a coefficient of 1e-5 is above it."""
ALLOWED_HALF = 2e-3
"""The same in 16 bits, where a family may compute its cross-entropy in them."""
MOVED, MOVED_HALF = 1e-4, 2e-2
"""Of the largest logit: what an earlier logit may change by, since products of other numbers round otherwise."""
DOCUMENTS = 256
"""Among so many, from the first, the shortest are taken."""
TOKENS = 23
"""Of the text whose later tokens are changed: no multiple of a block that a model may want."""

Call = Callable[[Callable[[], Any]], Any]
"""Runs a function of the model; a sharded model has to be called from outside."""


def check_own_loss(
    prepared: Prepared, model: Any, call: Call | None = None, half: torch.dtype | None = None
) -> Decision | None:
    """Raises `UserError` where the run would learn something else than the model's own code; a line for the plan where
    that code could not be asked. `half`: the 16-bit dtype that `call` computes in."""
    plan = prepared.plan
    if prepared.packing.packed:  # in the table
        return None
    forward = make_loss_forward(model, prepared.task.head, plan.path, fused=plan.fused_loss)
    collator = PaddedCollator(
        prepared.train.store, place=prepared.task.rows.labels, pad_token_id=prepared.tokenizer.pad_token_id or 0
    )
    documents = short_documents(collator)
    if documents is None:
        return None
    batch, text = collator(documents).to(plan.device), some_text(prepared.train.store, prepared.train.max_length)
    name, call = prepared.cfg.model.pretrained_model_name_or_path, call or (lambda function: function())
    try:
        with untouched(model), _precision_of(model):
            half = half or half_of_model(model)
            if prepared.task.head.next_token:
                require_causal(model, text.to(plan.device), name, call, half)
            require_same_loss(model, forward, prepared.loss, batch, prepared.task, name, call, half)
            model.train()  # Reformer refuses some lengths only then
            require_it_runs(model, forward, batch, name, call)
    except UserError:
        raise
    except torch.OutOfMemoryError:  # what fits is found out later
        return Decision("own loss", "not compared", "two short documents ran out of memory")
    except Exception as error:  # of the model's own code, which may take other inputs than a run has
        reason = in_short(error)
        micro = list(range(min(plan.micro_batch_size, len(prepared.train.store))))
        with untouched(model), _precision_of(model):
            for rows in (micro, documents):
                require_it_runs(model, forward, collator(rows).to(plan.device), name, call)
        return Decision("own loss", "not compared", f"the model's own forward does not take these inputs ({reason})")
    return None


def require_it_runs(model: Any, forward: LossForward, batch: PaddedBatch, name: str, call: Call) -> None:
    """Refuses a model that cannot be given a batch of the run."""
    try:
        call(lambda: forward(batch))
    except torch.OutOfMemoryError:
        return
    except Exception as error:
        raise UserError(
            f"model: {name!r} is a {model.config.model_type} model ({type(model).__name__}) whose code does not take "
            f"batches of text alone: {in_short(error)}. It may want pictures, boxes or texts of certain lengths. "
            "Choose another model."
        ) from error


def in_short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def short_documents(collator: PaddedCollator) -> list[int] | None:
    """Two short documents with something to learn, of two lengths where there are two; none where there is nothing."""
    lengths = collator.store.lengths[:DOCUMENTS]
    learned = (int(i) for i in np.argsort(lengths, kind="stable") if collator([int(i)]).num_labels)
    first = next(learned, None)
    if first is None:
        return None
    other = next((i for i in learned if lengths[i] > lengths[first]), first)
    return [other, first]


def some_text(store: TokenStore, longest: int) -> Tensor:
    """The first tokens of the data, as one row that is not longer than `longest`."""
    length = min(TOKENS, longest)
    return torch.from_numpy(np.resize(np.asarray(store.input_ids[:length], dtype=np.int64), length))[None]


@contextmanager
def untouched(model: Any) -> Generator[None]:
    """Puts back what forward passes change: random generators, buffers, the mode, and what transformers' classifiers
    write into their config."""
    drawn = randomness.capture()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    modes = [(module, module.training) for module in model.modules()]
    had = "problem_type" in model.config.__dict__
    problem = getattr(model.config, "problem_type", None)
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        if had or problem is not None:
            model.config.problem_type = problem
        randomness.restore(*drawn)


def require_same_loss(
    model: Any,
    forward: LossForward,
    loss: SupervisedLoss,
    batch: PaddedBatch,
    task: Task,
    name: str,
    call: Call,
    half: torch.dtype | None,
) -> None:
    """Refuses a model whose own loss is another."""
    if "labels" not in inspect.signature(model.forward).parameters:
        return  # it has none
    plain = SupervisedLoss(loss.problem)  # what the config adds to it (smoothing, weights) is asked for
    randomness.seed_everything(0)  # both passes drop the same
    output = call(lambda: model(**_stock_inputs(model, batch, task)))
    own = getattr(output, "loss", None)
    if own is None or own.numel() != 1:
        return
    randomness.seed_everything(0)
    outputs = call(lambda: forward(batch))
    count = max(1, batch.num_labels)
    ours = [float(plain.sum(outputs, batch.labels)) / count]
    logits = outputs.logits if isinstance(outputs, Balanced) else outputs
    if half and isinstance(logits, Tensor) and plain.problem == "classes":
        flat = logits.to(half).flatten(0, -2)
        ours.append(float(torch.nn.functional.cross_entropy(flat, batch.labels.flatten(), ignore_index=IGNORE)))
    allowed = (ALLOWED_HALF if half else ALLOWED) * max(1.0, abs(float(own)))
    if any(abs(float(own) - each) <= allowed for each in ours):
        return
    raise UserError(
        f"model: {name!r} is a {model.config.model_type} model ({type(model).__name__}) whose own loss is "
        f"{float(own):.6g} on two examples where the loss of this task is {ours[0]:.6g}: its code learns something "
        f"else than a run would. {_keys_of_losses(model.config)}Choose another model, or train this one by a script "
        "with automodel.Trainer, which takes the model's own loss."
    )


def require_causal(model: Any, ids_1S: Tensor, name: str, call: Call, half: torch.dtype | None) -> None:
    """Refuses a language model whose logits of a token depend on what comes after it."""
    model.eval()  # what is dropped differs from pass to pass
    length = ids_1S.shape[1]

    def logits_of(changed_from: int) -> Tensor:
        ids = ids_1S.clone()
        ids[:, changed_from:] = _other_words(ids[:, changed_from:], ids_1S, model)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        randomness.seed_everything(0)
        output = call(lambda: model(**inputs, **_no_cache(model)))
        return output["logits"][0].float()

    allowed = MOVED_HALF if half else MOVED
    before = logits_of(length)
    for place in (length - 1, length // 2):
        moved = (logits_of(place)[:place] - before[:place]).abs().amax(-1)
        if bool((moved > allowed * before.abs().max()).any()):
            first = int((moved > allowed * before.abs().max()).nonzero()[0])
            raise UserError(
                f"model: {name!r} is a {model.config.model_type} model ({type(model).__name__}) whose attention sees "
                f"later tokens: other words from place {place + 1} on moved what it says at place {first + 1} of a "
                f"text. As a causal language model it would learn to copy its answers. {_as_decoder(model.config)}"
            )


def _as_decoder(config: Any) -> str:
    if getattr(config, "is_decoder", True):
        return "Choose a causal model."
    return "Set model.is_decoder=true, or choose a causal model."


def _other_words(ids: Tensor, text: Tensor, model: Any) -> Tensor:
    """For each token another one: of the same text, where it has two, so that it is a word."""
    words = text.unique()
    if len(words) == 1:
        return (ids + 1) % model.get_input_embeddings().weight.shape[0]
    return words[(torch.searchsorted(words, ids) + 1) % len(words)]


def _stock_inputs(model: Any, batch: PaddedBatch, task: Task) -> dict[str, Any]:
    """The batch as a script for transformers would give it, labels included."""
    labels = batch.labels.clone()
    if task.head.next_token:  # there a label stands under its own token
        labels = torch.nn.functional.pad(labels[:, :-1], (1, 0), value=IGNORE)
    inputs = {"input_ids": batch.input_ids_BS, "attention_mask": batch.attention_mask_BS, "labels": labels}
    if batch.token_type_ids_BS is not None:
        inputs["token_type_ids"] = batch.token_type_ids_BS
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if task.head.encoder_decoder and shift is not None:
        inputs["decoder_input_ids"] = shift(labels=batch.labels.clone())
    return {**inputs, **_no_cache(model)}


def _no_cache(model: Any) -> dict[str, Any]:
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def half_of_model(model: Any) -> torch.dtype | None:
    """The 16-bit dtype that the model computes in here, if it is one."""
    if torch.is_autocast_enabled(model.device.type):
        return torch.get_autocast_dtype(model.device.type)
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in dtypes), None)


def _precision_of(model: Any) -> AbstractContextManager:
    """fp32 where the weights are; flash attention knows 16 bits alone."""
    if "flash" in str(model.config._attn_implementation) and model.device.type == "cuda":
        return torch.autocast("cuda", torch.bfloat16)
    return nullcontext()


def _keys_of_losses(config: Any) -> str:
    """Keys of the config that may be the reason."""
    text = config.get_text_config()
    found = {k: v for k, v in vars(text).items() if "loss" in k and isinstance(v, bool | int | float)}
    named = ", ".join(f"{key}: {value}" for key, value in sorted(found.items())[:4])
    return f"Its config says {named}, which `model:` can change. " if named else ""
