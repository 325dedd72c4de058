"""The named workloads of the results files, made from nothing and run anywhere.

    python benchmarks/workloads.py make distilbert-b8 --out DIR      # then: automodel benchmark -c DIR/run.yaml …
    python benchmarks/workloads.py run distilbert-b8 bert-base-b32 --rows rows.json [--compile] [--steps 60]
    python benchmarks/workloads.py merge rows.json benchmarks/results/h200.json

A workload is a folder: a model config (weights are drawn at random, seed 0), a tokenizer, pre-tokenised rows whose
lengths follow the stated lognormal (seed 0, 1,000 documents; the label is planted in each document's first tokens, so
the loss has somewhere to go), and `run.yaml`. `quickstart-cpu` is real: MiniLM on movie reviews, as the quickstart
trains it. `run` measures each one against Trainer, stock and tuned, in fresh processes, and writes the rows after
every workload, so that a run stopped by its time limit keeps what it has.

The package need not be installed: `src/` beside this folder is used.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))
os.environ["PYTHONPATH"] = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])

import numpy as np  # noqa: E402

from automodel.benchmark.rows import merge_into, rows_of  # noqa: E402

DOCUMENTS, HELD_OUT = 1000, 200
PLANTED = 8  # tokens at the start of a document that give its label away
PLANTED_ID = 2000


@dataclass(frozen=True)
class Workload:
    """A random model of a known shape on random documents of known lengths."""

    config: str
    """transformers' config class; its defaults are the published model's shape."""
    batch: int
    lengths: tuple[float, float]
    """Mean and deviation of the lognormal."""
    shortest: int
    longest: int
    steps: int = 125
    lr: float = 2e-5


WORKLOADS = {
    "distilbert-b8": Workload("DistilBertConfig", 8, (5.4, 0.55), 16, 512),
    "distilbert-b32": Workload("DistilBertConfig", 32, (5.4, 0.55), 16, 512),
    "bert-base-b32": Workload("BertConfig", 32, (5.4, 0.55), 16, 512),
    "modernbert-base-b16": Workload("ModernBertConfig", 16, (6.2, 0.6), 64, 2048, steps=63),
}
QUICKSTART = "quickstart-cpu"
QUICKSTART_STEPS = 40


def make(name: str, folder: Path, steps: int | None = None) -> Path:
    """Writes the workload into `folder` and returns its run.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == QUICKSTART:
        return make_quickstart(folder, steps or QUICKSTART_STEPS)
    work = WORKLOADS[name]
    config = write_model(work, folder / "model")
    rng = np.random.default_rng(0)
    write_rows(folder / "train.jsonl", DOCUMENTS, work, config, rng)
    write_rows(folder / "validation.jsonl", HELD_OUT, work, config, rng)
    steps = steps or work.steps
    return write_yaml(
        folder,
        {
            "model": {
                "_target_": "automodel.AutoModelForSequenceClassification.from_config",
                "pretrained_model_name_or_path": str(folder / "model"),
                "num_labels": 2,
            },
            "task": "text-classification",
            "seed": 0,
            "dataset": {"path": str(folder / "train.jsonl"), "max_length": work.longest},
            "validation_dataset": {"path": str(folder / "validation.jsonl")},
            "dataloader": {"batch_size": work.batch},
            "optimizer": {"lr": work.lr, "weight_decay": 0.01},
            "step_scheduler": {"max_steps": steps, "val_every_steps": steps},
            "checkpoint": {"checkpoint_dir": str(folder / "out"), "keep_last": 1},
        },
    )


def write_model(work: Workload, folder: Path) -> Any:
    """A config and a tokenizer that has a word for every id of the model's vocabulary."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    config = getattr(transformers, work.config)(num_labels=2)
    config.save_pretrained(folder)
    words = [f"w{i}" for i in range(config.vocab_size)]
    words[config.pad_token_id] = "[PAD]"
    for place, word in zip((100, 101, 102, 103), ("[UNK]", "[CLS]", "[SEP]", "[MASK]")):
        words[place] = word
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=work.longest,
    )
    tokenizer.save_pretrained(folder)
    return config


def write_rows(path: Path, count: int, work: Workload, config: Any, rng: np.random.Generator) -> None:
    """Random tokens between [CLS] and [SEP]; the first few say the label."""
    lengths = np.clip(rng.lognormal(*work.lengths, count).astype(int), work.shortest, work.longest)
    labels = rng.integers(0, 2, count)
    highest = min(config.vocab_size, 30_000)  # below ModernBERT's special tokens
    with path.open("w", encoding="utf-8") as file:
        for length, label in zip(lengths, labels):
            tokens = rng.integers(1000, highest, length)
            tokens[1 : 1 + PLANTED] = PLANTED_ID + label
            tokens[0], tokens[-1] = 101, 102
            file.write(json.dumps({"input_ids": tokens.tolist(), "label": int(label)}) + "\n")


def make_quickstart(folder: Path, steps: int) -> Path:
    """The quickstart's model and reviews, for fewer steps."""
    from automodel.cli.demo.reviews import model_folder, split

    batch = 16
    training, held_out = split(steps * batch, 64)  # one epoch: length grouping shows its true mix only over a whole one
    for name, reviews in (("train", training), ("validation", held_out)):
        lines = (json.dumps({"text": review.text, "label": review.label}) + "\n" for review in reviews)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return write_yaml(
        folder,
        {
            "model": {
                "pretrained_model_name_or_path": str(model_folder()),
                "num_labels": 2,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            },
            "task": "text-classification",
            "dataset": {"path": str(folder / "train.jsonl"), "max_length": 256},
            "validation_dataset": {"path": str(folder / "validation.jsonl")},
            "dataloader": {"batch_size": batch},
            "optimizer": {"lr": 1e-4, "weight_decay": 0.01},
            "lr_scheduler": {"name": "linear", "warmup_ratio": 0.1},
            "step_scheduler": {"max_steps": steps, "val_every_steps": steps},
            "checkpoint": {"checkpoint_dir": str(folder / "out"), "enabled": False},
        },
    )


