"""One class of transformers against this project: `examine("bert", "causal-lm", folder)` returns a row of the table.

What is compared, in fp32 without dropout:

- *alone*: logits and gradients of one batch, as a run would compute them, beside the stock model given each document
  alone; the loss is the stock model's own.
- *curve*: ten steps of `finetune` beside ten steps of transformers' Trainer, over the same rows in the same order.
- *reload*: the saved folder, loaded by stock transformers, has the loss that the run measured on its last weights.

A class that `finetune` refuses with a `UserError` is *refused*, with its words.
"""

from __future__ import annotations

import inspect
import json
import random
import textwrap
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor

from automodel.tasks.registry import task_named

STEPS = 10
BATCH = 4
CLASSES = 2
CLASS_NAMES = {0: "no", 1: "yes"}
"""Named, so that a saved config says how many there are: some configs have three by default."""
TOLERANCE = {"alone_logits": 1e-5, "alone_gradients": 1e-4, "curve": 1e-4, "reload": 1e-5}
"""Largest relative difference that counts as equal. Gradients are sums over many tokens, in another order."""

IGNORE = -100
LETTERS = 300
"""Of an error, in a row."""


@dataclass
class Row:
    """What one class did."""

    kind: str
    task: str
    verdict: str = ""
    """One of `sweep._MEANING`."""
    path: str = ""
    """`packed` or `padded`."""
    reason: str = ""
    """Why it is padded, refused, or what went wrong."""
    alone_logits: float | None = None
    alone_gradients: float | None = None
    curve: float | None = None
    reload: float | None = None
    seconds: float = 0.0


def examine(kind: str, task: str, folder: Path) -> dict[str, Any]:
    """The row of one class; `folder` is empty and may be written to."""
    row, started = Row(kind, task), time.perf_counter()
    try:
        # Token classifiers of decoders drop a tenth where their config has no word for it.
        heads = {"id2label": CLASS_NAMES, "classifier_dropout": 0.0} if "classification" in task else {}
        model = tiny.tiny_model(kind, task, **heads)
    except Exception as error:
        row.verdict, row.reason = "cannot be built", one_line(error, folder)
    else:
        _examine(row, model, folder)
    row.seconds = round(time.perf_counter() - started, 1)
    return asdict(row)


def _examine(row: Row, model: Any, folder: Path) -> None:
    from automodel.config.errors import UserError

    rows = make_rows(row.task, model.config)
    _write(folder, model, rows)
    stock = None
    try:
        stock = _stock_curve(row.task, folder, rows)
    except Exception as error:
        row.reason = f"stock Trainer: {one_line(error, folder)}"
    try:
        losses, evaluation = _our_curve(row, folder)
        if stock is None:
            row.verdict = "stock cannot"
            return
        row.curve = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(losses, stock, strict=True))
        _compare(row, folder, rows, evaluation)
    except UserError as error:
        row.verdict, row.reason = "refused", one_line(error, folder)
    except Exception as error:
        row.verdict, row.reason = "crashed", one_line(error, folder)


def _compare(row: Row, folder: Path, rows: list[dict[str, Any]], evaluation: float) -> None:
    """Fills in the verdict of a class that trained."""
    first = rows[:BATCH]
    row.alone_logits, row.alone_gradients = _beside_stock(row, folder, [[document] for document in first])
    row.reload = _reloaded(row.task, folder, rows, evaluation, alone=True)
    off = _off(row)
    row.verdict = "differs" if off else "equal"
    if row.path == "padded" and off and "curve" not in off:
        row.reload = _reloaded(row.task, folder, rows, evaluation, alone=False)
        logits, gradients = _beside_stock(row, folder, [first])
        padded = {"alone_logits": logits, "alone_gradients": gradients, "reload": row.reload}
        if all(value <= TOLERANCE[name] for name, value in padded.items()):
            row.verdict = "as stock pads"
    if off:
        why = f"{', '.join(off)} above the tolerance"
        row.reason = f"{why}; {row.reason}" if row.reason else why


def _off(row: Row) -> list[str]:
    """The comparisons that are not equal."""
    return [name for name, limit in TOLERANCE.items() if not (getattr(row, name) <= limit)]


