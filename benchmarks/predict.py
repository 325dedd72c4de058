"""Classifying a file of texts: `automodel predict` beside what a careful user of transformers writes.

    python benchmarks/predict.py make --out DIR                           # a fine-tuned MiniLM and 512 held-out reviews
    python benchmarks/predict.py run DIR --rows rows.json --repeat 3      # then: workloads.py merge rows.json …

`make` is `automodel quickstart`. `run` measures three sides, in turns, each in a fresh process:

    automodel            `automodel predict DIR --input held_out.csv`, in the precision that it chooses
    automodel-fp32       the same in fp32
    transformers-tuned   one loop under `inference_mode` over the texts sorted by length, padded to the longest of each
                         batch; which precision (fp32, autocast, a model in bf16), attention and batch size are fastest
                         is found by trying, in a process before all others

`wall_s` is from the start of a process until the answers are in a file. After that the same process classifies all
texts again, `--passes` times: `ms_per_text` is the median over the passes of all repeats, tokenising included.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path[:0] = [str(SOURCE), str(Path(__file__).resolve().parent)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])

WORKLOAD, TEXTS, TRAINED_ON = "predict-cpu", 512, 600
AUTOMATIC, FP32, TUNED = "automodel", "automodel-fp32", "transformers-tuned"
PRECISIONS, ATTENTIONS, BATCH_SIZES = ("fp32", "bf16 autocast", "bf16"), ("sdpa", "eager"), (8, 16, 32, 64)
USUAL_BATCH_SIZE = 32  # with which precisions and attentions are tried
TRIED_BATCHES = 3  # from the longest texts to the shortest
Answers = list[tuple[str, float]]
"""Label and probability of each text."""


# What a careful user writes.


class Careful:
    """A sequence classifier of transformers, asked as fast as it can be without code for a model's own layers."""

    def __init__(self, folder: str, precision: str, attention: str, batch_size: int):
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.batch_size, self.autocast = batch_size, precision == "bf16 autocast"
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
        self.model = model.eval()

    def __call__(self, texts: Sequence[str]) -> Answers:
        ids = self.tokenizer(list(texts), truncation=True)["input_ids"]
        return self.ask(ids, batches_by_length(ids, self.batch_size))

    def ask(self, ids: list[list[int]], batches: list[list[int]]) -> Answers:
        """The answers to the texts of these batches."""
        import torch

        answers: list[Any] = [None] * len(ids)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            for rows in batches:
                batch = self.tokenizer.pad({"input_ids": [ids[row] for row in rows]}, return_tensors="pt")
                scores, labels = self.model(**batch).logits.float().softmax(-1).max(-1)
                for row, label, score in zip(rows, labels.tolist(), scores.tolist()):
                    answers[row] = (self.model.config.id2label[label], score)
        return answers


def batches_by_length(ids: list[list[int]], size: int) -> list[list[int]]:
    """Rows of similar lengths together, the longest first."""
    order = sorted(range(len(ids)), key=lambda row: -len(ids[row]))
    return [order[i : i + size] for i in range(0, len(order), size)]


