"""The reference documents' own YAML and snippets, read from the documents when the test runs, in the real command.

Names such as `distilbert-base-uncased` and `imdb` are served from a local Hugging Face cache made here: a tiny
DistilBERT with BERT's real tokenizer, real reviews, a tiny real Llama and SQuAD in the hub's layout. Runs are shortened
on the command line only; the YAML is used as it is printed.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_runs as tiny
from hf_cache import HfCache

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT.parent / "shared" / "reference"
DATA = ROOT.parent / "shared" / "data"

pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason="../shared/reference is not here")

SHORT = ("step_scheduler.max_steps=6", "step_scheduler.log_every_steps=2")


def blocks(document: str, language: str = "yaml") -> list[str]:
    """The document's blocks of a language at the left margin."""
    text = (REFERENCE / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def gzipped(path: Path) -> str:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read()


def add_distilbert(cache: HfCache, folder: Path) -> None:
    import torch
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    folder.mkdir()
    for file in (DATA / "tokenizers" / "bert-base-uncased").iterdir():
        shutil.copyfile(file, folder / file.name)
    torch.manual_seed(0)
    config = DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=64)
    DistilBertForMaskedLM(config).save_pretrained(folder)
    cache.add_model("distilbert-base-uncased", folder)


def add_imdb(cache: HfCache) -> None:
    from datasets import ClassLabel, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    splits = {}
    for split, count in (("train", 96), ("test", 32)):
        lines = gzipped(DATA / "imdb-small" / f"{split}.jsonl.gz").split("\n")[:count]
        splits[split] = [{key: json.loads(line)[key] for key in ("text", "label")} for line in lines]
    cache.add_dataset("imdb", splits, config="plain_text", features=features)


def add_llama(cache: HfCache, folder: Path) -> None:
    """A tiny real Llama that takes texts as long as the one it stands for: its positions are rotations, not a table."""
    shutil.copytree(DATA / "stories260k-hf", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 131_072}))
    cache.add_model("meta-llama/Llama-3.2-1B", folder)


def add_squad(cache: HfCache) -> None:
    """The original nested file in the flat layout that the hub serves."""
    articles = json.loads(gzipped(DATA / "squad-v1.1-dev" / "dev-v1.1.json.gz"))["data"][:3]
    rows = [
        {
            "id": question["id"],
            "title": article["title"],
            "context": paragraph["context"],
            "question": question["question"],
            "answers": {key: [answer[key] for answer in question["answers"]] for key in ("text", "answer_start")},
        }
        for article in articles
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]
    # Its 512-token vocabulary makes long contexts of many tokens; the short ones fit into the model's positions.
    rows = [row for row in rows if len(row["context"]) < 600]
    cache.add_dataset("rajpurkar/squad", {"train": rows[:64], "validation": rows[64:96]}, config="plain_text")


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> dict[str, str]:
    """The environment of a machine that once downloaded what the documents name, and is offline now."""
    if not DATA.is_dir():
        pytest.skip("../shared/data is not here")
    home = tmp_path_factory.mktemp("machine")
    cache = HfCache(home / "hf")
    add_distilbert(cache, home / "distilbert")
    add_imdb(cache)
    add_llama(cache, home / "llama")
    add_squad(cache)
    return cache.env(AUTOMODEL_CACHE=str(home / "tokens"), HOME=str(home))


