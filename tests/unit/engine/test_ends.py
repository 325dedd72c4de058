"""Encoder-decoder classifiers and texts in which the end-of-sequence token stands."""

import pytest

import tiny_runs as tiny
from automodel.config.errors import UserError
from automodel.engine.prepare import prepare_run
from automodel.plan.check import load_run_config


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))

    def make(rows, kind="t5", eos=3):
        tiny.make_model_folder(tmp_path / "model", kind)
        if kind == "t5":
            described = tmp_path / "model" / "config.json"
            described.write_text(described.read_text().replace('"eos_token_id": 3', f'"eos_token_id": {eos}'))
        tiny.make_tokenizer().save_pretrained(tmp_path / "model")
        tiny.write_jsonl(tmp_path / "train.jsonl", rows)
        (tmp_path / "run.yaml").write_text(
            f"task: text-classification\nmodel: {tmp_path}/model\ndataset: {{path: {tmp_path}/train.jsonl}}\n"
        )
        return load_run_config([tmp_path / "run.yaml"])

    return make


def test_a_text_with_an_end_inside_is_found_before_training(config_of):
    rows = tiny.reviews(8)
    prepare_run(config_of(rows))
    rows[5]["text"] = "good [SEP] film"
    with pytest.raises(UserError, match=r"dataset: 1 of 8 texts .* hold it 1 time: row 5 has 2 .*t5 classifiers"):
        prepare_run(config_of(rows))
    assert prepare_run(config_of(rows, "bert")).plan.path == "packed"  # who reads the first token does not care


def test_texts_without_an_end_are_refused(config_of):
    with pytest.raises(UserError, match=r"do not end with .*\(id 4\)"):
        prepare_run(config_of(tiny.reviews(8), eos=4))
