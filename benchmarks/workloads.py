"""The named workloads of the results files, made from nothing and run anywhere.

    python benchmarks/workloads.py make distilbert-b8 --out DIR      # then: automodel benchmark -c DIR/run.yaml …
    python benchmarks/workloads.py run distilbert-b8 bert-base-b32 --rows rows.json [--compile] [--steps 60]
    python benchmarks/workloads.py run llama1b-4k --rows rows.json --against none          # this library alone
    python benchmarks/workloads.py run … --against none --steps 1000 --set benchmark.warmup_steps=500
    python benchmarks/workloads.py whole llama1b-squad-b8 --steps 200 --rows rows.json     # start to saved model
    python benchmarks/workloads.py merge rows.json benchmarks/results/h200.json

A workload is a folder: a model config (weights are drawn at random, seed 0), a tokenizer, pre-tokenised rows whose
lengths follow the stated lognormal (seed 0, 1,000 documents; the label is planted in each document's first tokens, and
every third word for a language model is the same, so the loss has somewhere to go), and `run.yaml`. `quickstart-cpu` is
real: MiniLM on movie reviews, as the quickstart trains it. `run` measures each one against Trainer, stock and tuned, in
fresh processes, and writes the rows after every workload, so that a run stopped by its time limit keeps what it has.
`whole` is about `wall_s`, from the start of a process to the evaluated and saved model: Trainer, then this library
twice, first with empty caches and then with those that the first run left. `flush_s` is what the disk has to do after
that: this library's checkpoint is on it by then, its model and Trainer's files are in memory.

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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))
os.environ["PYTHONPATH"] = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])

import numpy as np  # noqa: E402

from automodel.benchmark.rows import merge_into, rows_of  # noqa: E402

DOCUMENTS, HELD_OUT = 1000, 200
PLANTED = 8  # tokens at the start of a document that give its label away
PLANTED_ID = 2000
CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "causal-lm": "AutoModelForCausalLM",
}


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
    task: str = "text-classification"
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Where it differs from the class's defaults."""
    learned: float = 1.0
    """Share of a document's last tokens that a language model learns."""
    settings: tuple[str, ...] = ()
    """Of the run, as `section.key=value`."""

    @property
    def writes(self) -> bool:
        return self.task == "causal-lm"


LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256, "tie_word_embeddings": True,
    "max_position_embeddings": 131_072, "rope_theta": 500_000.0,
}  # fmt: skip
"""Llama 3.2 1B."""
SQUAD, FULL = (5.1, 0.35), (9.0, 0.0)
PURE = "training_optimizations.precision=bf16-pure"
LONG = 32_768
"""One document fills a step."""


def llama(batch: int, lengths: tuple[float, float], longest: int, steps: int, *settings: str, **about: Any) -> Workload:
    shortest = longest if lengths == FULL else 16
    return Workload(
        "LlamaConfig", batch, lengths, shortest, longest, steps, task="causal-lm", shape=LLAMA_1B, settings=settings,
        **about,
    )  # fmt: skip


WORKLOADS = {
    "distilbert-b8": Workload("DistilBertConfig", 8, (5.4, 0.55), 16, 512),
    "distilbert-b32": Workload("DistilBertConfig", 32, (5.4, 0.55), 16, 512),
    "bert-base-b32": Workload("BertConfig", 32, (5.4, 0.55), 16, 512),
    "modernbert-base-b16": Workload("ModernBertConfig", 16, (6.2, 0.6), 64, 2048, steps=63),
    "llama1b-squad-b8": llama(8, SQUAD, 512, 100),
    "llama1b-squad-b8-bf16": llama(8, SQUAD, 512, 100, PURE),
    "llama1b-squad-b8-answers": llama(8, SQUAD, 512, 100, learned=0.1),
    "llama1b-4k": llama(2, FULL, 4096, 30),
    "llama1b-4k-bf16": llama(2, FULL, 4096, 30, PURE),
    "llama1b-4k-fsdp2": llama(2, FULL, 4096, 30, "distributed.strategy=fsdp2"),
    "llama1b-4k-tight": llama(2, FULL, 4096, 30, PURE, "optim=adamw_8bit", "gradient_checkpointing=full"),
    "llama1b-short16k": llama(93, SQUAD, 512, 30),
    "llama1b-32k": llama(1, FULL, LONG, 10, f"packed_sequence.packed_sequence_size={LONG}"),
    "llama1b-32k-bf16": llama(1, FULL, LONG, 10, f"packed_sequence.packed_sequence_size={LONG}", PURE),
}
QUICKSTARTS = {"quickstart-cpu": 0.0, "quickstart-cpu-dropout": 0.1}
"""With the dropout of the quickstart, which has none, and of MiniLM's own config."""
QUICKSTART_STEPS = 40
CHAT = "chat-cpu"
CHAT_STEPS = 33
"""All that the chat quickstart does: three epochs over 84 conversations."""


