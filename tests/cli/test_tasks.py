"""Every task from a YAML file to a saved model that stock transformers loads: metrics, plan, label names, falling loss.

The runs are in this process (a fresh one costs seconds of imports and changes nothing); the reference documents go
through the real command elsewhere. Models are tiny and random, so each task is a rule that one can learn from words.
"""

from __future__ import annotations

import io
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tiny_runs as tiny

EPOCHS = """
step_scheduler: {num_epochs: 12, log_every_steps: 8, val_every_steps: 48}
optimizer: {lr: 5e-3}
lr_scheduler: {warmup_ratio: 0.1}
training_optimizations: {precision: fp32}
"""


@dataclass
class Ran:
    """What a run left behind."""

    folder: Path
    output: str
    plan: dict[str, str]
    """Decisions by name, value and reason together."""
    summary: dict[str, Any]
    losses: list[float]

    def model(self, task_class: str) -> Any:
        import transformers

        return getattr(transformers, task_class).from_pretrained(self.folder)


@pytest.fixture
def finetune(tmp_path, monkeypatch):
    """Writes a YAML file and runs it."""
    from rich.console import Console

    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "tokens"))
    monkeypatch.chdir(tmp_path)

    def start(text: str, *overrides: str) -> Ran:
        (tmp_path / "run.yaml").write_text(text)
        said = io.StringIO()
        cfg = load_run_config([tmp_path / "run.yaml"], list(overrides))
        done = finetune(cfg, console=Console(file=said, width=200))
        assert done.exit_code == 0
        plan = json.loads((done.folder / "run" / "plan.json").read_text())
        lines = {d["name"]: f"{d['value']} ({d['reason']})" for d in plan["decisions"]}
        return Ran(done.folder, said.getvalue(), lines, done.summary, list(tiny.losses(done.folder).values()))

    return start


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """One folder for each kind of model, made once."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("bert", "distilbert", "llama", "t5", "bart"):
        tiny.make_model_folder(root / kind, kind)
    return root


def jsonl(name: str, rows: list[dict]) -> str:
    tiny.write_jsonl(Path(name), rows)
    return name


def sentences(count: int, seed: int = 0) -> list[tuple[str, int]]:
    return [(row["text"], row["label"]) for row in tiny.reviews(count, seed, longest=12)]


def test_three_lines_are_a_config(finetune, models):
    """No epochs, no batch, no split: `model`, `dataset`, `task`."""
    jsonl("reviews.jsonl", tiny.reviews(40, longest=10))
    run = finetune(f"model: {models / 'bert'}\ndataset: reviews.jsonl\ntask: text-classification\n")
    assert run.folder == Path("checkpoints")
    assert run.plan["steps"] == "15 (3 epochs of 5)"
    assert run.plan["validation"] == "none (no validation_dataset)"
    assert run.summary["validation"] is None
    assert run.model("AutoModelForSequenceClassification").config.num_labels == 2


def test_string_labels_keep_their_names(finetune, models):
    def named(count, seed):
        return [{"review": text, "sentiment": ("sour", "sweet")[label]} for text, label in sentences(count, seed)]

    jsonl("train.jsonl", named(128, 0)), jsonl("test.jsonl", named(24, 1))
    run = finetune(
        f"model: {models / 'distilbert'}\ntask: text-classification\ndataset: train.jsonl\n"
        f"validation_dataset: test.jsonl\n{EPOCHS}"
    )
    assert run.losses[-1] < run.losses[0] * 0.5
    assert run.summary["validation"]["accuracy"] > 0.9
    assert run.summary["label_names"] == ["sour", "sweet"]
    model = run.model("AutoModelForSequenceClassification")
    assert model.config.id2label == {0: "sour", 1: "sweet"}
    assert model.config.problem_type == "single_label_classification"
    from transformers import pipeline

    classify = pipeline("text-classification", model=str(run.folder))
    assert classify("superb great happy")[0]["label"] == "sweet"
    assert run.plan["padding"].startswith("none, documents are packed (")


def test_text_pairs_have_segments(finetune, models):
    def pairs(count, seed):
        said = sentences(count, seed)
        return [{"premise": "the film was quite", "hypothesis": text, "label": label} for text, label in said]

    jsonl("train.jsonl", pairs(128, 0)), jsonl("test.jsonl", pairs(24, 1))
    run = finetune(
        f"model: {models / 'bert'}\ntask: text-classification\ndataset: train.jsonl\n"
        f"validation_dataset: test.jsonl\n{EPOCHS}"
    )
    assert run.losses[-1] < run.losses[0] * 0.5
    assert run.summary["validation"]["f1"] > 0.9
    # The trained model, asked by stock transformers with segments, agrees with the run's own evaluation.
    import torch
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(run.folder), run.model("AutoModelForSequenceClassification").eval()
    rows = pairs(24, 1)
    batch = tokenizer(
        [r["premise"] for r in rows], [r["hypothesis"] for r in rows], padding=True, return_tensors="pt",
        return_token_type_ids=True,
    )  # fmt: skip
    with torch.no_grad():
        right = (model(**batch).logits.argmax(-1) == torch.tensor([r["label"] for r in rows])).float().mean()
    assert right == pytest.approx(run.summary["validation"]["accuracy"])


def test_multi_label(finetune, models):
    def rows(count, seed):
        chance = random.Random(seed)
        made = []
        for _ in range(count):
            about = [name for name in ("music", "plot", "actor") if chance.random() < 0.5]
            words = about + [chance.choice(tiny.GOOD) for _ in range(3)]
            chance.shuffle(words)
            made.append({"text": " ".join(words), "labels": about})
        return made

    jsonl("train.jsonl", rows(256, 0)), jsonl("test.jsonl", rows(24, 1))
    run = finetune(
        f"model: {models / 'bert'}\ntask: text-classification\ndataset: train.jsonl\n"
        f"validation_dataset: test.jsonl\n{EPOCHS}",
        "optimizer.lr=2e-3",
    )
    assert run.losses[-1] < run.losses[0] * 0.6
    assert run.summary["problem_type"] == "multi_label_classification"
    assert run.summary["validation"]["f1_micro"] > 0.85
    config = run.model("AutoModelForSequenceClassification").config
    assert config.problem_type == "multi_label_classification"
    assert sorted(config.id2label.values()) == ["actor", "music", "plot"]


def test_regression(finetune, models):
    def rows(count, seed):
        chance = random.Random(seed)
        counts = [chance.randint(0, 6) for _ in range(count)]
        return [{"sentence": " ".join(["good"] * n + ["bad"] * (6 - n)), "score": n / 6} for n in counts]

    jsonl("train.jsonl", rows(128, 0)), jsonl("test.jsonl", rows(24, 1))
    run = finetune(
        f"model: {models / 'bert'}\ntask: text-classification\ndataset: train.jsonl\n"
        f"validation_dataset: test.jsonl\n{EPOCHS}"
    )
    assert run.losses[-1] < run.losses[0] * 0.5
    assert run.summary["problem_type"] == "regression"
    assert run.summary["validation"]["pearson"] > 0.9
    assert run.summary["validation"]["mse"] == pytest.approx(run.summary["validation"]["loss"], rel=1e-4)
    config = run.model("AutoModelForSequenceClassification").config
    assert (config.num_labels, config.problem_type) == (1, "regression")


def test_token_classification(finetune, models):
    def rows(count, seed):
        made = []
        for text, _ in sentences(count, seed):
            words = text.split()
            tags = ["B-GOOD" if w in tiny.GOOD else "B-BAD" if w in tiny.BAD else "O" for w in words]
            made.append({"tokens": words, "ner_tags": tags})
        return made

    jsonl("train.jsonl", rows(128, 0)), jsonl("test.jsonl", rows(24, 1))
    run = finetune(
        f"model: {models / 'bert'}\ntask: token-classification\ndataset: train.jsonl\n"
        f"validation_dataset: test.jsonl\n{EPOCHS}"
    )
    assert run.losses[-1] < run.losses[0] * 0.4
    assert run.summary["validation"]["entity_f1"] > 0.9
    model = run.model("AutoModelForTokenClassification")
    assert set(model.config.id2label.values()) == {"B-GOOD", "B-BAD", "O"}
    from transformers import pipeline

    found = pipeline("token-classification", model=str(run.folder))("the superb film")
    assert "B-GOOD" in {part["entity"] for part in found}


def noise(chance: random.Random, count: int = 5) -> str:
    """Words that nobody can predict; whoever trains on them keeps a high loss."""
    return " ".join(chance.choice(tiny.GOOD + tiny.BAD + tiny.NEUTRAL) for _ in range(count))


def test_instructions_train_the_answer_only(finetune, models):
    chance = random.Random(0)
    jsonl("train.jsonl", [{"instruction": noise(chance), "output": "the answer is good ."} for _ in range(128)])
    jsonl("test.jsonl", [{"instruction": noise(chance), "output": "the answer is good ."} for _ in range(16)])
    text = f"model: {models / 'llama'}\nvalidation_dataset: test.jsonl\n{EPOCHS}dataset: "
    run = finetune(text + "train.jsonl\n")
    assert run.plan["task"].startswith("causal-lm (")
    assert run.plan["padding"].startswith("none, documents are packed")
    assert run.losses[-1] < 0.3 < 2.0 < run.losses[0]
    assert run.summary["validation"]["perplexity"] < 1.4
    whole = finetune(text + "{path: train.jsonl, answer_only_loss: false}\n", "checkpoint.checkpoint_dir=whole")
    assert whole.losses[-1] > 0.8, "prompts are noise: their tokens must cost"


def test_chats_train_the_assistant_only(finetune, models):
    def chats(count, seed):
        chance = random.Random(seed)
        turns = [("user", "assistant")[i % 2] for i in range(4)]
        said = {"assistant": "the answer is good ."}
        return [
            {"messages": [{"role": r, "content": said.get(r) or noise(chance)} for r in turns]} for _ in range(count)
        ]

    jsonl("train.jsonl", chats(128, 0)), jsonl("test.jsonl", chats(16, 1))
    run = finetune(f"model: {models / 'llama'}\ndataset: train.jsonl\nvalidation_dataset: test.jsonl\n{EPOCHS}")
    assert run.losses[-1] < 0.3 < 2.0 < run.losses[0]
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(run.folder), run.model("AutoModelForCausalLM")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "what is the plot ?"}], add_generation_prompt=True, return_tensors="pt",
        return_dict=True,
    )  # fmt: skip
    answer = model.generate(**asked, max_new_tokens=8, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "the answer is good ."


def test_plain_text(finetune, models):
    jsonl("train.jsonl", [{"text": "the film is good and the plot is great ."} for _ in range(64)])
    run = finetune(
        f"model: {models / 'llama'}\ndataset: train.jsonl\ntask: causal-lm\n{EPOCHS}",
        "step_scheduler.val_every_steps=null",
    )
    assert run.losses[-1] < run.losses[0] * 0.3
    assert "Perplexity" not in run.output, "there is nothing to validate on"
    assert run.model("AutoModelForCausalLM").config.model_type == "llama"


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_sequences_to_sequences(finetune, models, kind):
    def rows(count, seed):
        return [{"document": text, "summary": ("bad", "good")[label]} for text, label in sentences(count, seed)]

    jsonl("train.jsonl", rows(128, 0)), jsonl("test.jsonl", rows(16, 1))
    run = finetune(f"model: {models / kind}\ndataset: train.jsonl\nvalidation_dataset: test.jsonl\n{EPOCHS}")
    assert run.plan["task"].startswith("seq2seq")
    assert run.plan["padding"].startswith("to the longest of a batch (")
    assert "batches of similar lengths" in run.plan["padding"]
    assert "Applied length-grouped padding to model" in run.output
    assert run.losses[-1] < run.losses[0] * 0.7
    assert run.summary["validation"]["perplexity"] < 20
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(run.folder), run.model("AutoModelForSeq2SeqLM")
    asked = tokenizer("superb happy great film", return_tensors="pt", return_token_type_ids=False)
    assert tokenizer.decode(model.generate(**asked, max_new_tokens=4)[0], skip_special_tokens=True) == "good"


def test_translations_in_records(finetune, models):
    """As WMT's data have them; held-out data and a prefix beside, and what the run notes of it."""
    rows = [{"translation": {"en": text, "de": ("bad", "good")[label]}} for text, label in sentences(32, 0)]
    jsonl("train.jsonl", rows), jsonl("test.jsonl", rows[:8])
    run = finetune(
        f"model: {models / 't5'}\ndataset: {{path: train.jsonl, source_column: en, source_prefix: 'film ', "
        "max_target_length: 9}\nvalidation_dataset: test.jsonl\nstep_scheduler: {max_steps: 4, log_every_steps: 1}\n"
    )
    assert run.plan["columns"].startswith("en → de")
    assert run.summary["validation"]["loss"] > 0
    noted = json.loads((run.folder / "run" / "layout.json").read_text())
    assert noted == {"kind": "sources", "prefix": "film ", "target_length": 9}


