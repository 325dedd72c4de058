"""`reference-script-b8`: the reference's baseline script, with one import changed, against itself.

    python benchmarks/reference_script.py run --rows rows.json [--repeat 2] [--no-dropout] [--tiny]
    python benchmarks/workloads.py merge rows.json benchmarks/results/h200.json

The script fine-tunes DistilBERT on 1,000 texts padded to 512, batch 8, evaluates twice on 200, and prints the time that
`trainer.train()` took. Sides, each in its own process: stock Trainer as the script says (fp32), stock with bf16, ours
with bf16 (`from automodel import Trainer, TrainingArguments` and `bf16=True`), ours in fp32. Weights are random (seed
0), texts are random words with the lengths of the `distilbert-b8` workload and a planted label.

`ms_per_step` is the median over windows of ten steps, from log line to log line (each reads losses, so the device is
waited for), without those that evaluate. `training_s` is what the script prints. `--repeat 2` runs every side twice and
keeps the second: the first compiles kernels that are compiled once on a machine.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))

WORKLOAD = "reference-script-b8"
WINDOW = 10
SIDES = {
    "hf-trainer": ("transformers", ""),
    "hf-trainer-bf16": ("transformers", "bf16=True,"),
    "automodel": ("automodel", "bf16=True,"),
    "automodel-fp32": ("automodel", ""),
}

SCRIPT = """
from {home} import Trainer, TrainingArguments
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from datasets import load_dataset
import time

folder = {folder!r}
tokenizer = AutoTokenizer.from_pretrained(folder + "/model")
model = AutoModelForSequenceClassification.from_pretrained(folder + "/model", num_labels=2)
dataset = load_dataset("json", data_files=folder + "/train.jsonl", split="train")
val_dataset = load_dataset("json", data_files=folder + "/test.jsonl", split="train")


def tokenize_function(examples):
    return tokenizer(examples["text"], truncation=True, padding="max_length", max_length={longest})


