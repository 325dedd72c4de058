"""Whole fine-tunes of language models, in this process, fp32: thirty losses equal HF Trainer's for every family of the
issue (packed or padded), however a step of eight is split the losses are the same, and the folder that a run leaves
loads in stock transformers and computes what the run computed."""

from __future__ import annotations

import json

import pytest
import torch

import tiny_models
import tiny_runs as tiny
from hf_trainer import trainer_losses
from tiers import quick

STEPS = 30
PACKED = (
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "smollm3", "gpt2", "gpt_neox",
)  # fmt: skip
PADDED = ("falcon",)


@pytest.fixture
def language_model(tmp_path, monkeypatch):
    """A folder with a model of the family and rows that are tokenised already; answers of very different lengths, so
    that a mean of means would differ from a mean."""
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))

    def made(kind: str, count: int = 96) -> list[dict]:
        tokenizer = tiny.make_tokenizer(decoder=True)
        _, model = tiny_models.tiny(kind, "causal-lm", pad_token_id=0)
        model.save_pretrained(tmp_path / "start")
        tokenizer.save_pretrained(tmp_path / "start")
        rows = []
        for number, review in enumerate(tiny.reviews(count)):
            ids = tokenizer(review["text"])["input_ids"]
            cut = (len(ids) // 2, 1, len(ids) - 1)[number % 3]
            rows.append({"input_ids": ids, "labels": [-100] * cut + ids[cut:]})
        tiny.write_jsonl(tmp_path / "train.jsonl", rows)
        return rows

    return made


def run(folder, out: str = "out", steps: int = STEPS, batch: int = 8, accumulation: int = 1, *settings: str):
    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    (folder / "run.yaml").write_text(
        f"task: causal-lm\nmodel: {folder}/start\ndataset: {{path: {folder}/train.jsonl}}\n"
        f"dataloader: {{shuffle: false, batch_size: {batch}}}\n"
        "optimizer: {lr: 1e-3, weight_decay: 0.01}\nlr_scheduler: {name: linear}\n"
        f"step_scheduler: {{max_steps: {steps}, log_every_steps: 1, grad_acc_steps: {accumulation}}}\n"
        f"checkpoint: {{checkpoint_dir: {folder}/{out}}}\n" + tiny.FP32
    )
    finetune(load_run_config([folder / "run.yaml"], settings))
    plan = json.loads((folder / out / "run" / "plan.json").read_text())
    return list(tiny.losses(folder / out).values()), plan


@pytest.mark.parametrize("kind", quick([*PACKED, *PADDED], "llama", "gemma2", "gpt2", "falcon"))
def test_thirty_losses_equal_hf_trainer(tmp_path, language_model, kind):
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in language_model(kind)]
    theirs = trainer_losses(tmp_path, tmp_path / "start", rows, accumulation=2, batch=4, task="causal-lm", steps=STEPS)
    ours, plan = run(tmp_path, "out", STEPS, 4, 2)
    assert plan["path"] == ("padded" if kind in PADDED else "packed")
    assert len(ours) == STEPS
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)
    assert ours[-1] < ours[0] * 0.97, "nothing was learned, so equality would prove little"


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("llama", ()), ("llama", ("loss_fn.z_loss=0.01", "loss_fn.label_smoothing=0.1")), ("falcon", ())],
    ids=["packed", "z-loss and smoothing", "padded"],
)
def test_a_step_of_eight_is_the_same_however_it_is_split(tmp_path, language_model, kind, settings):
    language_model(kind)
    curves = {}
    for batch, accumulation in ((8, 1), (1, 8), (2, 4)):
        curves[batch], plan = run(tmp_path, f"out-{batch}", 12, batch, accumulation, *settings)
        assert plan["global_batch_size"] == 8
    assert curves[1] == pytest.approx(curves[8], rel=1e-5)
    assert curves[2] == pytest.approx(curves[8], rel=1e-5)


def test_packed_and_padded_runs_have_the_same_losses(tmp_path, language_model):
    language_model("llama")
    packed, _ = run(tmp_path, "packed", 12)
    padded, plan = run(
        tmp_path, "padded", 12, 8, 1, "packed_sequence.enabled=false", "dataloader.group_by_length=false"
    )
    assert plan["path"] == "padded"
    assert padded == pytest.approx(packed, rel=1e-5)


@pytest.mark.parametrize("kind", quick([*PACKED, *PADDED], "llama", "gpt_neox", "falcon"))
def test_the_folder_loads_in_stock_transformers_with_identical_logits(tmp_path, language_model, monkeypatch, kind):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from automodel.engine import run as engine_run
    from automodel.models.forward import stock_attention

    language_model(kind, 24)
    ids, seen = torch.arange(5, 29)[None], []
    real = engine_run.save_hf_folder

    def watched(model, *rest, **options):
        """The logits of the trained model at the moment at which it is exported."""
        training = model.training
        with torch.no_grad(), stock_attention(model):
            seen.append(model.eval()(ids).logits)
        model.train(training)
        return real(model, *rest, **options)

    monkeypatch.setattr(engine_run, "save_hf_folder", watched)
    run(tmp_path, "out", 3)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "start").eval()
    with torch.no_grad():
        assert torch.equal(stock(ids).logits, seen[-1])
        assert not torch.equal(start(ids).logits, seen[-1])
    assert {p.dtype for p in stock.parameters()} == {torch.float32}
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "[SEP]"
