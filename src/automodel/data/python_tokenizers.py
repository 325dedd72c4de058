"""Which characters a token comes from, and which word: also where the tokenizer cannot say.

Tokenizers of the Rust library say it themselves. Those written in Python (BioGPT, GPT-SW3, BERTweet, Japanese BERTs,
most that come with a model's own code) only give ids, so a place in a text is found by tokenising the text up to it:
where that is how the whole text begins, the place lies between two tokens. Otherwise a token reaches over it: the next
such place before or behind is where that token begins or ends. It is learned, as it would be by its offsets.

Words are tokenised one by one by such tokenizers, so a word's pieces are those it has by itself. How long a text
was before it was cut they do not say either: one that fills its room is tokenised once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from automodel.config.errors import UserError

Spans = Sequence[tuple[int, int]]
LONGEST = 64  # characters that a token has, at most; a longer one is taken for one that reaches just over the place


def learned_tokens(
    tokenizer: Any, texts: list[str], spans: list[Spans], special: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The ids of each text, and which of them reach into its spans of characters. `special` adds the tokenizer's own
    special tokens, which are in no span."""
    if not getattr(tokenizer, "is_fast", True):
        return [_found_by_cutting(tokenizer, text, own, special) for text, own in zip(texts, spans, strict=True)]
    encoded = tokenizer(
        texts, add_special_tokens=special, return_offsets_mapping=True, return_attention_mask=False, verbose=False
    )
    made = []
    for position, own in enumerate(spans):
        ids = np.asarray(encoded["input_ids"][position], dtype=np.int64)
        offsets = np.asarray(encoded["offset_mapping"][position], dtype=np.int64).reshape(-1, 2)
        learned = np.zeros(len(ids), dtype=bool)
        for start, end in own:
            learned |= (offsets[:, 1] > start) & (offsets[:, 0] < end) & (offsets[:, 1] > offsets[:, 0])
        made.append((ids, learned))
    return made


def _found_by_cutting(tokenizer: Any, text: str, spans: Spans, special: bool) -> tuple[np.ndarray, np.ndarray]:
    def ids_of(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    words = ids_of(text)
    ids = tokenizer.build_inputs_with_special_tokens(words) if special else words
    first = _place_in(ids, words, tokenizer)

    def tokens_up_to(place: int, step: int) -> int:
        """How many tokens there are before the nearest place between two of them, in one direction."""
        for cut in range(place, min(max(place + step * LONGEST, -1), len(text) + 1), step):
            before = ids_of(text[:cut])
            if before == words[: len(before)]:
                return len(before)
        return _common(ids_of(text[:place]), words) + (step > 0)

    learned = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        learned[first + tokens_up_to(start, -1) : first + tokens_up_to(end, 1)] = True
    return np.asarray(ids, dtype=np.int64), learned


def word_numbers(encoded: Any, position: int, tokenizer: Any, words: list[str]) -> list[int | None]:
    """For each token of an encoded list of words, the word it is a piece of; None for special tokens."""
    if encoded.is_fast:
        return encoded.word_ids(position)
    pieces = [tokenizer.tokenize(word) for word in words]
    numbers: list[int | None] = [number for number, own in enumerate(pieces) for _ in own]
    ids = tokenizer.convert_tokens_to_ids([piece for own in pieces for piece in own])
    whole = tokenizer.build_inputs_with_special_tokens(ids)
    found: list[int] = encoded["input_ids"][position]
    first = _place_in(whole, ids, tokenizer)
    behind = len(whole) - len(ids) - first
    kept = len(found) - first - behind  # special tokens stay where words were cut
    cut = len(ids) - kept if tokenizer.truncation_side == "left" else 0
    if found != [*whole[:first], *ids[cut : cut + kept], *whole[first + len(ids) :]]:
        raise UserError(
            f"model.tokenizer: {type(tokenizer).__name__} is a Python tokenizer that does not cut a list of words into "
            "the pieces of each of them, so it cannot be said which tokens belong to which words. Use one with a "
            "tokenizer.json."
        )
    return [None] * first + numbers[cut : cut + kept] + [None] * behind


def whole_length(encoded: Any, position: int, room: int, tokenizer: Any, *text: Any, **how: Any) -> int:
    """The tokens of this text, special ones included, before the tokenizer cut it to fit into `room`. It was called
    with `how`."""
    kept = len(encoded["input_ids"][position])
    if encoded.encodings is not None:
        rest = encoded.encodings[position].overflowing
        if not rest or len(text) == 1:  # each piece of the rest has special tokens of its own
            return kept + sum(len(piece.ids) - sum(piece.special_tokens_mask) for piece in rest)
    elif kept < room:
        return kept
    return len(tokenizer(*text, **how, return_attention_mask=False, verbose=False)["input_ids"])


def _place_in(whole: list[int], part: list[int], tokenizer: Any) -> int:
    for first in range(len(whole) - len(part) + 1):
        if whole[first : first + len(part)] == part:
            return first
    raise UserError(
        f"model.tokenizer: {type(tokenizer).__name__} is a Python tokenizer that puts special tokens into the middle "
        "of a text, so it cannot be said which tokens belong to which words. Use one with a tokenizer.json."
    )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids both begin with."""
    count = 0
    for a, b in zip(one, other):
        if a != b:
            break
        count += 1
    return count