def make_rows(task: str, config: Any) -> list[dict[str, Any]]:
    """Random documents of 5 to 23 tokens, each with its labels, and the end token where the model has one."""
    generator = random.Random(0)
    text = config.get_text_config()
    end = getattr(text, "eos_token_id", None)
    end = end[0] if isinstance(end, list) else end
    words = tiny.TEXT_IDS[: _words(text) - tiny.TEXT_IDS.start]
    rows = []
    for number in range(STEPS * BATCH):
        ids = generator.choices(words, k=generator.randint(5, 22))
        ids += [end] if isinstance(end, int) and end < tiny.VOCAB else []
        row: dict[str, Any] = {"input_ids": ids}
        if task == "text-classification":
            row["label"] = number % CLASSES
        elif task == "token-classification":
            row["labels"] = [IGNORE if i % 3 == 0 else (t + i) % CLASSES for i, t in enumerate(ids)]
        elif task == "causal-lm":
            row["labels"] = [IGNORE] * 2 + ids[2:]
        else:
            row["labels"] = generator.choices(words, k=generator.randint(3, 9)) + ids[-1:]
        rows.append(row)
    return rows


def _write(folder: Path, model: Any, rows: list[dict[str, Any]]) -> None:
    model.save_pretrained(folder / "start")
    make_tokenizer(model).save_pretrained(folder / "start")
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(lines)


def make_tokenizer(model: Any) -> Any:
    """A word for every row of the model's embedding, so that the two belong together; its special tokens are the
    model's, or else the ids 0 to 2, which no document holds."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    text = model.config.get_text_config()
    size = _words(text)
    inner = Tokenizer(WordLevel({f"w{i}": i for i in range(size)}, unk_token="w4"))
    inner.pre_tokenizer = WhitespaceSplit()
    special = {}
    for name, default in (("pad", 0), ("bos", 1), ("eos", 2)):
        value = getattr(text, f"{name}_token_id", None)
        value = value[0] if isinstance(value, list) else value
        special[f"{name}_token"] = f"w{value if isinstance(value, int) and 0 <= value < size else default}"
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w4", model_max_length=64, **special)


def _words(text: Any) -> int:
    """Rows of the embedding: some classes have fewer by default than the small vocabulary."""
    return min(tiny.VOCAB, getattr(text, "vocab_size", tiny.VOCAB))


def _our_curve(row: Row, folder: Path) -> tuple[list[float], float]:
    """Losses of our ten steps, and the loss of the last weights over all rows."""
    from rich.console import Console

    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    (folder / "run.yaml").write_text(_config(row.task, folder))
    finetune(load_run_config([folder / "run.yaml"]), console=Console(quiet=True))
    plan = json.loads((folder / "out/run/plan.json").read_text())
    row.path = plan["path"]
    row.reason = row.reason or next((d["reason"] for d in plan["decisions"] if d["name"] == "padding"), "")
    metrics = [json.loads(line) for line in (folder / "out/run/metrics.jsonl").read_text().splitlines()]
    losses = [m["loss"] for m in metrics if m["split"] == "train"]
    evaluation = [m["loss"] for m in metrics if m["split"] == "validation"][-1]
    return losses, evaluation


def _config(task: str, folder: Path) -> str:
    return f"""