def write_yaml(folder: Path, settings: dict[str, Any]) -> Path:
    import yaml

    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return path


def run(options: argparse.Namespace) -> int:
    """Measures the workloads one after the other. Exit code 1 where one failed or was left out."""
    from automodel.benchmark.machine import system_info
    from automodel.benchmark.verb import Wishes, benchmark
    from automodel.plan.check import load_run_config

    began, missing, lost = time.monotonic(), [], 0.0
    against = (*options.against.split(","), *(["hf-trainer-compile"] if options.compile else []))
    for name in options.names:
        if time.monotonic() - began + lost > options.budget:
            missing.append(f"{name}: left out, the time budget of {options.budget:g} s would not be enough")
            continue
        started = time.monotonic()
        print(f"\n=== {name} ===", flush=True)
        with tempfile.TemporaryDirectory(prefix=f"{name}-") as temporary:
            folder = Path(temporary)
            os.environ["AUTOMODEL_CACHE"] = str(folder / "tokens")
            cfg = load_run_config([make(name, folder, options.steps)], options.settings)
            wishes = Wishes(against, folder / "benchmark", options.repeat, ladder=options.ladder)
            outcome = benchmark(cfg, wishes)
            failed = [side for side, found in outcome.sides.items() if found["status"] == "failed"]
            missing.extend(f"{name}: {side} failed" for side in failed)
            rows = rows_of(
                name,
                outcome.sides,
                system_info(),
                date=time.strftime("%Y-%m-%d", time.gmtime()),
                commit=options.commit or commit_here(),
                command=shlex.join(["python", *sys.argv]),
            )
            merge_into(options.rows, rows)
            keep(outcome, options.keep, name)
        lost = max(lost, time.monotonic() - started)  # the next one is assumed to take as long as the longest so far
    for line in missing:
        print(f"missing: {line}", file=sys.stderr)
    return 1 if missing else 0


def keep(outcome: Any, folder: Path | None, name: str) -> None:
    """Copies the report and the results of a workload, where a folder for them was named."""
    if folder is None or outcome.document is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(outcome.report, folder / f"{name}.html")
    shutil.copy(outcome.results, folder / f"{name}.json")


def commit_here() -> str | None:
    """The commit of this checkout; None in a copy without git."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=SOURCE, capture_output=True, text=True)
    return found.stdout.strip() or None if found.returncode == 0 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    names = [*WORKLOADS, QUICKSTART]
    maker = verbs.add_parser("make", help="write a workload's folder")
    maker.add_argument("name", choices=names)
    maker.add_argument("--out", type=Path, required=True)
    maker.add_argument("--steps", type=int)
    runner = verbs.add_parser("run", help="measure workloads and write rows")
    runner.add_argument("names", nargs="+", choices=names)
    runner.add_argument("--rows", type=Path, required=True, help="JSON file to merge the rows into")
    runner.add_argument("--compile", action="store_true", help="also measure hf-trainer-compile (a minute more each)")
    runner.add_argument("--against", default="hf-trainer,hf-trainer-tuned", help="sides to compare with")
    runner.add_argument("--ladder", action="store_true", help="also climb the ladder")
    runner.add_argument("--steps", type=int)
    runner.add_argument("--repeat", type=int, default=1)
    runner.add_argument("--budget", type=float, default=460.0, help="seconds after which no workload is started")
    runner.add_argument("--commit", help="commit to write into the rows, in a copy without git")
    runner.add_argument("--keep", type=Path, help="folder for each workload's report and results")
    runner.add_argument("--set", dest="settings", action="append", default=[], metavar="section.key=value")
    merger = verbs.add_parser("merge", help="merge rows into a results file")
    merger.add_argument("rows", type=Path)
    merger.add_argument("results", type=Path)
    # The short form of the docs: a name alone means `make`.
    arguments = sys.argv[1:]
    if arguments and arguments[0] in names:
        arguments = ["make", *arguments]
    options = parser.parse_args(arguments)
    if options.verb == "make":
        print(make(options.name, options.out.resolve(), options.steps))
        return 0
    if options.verb == "merge":
        merge_into(options.results, json.loads(options.rows.read_text(encoding="utf-8")))
        return 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
