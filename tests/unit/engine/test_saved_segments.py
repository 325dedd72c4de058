"""A model of text pairs that learned from token types is asked with token types, by stock transformers too."""

from dataclasses import replace
from typing import Any

import pytest

import tiny_runs as tiny
from automodel.engine.assess import assess
from automodel.engine.predict import Predictor
from automodel.engine.run import finetune
from automodel.plan.check import load_run_config


def test_stock_pipelines_answer_as_the_model_was_trained(tmp_path, monkeypatch):
    """Some tokenizers of transformers 5 (ALBERT's, generic ones) make no token types unless told to."""
    from transformers import AutoTokenizer, pipeline

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    tiny.make_model_folder(tmp_path / "model")
    assert "token_type_ids" not in AutoTokenizer.from_pretrained(tmp_path / "model").model_input_names
    rows = tiny.reviews(48)
    rows = [{**row, "second": rows[(7 * i + 3) % 48]["text"]} for i, row in enumerate(rows)]
    tiny.write_jsonl(tmp_path / "train.jsonl", rows)
    (tmp_path / "run.yaml").write_text(
        f"task: text-classification\nmodel: {tmp_path}/model\noptimizer: {{lr: 5e-3}}\n"
        f"dataset: {{path: {tmp_path}/train.jsonl, text_pair_column: second, labels: [neg, pos]}}\n"
        f"checkpoint: {{checkpoint_dir: {tmp_path}/out}}\nstep_scheduler: {{max_steps: 30}}\n{tiny.FP32}"
    )
    finetune(load_run_config([tmp_path / "run.yaml"]))
    stock: Any = pipeline("text-classification", str(tmp_path / "out"), device=-1)
    texts, seconds = ["good film", "bad sad film"], ["bad plot", "good great"]
    theirs = [stock({"text": a, "text_pair": b}) for a, b in zip(texts, seconds)]
    ours: Any = Predictor(tmp_path / "out").classify(texts, seconds)
    assert [one["label"] for one in theirs] == [one.prediction for one in ours]
    assert [one["score"] for one in theirs] == pytest.approx([one.score for one in ours], abs=1e-5)


def test_stock_pipelines_cut_where_training_did(tmp_path, monkeypatch):
    from transformers import pipeline

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    tiny.make_model_folder(tmp_path / "model")
    tiny.write_jsonl(tmp_path / "train.jsonl", tiny.reviews(24))
    (tmp_path / "run.yaml").write_text(
        f"task: text-classification\nmodel: {tmp_path}/model\noptimizer: {{lr: 5e-3}}\n"
        f"dataset: {{path: {tmp_path}/train.jsonl, max_length: 6}}\n"
        f"checkpoint: {{checkpoint_dir: {tmp_path}/out}}\nstep_scheduler: {{max_steps: 20}}\n{tiny.FP32}"
    )
    finetune(load_run_config([tmp_path / "run.yaml"]))
    text = "good film great plot " + "bad sad ugly " * 9
    stock: Any = pipeline("text-classification", str(tmp_path / "out"), device=-1)
    (theirs,) = stock(text, truncation=True)
    (ours,) = Predictor(tmp_path / "out").classify([text])
    assert (theirs["label"], theirs["score"]) == (ours.prediction, pytest.approx(ours.score, abs=1e-5))
    measured = assess(tmp_path / "out", dataset=str(tmp_path / "train.jsonl")).metrics.values
    (tmp_path / "out" / "run").rename(tmp_path / "elsewhere")  # the folder alone: its tokenizer knows
    assert Predictor(tmp_path / "out").max_length == 6
    assert assess(tmp_path / "out", dataset=str(tmp_path / "train.jsonl")).metrics.values == measured
    assert stock(text)[0]["score"] != pytest.approx(ours.score, abs=1e-5)  # nobody is kept from reading all of it


def test_rows_that_came_as_tokens_are_not_cut_by_our_default(tmp_path, monkeypatch):
    """Whoever tokenised them chose their length, so stock pipelines read as much."""
    from transformers import AutoTokenizer

    from automodel.engine.convert import convert_checkpoint
    from automodel.tasks.text_classification import TextClassification

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(TextClassification, "rows", replace(TextClassification.rows, max_length=8))
    tiny.make_model_folder(tmp_path / "model")
    rows = [{"input_ids": [2, *range(5, 5 + size), 3], "label": size % 2} for size in range(4, 20)]
    tiny.write_jsonl(tmp_path / "train.jsonl", rows)
    (tmp_path / "run.yaml").write_text(
        f"task: text-classification\nmodel: {tmp_path}/model\ndataset: {tmp_path}/train.jsonl\n"
        f"checkpoint: {{checkpoint_dir: {tmp_path}/out}}\nstep_scheduler: {{max_steps: 2}}\n"
    )
    finetune(load_run_config([tmp_path / "run.yaml"]))
    convert_checkpoint(tmp_path / "out", tmp_path / "converted")
    for folder in ("out", "converted"):
        assert AutoTokenizer.from_pretrained(tmp_path / folder).model_max_length == 21