task: {task}
model: {folder}/start
dataset: {{path: {folder}/train.jsonl}}
validation_dataset: {{path: {folder}/train.jsonl}}
dataloader: {{shuffle: false, batch_size: {BATCH}}}
validation_dataloader: {{batch_size: {BATCH}}}
optimizer: {{lr: 1e-3, weight_decay: 0.01}}
step_scheduler: {{max_steps: {STEPS}, log_every_steps: 1, val_every_steps: {STEPS}, grad_acc_steps: 1}}
training_optimizations: {{precision: fp32}}
checkpoint: {{checkpoint_dir: {folder}/out}}
"""


def _stock_curve(task: str, folder: Path, rows: list[dict[str, Any]]) -> list[float]:
    """Losses of ten steps of stock Trainer, from the same weights over the same rows."""
    from hf_trainer import trainer_losses

    rows = [{("labels" if name == "label" else name): value for name, value in row.items()} for row in rows]
    start = folder / "start"
    return trainer_losses(folder, start, rows, accumulation=1, batch=BATCH, task=task, steps=STEPS)


def _stock_model(task: str, folder: Path) -> Any:
    import transformers

    auto = getattr(transformers, tiny.TASKS[task][0])
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _reloaded(task: str, folder: Path, rows: list[dict[str, Any]], evaluation: float, alone: bool) -> float:
    """How far the loss of the saved folder, in stock transformers, is from the run's own evaluation: over documents
    alone, or over padded batches of documents sorted by length, as the run evaluates."""
    model = _stock_model(task, folder / "out")
    ordered = sorted(rows, key=lambda row: -len(row["input_ids"]))
    batches = [[row] for row in rows] if alone else [ordered[i : i + BATCH] for i in range(0, len(rows), BATCH)]
    with torch.no_grad():
        sums = [_stock_batch(model, task, batch) for batch in batches]
    loss = sum(float(s) for s, _, _ in sums) / sum(n for _, n, _ in sums)
    return abs(loss - evaluation) / max(abs(evaluation), 1e-6)


def _stock_batch(model: Any, task: str, rows: list[dict[str, Any]]) -> tuple[Tensor, int, Tensor]:
    """(summed loss, labels, logits at the labels) of documents padded into one batch; the loss is the stock model's
    own. One document is not padded."""
    pad = model.config.get_text_config().pad_token_id or 0
    ids = _rectangle([row["input_ids"] for row in rows], pad)
    mask = _rectangle([[1] * len(row["input_ids"]) for row in rows], 0)
    if task == "text-classification":
        labels = torch.tensor([row["label"] for row in rows])
    else:
        labels = _rectangle([row["labels"] for row in rows], IGNORE)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "labels": labels.clone()}
    if task == "seq2seq" and hasattr(model, "prepare_decoder_input_ids_from_labels"):
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=labels.clone())
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    outputs = model(**inputs)
    logits = outputs.logits.float()
    if task == "text-classification":
        return outputs.loss * len(rows), len(rows), logits
    if task == "causal-lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    kept = labels != IGNORE
    return outputs.loss * int(kept.sum()), int(kept.sum()), logits[kept]


def _rectangle(rows: list[list[int]], fill: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])


def _beside_stock(row: Row, folder: Path, batches: list[list[dict[str, Any]]]) -> tuple[float, float]:
    """Relative differences of the logits and gradients of the run's first batch from those of the stock model, which
    is given the same documents as these batches."""
    task = row.task
    stock = _stock_model(task, folder / "start")
    sums = [_stock_batch(stock, task, batch) for batch in batches]
    count = sum(n for _, n, _ in sums)
    (torch.stack([s.reshape(()) for s, _, _ in sums]).sum() / count).backward()
    theirs = torch.cat([logits for _, _, logits in sums]).detach()
    gradients = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    logits, own = _ours(row, folder)
    missing = set(gradients) ^ set(own)
    for name in missing:
        gradients.setdefault(name, torch.zeros_like(own.get(name, torch.zeros(1))))
        own.setdefault(name, torch.zeros_like(gradients[name]))
    names = sorted(gradients)
    ours_flat = torch.cat([own[n].reshape(-1) for n in names])
    theirs_flat = torch.cat([gradients[n].reshape(-1) for n in names])
    return _relative(logits, theirs), _relative(ours_flat, theirs_flat)


def _ours(row: Row, folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits at the labels and gradients of the first batch, as a run computes them."""
    from automodel.data.batch import PackedBatch
    from automodel.engine.prepare import prepare_run
    from automodel.engine.steps import make_fitting_step, make_step_loader
    from automodel.engine.used_rows import UsedRows
    from automodel.models.forward import make_forward
    from automodel.plan.check import load_run_config

    prepared = prepare_run(load_run_config([folder / "run.yaml"]))
    prepared, model, step = make_fitting_step(prepared)
    batch = next(iter(make_step_loader(prepared))).micro_batches[0]
    step._micro_step(batch, batch.num_labels)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    if isinstance(step.rows, UsedRows):  # on the CPU a word table holds only the rows that the data reads
        name, size = step.rows.name, step.rows.table_VN.shape
        gradients[name] = torch.zeros(size).index_copy_(0, step.rows.ids, gradients[name])
    fresh = _stock_model(row.task, folder / "start")
    with torch.no_grad():
        logits = make_forward(fresh, task_named(row.task).head, prepared.plan.path)(batch).float()
    if isinstance(batch, PackedBatch):
        kept = batch.labels_R != IGNORE
        return logits.reshape(len(kept), -1)[kept], gradients
    if row.task == "text-classification":
        return logits, gradients
    return logits[batch.labels != IGNORE], gradients


def _relative(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference by the norm; not finite where either is not, or where shapes differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    value = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))
    return value if value == value else float("inf")


def one_line(error: BaseException, folder: Path) -> str:
    """The error without its line breaks and without the names of the folder, which is another one in each sweep, and
    of the model's folder in it."""
    text = f"{type(error).__name__}: {error}".replace(f"{folder}/", "").replace("'start' is ", "this is ")
    return textwrap.shorten(text, LETTERS, placeholder=" …")