def test_already_tokenised_rows_in_a_saved_dataset(finetune, models):
    """`datasets.DatasetDict.save_to_disk` of tokenised rows: splits by name, no text column anywhere."""
    from datasets import Dataset, DatasetDict
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "bert")

    def tokenised(count, seed):
        rows = tiny.reviews(count, seed, longest=10)
        ids = tokenizer([r["text"] for r in rows])
        return Dataset.from_dict(
            {
                "input_ids": ids["input_ids"],
                "attention_mask": ids["attention_mask"],
                "label": [r["label"] for r in rows],
            }
        )

    DatasetDict({"train": tokenised(128, 0), "test": tokenised(24, 1)}).save_to_disk("saved")
    run = finetune(
        f"model: {models / 'bert'}\ntask: text-classification\ndataset: {{path: saved, split: train}}\n"
        f"validation_dataset: {{path: saved, split: test}}\n{EPOCHS}"
    )
    assert run.plan["data"].startswith("128 examples")
    assert run.losses[-1] < run.losses[0] * 0.5
    assert run.summary["validation"]["accuracy"] > 0.9


def test_a_saved_dataset_of_texts_with_class_names(finetune, models):
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=["thumbs down", "thumbs up"])})
    Dataset.from_list(tiny.reviews(160, longest=10), features=features).save_to_disk("saved")
    run = finetune(
        f"model: {models / 'bert'}\ntask: text-classification\ndataset: {{path: saved, split: 'train[:128]'}}\n"
        "validation_dataset: {path: saved, split: 'train[128:]'}\n" + EPOCHS
    )
    assert run.plan["data"].startswith("128 examples")
    assert run.model("AutoModelForSequenceClassification").config.label2id == {"thumbs down": 0, "thumbs up": 1}
    assert run.summary["validation"]["accuracy"] > 0.8
    assert json.loads((run.folder / "run" / "data.json").read_text())["validation"]["rows"] == 32
