"""Where the words of a text are, as tagged corpora have them: punctuation marks apart, hyphens and apostrophes inside.

Vowel signs and accents that are characters of their own (Devanagari, Arabic, decomposed Latin) belong to their word.
Chinese characters are words of their own, as in the corpora of Chinese. Other scripts without spaces (Thai, kana) have
no such rule: whoever tags them splits the text and gives lists of words.
"""

from __future__ import annotations

import re
import unicodedata

_CHINESE = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_LETTER = rf"(?:(?![{_CHINESE}])\w)"
_WORDS = re.compile(rf"[{_CHINESE}]|{_LETTER}+(?:[-'’]{_LETTER}+)*|[^\w\s]")
_JOINERS = "\u200c\u200d"  # invisible, between the letters of a word


def word_places(text: str) -> list[tuple[int, int]]:
    """First character of each word, and the one behind its last."""
    places: list[tuple[int, int]] = []
    after_mark = False
    for match in _WORDS.finditer(text):
        start, end = match.span()
        mark = text[start] in _JOINERS or unicodedata.category(text[start]).startswith("M")
        first = places[-1][0] if places and places[-1][1] == start else None
        if first is not None and (mark or (after_mark and text[first].isalnum() and text[start].isalnum())):
            places[-1] = (first, end)
        else:
            places.append((start, end))
        after_mark = mark
    return places
