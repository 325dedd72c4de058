"""Which settings of a model's `generation_config.json` count: those that are part of the model, as in stock
transformers. Those that somebody prefers do not, whatever they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import tiny_runs as tiny
from automodel.engine import predict
from automodel.engine.predict import Predictor
from automodel.models.families import PackingSupport

PROMPTS = ["good film", "the story was quite bad", "warm and bright"]
HOW = {"greedy": {}, "beams": {"num_beams": 2}, "drawn": {"temperature": 1.0}}
PREFERRED = {
    "several answers": {"num_return_sequences": 2, "num_beams": 2, "do_sample": True},
    "records": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "strings that stop": {"stop_strings": ["film", "plot"]},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "groups of beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "short beams": {"num_beams": 4, "length_penalty": -9.0, "early_stopping": True},
    "guidance": {"guidance_scale": 3.0},
    "watermarks": {"watermarking_config": {"bias": 10.0, "seeding_scheme": "lefthash"}},
    "little time": {"max_time": 1e-9},
    "cut-offs": {"do_sample": True, "eta_cutoff": 0.9, "epsilon_cutoff": 0.9, "top_h": 0.1, "top_k": 1, "min_p": 0.9},
    "a bias": {"sequence_bias": [[[7], 50.0]]},
    "words": {"bad_words_ids": [[number] for number in range(5, 40)], "force_words_ids": [[9]]},
    "contrast": {"penalty_alpha": 0.6, "top_k": 4},
    "penalties": {
        "repetition_penalty": 9.0,
        "no_repeat_ngram_size": 1,
        "min_new_tokens": 7,
        "renormalize_logits": True,
    },
    "healing": {"token_healing": True},
    "caches": {"cache_implementation": "quantized", "use_cache": False},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny.make_model_folder(tmp_path_factory.mktemp("settings") / "llama", "llama", seed=1)


@pytest.fixture(scope="module")
def plain_answers(llama):
    return {name: answers(llama, **how) for name, how in HOW.items()}


def answers(folder: Path, prompts=PROMPTS, **how) -> list[str]:
    found = Predictor(folder).generate(prompts, max_new_tokens=8, raw=True, **how)
    return [answer.prediction for answer in found]


def with_settings(folder: Path, to: Path, **settings) -> Path:
    """A copy of the folder whose generation config has these settings too."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    path = to / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return to


def stock(folder: Path, prompt: str, **how) -> str:
    """One prompt alone in plain transformers, which does obey the folder's generation config."""
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model, tokenizer = kind.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    made = model.generate(**inputs, **({"do_sample": False, "max_new_tokens": 8} | how))[0]
    before = 1 if config.is_encoder_decoder else inputs["input_ids"].shape[1]
    return tokenizer.decode(made[before:], skip_special_tokens=True)


@pytest.mark.parametrize("how", ["greedy", "beams"])
def test_without_preferences_answers_are_those_of_stock_transformers(llama, plain_answers, how):
    assert plain_answers[how] == [stock(llama, prompt, **HOW[how]) for prompt in PROMPTS]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("preferred", PREFERRED)
def test_no_preference_changes_an_answer(llama, plain_answers, tmp_path, preferred, how):
    folder = with_settings(llama, tmp_path / "model", **PREFERRED[preferred])
    assert answers(folder, **HOW[how]) == plain_answers[how]


def test_the_model_keeps_its_settings(llama, tmp_path):
    predictor = Predictor(
        with_settings(llama, tmp_path / "model", max_time=1e-9, num_return_sequences=2, do_sample=True)
    )
    before = predictor.model.generation_config
    predictor.generate(PROMPTS, max_new_tokens=2, raw=True)
    assert predictor.model.generation_config is before
    assert (before.max_time, before.num_return_sequences) == (1e-9, 2)


def test_rows_without_an_answer_of_their_own_are_noticed(llama, monkeypatch):
    """Two answers for each prompt would put all but the first on the wrong prompts."""
    from automodel.engine import predict

    twice = lambda *args: [answer for answer in generate_batch(*args) for _ in range(2)]  # noqa: E731
    generate_batch = predict.generate_batch
    monkeypatch.setattr(predict, "generate_batch", twice)
    with pytest.raises(ValueError, match="zip"):
        Predictor(llama).generate(PROMPTS, max_new_tokens=2, raw=True)


# -- what is part of the model ----------------------------------------------------------------------------------------


def with_bias(folder: Path, bias: dict[int, float]) -> Path:
    """The encoder-decoder with a bias for some tokens, and its generation config as it was."""
    settings = (folder / "generation_config.json").read_text()
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    for token, value in bias.items():
        model.final_logits_bias[0, token] = value
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(settings)
    return folder


