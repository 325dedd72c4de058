"""The reference documents' scripts for HF Trainer, read from the documents, under `automodel run`.

Complete scripts run as printed; fragments run after the lines that they assume. Names of the hub are served from a
local cache with a tiny DistilBERT, a tiny BERT and real reviews.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import tiny_runs as tiny

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "reference"
pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason="../shared/reference is not here")

ASSUMED = """
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

words = AutoTokenizer.from_pretrained("bert-base-uncased")
rows = load_dataset("imdb", split="train[:16]")
rows = rows.map(lambda e: words(e["text"], truncation=True, padding="max_length", max_length=32), batched=True)
train_dataset = eval_dataset = dataset = rows
model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased")
"""


def python_blocks(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (REFERENCE / document).read_text(encoding="utf-8"), re.S | re.M)


@pytest.fixture
def machine(hf_cache, tmp_path, monkeypatch):
    """A machine that has downloaded what the scripts name."""
    made = runpy.run_path(str(Path(__file__).with_name("test_reference_documents.py")))
    made["add_distilbert"](hf_cache, tmp_path / "distilbert")
    made["add_imdb"](hf_cache)
    hf_cache.add_model("bert-base-uncased", tiny.make_model_folder(tmp_path / "bert", "bert"))
    hf_cache.activate(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(machine: Path, text: str) -> list[str]:
    from automodel.trainer.stand_in import run_script

    (machine / "script.py").write_text(text)
    return run_script(machine / "script.py", [])


def test_the_baseline_script_runs_as_printed(machine, capsys):
    (script,) = [
        text for text in python_blocks("text-classification-example.md") if "baseline_hf_training" in text[:40]
    ]
    said = run(machine, script)
    output = capsys.readouterr()
    assert said[0].startswith("packed steps without padding (fp32, 96 rows held without padding); 12 steps")
    assert "Baseline training time:" in output.out
    assert "evaluation_strategy is now eval_strategy" in output.err


@pytest.mark.slow
def test_the_comparison_script_runs_as_printed_and_reads_the_memory_that_was_meant(machine, capsys, monkeypatch):
    """Its parts are the document's own, with fewer steps; a GPU of 139 GiB is pretended, since it divides by memory."""
    from automodel.trainer import children

    document = "text-classification-example.md"
    (baseline,) = [text for text in python_blocks(document) if "baseline_hf_training" in text[:40]]
    (script,) = [text for text in python_blocks(document) if "performance_comparison.py" in text[:40]]
    config = re.findall(r"^```yaml\n(.*?)^```", (REFERENCE / document).read_text(encoding="utf-8"), re.S | re.M)[0]
    (machine / "baseline_hf_training.py").write_text(baseline)
    shorter = config.replace("max_steps: 125", "max_steps: 6").replace("num_workers: 4", "num_workers: 0")
    shorter = shorter.replace("num_workers: 2", "num_workers: 0").replace("persistent_workers: true", "")
    (machine / "optimized_sentiment_classification.yaml").write_text(shorter)

    peaks = iter([3 * 2**30, 2 * 2**30])

    class Pretended:
        def start(self):
            pass

        def peak(self):
            return next(peaks)

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(children, "Watched", Pretended)
    for name, value in (("is_available", True), ("device_count", 1), ("get_device_name", "H200")):
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *args: (100 * 2**30, 139 * 2**30))
    run(machine, script)
    said = capsys.readouterr()
    assert "Reduction:    33.3% less memory" in said.out
    assert "given is the most that the last process it started needed" in said.err
    found = json.loads((machine / "performance_comparison_results.json").read_text())
    assert found["results"]["baseline"]["max_gpu_memory_gb"] == 3.0
    assert found["results"]["nemo_automodel"]["max_gpu_memory_gb"] == 2.0
    assert found["results"]["improvements"]["speedup_factor"] > 0
    assert found["system_info"]["gpu_name"] == "H200"


def test_other_processes_of_a_script_are_left_alone():
    from automodel.trainer.children import Children, translated

    for command in ("python a.py", ["ls"], ["python", "-c", "1"], [sys.executable, "a.py"]):
        assert translated(command) is command
    assert translated(["python", "a.py", "-x"])[1:] == ["-m", "automodel.trainer.old_script", "a.py", "-x"]
    children = Children()
    done = children.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True)
    assert done.stdout == "1\n"
    assert children.peak is None
    assert children.memory_allocated() == 0


def test_accumulation_and_apex_examples_and_the_migration_snippet(machine, capsys):
    examples = [text for text in python_blocks("gpu-usage-in-classification.md") if "Trainer(" in text]
    assert len(examples) == 2
    head = "\n".join(line for line in examples[0].splitlines() if line.startswith(("import", "from")))
    lines = run(machine, f"{ASSUMED}\n{examples[0]}")
    assert lines[0].startswith("packed steps")
    lines = run(machine, f"{ASSUMED}\n{head}\n{examples[1].replace('fp16=True', 'bf16=True, use_cpu=True')}")
    assert lines[0].startswith("packed steps")  # fp16 needs a GPU; the rest is as printed
    assert "apex.amp.initialize changes nothing" in capsys.readouterr().err
    (snippet,) = [text for text in python_blocks("speedup-tutorial.md") if "Your current HF Trainer workflow" in text]
    assert run(machine, f"{ASSUMED}\n{snippet}")[0].startswith("packed steps")
