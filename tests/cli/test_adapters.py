"""Adapter runs from the command line: train, resume, predict, evaluate, generate, continue, export."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_runs as tiny

PEFT = "peft: {lora_r: 4, lora_alpha: 8, dropout: 0.1}\nstep_scheduler: {max_steps: 12, log_every_steps: 1}\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished classification run."""
    folder = tmp_path_factory.mktemp("adapter")
    tiny.write_run(folder, text=PEFT)
    tiny.automodel("finetune", "llm", "-c", folder / "run.yaml", AUTOMODEL_CACHE=str(folder / "cache"))
    return folder


def finetune(folder, *settings, check=True):
    return tiny.automodel(
        "finetune", "llm", "-c", folder / "run.yaml", *settings, check=check, AUTOMODEL_CACHE=str(folder / "cache")
    )


def test_a_run_ends_with_a_peft_folder_and_small_checkpoints(run):
    out = run / "out"
    assert not (out / "model.safetensors").exists()
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"], config["r"], config["lora_alpha"]) == ("LORA", "SEQ_CLS", 4, 8)
    assert config["base_model_name_or_path"] == str(run / "model")
    saved = load_file(out / "adapter_model.safetensors")
    assert any(float(t.abs().max()) > 0 for name, t in saved.items() if "lora_B" in name), "nothing was learned"
    assert "base_model.model.classifier.weight" in saved
    checkpoint = load_file(next((out / "run" / "steps").glob("step-*")) / "model.safetensors")
    assert len(checkpoint) == len(saved), "the frozen base is not in checkpoints"
    plan = {d["name"]: d for d in json.loads((out / "run" / "plan.json").read_text())["decisions"]}
    assert plan["adapter"]["value"].startswith("LoRA, ")
    assert "in full: bert.pooler, classifier" in plan["adapter"]["reason"]


def test_predict_and_evaluate_load_base_and_adapter(run):
    answer = json.loads(tiny.automodel("predict", run / "out", "--json", "good film").stdout)
    assert answer["prediction"] in ("LABEL_0", "LABEL_1")
    done = tiny.automodel("evaluate", run / "out", "--json", AUTOMODEL_CACHE=str(run / "cache"))
    summary = json.loads((run / "out" / "run" / "summary.json").read_text())
    assert json.loads(done.stdout)["metrics"]["loss"] == pytest.approx(summary["validation"]["loss"], rel=1e-4)


def test_a_merged_export_answers_alike(run):
    done = tiny.automodel("export", run / "out", "--merge", "--out", run / "merged", AUTOMODEL_CACHE=str(run / "cache"))
    assert "Merged 12 layers" in done.stdout
    assert not (run / "merged" / "adapter_config.json").exists()
    answers = [
        json.loads(tiny.automodel("predict", run / place, "--json", "a dull plot").stdout)
        for place in ("out", "merged")
    ]
    assert answers[0]["scores"] == pytest.approx(answers[1]["scores"], abs=1e-5)
    half = tiny.automodel("export", run / "out", "--merge", "--dtype", "bf16", "--out", run / "half", "--text", "good")
    assert "(bf16); on 1 rows" in half.stdout
    assert load_file(run / "half" / "model.safetensors")["classifier.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("out", "--out", "new"), "say --merge"),
        (("model", "--merge", "--out", "new"), "has no|holds"),
        (("out", "--merge", "--out", "model"), "exists and is not empty"),
    ],
)
def test_exports_that_cannot_be(run, arguments, message):
    import re

    done = tiny.automodel("export", *arguments, cwd=run, check=False)
    assert done.returncode == 2
    assert re.search(message, done.stderr)
    assert not (run / "new").exists()


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_same_numbers(run, tmp_path):
    """Six steps, a stop, six more: the adapter of twelve steps in one go, dropout included."""
    tiny.write_run(tmp_path, text=PEFT + "lr_scheduler: {name: constant}\n")
    finetune(tmp_path, "checkpoint.keep_best=false")
    whole = load_file(tmp_path / "out" / "adapter_model.safetensors")
    parts = ["checkpoint.keep_best=false", f"checkpoint.checkpoint_dir={tmp_path / 'parts'}"]
    finetune(tmp_path, *parts, "step_scheduler.max_steps=6")
    finetune(tmp_path, *parts, "--resume")
    resumed = load_file(tmp_path / "parts" / "adapter_model.safetensors")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    changed = finetune(tmp_path, *parts, "--resume", "peft.dim=8", "step_scheduler.max_steps=20", check=False)
    assert changed.returncode == 2
    assert "peft" in changed.stderr
    # The base, of which a checkpoint holds nothing, as another run would leave it in its folder.
    weights = tmp_path / "model" / "model.safetensors"
    save_file({n: t + 0.01 for n, t in load_file(weights).items()}, weights, metadata={"format": "pt"})
    replaced = finetune(tmp_path, *parts, "--resume", "step_scheduler.max_steps=20", check=False)
    assert (replaced.returncode, "were replaced since" in replaced.stderr) == (2, True)


@pytest.mark.slow
def test_a_run_starts_from_an_adapter(run, tmp_path):
    (tmp_path / "run.yaml").write_text(
        (run / "run.yaml").read_text().replace(PEFT, "").replace(str(run / "out"), str(tmp_path / "out"))
        + f"peft: {{pretrained_adapter: {run / 'out'}}}\nstep_scheduler: {{max_steps: 1}}\n"
    )
    finetune(tmp_path, "optimizer.lr=1e-12")
    before, after = (load_file(f / "out" / "adapter_model.safetensors") for f in (run, tmp_path))
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(before[name], after[name], rtol=0, atol=1e-8)
    for setting, message in (
        ("peft.dim=16", "peft.dim: is 16, but the adapter"),
        (f"model={run / 'out'}", "an adapter"),
    ):
        refused = finetune(tmp_path, setting, "--overwrite", check=False)
        assert refused.returncode == 2
        assert message in refused.stderr


@pytest.mark.slow
def test_a_language_model_generates_from_its_adapter(tmp_path):
    tiny.write_run(tmp_path, kind="llama", text=PEFT + "task: causal-lm\n")
    text = (tmp_path / "run.yaml").read_text().replace("task: text-classification\n", "")
    rows = [{"question": "what is", "context": r["text"], "answer": r["text"][:9]} for r in tiny.reviews(24)]
    tiny.write_jsonl(tmp_path / "train.jsonl", rows)
    tiny.write_jsonl(tmp_path / "test.jsonl", rows[:4])
    (tmp_path / "run.yaml").write_text(text)
    finetune(tmp_path)
    asked = tiny.write_jsonl(tmp_path / "asked.jsonl", [{"question": "what is", "context": c} for c in ("good", "bad")])
    tiny.automodel("export", tmp_path / "out", "--merge", "--out", tmp_path / "merged", "--text", "good film")
    answers = [
        tiny.automodel("generate", tmp_path / place, "--input", asked, "--max-new-tokens", "4", "--json").stdout
        for place in ("out", "merged")
    ]
    assert "prediction" in json.loads(answers[0].splitlines()[0])
    assert answers[0] == answers[1], "the merged model is asked otherwise"


def test_a_target_that_does_not_exist_is_refused_by_name(run):
    wrong = finetune(run, "peft.target_modules=[q_porj]", "--overwrite", check=False)
    assert wrong.returncode == 2
    assert "no module of the model is called 'q_porj'. There are: query ×2" in wrong.stderr