def make(name: str, folder: Path, steps: int | None = None) -> Path:
    """Writes the workload into `folder` and returns its run.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    if name in QUICKSTARTS:
        return make_quickstart(folder, steps or QUICKSTART_STEPS, QUICKSTARTS[name])
    if name == CHAT:
        return make_chat(folder, steps or CHAT_STEPS)
    work = WORKLOADS[name]
    config = write_model(work, folder / "model")
    rng, steps = np.random.default_rng(0), steps or work.steps
    documents = steps * work.batch if work.writes else DOCUMENTS
    write_rows(folder / "train.jsonl", documents, work, config, rng)
    settings: dict[str, Any] = {
        "model": {
            "_target_": f"automodel.{CLASSES[work.task]}.from_config",
            "pretrained_model_name_or_path": str(folder / "model"),
        },
        "task": work.task,
        "seed": 0,
        "dataset": {"path": str(folder / "train.jsonl"), "max_length": work.longest},
        "dataloader": {"batch_size": work.batch},
        "optimizer": {"lr": work.lr, "weight_decay": 0.01},
        "step_scheduler": {"max_steps": steps, "val_every_steps": steps},
        "checkpoint": {"checkpoint_dir": str(folder / "out"), "keep_last": 1},
    }
    if work.writes:  # steps alone: nothing is evaluated, and 5 GB of weights not saved
        settings["checkpoint"]["enabled"] = False
        del settings["step_scheduler"]["val_every_steps"]
        return write_yaml(folder, settings)
    write_rows(folder / "validation.jsonl", HELD_OUT, work, config, rng)
    settings["validation_dataset"] = {"path": str(folder / "validation.jsonl")}
    settings["model"]["num_labels"] = 2
    return write_yaml(folder, settings)


def write_model(work: Workload, folder: Path) -> Any:
    """A config and a tokenizer that has a word for every id of the model's vocabulary."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    labels: dict[str, Any] = {} if work.writes else {"num_labels": 2}
    config = getattr(transformers, work.config)(**labels, **work.shape)
    config.save_pretrained(folder)
    words = [f"w{i}" for i in range(config.vocab_size)]
    words[config.pad_token_id or 0] = "[PAD]"
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
        eos_token="[SEP]",
        model_max_length=work.longest,
    )
    tokenizer.save_pretrained(folder)
    return config


def write_rows(path: Path, count: int, work: Workload, config: Any, rng: np.random.Generator) -> None:
    """Random tokens between [CLS] and [SEP]; the first few say the label, or every third word is the same."""
    lengths = np.clip(rng.lognormal(*work.lengths, count).astype(int), work.shortest, work.longest)
    labels = rng.integers(0, 2, count)
    highest = min(config.vocab_size, 30_000)  # below ModernBERT's special tokens
    with path.open("w", encoding="utf-8") as file:
        for length, label in zip(lengths, labels):
            tokens = rng.integers(1000, highest, length)
            if work.writes:
                tokens[2::3], tokens[-1] = PLANTED_ID, 102
                learned = np.full(length, -100)
                first = length - max(2, round(work.learned * length))
                learned[first:] = tokens[first:]
                row = {"input_ids": tokens.tolist(), "labels": learned.tolist()}
            else:
                tokens[1 : 1 + PLANTED] = PLANTED_ID + label
                tokens[0], tokens[-1] = 101, 102
                row = {"input_ids": tokens.tolist(), "label": int(label)}
            file.write(json.dumps(row) + "\n")


def make_quickstart(folder: Path, steps: int, dropout: float) -> Path:
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
                "hidden_dropout_prob": dropout,
                "attention_probs_dropout_prob": dropout,
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


