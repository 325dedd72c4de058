"""`automodel benchmark`, for real: two processes on the same weights and tokens, and losses that agree."""

import json
import re
from pathlib import Path

import pytest

import tiny_runs as tiny

AT_ONCE = "dataloader: {batch_size: 4}\nstep_scheduler: {max_steps: 20, val_every_steps: 8}\n"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Twenty steps, nearly two shuffled epochs, against the stock Trainer, with a threshold that is out of reach."""
    folder = tmp_path_factory.mktemp("benchmark")
    path = tiny.write_run(folder, text=AT_ONCE)
    result = tiny.automodel(
        *("benchmark", "-c", path, "--against", "hf-trainer", "--speedup-threshold", "1000", "--output", folder / "b"),
        check=False,
        AUTOMODEL_CACHE=str(folder / "tokens"),
    )
    return folder / "b", result


def test_below_the_threshold_is_exit_code_4(compared):
    _, result = compared
    assert result.returncode == 4, result.stdout + result.stderr
    assert "Below the threshold of 1000x: exit code 4" in result.stdout


def test_the_table_is_printed(compared):
    _, result = compared
    for row in ("Training Time", "Host Memory (peak)", "Steps/Second", "Samples/Second", "Seconds/Epoch"):
        assert row in result.stdout
    assert re.search(r"Improvement", result.stdout)
    assert "fp32, padded to 128" in result.stdout
    assert "fp32, packed" in result.stdout


def test_losses_agree_with_trainer_step_by_step(compared):
    folder, _ = compared
    document = json.loads((folder / "performance_comparison_results.json").read_text())
    assert document["agreement"][0]["compared_steps"] == 20
    assert document["agreement"][0]["max_relative_difference"] < 1e-4
    sides = document["sides"]
    assert len(sides["automodel"]["losses"]) == len(sides["hf-trainer"]["losses"]) == 20
    assert sides["automodel"]["tokens"] == sides["hf-trainer"]["tokens"]
    assert sides["automodel"]["samples"] == sides["hf-trainer"]["samples"] == 80
    theirs, ours = (sides[name]["validation"] for name in ("hf-trainer", "automodel"))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert ours["accuracy"] == theirs["accuracy"]


def test_results_and_measurements(compared):
    folder, _ = compared
    document = json.loads((folder / "performance_comparison_results.json").read_text())
    assert set(document["results"]) == {"baseline", "nemo_automodel", "improvements"}
    for side in document["sides"].values():
        assert side["status"] == "completed"
        assert 0 < side["imports_s"] < side["first_step_s"] < side["wall_s"]
        assert side["training_time"] >= side["train_s"] > 0
        assert side["ms_p20"] <= side["ms_per_step"] <= side["ms_p80"]
        assert 0.1 < side["peak_memory_gib"] < 8
        assert len(side["step_ms"]) == 20


def test_report_and_logs_are_there_and_weights_are_not(compared):
    folder, _ = compared
    page = (folder / "report.html").read_text()
    assert "automodel against HF Trainer" in page
    assert sorted(p.name for p in (folder / "logs").iterdir()) == ["automodel-1.log", "hf-trainer-1.log"]
    assert not list(folder.rglob("*.safetensors"))


@pytest.mark.slow
def test_causal_lm_with_accumulation_agrees_with_tuned_trainer(tmp_path, monkeypatch):
    """Labels on part of the tokens, micro-batches of unequal label counts, another schedule, decay and clipping; three
    shuffled epochs."""
    from rich.console import Console

    from automodel.benchmark.verb import Wishes, benchmark
    from automodel.plan.check import load_run_config

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "tokens"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tiny.make_model_folder(tmp_path / "model", "llama")
    rows = []
    for index in range(24):
        ids = [5 + (index * 7 + k * 3) % 30 for k in range(5 + index % 11)]
        rows.append({"input_ids": ids, "labels": [-100] * (index % 4) + ids[index % 4 :]})
    tiny.write_jsonl(tmp_path / "train.jsonl", rows)
    (tmp_path / "run.yaml").write_text(
        f"model: {tmp_path / 'model'}\n"
        "task: causal-lm\n"
        f"dataset: {{path: {tmp_path / 'train.jsonl'}}}\n"
        "dataloader: {batch_size: 2}\n"
        "step_scheduler: {grad_acc_steps: 3, num_epochs: 3}\n"
        "optimizer: {lr: 1e-3, weight_decay: 0.1}\n"
        "lr_scheduler: {name: cosine, warmup_steps: 3, min_lr: 1e-4}\n"
        "training_optimizations: {precision: fp32, gradient_clipping: 0.5}\n"
        f"checkpoint: {{checkpoint_dir: {tmp_path / 'out'}, enabled: false}}\n"
    )
    (tmp_path / "b" / "work").mkdir(parents=True)
    (tmp_path / "b" / "work" / "thesis.txt").write_text("the user's own")
    wishes = Wishes(against=("hf-trainer-ungrouped",), output=tmp_path / "b", threshold=0.0)
    with (tmp_path / "log").open("w") as log:
        outcome = benchmark(load_run_config([tmp_path / "run.yaml"]), wishes, Console(file=log, width=120))
    assert outcome.exit_code == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "b" / "work" / "thesis.txt").exists()
    assert not list((tmp_path / "b").glob(".*")), "what the comparison made for itself is gone"
    found = outcome.document["agreement"][0]
    assert found["compared_steps"] == 12
    assert found["max_relative_difference"] < 1e-4
    sides = outcome.document["sides"]
    assert sides["automodel"]["tokens"] == sides["hf-trainer-ungrouped"]["tokens"]
    tried = sides["hf-trainer-ungrouped"]["tried"]
    assert {one["precision"] for one in tried} == {"fp32"}, "the config asks for it"
    assert sides["hf-trainer-ungrouped"]["attention"] == tried[0]["attention"]
    assert any("training_optimizations.precision asks for fp32" in note for note in outcome.document["notes"])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("loss_fn: {class_weights: [1.0, 2.0]}", "loss_fn.class_weights: Trainer has no such setting"),
        ("optimizer: {_target_: torch.optim.Adagrad, lr: 1e-3}", "optimizer: torch.optim.Adagrad is not compared"),
        ("optimizer: {_target_: torch.optim.AdamW, amsgrad: true}", "optimizer.amsgrad: Trainer has no such setting"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(tmp_path, section, message):
    from automodel.benchmark.verb import Wishes, benchmark
    from automodel.config.errors import NotYetError
    from automodel.plan.check import load_run_config

    path = tmp_path / "run.yaml"
    path.write_text(f"model: nowhere\ntask: text-classification\ndataset: nothing.csv\n{section}\n")
    with pytest.raises(NotYetError, match=message):
        benchmark(load_run_config([path]), Wishes(output=tmp_path / "b"))


@pytest.mark.parametrize(
    ("script", "given", "expected"),
    [
        (
            "performance_comparison.py",
            ["-h"],
            "benchmark -c optimized_sentiment_classification.yaml --against hf-trainer,hf-trainer-tuned --output . -h",
        ),
        (
            "performance_comparison.py",
            ["-c", "a.yaml", "--against", "hf-trainer"],
            "benchmark --output . -c a.yaml --against hf-trainer",
        ),
        (
            "performance_comparison.py",
            ["--config=a.yaml", "--output=b"],
            "benchmark --against hf-trainer,hf-trainer-tuned --config=a.yaml --output=b",
        ),
        (
            "validate_performance.py",
            ["--speedup-threshold", "3", "--repeat", "3"],
            "benchmark -c optimized_sentiment_classification.yaml --speedup-threshold 3 --repeat 3",
        ),
        (
            "validate_performance.py",
            ["-c", "a.yaml", "--config", "b.yaml"],
            "benchmark -c a.yaml -c b.yaml --speedup-threshold 2.0",
        ),
    ],
)
def test_the_examples_are_thin_callers_of_the_verb(script, given, expected, monkeypatch):
    """Their exit code is the verb's, so a CI job fails below the threshold."""
    import runpy
    import subprocess
    import sys

    calls = []

    def call(command):
        calls.append(command)
        return subprocess.CompletedProcess(command, 4)

    path = Path(__file__).parents[2] / "examples" / "benchmark" / script
    monkeypatch.setattr(sys, "argv", [str(path), *given])
    monkeypatch.setattr(subprocess, "run", call)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 4
    assert " ".join(calls[0][3:]) == expected


def test_the_examples_config_is_valid():
    from automodel.plan.check import load_run_config

    folder = Path(__file__).parents[2] / "examples" / "benchmark"
    cfg = load_run_config([folder / "optimized_sentiment_classification.yaml"])
    assert cfg.benchmark.against == ("hf-trainer", "hf-trainer-tuned")


@pytest.mark.slow
def test_an_adapter_against_trainer_with_peft(tmp_path):
    pytest.importorskip("peft")
    path = tiny.write_run(tmp_path, text=AT_ONCE.replace("20", "6") + "peft: {dim: 4}\n")
    tiny.automodel(
        *("benchmark", "-c", path, "--against", "hf-trainer", "--output", tmp_path / "b"),
        AUTOMODEL_CACHE=str(tmp_path / "tokens"),
    )
    document = json.loads((tmp_path / "b" / "performance_comparison_results.json").read_text())
    assert document["agreement"][0]["compared_steps"] == 6
    assert document["agreement"][0]["max_relative_difference"] < 1e-4
