"""What a limit cuts off is counted for every task and layout, with the length that was there before."""

import pytest

from automodel.data.batch import IGNORE

WORDS = ["good film", "the good film", "good good good good good good"]  # 4, 5 and 8 tokens with [CLS] and [SEP]
CHAT = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]


def long_chat(answer):
    return {"messages": [CHAT[0], {"role": "assistant", "content": answer}]}


LAYOUTS = {
    "texts": ("text-classification", [{"text": t, "label": i % 2} for i, t in enumerate(WORDS)], {"max_length": 4}),
    "pairs": (
        "text-classification",
        [{"sentence1": t, "sentence2": "the film", "label": i % 2} for i, t in enumerate(WORDS)],
        {"max_length": 7},
    ),
    "tagged words": (
        "token-classification",
        [{"tokens": t.split(), "tags": ["A", "B", *"AAAA"][: len(t.split())]} for t in WORDS],
        {"max_length": 4},
    ),
    "tokenised texts": (
        "text-classification",
        [{"input_ids": [2] * n, "labels": n % 2} for n in (4, 5, 8)],
        {"max_length": 4},
    ),
    "tokenised tags": (
        "token-classification",
        [{"input_ids": [5] * n, "labels": [n % 2] * n} for n in (4, 5, 8)],
        {"max_length": 4},
    ),
}
LANGUAGE = {
    "prompt and completion": (
        "causal-lm",
        [{"prompt": "ab", "completion": "c" * n} for n in (1, 2, 5)],  # and the token that ends it
        {"max_length": 4, "prompt_template": "{prompt}"},
    ),
    "plain text": ("causal-lm", [{"text": "a" * n} for n in (3, 4, 7)], {"max_length": 4, "on_long": "cut"}),
    "tokenised text": ("causal-lm", [{"input_ids": [9] * n} for n in (4, 5, 8)], {"max_length": 4}),
    "several documents in a row": (
        "causal-lm",
        [{"input_ids": [9] * 17, "labels": [9] * 17, "seq_lengths": [4, 5, 8]}],
        {"max_length": 4},
    ),
}


def check(data, longest=8):
    assert (data.stats.truncated, data.stats.used, data.stats.longest) == (2, 3, longest)
    limit = data.stats.max_length
    assert data.store.lengths.tolist() == [limit] * 3 or data.store.lengths.max() == limit
    (cut,) = data.stats.cuts
    assert cut.how_many == "2 of 3 samples (66.7%)"
    assert cut.why == f"longer than max_length {limit}; the longest has {longest} tokens"


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n != "pairs"])
def test_encoders(prepare_rows, bert_like, name):
    task, rows, settings = LAYOUTS[name]
    check(prepare_rows(rows, bert_like, task=task, **settings))


def test_pairs(prepare_rows, bert_like):
    task, rows, settings = LAYOUTS["pairs"]
    check(prepare_rows(rows, bert_like, task=task, **settings), longest=11)


@pytest.mark.parametrize("name", LANGUAGE)
def test_decoders(prepare_rows, gpt_like, name):
    task, rows, settings = LANGUAGE[name]
    data = prepare_rows(rows, gpt_like, task=task, **settings)
    check(data)


def test_chats(prepare_rows, chat_like):
    rows = [long_chat("a"), long_chat("a" * 5), long_chat("a" * 30)]
    whole = prepare_rows(rows, chat_like, task="causal-lm", max_length=500)
    lengths = whole.store.lengths.tolist()
    assert whole.stats.cuts == ()
    cut = prepare_rows(rows, chat_like, task="causal-lm", max_length=lengths[0])
    check(cut, longest=lengths[2])


def test_a_tokenizer_that_cuts_on_the_left(prepare_rows, bert_like):
    task, rows, settings = LAYOUTS["texts"]
    bert_like.truncation_side = "left"
    try:
        check(prepare_rows(rows, bert_like, task=task, **settings))
    finally:
        bert_like.truncation_side = "right"


def test_text_that_spells_special_tokens(prepare_rows, bert_like):
    rows = [{"text": "[SEP] good [CLS] [SEP] film", "label": i} for i in range(2)]
    assert prepare_rows(rows, bert_like, max_length=4).stats.longest == 7


def test_sources_and_targets_are_counted_apart(prepare_rows, gpt_like):
    rows = [{"source": "a" * s, "target": "b" * t} for s, t in ((3, 9), (30, 2), (40, 2))]
    data = prepare_rows(rows, gpt_like, task="seq2seq", max_length=8, max_target_length=4)
    told = [(cut.how_many, cut.why) for cut in data.stats.cuts]
    assert told == [
        ("2 of 3 samples (66.7%)", "longer than max_length 8; the longest has 40 tokens"),
        ("1 of 3 targets (33.3%)", "longer than max_target_length 4; the longest has 9 tokens"),
    ]


def test_targets_that_are_tokenised_already(prepare_rows, gpt_like):
    rows = [{"input_ids": [5, 6], "labels": [7] * n} for n in (3, 6)]
    data = prepare_rows(rows, gpt_like, task="seq2seq", max_target_length=4)
    assert [(cut.what, cut.count, cut.longest) for cut in data.stats.cuts] == [("targets", 1, 6)]


def test_plain_text_that_is_split_is_not_cut(prepare_rows, gpt_like):
    data = prepare_rows([{"text": "a" * 30}, {"text": "b"}], gpt_like, task="causal-lm", max_length=8)
    assert (data.stats.cuts, data.stats.longest, data.store.lengths.max()) == ((), 31, 8)


def test_all_datasets_of_a_mixture_count(prepare_rows, bert_like, tmp_path):
    task, rows, settings = LAYOUTS["texts"]
    prepare_rows(rows, bert_like, task=task, name="one.jsonl")
    prepare_rows([{"text": "good", "label": n % 2} for n in range(3)], bert_like, task=task, name="two.jsonl")
    from automodel.data.config import MixtureEntry

    entries = tuple(MixtureEntry(path=str(tmp_path / name), weight=1.0) for name in ("two.jsonl", "one.jsonl"))
    data = prepare_rows(None, bert_like, task=task, mixture=entries, **settings)
    assert (data.stats.truncated, data.stats.used, data.stats.longest) == (2, 6, 8)


def test_a_document_whose_labels_are_all_cut_off_is_named(prepare_rows, gpt_like):
    from automodel.config.errors import UserError

    late = {"input_ids": [9] * 12, "labels": [9] * 3 + [IGNORE] * 8 + [9], "seq_lengths": [3, 9]}
    with pytest.raises(UserError, match=r"row 0: no label of a document of 9 tokens lies within its first 4"):
        prepare_rows([late], gpt_like, task="causal-lm", max_length=4)