def make_chat(folder: Path, steps: int) -> Path:
    """The chat quickstart's own recipe, for fewer steps and without checkpoints."""
    import yaml

    from automodel.cli.demo.smollm2 import smollm2_folder
    from automodel.cli.quickstart_chat import FULL_MINUTES, write_recipe

    recipe, _ = write_recipe(folder, smollm2_folder(), FULL_MINUTES, samples=None)
    settings = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    settings["step_scheduler"] |= {"max_steps": steps, "num_epochs": None}
    settings["checkpoint"]["enabled"] = False
    return write_yaml(folder, settings)


def write_yaml(folder: Path, settings: dict[str, Any]) -> Path:
    import yaml

    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return path


def run(options: argparse.Namespace) -> int:
    """Measures the workloads one after the other. Exit code 1 where one failed or was left out."""
    from automodel.benchmark.machine import system_info
    from automodel.plan.check import load_run_config

    began, missing, lost = time.monotonic(), [], 0.0
    for name in options.names:
        if time.monotonic() - began + lost > options.budget:
            missing.append(f"{name}: left out, the time budget of {options.budget:g} s would not be enough")
            continue
        started = time.monotonic()
        print(f"\n=== {name} ===", flush=True)
        with tempfile.TemporaryDirectory(prefix=f"{name}-") as temporary:
            folder = Path(temporary)
            os.environ["AUTOMODEL_CACHE"] = str(folder / "tokens")
            settings = [*(WORKLOADS[name].settings if name in WORKLOADS else ()), *options.settings]
            cfg = load_run_config([make(name, folder, options.steps)], settings)
            sides = measure_alone(cfg, folder) if options.against == "none" else compare(cfg, folder, name, options)
            missing.extend(f"{name}: {side} failed" for side, found in sides.items() if found["status"] == "failed")
            rows = rows_of(
                name,
                sides,
                system_info(),
                date=time.strftime("%Y-%m-%d", time.gmtime()),
                commit=options.commit or commit_here(),
                command=shlex.join(["python", *sys.argv]),
            )
            merge_into(options.rows, rows)
        lost = max(lost, time.monotonic() - started)  # the next one is assumed to take as long as the longest so far
    for line in missing:
        print(f"missing: {line}", file=sys.stderr)
    return 1 if missing else 0