train_dataset = dataset.map(tokenize_function, batched=True)
val_dataset = val_dataset.map(tokenize_function, batched=True)
training_args = TrainingArguments(
    output_dir=folder + "/results",
    num_train_epochs=1,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=16,
    learning_rate=2e-5,
    logging_steps=10,
    eval_strategy="steps",
    eval_steps=50,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    {more}
)
trainer = Trainer(model=model, args=training_args, train_dataset=train_dataset, eval_dataset=val_dataset)
start_time = time.time()
trainer.train()
print(f"training time: {{time.time() - start_time:.2f}} seconds")
"""


def make(folder: Path, tiny: bool, dropout: bool) -> int:
    """Model, tokenizer and texts; returns the number of tokens in the training texts."""
    import numpy as np
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import DistilBertConfig, DistilBertForMaskedLM, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(30_522 - 5))]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = WhitespaceSplit()
    inner.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=512,
    )  # fmt: skip
    torch.manual_seed(0)
    shape: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64} if tiny else {}
    if not dropout:
        shape |= {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    DistilBertForMaskedLM(DistilBertConfig(**shape)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    if tiny:
        (folder / "tiny").touch()
    rng, tokens = np.random.default_rng(0), 0
    for name, count in (("train", 400 if tiny else 1000), ("test", 32 if tiny else 200)):
        lengths = np.clip(rng.lognormal(5.4, 0.55, count), 16, 512).astype(int) // (8 if tiny else 1)
        with open(folder / f"{name}.jsonl", "w") as out:
            for index, length in enumerate(np.maximum(lengths, 4)):
                text = rng.integers(100, 30_000, length - 2)
                text[:2] = 50 + index % 2
                out.write(json.dumps({"text": " ".join(f"w{i}" for i in text), "label": index % 2}) + "\n")
        tokens = int(np.maximum(lengths, 4).sum()) if name == "train" else tokens
    return tokens


def side(folder: Path, name: str, started: float) -> dict[str, Any]:
    """Runs the script of one side in this process and says what it needed."""
    home, more = SIDES[name]
    _ = importlib.import_module(home).Trainer  # the first line of the script, before anything of ours
    import torch
    import transformers.trainer
    from transformers import TrainerCallback

    script = folder / f"{name}.py"
    longest = 64 if (folder / "tiny").exists() else 512
    cpu = "" if torch.cuda.is_available() else "use_cpu=True,"
    script.write_text(SCRIPT.format(home=home, more=more + cpu, folder=str(folder), longest=longest))

    ends: list[float] = []
    evaluated: set[int] = set()
    found: dict[str, Any] = {}

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())
            if control.should_evaluate:
                evaluated.add(len(ends))

    base = transformers.trainer.Trainer
    begin, train = base.__init__, base.train

    def with_clock(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.add_callback(Clock())

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = time.perf_counter()
        found["output"] = train(self, *args, **kwargs)
        found["training_s"] = time.perf_counter() - before
        found["first_step_s"] = ends[0] - before
        found["trainer"] = self
        return found["output"]

    base.__init__, base.train = with_clock, timed  # ty: ignore[invalid-assignment]
    torch.manual_seed(0)  # the new head, the same on every side
    runpy.run_path(str(script), run_name="__main__")
    wall = time.time() - started
    windows = []
    for first in range(2 * WINDOW, len(ends) - WINDOW, WINDOW):
        if not evaluated & set(range(first + 1, first + WINDOW + 1)):
            windows.append(1000 * (ends[first + WINDOW] - ends[first]) / WINDOW)
    history = found["trainer"].state.log_history
    way = getattr(found["trainer"], "acceleration", None)
    parts = statistics.quantiles(windows, n=5) if len(windows) > 1 else [windows[0]] * 4
    return {
        "workload": WORKLOAD, "provider": name, "ms_per_step": round(statistics.median(windows), 3),
        "ms_p20": round(parts[0], 3), "ms_p80": round(parts[-1], 3), "training_s": round(found["training_s"], 3),
        "first_step_s": round(found["first_step_s"], 3), "wall_s": round(wall, 2), "steps": len(ends),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if torch.cuda.is_available() else None,
        "precision": "bf16" if "bf16" in more else "fp32", "losses": [e["loss"] for e in history if "loss" in e],
        "eval_losses": [e["eval_loss"] for e in history if "eval_loss" in e], "setup": str(way or "stock Trainer"),
        "torch": torch.__version__, "transformers": transformers.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
    }  # fmt: skip


def run(rows_file: Path, repeat: int, tiny: bool, dropout: bool, commit: str, sides: list[str]) -> list[dict[str, Any]]:
    """Every side in a process of its own, `repeat` times; the last one counts."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        tokens = make(Path(folder), tiny, dropout)
        for name in sides:
            for _ in range(repeat):
                started = time.time()
                command = [sys.executable, __file__, "side", folder, name, str(started)]
                env = {
                    **os.environ,
                    "HF_HUB_OFFLINE": "1",
                    "HF_HOME": f"{folder}/hf",
                    "TOKENIZERS_PARALLELISM": "false",
                }
                env["PYTHONPATH"] = os.pathsep.join([str(SOURCE), env.get("PYTHONPATH", "")])
                done = subprocess.run(command, env=env, capture_output=True, text=True)
                if done.returncode:
                    print(done.stdout[-2000:], done.stderr[-4000:])
                    raise SystemExit(f"{name} failed")
                row = json.loads(done.stdout.splitlines()[-1])
                print(f"{name}: {row['ms_per_step']} ms a step, {row['training_s']} s printed, {row['setup']}")
            rows.append(row | {"tokens_per_s": round(tokens / row["steps"] / row["ms_per_step"] * 1000)})
    stock = dict(rows[0])
    for row in rows:
        row["speedup_vs_hf_stock"] = round(stock["ms_per_step"] / row["ms_per_step"], 2)
        row["training_speedup_vs_hf_stock"] = round(stock["training_s"] / row["training_s"], 2)
        row["largest_loss_difference"] = round(max(abs(a - b) for a, b in zip(row["losses"], stock["losses"])), 5)
        row["final_loss"] = row.pop("losses")[-1]
        row["final_eval_loss"] = row.pop("eval_losses")[-1]
        row["note"] = "dropout 0.1" if dropout else "dropout off"
        row["workload"] += "" if dropout else "-no-dropout"
        row |= {"date": datetime.date.today().isoformat(), "commit": commit, "command": " ".join(sys.argv)}
        rows_file.write_text(json.dumps(rows, indent=1) + "\n")
        print(
            f"{row['provider']:16} {row['ms_per_step']:8.2f} ms {row['speedup_vs_hf_stock']:6.2f}x   printed "
            f"{row['training_s']:6.2f} s {row['training_speedup_vs_hf_stock']:6.2f}x   loss {row['final_loss']:.4f} "
            f"(differs by {row['largest_loss_difference']})"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("side")
    one.add_argument("folder", type=Path)
    one.add_argument("name", choices=SIDES)
    one.add_argument("started", type=float)
    every = verbs.add_parser("run")
    every.add_argument("--rows", type=Path, default=Path("rows.json"))
    every.add_argument("--repeat", type=int, default=2)
    every.add_argument("--tiny", action="store_true", help="a small model, for a machine without a GPU")
    every.add_argument("--no-dropout", action="store_true", help="so that losses can be compared one by one")
    every.add_argument("--commit", default="")
    every.add_argument("--sides", default=",".join(SIDES), help="in this order; the first is what others are held to")
    given = parser.parse_args()
    if given.verb == "side":
        print(json.dumps(side(given.folder, given.name, given.started)))
    else:
        run(given.rows, given.repeat, given.tiny, not given.no_dropout, given.commit, given.sides.split(","))


if __name__ == "__main__":
    main()
