"""Where a prompt ends and its answer begins, in tokens: what `generate` asks with is what stood before the answers in
training, also where the prompt ends in white space; and every answer has an end that is learned."""

import copy

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import tiny_runs as tiny
from automodel.data.batch import IGNORE
from automodel.data.chat import ChatTemplate
from automodel.data.language import Chats, Instructions
from automodel.data.samples import SampleWriter
from automodel.engine.prompts import PromptWriter
from automodel.tasks.registry import CAUSAL_LM

TEXTS = ["Q: what is the capital? A: Paris", "Answer: Rome\n\nAnswer: Paris\n\n", " Rome Paris 42 the a x\n\n"]
TURNS = "{% for m in messages %}{{ m.role }}:\n\n{{ m.content }}{{ eos_token }}{% endfor %}"
ASKED = TURNS + "{% if add_generation_prompt %}{{ 'assistant:\n\n' }}{% endif %}"
SPACED = ASKED.replace("\n\n", " ")


@pytest.fixture(scope="module")
def tokenizer():
    """Byte pairs as GPT-2 makes them: a space is part of the word behind it, two line breaks are one token alone."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<end>"], initial_alphabet=alphabet)
    inner.train_from_iterator(TEXTS * 9, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    assert [len(made(text)["input_ids"]) for text in (" Paris", "\n\n", "\n\na")] == [1, 1, 3]
    return made


def encoded(encoder, row: dict) -> tuple[list[int], list[int]]:
    """What stands before the answer, and what is learned."""
    out = SampleWriter()
    encoder.encode({name: [value] for name, value in row.items()}, 0, out)
    assert not out.bad
    ids, labels = np.asarray(out.input_ids[0]), np.asarray(out.token_labels[0])
    first = int(np.argmax(labels != IGNORE))
    assert (labels[first:] != IGNORE).all()
    return ids[:first].tolist(), ids[first:].tolist()


@pytest.mark.parametrize("answer", ["Paris", "Rome", "42", "Zug"])
@pytest.mark.parametrize("template", ["Q: {q} A: ", "Q: {q} A:  ", "Q: {q}\n\n", "Q: {q} A:", "{q}\n\n###\n\n"])
def test_prompts_are_the_beginnings_of_what_was_learned(tokenizer, template, answer):
    encoder = Instructions(tokenizer, {"q": "q"}, "a", 99, True, template)
    before, learned = encoded(encoder, {"q": "what is the capital?", "a": answer})
    assert PromptWriter(tokenizer, encoder).tokens({"q": "what is the capital?"}) == before
    assert tokenizer.decode(learned).strip() == answer + "<end>"
    assert (
        tokenizer.decode(before + learned)
        == template.format(q="what is the capital?") + " " * (template[-1] == ":") + answer + "<end>"
    )


@pytest.mark.parametrize("answer", ["Paris", "42", "Zug"])
@pytest.mark.parametrize("template", [ASKED, SPACED])
def test_prompts_of_chats_too(tokenizer, template, answer):
    """A space that is a token of its own before an answer is learned: nobody asks with it."""
    tokenizer.chat_template = template
    encoder = Chats(tokenizer, "messages", 99, True, ChatTemplate(tokenizer))
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": answer}]
    before, learned = encoded(encoder, {"messages": turns})
    assert PromptWriter(tokenizer, encoder).tokens(turns[:1]) == before
    assert tokenizer.decode(learned).strip() == f"{answer}<end>"


def test_an_answer_that_ends_in_an_unknown_word_has_an_end():
    words = tiny.make_tokenizer(decoder=True)
    encoder = Instructions(words, {"prompt": "p"}, "a", 99, True)
    _, learned = encoded(encoder, {"p": "what was the film ?", "a": " a great Zeppelin"})
    assert learned[-2:] == [words.unk_token_id, words.eos_token_id]


def test_an_end_that_is_the_unknown_word_as_well_is_an_end(tokenizer):
    """GPT-2 has one token for both, and templates write a line break behind it."""
    both = copy.deepcopy(tokenizer)
    both.unk_token = both.eos_token
    both.chat_template = TURNS.replace("{{ eos_token }}", "{{ eos_token }}\n")
    encoder = Chats(both, "messages", 99, True, ChatTemplate(both))
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "Paris"}]
    out = SampleWriter()
    encoder.encode({"messages": [turns]}, 0, out)
    (ids,) = out.input_ids
    assert list(ids).count(both.eos_token_id) == 2  # one a turn


def test_texts_that_bring_the_first_token_along_are_said(tmp_path, monkeypatch):
    """Datasets written for Llama 2 begin with `<s>[INST]`, and its tokenizer adds a `<s>` of its own."""
    from tokenizers.processors import TemplateProcessing

    from automodel.data import prepare as prepare_module
    from automodel.data.config import DatasetConfig
    from automodel.data.prepare import prepare

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    words = tiny.make_tokenizer(decoder=True)
    words.bos_token = "[CLS]"
    begin = [("[CLS]", words.bos_token_id)]
    words.backend_tokenizer.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=begin)
    rows = [{"text": "[CLS] the film was good"}, {"text": "a bad film"}, {"text": "[CLS] a good film"}]
    path = tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    facts = {"row_format": CAUSAL_LM.rows, "tokenizer": words, "max_positions": 64, "type_vocab_size": 0}
    (note,) = prepare(DatasetConfig(path=str(path)), **facts).notes
    assert "2 of 3 samples begin with two '[CLS]'" in note
    monkeypatch.setattr(prepare_module, "LOOKED_AT", 2)
    (note,) = prepare(DatasetConfig(path=str(path)), **facts).notes
    assert "1 of the first 2 samples begin with two '[CLS]'" in note
    tiny.write_jsonl(path, [{"text": "a bad film"}])
    assert not prepare(DatasetConfig(path=str(path)), **facts).notes
