"""Tokenizers with tokens beyond the model's embedding, as Gemma 3's text models are published: trained, measured and
asked, unless a text has one of those tokens."""

import pytest
from rich.console import Console

import tiny_runs as tiny
from automodel.config.errors import UserError
from automodel.engine.assess import assess
from automodel.engine.predict import Predictor
from automodel.engine.run import finetune
from automodel.plan.check import load_run_config


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    tiny.make_model_folder(tmp_path / "model", "llama")
    tokenizer = tiny.make_tokenizer(decoder=True)
    assert tokenizer.add_tokens(["<picture>"], special_tokens=True) == 1
    tokenizer.save_pretrained(tmp_path / "model")
    texts = [{"text": row["text"]} for row in tiny.reviews(12)]
    tiny.write_jsonl(tmp_path / "rows.jsonl", texts)
    tiny.write_jsonl(tmp_path / "bad.jsonl", [*texts, {"text": "the <picture> was good"}, *texts])
    (tmp_path / "run.yaml").write_text(
        f"task: causal-lm\nmodel: {tmp_path}/model\ndataset: {{path: {tmp_path}/rows.jsonl}}\n"
        f"validation_dataset: {{path: {tmp_path}/rows.jsonl}}\n"
        f"step_scheduler: {{max_steps: 2}}\ncheckpoint: {{checkpoint_dir: {tmp_path}/out}}\n"
    )
    return tmp_path


def run(place, *settings):
    with (place / "console.txt").open("w") as file:
        finetune(load_run_config([place / "run.yaml"], settings), console=Console(file=file, width=200))


def test_tokens_that_no_text_has_do_not_matter(place):
    run(place)
    assert assess(place / "out").metrics.values["loss"] > 0
    with pytest.raises(UserError, match=r"validation_dataset: 1 row has .*\('<picture>'\): row 12 \(counted"):
        assess(place / "out", dataset=str(place / "bad.jsonl"))
    predictor = Predictor(place / "out")
    assert len(predictor.generate(["the film"], raw=True, max_new_tokens=2)) == 1
    with pytest.raises(UserError, match="row 0: the prompt has the token '<picture>', for which the model has no emb"):
        predictor.generate(["a <picture>"], raw=True)


def test_a_text_that_has_one_is_named_before_anything_is_trained(place):
    with pytest.raises(UserError, match=r"dataset: 1 row has tokens that the model's embedding of \d+ rows does not"):
        run(place, f"dataset.path={place}/bad.jsonl")
    assert not (place / "out").exists()


def test_a_pad_token_beyond_the_embedding_is_refused(place):
    tokenizer = tiny.make_tokenizer(decoder=True)
    tokenizer.add_special_tokens({"pad_token": "<new pad>"})
    tokenizer.save_pretrained(place / "model")
    with pytest.raises(UserError, match=r"the pad token '<new pad>' of .* was added to the tokenizer alone"):
        run(place)