def write_parts(folder: Path) -> list[Path]:
    """The text-classification document's three YAML blocks as files: complete, advanced, experimental."""
    paths = [folder / name for name in ("optimized_sentiment_classification.yaml", "advanced.yaml", "research.yaml")]
    for path, text in zip(paths, blocks("text-classification-example.md"), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


@pytest.fixture
def parts(tmp_path) -> list[Path]:
    return write_parts(tmp_path)


def plan_lines(output: str) -> dict[str, str]:
    """The printed plan: `name  value  (reason)`, one line for each decision."""
    found = re.findall(r"^([a-z_]+) {2,}(.+\))$", output, re.MULTILINE)
    assert found, output
    return dict(found)


def finetune(folder: Path, machine: dict[str, str], *arguments, check: bool = True):
    return tiny.automodel("finetune", "llm", *arguments, cwd=folder, check=check, **machine)


def refusal(arguments: list, monkeypatch, capsys) -> tuple[int, str]:
    """Exit code and message of a command that must not start; in this process, since nothing is loaded."""
    from automodel.cli.main import main

    monkeypatch.setattr(sys, "argv", ["automodel", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code, capsys.readouterr().err


@pytest.fixture(scope="module")
def sentiment(machine, tmp_path_factory):
    """The complete YAML, verbatim."""
    folder = tmp_path_factory.mktemp("sentiment")
    return folder, finetune(folder, machine, "-c", write_parts(folder)[0].name, *SHORT)


def test_the_tutorials_own_check_says_that_everything_is_ready(tmp_path):
    """Its reader stops where this prints False."""
    check = blocks("speedup-tutorial.md", "bash")[0]
    assert "HAS_LIGER_KERNEL" in check
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", check], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\nNeMo AutoModel ready: True\nLiger kernels available: True\n")


def test_the_complete_yaml_runs_as_printed(sentiment):
    _, result = sentiment
    plan = plan_lines(result.stdout)
    assert plan["task"] == "text-classification  (inferred from the model class)"
    assert plan["model"].startswith("distilbert-base-uncased  (distilbert")
    assert re.fullmatch(r"96 examples  \([\d,]+ tokens, .* cut at 512\)", plan["data"])
    assert plan["precision"].startswith("bf16  (model.torch_dtype asks for it; master weights")
    assert plan["batch"] == "8 × 1 = 8  (examples per device × gradient accumulation steps)"
    assert plan["steps"] == "6  (max_steps; an epoch is 12)"
    assert plan["validation"] == "every 25 steps  (and at the end)"
    assert plan["optimizer"].startswith("AdamW, lr 2.0e-5  (weight decay 0.01")
    assert plan["workers"].split()[0] in "1234"
    assert "no GPU to copy to" in plan["pin_memory"]
    assert "no checkpoint and no model is saved" in plan["checkpoints"]
    assert plan["sinks"].startswith("wandb")
    lines = result.stdout.splitlines()
    assert "[INFO] Launching job locally on 1 device" in lines
    assert "[INFO] Applied packed attention to model" in lines
    form = r"\[Step 2/6\] Loss: \d\.\d+ \| LR: \S+ \| Host Mem: \d+\.\dGB \| Speed: \d+\.?\d* steps/sec"
    assert any(re.fullmatch(form, line) for line in lines)
    assert any(re.match(r"\[Step 6/6\] Validation \| Loss: \S+ \| Accuracy: \d\.\d+", line) for line in lines)
    assert result.stderr == "", "a run that is right has nothing to complain about"


def test_the_complete_yaml_records_offline_and_saves_no_model(sentiment):
    folder, result = sentiment
    assert "wandb: recording offline: no login found" in result.stdout
    assert "No model was saved: checkpoint.enabled is false" in result.stdout
    run = folder / "checkpoints" / "run"
    (recorded,) = run.glob("wandb/offline-run-*/*.wandb")
    assert b"performance_comparison" in recorded.read_bytes()
    assert not (folder / "checkpoints" / "config.json").exists()
    assert not (run / "steps").exists()
    assert (run / "report.html").stat().st_size > 10_000
    assert json.loads((run / "summary.json").read_text())["validation"]["accuracy"] >= 0
    assert tiny.losses(folder / "checkpoints").keys() == {2, 4, 6}


def test_the_advanced_fragment_runs_layered(parts, machine, tmp_path):
    result = finetune(tmp_path, machine, "-c", parts[0], "-c", parts[1], *SHORT, "wandb.mode=disabled")
    plan = plan_lines(result.stdout)
    assert "flash_attention_2 was asked for; this is exact too" in plan["attention"]
    assert "FSDP2Manager has nothing to share out on one device" in plan["distributed"]
    assert "asked for, but on the CPU" in plan["compile"]
    assert "gradients clipped at norm 1" in plan["optimizer"]
    assert plan["liger"].startswith("not used")
    assert re.search(r"8 were asked for, but there are only \d+ cores|^8 ", plan["workers"])
    assert "4 batches ahead" in plan["workers"]
    assert "num_labels: 2" in (tmp_path / "checkpoints" / "run" / "config.yaml").read_text(), (
        "the base file still holds"
    )
    assert "[Step 6/6] Loss:" in result.stdout


@pytest.mark.slow
def test_the_experimental_fragment_trains_an_adapter(parts, machine, tmp_path):
    files = ("-c", parts[0], "-c", parts[2])
    valid = tiny.automodel("config", "validate", *files, cwd=tmp_path, **machine)
    assert "is a valid config" in valid.stdout
    assert "not yet" not in valid.stdout
    done = finetune(tmp_path, machine, *files)
    assert "rank 8, alpha 16 on" in done.stdout
    assert re.search(r"^use_triton +not needed", done.stdout, flags=re.M)
    assert re.search(r"\[Step (\d+)/\1\] Loss:", done.stdout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: re.sub(r"^(  )# (fp8_config:|  _target_:)", r"\1\2", text, flags=re.M),
            "model.fp8_config: FP8 needs a GPU with FP8 tensor cores",
        ),
        (
            lambda text: text + "distributed:\n  tp_size: 2\n",
            "distributed.tp_size is 2, but transformers has no tensor-parallel plan for distilbert",
        ),
    ],
    ids=["fp8_config uncommented", "tensor parallel"],
)
def test_what_this_machine_or_model_cannot_do_is_refused_by_name(parts, change, message, machine, tmp_path):
    parts[2].write_text(change(parts[2].read_text()))
    files = ("-c", parts[0], "-c", parts[2])
    done = finetune(tmp_path, machine, *files, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("error:") == 1
    assert tiny.automodel("config", "validate", *files, cwd=tmp_path, **machine).returncode == 0


@pytest.mark.slow
def test_the_experimental_fragment_over_a_quantised_base(parts, machine, tmp_path):
    parts[2].write_text(parts[2].read_text() + "quantization:\n  load_in_4bit: true\n  bnb_4bit_quant_type: nf4\n")
    done = finetune(tmp_path, machine, "-c", parts[0], "-c", parts[2], *SHORT)
    assert "the same numbers at full speed" in done.stdout
    assert "[Step 6/6] Loss:" in done.stdout


@pytest.fixture(scope="module")
def squad(machine, tmp_path_factory) -> tuple[Path, str]:
    """The example with the tutorial's fragment on it, run as the tutorial says: from its own folder."""
    folder = tmp_path_factory.mktemp("examples") / "llm"
    shutil.copytree(ROOT / "examples" / "llm", folder)
    (fragment,) = blocks("speedup-tutorial.md")
    (folder / "fragment.yaml").write_text(fragment)
    files = ("-c", "llama_3_2_1b_squad.yaml", "-c", "fragment.yaml")
    result = finetune(folder, machine, *files, *SHORT, "optimizer.lr=1e-3", "validation_dataset.num_samples_limit=8")
    return folder, result.stdout


def test_the_squad_example_takes_the_tutorials_fragment(squad):
    folder, output = squad
    plan = plan_lines(output)
    assert plan["model"].startswith("meta-llama/Llama-3.2-1B  (llama")
    assert plan["padding"].startswith("none, documents are packed")
    assert "FSDP2Manager" in plan["distributed"]
    assert "dataloader.shuffle is false" in plan["shuffle"]
    assert plan["schedule"].startswith("cosine  (1 warm-up step,")
    assert "[Step 6/6] Validation | Loss: " in output
    assert "Perplexity: " in output
    losses = list(tiny.losses(folder / "checkpoints").values())
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_the_squad_example_alone_is_a_complete_config(machine, tmp_path):
    result = finetune(tmp_path, machine, "-c", ROOT / "examples" / "llm" / "llama_3_2_1b_squad.yaml", "--dry-run")
    assert plan_lines(result.stdout)["steps"].startswith("1000  (max_steps")
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_the_tutorials_inference_snippet_loads_the_run_folder(squad, machine):
    """`benchmark_inference("./checkpoints", …)`, as printed: stock transformers, nothing of ours."""
    folder, _ = squad
    (snippet,) = [text for text in blocks("speedup-tutorial.md", "python") if "def benchmark_inference" in text]
    result = subprocess.run(
        [sys.executable, "-c", snippet], cwd=folder, env={**machine, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=200,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert re.search(r"Throughput: \d+\.\d inferences/sec", result.stdout)
    assert "automodel" not in snippet


def test_the_tutorials_import_check(machine):
    (shell,) = [text for text in blocks("speedup-tutorial.md", "bash") if "import nemo_automodel" in text]
    help_line, snippet = re.match(r".*?(automodel --help)\npython -c \"\n(.*)\"\n", shell, re.DOTALL).groups()
    result = subprocess.run([sys.executable, "-c", snippet], env=machine, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert re.search(r"NeMo AutoModel ready: (True|False)\nLiger kernels available: (True|False)", result.stdout)
    assert "finetune" in tiny.automodel(*help_line.split()[1:]).stdout
