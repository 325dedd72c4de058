"""Tokenizers with tokens beyond the model's embedding, as Gemma 3's text models are published: trained, measured and
asked, unless a text has one of those tokens."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import tiny_runs as tiny
from automodel.config.errors import UserError
from automodel.data.samples import SampleWriter
from automodel.data.store import TokenStore
from automodel.engine.assess import assess
from automodel.engine.known_tokens import check_tokens
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


def test_what_is_to_be_written_counts_too():
    writer = SampleWriter()
    for row, target in enumerate(([1, 2], [3, 90], [1])):
        writer.add(row, np.array([4, 5]), target_ids=np.array(target))
    store = TokenStore.in_memory(writer.finish())
    tokenizer: Any = tiny.make_tokenizer()
    with pytest.raises(UserError, match=r"dataset: 1 row has tokens .*: row 1 \(counted"):
        check_tokens(store, tokenizer, SimpleNamespace(vocab_size=len(tokenizer) - 1), "dataset")
