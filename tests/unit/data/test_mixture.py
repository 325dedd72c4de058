"""Weighted mixtures: the shares of an epoch, that nothing is read twice too early, and what can be wrong."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from automodel.config.errors import ConfigError, UserError
from automodel.data.batch import IGNORE
from automodel.data.bins import BinOrder
from automodel.data.collate import PackedCollator
from automodel.data.config import DatasetConfig, MixtureEntry
from automodel.data.loader import StepLoader
from automodel.data.mixture import Mixture
from automodel.data.order import StepOrder
from automodel.data.prepare import prepare
from automodel.plan.check import load_run_config
from automodel.tasks.registry import task_named


@pytest.mark.parametrize(
    ("sizes", "weights", "counts"),
    [
        ((1000, 2000), (0.7, 0.3), (1000, 429)),  # the larger share is read once, of the other 0.3/0.7 as many
        ((700, 2000), (7, 3), (700, 300)),  # weights need no common scale
        ((100, 2000), (0.5, 0.5), (2000, 2000)),  # equal shares: the larger dataset once, the smaller one 20 times
        ((2000, 10), (0.9, 0.1), (2000, 222)),
        ((1000, 5), (1.0, 0.0001), (1000, 1)),  # never none
        ((10,), (3.0,), (10,)),
    ],
)
def test_the_largest_share_is_read_once(sizes, weights, counts):
    assert Mixture(tuple("ab"[: len(sizes)]), sizes, weights).counts == counts


MIXED = Mixture(("a", "b", "c"), (50, 400, 7), (0.5, 0.3, 0.2))  # 50, 30 and 20 samples an epoch
STARTS = (0, 50, 450, 457)


def members(samples, number: int) -> list[int]:
    return [i for i in samples if STARTS[number] <= i < STARTS[number + 1]]


@pytest.mark.parametrize("shuffle", [True, False])
def test_shares_hold_in_every_epoch_and_nothing_repeats_before_everything_was_read(shuffle):
    order = StepOrder(np.ones(457), micro_batch_size=10, seed=3, shuffle=shuffle, mixture=MIXED)
    assert order.steps_per_epoch == 10
    epochs = [order.permutation(epoch).tolist() for epoch in range(14)]
    for epoch in epochs:
        assert [len(members(epoch, n)) for n in range(3)] == [50, 30, 20]
        assert sorted(members(epoch, 0)) == list(range(50))
    read = [i for epoch in epochs for i in members(epoch, 1)]
    assert len(set(read[:390])) == 390  # 13.3 epochs are one pass over b
    often = np.bincount(np.asarray([i for epoch in epochs[:7] for i in members(epoch, 2)]) - 450)
    assert often.tolist() == [20] * 7  # 7 epochs of 20 are 20 passes over c
    if shuffle:
        assert epochs[0] != epochs[1]
    else:
        tenths = [epochs[0][start : start + 10] for start in range(0, 100, 10)]
        assert all(len(members(part, 0)) == 5 and len(members(part, 1)) == 3 for part in tenths)


def test_the_draw_is_a_function_of_seed_and_epoch():
    first, second, other = (StepOrder(np.ones(457), 10, seed=seed, mixture=MIXED) for seed in (1, 1, 2))
    assert np.array_equal(first.permutation(5), second.permutation(5))
    assert not np.array_equal(first.permutation(5), other.permutation(5))


@pytest.mark.parametrize("by_size", [0, 64])
def test_resume_in_the_middle(store_of, by_size):
    store = store_of("causal-lm", count=457)

    def loader() -> StepLoader:
        room = BinOrder(store.lengths, 64, 2, mixture=MIXED).most_documents if by_size else 8
        collate = PackedCollator(store, "next_token", micro_batch_size=room)
        return StepLoader(
            collate, lengths=store.lengths, micro_batch_size=8, grad_acc_steps=2, packed_sequence_size=by_size,
            mixture=MIXED,
        )  # fmt: skip

    def indices(steps) -> list:
        return [[b.indices for b in s.micro_batches] for s in steps]

    whole = list(itertools.islice(iter(loader()), 25))
    first = loader()
    for _ in itertools.islice(iter(first), 9):
        pass
    second = loader()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert indices(itertools.islice(iter(second), 16)) == indices(whole[9:])
    epoch = [i for s in whole if s.epoch == 0 for b in s.micro_batches for i in b.indices]
    assert [len(members(epoch, n)) for n in range(3)] == [50, 30, 20]


def test_another_weight_is_another_run(store_of):
    store = store_of("causal-lm", count=457)
    collate = PackedCollator(store, "next_token", micro_batch_size=8)
    state = StepLoader(collate, lengths=store.lengths, micro_batch_size=8, mixture=MIXED).state_dict()
    heavier = Mixture(MIXED.names, MIXED.sizes, (0.5, 0.3, 0.3))
    with pytest.raises(UserError, match=r"sizes and weights of dataset\.mixture"):
        StepLoader(collate, lengths=store.lengths, micro_batch_size=8, mixture=heavier).load_state_dict(state)


@pytest.fixture
def write(tmp_path):
    def written(name: str, rows: list[dict]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return written


@pytest.fixture
def mixed(tmp_path, gpt_like):
    def prepared(entries, task="causal-lm", tokenizer=gpt_like, **settings):
        cfg = DatasetConfig(
            mixture=tuple(MixtureEntry(**e) for e in entries), cache_dir=str(tmp_path / "cache"), **settings
        )
        return prepare(cfg, row_format=task_named(task).rows, tokenizer=tokenizer, max_positions=512, type_vocab_size=2)

    return prepared


TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def test_datasets_of_several_layouts_share_a_store(mixed, write, gpt_like):
    entries = [
        {"path": write("qa.jsonl", [{"q": "Q", "a": f"A{i}"} for i in range(4)]), "weight": 2.0,
         "column_mapping": {"question": "q", "answer": "a"}},
        {"path": write("talk.jsonl", [{"messages": TALK}] * 3), "chat_template": "plain"},
        {"path": write("text.jsonl", [{"text": "x" * 60}] * 2), "weight": 0.5},
    ]  # fmt: skip
    data = mixed(entries, max_length=40)
    assert data.mixture == Mixture(("qa.jsonl", "talk.jsonl", "text.jsonl"), (4, 3, 4), (2.0, 1.0, 0.5))
    assert data.mixture.in_words() == (
        "qa.jsonl: 4 of 4, talk.jsonl: 2 of 3 (0.67 epochs), text.jsonl: 1 of 4 (0.25 epochs)"
    )
    assert data.store.rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 8]
    texts = [
        gpt_like.decode(data.store.input_ids[start:stop])
        for start, stop in zip(data.store.offsets, data.store.offsets[1:])
    ]
    assert texts[2] == "Question: Q\n\nAnswer: A2<|end|>"
    assert texts[4].endswith("### Assistant:\nyo<|end|>\n\n")
    assert texts[7] == "x" * 40
    assert data.description == (
        "q → a (plain prompt); chat messages in 'messages', each answer up to the token that ends it; "
        "plain text in 'text', split into pieces where it is long"
    )
    assert (data.stats.rows, data.stats.used, data.stats.ended) == (9, 11, 9)
    assert mixed([{**entries[0], "weight": 9.0}, *entries[1:]], max_length=40).from_cache  # weights change no sample


def test_what_is_learned_is_counted_as_it_is_read(mixed, write):
    entries = [
        {"path": write("qa.jsonl", [{"question": "Q" * 20, "answer": f"A{i}"} for i in range(4)]), "weight": 2.0},
        {"path": write("text.jsonl", [{"text": "x" * (30 + i)} for i in range(4)]), "weight": 0.5},
    ]
    data = mixed(entries)
    store, places = data.store, data.store.offsets
    learned = np.asarray([(store.token_labels[a:b] != IGNORE)[1:].sum() for a, b in itertools.pairwise(places)])
    drawn = np.concatenate(
        [data.mixture.epoch(epoch, 0, True) for epoch in range(4)]
    )  # every sample, as often as asked
    assert data.learned_share == pytest.approx(learned[drawn].sum() / store.lengths[drawn].sum())
    assert data.learned_share < data.stats.supervised_share - 0.1
    assert f"{data.learned_share:.1%} of the tokens" in data.stats.learned_in_words(share=data.learned_share)


def test_classes_are_those_of_the_first_dataset(mixed, write, bert_like):
    first = write("a.jsonl", [{"text": "good", "label": "pos"}, {"text": "bad", "label": "neg"}])
    pairs = write("b.jsonl", [{"text": "good", "more": "film", "stance": "neg"}] * 3)
    odd = write("c.jsonl", [{"text": "good", "label": "meh"}])
    entry = {"path": pairs, "label_column": "stance", "text_pair_column": "more"}
    data = mixed([{"path": first}, entry], task="text-classification", tokenizer=bert_like)
    assert data.label_names == ["neg", "pos"]
    assert data.store.labels.tolist() == [1, 0, 0, 0, 0]
    assert data.store.token_types is not None
    assert data.store.token_types.tolist() == [0, 0, 0, 0, 0, 0, *([0, 0, 0, 1, 1] * 3)]  # zeros for single texts
    with pytest.raises(UserError, match=r"dataset\.mixture\.1: 1 of 1 rows cannot be used .*\n.*'meh'"):
        mixed([{"path": first}, {"path": odd}], task="text-classification", tokenizer=bert_like)


def test_everything_wrong_with_any_of_them_is_said_at_once(mixed, write):
    good = write("good.jsonl", [{"prompt": "p", "completion": "c"}] * 3)
    bad = write("bad.jsonl", [{"prompt": "p", "completion": ""}, {"prompt": "p", "completion": "c"}])
    with pytest.raises(UserError) as caught:
        mixed([{"path": good, "text_column": "txt"}, {"path": bad}, {"path": good + "x"}])
    message = str(caught.value)
    assert message.startswith("3 problems with the data\n")
    assert "- dataset.mixture.2.path: there is no file or folder" in message
    assert "- dataset.mixture.0.text_column: the data has no column 'txt'" in message
    assert "- dataset.mixture.1: 1 of 2 rows cannot be used" in message
    assert "\n    row 0: the answer is empty\n" in message


WRONG = [
    ("mixture: []", "dataset.mixture: is an empty list"),
    ("mixture: [{path: a, weight: 0}]", "dataset.mixture.0.weight: must be above 0, got 0."),
    ("mixture: [{path: a, weight: heavy}]", "dataset.mixture.0.weight: expected a number (above 0), got the text"),
    ("mixture: [{path: a, wieght: 0.7}]", "dataset.mixture.0.wieght: there is no such key; did you mean `weight`?"),
    ("mixture: [{path: a, _target_: b.c}]", "dataset.mixture.0._target_: nothing here takes a `_target_`"),
    ("mixture: [{weight: 0.7}]", "dataset.mixture.0.path: is missing"),
    ("mixture: [[a, b]]", "dataset.mixture.0: is a section with keys of its own (path, weight, name, split"),
    ("mixture: a.jsonl", "dataset.mixture: expected a list of sections, got the text 'a.jsonl'."),
    ("path: a.jsonl, mixture: [b.jsonl]", "dataset.mixture: give this or `path`, not both."),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[text for text, _ in WRONG])
def test_wrong_mixtures(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: gpt2\ntask: causal-lm\ndataset: {{{text}}}\n")
    with pytest.raises(ConfigError) as caught:
        load_run_config([path])
    assert message in str(caught.value)
    assert "run.yaml:3: " in str(caught.value)


def test_entries_in_files_and_on_the_command_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: gpt2\ndataset:\n  max_length: 64\n  mixture:\n    - a.jsonl\n    - {path: b.jsonl, weight: 0.3}\n"
    )
    cfg = load_run_config([path], ["dataset.mixture.0.weight=0.7", "dataset.mixture.2={path: c.jsonl}"])
    entries = cfg.dataset.mixture
    assert [(e.path, e.weight) for e in entries] == [("a.jsonl", 0.7), ("b.jsonl", 0.3), ("c.jsonl", 1.0)]
    from automodel.config.load import dump_config

    again = tmp_path / "again.yaml"
    again.write_text(dump_config(cfg))
    assert load_run_config([again]) == cfg


def test_a_mixture_is_validated_on_data_of_its_own(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: gpt2\ndataset: {mixture: [a.jsonl]}\nvalidation_dataset: {split: test}\n")
    with pytest.raises(ConfigError, match=r"validation_dataset\.path: is missing, and a mixture has no validation"):
        load_run_config([path])
    path.write_text(
        "model: gpt2\ndataset: {mixture: [a.jsonl]}\nvalidation_dataset: {mixture: [{path: b, weight: 2}]}\n"
    )
    with pytest.raises(ConfigError, match=r"mixture\.0\.weight: an evaluation reads every row once"):
        load_run_config([path])


def test_bad_rows_of_an_entry_are_left_out_as_its_error_says(mixed, write):
    entries = [
        {"path": write("a.jsonl", [{"text": "fine"}] * 2)},
        {"path": write("b.jsonl", [{"text": ""}, {"text": "x"}])},
    ]
    with pytest.raises(UserError, match=r"(?s)dataset\.mixture\.1: 1 of 2 rows.*with dataset\.on_bad_row: skip\."):
        mixed(entries)
    data = mixed(entries, on_bad_row="skip")
    assert data.stats.skipped == 1
    assert data.notes[-1].endswith("the first, row 0: the text is empty (b.jsonl)")  # row 0 of the other is fine
