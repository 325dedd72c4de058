"""Exact match and F1 by SQuAD's rules; the expected numbers are worked out by hand."""

from __future__ import annotations

import pytest

from automodel.data.language import every_answer
from automodel.metrics.answers import answer_scores, exact_match, normalised_answer, word_f1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Eiffel Tower!", "eiffel tower"),
        ("an apple, a pear", "apple pear"),
        ("U.S.A.", "usa"),
        ("theory of a the", "theory of"),
        ("  \n", ""),
    ],
)
def test_normalisation(text, expected):
    assert normalised_answer(text) == expected


def test_exact_match_and_f1_of_one_answer():
    assert exact_match("the Seine.", "Seine") == 1
    assert exact_match("Seine river", "Seine") == 0
    assert word_f1("in the old town", "old town") == pytest.approx(2 * 2 / (3 + 2))
    assert word_f1("yes yes no", "yes") == pytest.approx(2 * 1 / (3 + 1))  # a word counts as often as in both
    assert (word_f1("", "the"), word_f1("", "Paris"), word_f1("Paris", "")) == (1, 0, 0)


def test_the_best_of_several_right_answers_counts():
    found = answer_scores(["Paris", "red car"], [["Lyon", "paris"], ["a blue car", "tree"]])
    assert found == pytest.approx({"exact_match": 0.5, "f1": (1 + 0.5) / 2})
    with pytest.raises(ValueError, match="no answers"):
        answer_scores([], [])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("one", ["one"]),
        (7, ["7"]),
        (["one", "two"], ["one", "two"]),
        ({"text": ["one", "two"], "answer_start": [3, 4]}, ["one", "two"]),
        ([{"text": "one"}, {"text": "two"}], ["one", "two"]),
        ({"text": []}, []),
        (None, []),
    ],
)
def test_every_right_answer_of_a_row(value, expected):
    assert every_answer(value) == expected