@pytest.fixture(scope="module")
def bart(tmp_path_factory):
    """It says different words to different prompts, and never ends by itself."""
    folder = tmp_path_factory.mktemp("settings") / "bart"
    return with_bias(tiny.make_model_folder(folder, "bart", seed=1, init_std=1.0), dict.fromkeys(range(5), -1e4))


@pytest.mark.parametrize("settings", [
    {"forced_bos_token_id": 11},
    {"decoder_start_token_id": 12},
    {"suppress_tokens": [*range(20, 40)]},
    {"begin_suppress_tokens": [*range(5, 40)]},
    {"forced_eos_token_id": None},
    {"forced_eos_token_id": [3]},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("how", ["greedy", "beams"])
def test_what_is_part_of_the_model_counts(bart, tmp_path, settings, how):
    folder = with_settings(bart, tmp_path / "model", **settings)
    expected = [stock(folder, prompt, **HOW[how]) for prompt in PROMPTS]
    assert answers(folder, **HOW[how]) == expected


def test_special_tokens_that_a_model_must_not_make(bart, tmp_path):
    """Marian's padding, for which it has no weights: the converter gave it a place among the words, and the generation
    config says that it is no word."""
    folder = with_bias(with_settings(bart, tmp_path / "model", bad_words_ids=[[0]]), {0: 1e4})
    made = answers(folder)
    assert made == [stock(folder, prompt) for prompt in PROMPTS]
    assert all(text.split() for text in made)


# -- where an answer ends ---------------------------------------------------------------------------------------------


def test_an_end_that_the_limit_forced_is_not_the_models(bart):
    (answer,) = Predictor(bart).generate(PROMPTS[:1], max_new_tokens=4)
    assert answer.prediction == stock(bart, PROMPTS[0], max_new_tokens=4)
    assert (len(answer.prediction.split()), answer.finish_reason) == (3, "length")
    for beams in (1, 2):
        found = Predictor(bart, batch_size=2).generate(PROMPTS, max_new_tokens=4, num_beams=beams)
        assert {answer.finish_reason for answer in found} == {"length"}


def test_an_end_before_the_limit_is_the_models(bart, tmp_path):
    folder = with_bias(with_settings(bart, tmp_path / "model"), {3: 1e4})
    (answer,) = Predictor(folder).generate(PROMPTS[:1], max_new_tokens=4)
    assert (answer.prediction, answer.finish_reason) == ("", "stop")


def test_a_watched_answer_is_the_recorded_one(llama, plain_answers, tmp_path):
    """A word that ends an answer, as of a model whose config lists it beside the end of a text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    for number, prompt in enumerate(PROMPTS):
        words = plain_answers["greedy"][number].split()
        stop = tokenizer.convert_tokens_to_ids(words[3])
        folder = with_settings(llama, tmp_path / f"model-{number}", eos_token_id=[3, stop])
        pieces: list[str] = []
        (watched,) = Predictor(folder).generate([prompt], max_new_tokens=8, raw=True, on_text=pieces.append)
        assert "".join(pieces) == watched.prediction
        assert (watched.prediction.split(), watched.finish_reason) == (words[: words.index(words[3])], "stop")


RECURRENT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "lru_width": 32,
}
XLNET = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "pad_token_id": 0}


@pytest.mark.parametrize(("kind", "shape"), [("recurrent_gemma", RECURRENT), ("xlnet", XLNET)])
def test_models_that_read_padding_are_not_padded(llama, tmp_path, kind, shape):
    """transformers' code for them lets padding change what they write, whatever the mask says."""
    folder = with_settings(llama, tmp_path / kind)
    torch.manual_seed(0)
    words = len(transformers.AutoTokenizer.from_pretrained(llama))
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, vocab_size=words, initializer_range=1.0, **shape)
    )
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_()
    model.save_pretrained(folder)
    alone = [answers(folder, [prompt]) for prompt in PROMPTS]
    assert answers(folder) == [answer for one in alone for answer in one]


def test_other_models_are_padded(llama, monkeypatch):
    widths = []
    stock = transformers.LlamaForCausalLM.generate
    monkeypatch.setattr(
        transformers.LlamaForCausalLM,
        "generate",
        lambda model, **how: widths.append(how["input_ids"].shape[0]) or stock(model, **how),
    )
    answers(llama)
    assert widths == [3], "known to read each row alone"
    widths.clear()
    monkeypatch.setattr(predict, "packing_support", lambda *_: PackingSupport(False, "nobody knows it"))
    answers(llama)
    assert widths == [1, 1, 3], "tried out with one prompt, alone and padded; then all together"
    widths.clear()
    answers(llama, PROMPTS[:1])
    assert widths == [1], "nothing to try out"