def compare(cfg: Any, folder: Path, name: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Every side, by name."""
    from automodel.benchmark.verb import Wishes, benchmark

    against = (*options.against.split(","), *(["hf-trainer-compile"] if options.compile else []))
    outcome = benchmark(cfg, Wishes(against, folder / "benchmark", options.repeat, ladder=options.ladder))
    keep(outcome, options.keep, name)
    return outcome.sides


def measure_alone(cfg: Any, folder: Path) -> dict[str, dict[str, Any]]:
    """This library in a process of its own, from random weights: nothing has to be written for others."""
    from automodel.benchmark.job import warmup_steps
    from automodel.benchmark.launch import run_once
    from automodel.benchmark.sides import AUTOMODEL
    from automodel.config.load import dump_config
    from automodel.plan.hardware import read_hardware

    (folder / "run.yaml").write_text(dump_config(cfg), encoding="utf-8")
    steps = cfg.step_scheduler.max_steps
    warmup = warmup_steps(cfg.benchmark.warmup_steps if cfg.benchmark else None, 10, steps)
    settings = {"device": read_hardware().device, "warmup_steps": warmup, "steps_per_epoch": steps}
    (folder / "job.json").write_text(json.dumps(settings), encoding="utf-8")
    job: Any = SimpleNamespace(folder=folder, trust=())
    found = run_once(job, AUTOMODEL, 1, folder / "logs")
    told = found.get("error") or f"{found['ms_per_step']:.2f} ms a step, {found['tokens_per_s']:.0f} tokens a second"
    print(told, flush=True)
    return {AUTOMODEL.name: found}


def whole(options: argparse.Namespace) -> int:
    """Trainer once, this library twice, on one workload. Rows `…-whole-run` and `…-whole-run-warm`."""
    from automodel.benchmark.job import make_job
    from automodel.benchmark.launch import run_once
    from automodel.benchmark.machine import system_info
    from automodel.benchmark.sides import AUTOMODEL, sides_against
    from automodel.plan.check import load_run_config

    failed = 0
    with tempfile.TemporaryDirectory(prefix=f"{options.name}-") as temporary:
        folder = Path(temporary)
        os.environ["AUTOMODEL_CACHE"] = str(folder / "cache")
        os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")  # empty, whatever ran before
        settings = [*(WORKLOADS[options.name].settings if options.name in WORKLOADS else ()), "checkpoint.enabled=true"]
        cfg = load_run_config([make(options.name, folder, options.steps)], [*settings, *options.settings])
        job = make_job(cfg, folder / "work", steps=None, warmup=None)
        sides = [] if options.against == "none" else sides_against(options.against.split(","))
        baseline = None
        for turn, side in enumerate([*sides, AUTOMODEL, AUTOMODEL]):
            found = run_once(job, side, turn, folder / "logs")
            print(f"{side.name}: {found.get('error') or in_short(found, baseline)}", flush=True)
            baseline = baseline or found
            failed += found["status"] == "failed"
            rows = rows_of(
                f"{options.name}-whole-run{'-warm' if turn == len(sides) + 1 else ''}",
                {side.name: found},
                system_info(),
                date=time.strftime("%Y-%m-%d", time.gmtime()),
                commit=options.commit or commit_here(),
                command=shlex.join(["python", *sys.argv]),
            )
            merge_into(options.rows, rows)
    return 1 if failed else 0


def in_short(found: dict[str, Any], baseline: dict[str, Any] | None = None) -> str:
    """Where a run's time went: seconds since its start, one moment after the other. Its share of the baseline's time is
    said twice, the second time until the files of both are on the disk."""
    moments = {"imports": "imports_s", "loop": "loop_start_s", "first step": "first_step_s", "loop's end": "loop_end_s"}
    told = ", ".join(f"{name} {found[key]:.1f}" for name, key in moments.items())
    share = ""
    if baseline and baseline["status"] != "failed":
        until_saved, until_safe = (
            sum(found[key] for key in keys) / sum(baseline[key] for key in keys)
            for keys in (("wall_s",), ("wall_s", "flush_s"))
        )
        share = f", {until_saved:.3f} of {baseline['provider']}, on the disk {until_safe:.3f}"
    step = f"{found['ms_per_step']:.2f} ms a step"
    return f"{found['wall_s']:.1f} s ({told}; flush {found['flush_s']:.1f}), {step}{share}"


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
    names = [*WORKLOADS, *QUICKSTARTS, CHAT]
    maker = verbs.add_parser("make", help="write a workload's folder")
    maker.add_argument("name", choices=names)
    maker.add_argument("--out", type=Path, required=True)
    maker.add_argument("--steps", type=int)
    runner = verbs.add_parser("run", help="measure workloads and write rows")
    runner.add_argument("names", nargs="+", choices=names)
    runner.add_argument("--rows", type=Path, required=True, help="JSON file to merge the rows into")
    runner.add_argument("--compile", action="store_true", help="also measure hf-trainer-compile (a minute more each)")
    runner.add_argument("--against", default="hf-trainer,hf-trainer-tuned", help="sides to compare with, or `none`")
    runner.add_argument("--ladder", action="store_true", help="also climb the ladder")
    runner.add_argument("--steps", type=int)
    runner.add_argument("--repeat", type=int, default=1)
    runner.add_argument("--budget", type=float, default=460.0, help="seconds after which no workload is started")
    runner.add_argument("--commit", help="commit to write into the rows, in a copy without git")
    runner.add_argument("--keep", type=Path, help="folder for each workload's report and results")
    runner.add_argument("--set", dest="settings", action="append", default=[], metavar="section.key=value")
    walls = verbs.add_parser("whole", help="measure a workload from start to saved model, cold and warm")
    walls.add_argument("name", choices=names)
    walls.add_argument("--rows", type=Path, required=True)
    walls.add_argument("--against", default="hf-trainer-tuned", help="sides to compare with, or `none`")
    walls.add_argument("--steps", type=int)
    walls.add_argument("--commit")
    walls.add_argument("--set", dest="settings", action="append", default=[], metavar="section.key=value")
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
    return whole(options) if options.verb == "whole" else run(options)


if __name__ == "__main__":
    sys.exit(main())