def try_out(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Every precision with every attention over some batches, then the batch sizes over half of the texts; the best
    first."""
    texts = [row["text"] for row in read_rows(job["texts"])][::2]
    models = {(p, a): Careful(job["folder"], p, a, USUAL_BATCH_SIZE) for p in PRECISIONS for a in ATTENTIONS}
    ids = next(iter(models.values())).tokenizer(texts, truncation=True)["input_ids"]
    batches = batches_by_length(ids, USUAL_BATCH_SIZE)
    sample = batches[:: -(-len(batches) // TRIED_BATCHES)]
    ways = {(*way, USUAL_BATCH_SIZE): partial(model.ask, ids, sample) for way, model in models.items()}
    tried = fastest(ways, sum(map(len, sample)))
    best = (tried[0]["precision"], tried[0]["attention"])
    sizes = {(*best, size): partial(Careful(job["folder"], *best, size), texts) for size in BATCH_SIZES}
    return [*fastest(sizes, len(texts)), *tried]


def fastest(contestants: dict[tuple, Callable[[], Any]], texts: int) -> list[dict[str, Any]]:
    """The contestants with milliseconds per text, the fastest first."""
    from automodel.benchmark.trial import race

    names = ("precision", "attention", "batch_size")
    return [dict(zip(names, one)) | {"ms": round(s * 1e3 / texts, 3)} for one, s in race(contestants).items()]


# The sides, each in a process of its own.


def ask_automodel(job: dict[str, Any], output: str) -> tuple[Callable[[list[str]], Answers], dict[str, str]]:
    """The command itself; then what it asks, for the passes that follow."""
    from automodel.cli.main import app

    flags = [word for name, value in job["asked"].items() for word in (f"--{name}", value)]
    app(["predict", job["folder"], "--input", job["texts"], "--output", output, *flags], standalone_mode=False)
    from automodel.engine.predict import Predictor

    predictor = Predictor(job["folder"], **job["asked"])

    def classify(texts: list[str]) -> Answers:
        return [(one.prediction, one.score) for one in predictor.classify(texts) if one]  # ty: ignore[invalid-return-type]

    precision = computed_in(lambda: classify([read_rows(job["texts"])[0]["text"]]))
    path = "packed" if predictor.packed else "padded"
    setup = f"{precision}, {path}, batches of {predictor.batch_size}"
    return classify, {"precision": precision, "attention": path, "setup": setup}


def computed_in(run: Callable[[], Any]) -> str:
    """The precision of most of what a run's matrix products make, and the library where it is not torch's usual one:
    what is computed, whatever was asked for."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    made: Counter[str] = Counter()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            name = str(func)
            if "mm" in name or "linear" in name:
                library = " by oneDNN" if name.startswith("mkldnn") and out.dtype == torch.float32 else ""
                made[{torch.float32: "fp32", torch.bfloat16: "bf16"}[out.dtype] + library] += out.numel()
            return out

    with Products():
        run()
    return made.most_common(1)[0][0]


def ask_transformers(job: dict[str, Any], output: str) -> tuple[Callable[[list[str]], Answers], dict[str, str]]:
    """What stands in a script of a few lines."""
    chosen, rows = job["tried"][0], read_rows(job["texts"])
    careful = Careful(job["folder"], chosen["precision"], chosen["attention"], chosen["batch_size"])
    with open(output, "w", encoding="utf-8") as file:
        for row, (label, score) in zip(rows, careful([row["text"] for row in rows])):
            file.write(json.dumps({**row, "prediction": label, "score": score}) + "\n")
    setup = "{precision}, sorted by length, {attention} attention, batches of {batch_size}".format(**chosen)
    return careful, {"precision": chosen["precision"], "attention": chosen["attention"], "setup": setup}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """One side, from the start of this process to the answers in a file, and its passes after that."""
    from automodel.benchmark.machine import LoadWatch, peak_memory
    from automodel.benchmark.side import STARTED

    load, output = LoadWatch(), f"{job['output']}.jsonl"
    load.start()
    classify, about = (ask_transformers if job["side"] == TUNED else ask_automodel)(job, output)
    wall_s, rows = time.monotonic() - float(os.environ[STARTED]), read_answers(output)
    texts = [row["text"] for row in rows]
    classify(texts)
    passes_s = []
    for _ in range(job["passes"]):
        began = time.perf_counter()
        classify(texts)
        passes_s.append(time.perf_counter() - began)
    import torch

    used = {**load.stop(), **peak_memory("cpu"), "threads": torch.get_num_threads()}
    return {**about, **used, "wall_s": wall_s, "passes_s": passes_s, "rows": rows}


def read_rows(path: str) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_answers(path: str) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


# All sides in turns, and their rows.


def run(options: argparse.Namespace) -> int:
    """Measures every side `--repeat` times and writes the rows. Exit code 1 where a side failed."""
    from automodel.benchmark.launch import run_process

    sides = [AUTOMATIC, FP32] if options.against == "none" else [TUNED, AUTOMATIC, FP32]
    measured: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix=f"{WORKLOAD}-") as temporary:

        def in_own_process(verb: str, job: dict[str, Any], name: str) -> Any:
            place = Path(temporary) / name
            place.with_suffix(".json").write_text(json.dumps({**job, "output": str(place)}), encoding="utf-8")
            arguments = [str(Path(__file__).resolve()), verb, str(place.with_suffix(".json"))]
            ended = run_process(arguments, place.with_suffix(".result"), place.with_suffix(".log"))
            if ended.value is None:
                log = place.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
                raise SystemExit(f"{name} failed with exit code {ended.code}:\n{log[-3000:]}")
            return ended.value

        job: dict[str, Any] = {"folder": str(options.folder.resolve()), "passes": options.passes}
        job["texts"] = str(options.folder.resolve() / "data" / "held_out.csv")
        if TUNED in sides:
            job["tried"] = in_own_process("trial", job, "trial")
            print("tried:", *("{precision}, {attention}, {batch_size}: {ms} ms".format(**one) for one in job["tried"]),
                  sep="\n  ", flush=True)  # fmt: skip
        for number in range(options.repeat):
            for side in sides:
                asked = {"precision": "fp32"} if side == FP32 else {}
                found = in_own_process("side", {**job, "side": side, "asked": asked}, f"{side}-{number}")
                measured[side].append(found)
                each = statistics.median(found["passes_s"]) / len(found["rows"]) * 1e3
                print(f"{side}: {found['setup']}: {each:.3f} ms a text, {found['wall_s']:.2f} s in all", flush=True)
    from workloads import commit_here

    from automodel.benchmark.machine import system_info
    from automodel.benchmark.rows import merge_into

    about = {"commit": options.commit or commit_here(), "command": shlex.join(["python", *sys.argv])}
    merge_into(options.rows, rows_of(measured, system_info(), about))
    return 0


