"""Exact match and F1 of generated answers, as SQuAD counts them.

Both look at normalised text: lower case, without punctuation, without the articles a, an and the, words parted by one
space. Exact match is 1 where nothing else differs. F1 is that of the words two answers share, each as often as it
occurs in both. Where a question has several right answers the best one counts. Means over all questions, from 0 to 1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised_answer(text: str) -> str:
    """What is compared of an answer."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, right: str) -> float:
    return float(normalised_answer(prediction) == normalised_answer(right))


def word_f1(prediction: str, right: str) -> float:
    """Two empty answers agree; an empty one agrees with nothing else."""
    found, wanted = normalised_answer(prediction).split(), normalised_answer(right).split()
    if not found or not wanted:
        return float(found == wanted)
    shared = (Counter(found) & Counter(wanted)).total()
    return 2 * shared / (len(found) + len(wanted))


def answer_scores(predictions: Sequence[str], right_answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """`exact_match` and `f1`; one list of right answers for each prediction, none of them empty."""
    if not predictions:
        raise ValueError("there are no answers to score")
    totals = {"exact_match": 0.0, "f1": 0.0}
    for prediction, answers in zip(predictions, right_answers, strict=True):
        totals["exact_match"] += max(exact_match(prediction, answer) for answer in answers)
        totals["f1"] += max(word_f1(prediction, answer) for answer in answers)
    return {name: total / len(predictions) for name, total in totals.items()}