def rows_of(measured: dict[str, list[dict[str, Any]]], system: dict[str, Any], about: dict[str, Any]) -> list[dict]:
    """One row for every side: medians over its runs, and how its answers compare with our own in fp32."""
    from automodel.benchmark.recorder import quantile

    exact = measured[FP32][0]["rows"]
    texts, rows = len(exact), []
    passes = {side: [s * 1e3 / texts for run in runs for s in run["passes_s"]] for side, runs in measured.items()}
    each = {side: statistics.median(times) for side, times in passes.items()}
    walls = {side: statistics.median(run["wall_s"] for run in runs) for side, runs in measured.items()}

    def times_as_fast(figures: dict[str, float], side: str, other: str) -> float | None:
        return round(figures[other] / figures[side], 2) if other in figures else None

    for side, runs in measured.items():
        answers = runs[0]["rows"]
        pairs = list(zip(answers, exact, strict=True))
        rows.append({
            "workload": WORKLOAD,
            "provider": side,
            "ms_per_text": round(each[side], 4),
            "ms_p20": round(quantile(passes[side], 0.2), 4),
            "ms_p80": round(quantile(passes[side], 0.8), 4),
            "texts_per_s": round(1e3 / each[side], 1),
            "wall_s": round(walls[side], 2),
            "peak_gib": round(max(run["peak_memory_gib"] for run in runs), 3),
            "speedup_vs_hf": times_as_fast(each, side, TUNED),
            "speedup_vs_hf_wall": times_as_fast(walls, side, TUNED),
            "speedup_vs_own_fp32": times_as_fast(each, side, FP32),
            "speedup_vs_own_fp32_wall": times_as_fast(walls, side, FP32),
            **{key: runs[0][key] for key in ("precision", "attention", "setup")},
            "texts": texts,
            "accuracy": round(sum(row["prediction"] == row["label"] for row in answers) / texts, 4),
            "same_as_own_fp32": sum(a["prediction"] == b["prediction"] for a, b in pairs) / texts,
            "largest_difference": round(max(abs(a["score"] - b["score"]) for a, b in pairs), 5),
            "repeats": len(runs),
            "cpu_s": round(statistics.median(run["cpu_s"] for run in runs), 2),
            "other_load_percent": round(max(run["other_load_percent"] for run in runs)),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "commit": about["commit"],
            "torch": system["torch"],
            "transformers": system["transformers"],
            "gpu": system["gpu_name"],
            "processor": system["processor"],
            "cores": system["cores"],
            "threads": runs[0]["threads"],
            "command": about["command"],
        })  # fmt: skip
    return rows


def make(folder: Path, texts: int, trained_on: int) -> int:
    """The quickstart's model and its held-out reviews."""
    command = [sys.executable, "-m", "automodel", "quickstart", "--output", str(folder), "--overwrite"]
    return subprocess.run([*command, "--samples", str(trained_on), "--held-out", str(texts)]).returncode


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    maker = verbs.add_parser("make", help="fine-tune the model whose predictions are measured")
    maker.add_argument("--out", type=Path, required=True)
    maker.add_argument("--texts", type=int, default=TEXTS)
    maker.add_argument("--samples", type=int, default=TRAINED_ON, help="reviews to learn from")
    runner = verbs.add_parser("run", help="measure and write rows")
    runner.add_argument("folder", type=Path, help="what `make` wrote")
    runner.add_argument("--rows", type=Path, required=True, help="JSON file to merge the rows into")
    runner.add_argument("--against", choices=(TUNED, "none"), default=TUNED)
    runner.add_argument("--repeat", type=int, default=1)
    runner.add_argument("--passes", type=int, default=3)
    runner.add_argument("--commit", help="commit to write into the rows, in a copy without git")
    for verb, what in (("trial", "try the peer's choices"), ("side", "measure one side")):
        own = verbs.add_parser(verb, help=f"{what}; started by `run`")
        own.add_argument("request", type=Path)
        own.add_argument("result", type=Path)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    if options.verb == "make":
        return make(options.out, options.texts, options.samples)
    if options.verb == "run":
        return run(options)
    job = json.loads(options.request.read_text(encoding="utf-8"))
    found = try_out(job) if options.verb == "trial" else measure(job)
    options.result.write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
