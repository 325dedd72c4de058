"""Tokenizers written in Python say neither offsets nor words; what is learned is found without them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from transformers import ByT5Tokenizer, PreTrainedTokenizer

from automodel.config.errors import UserError
from automodel.data.batch import IGNORE
from automodel.data.chat import ChatTemplate
from automodel.data.classify import TokenClassifier
from automodel.data.labels import LabelMap
from automodel.data.language import Chats, Instructions
from automodel.data.python_tokenizers import learned_tokens
from automodel.data.samples import SampleWriter
from automodel.data.sequences import SourceTarget

MARKED = (
    "{% for m in messages %}{{ '<s>' + m.role + ': ' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '</s>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *"abcdefghijklmnopqrstuvwxyz :.?",
    "as",
    "sis",
    "ant",
    "us",
    "er",
    " y",
    ": y",
    "es",
    "? ",
]


class Longest(PreTrainedTokenizer):
    """The longest piece first, from left to right; pieces reach over the borders of prompts and answers."""

    model_input_names = ("input_ids", "attention_mask")

    def __init__(self, **kw):
        self.pieces = {piece: number for number, piece in enumerate(PIECES)}
        super().__init__(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>", **kw)

    @property
    def vocab_size(self):
        return len(self.pieces)

    def get_vocab(self):
        return dict(self.pieces)

    def _tokenize(self, text, **_):
        found, place = [], 0
        while place < len(text):
            piece = max((p for p in self.pieces if text.startswith(p, place)), key=len, default=text[place])
            found.append(piece)
            place += len(piece)
        return found

    def _convert_token_to_id(self, token):
        return self.pieces.get(token, 0)

    def _convert_id_to_token(self, index):
        return PIECES[index]

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
        return [self.pieces["<s>"], *token_ids_0, self.pieces["</s>"]]


@pytest.fixture
def tokenizer():
    made = Longest()
    assert not made.is_fast
    return made


def learned(encoder, rows) -> str:
    out = SampleWriter()
    encoder.encode(rows, 0, out)
    assert not out.bad
    labels = out.finish().token_labels
    assert labels is not None
    return "".join(PIECES[i] for i in labels[labels != IGNORE])


@pytest.mark.parametrize("special", [False, True])
def test_tokens_are_those_that_reach_into_the_spans(tokenizer, special):
    chance = random.Random(0)
    for _ in range(300):
        text = "".join(chance.choice([*"abs :y", *PIECES[-8:]]) for _ in range(30))
        start = chance.randrange(len(text))
        end = chance.randrange(start + 1, len(text) + 1)
        ((ids, marks),) = learned_tokens(tokenizer, [text], [[(start, end)]], special)
        pieces = tokenizer._tokenize(text)
        ends = np.cumsum([len(piece) for piece in pieces])
        expected = (ends > start) & (ends - [len(piece) for piece in pieces] < end)
        expected = [False, *expected, False] if special else list(expected)
        assert marks.tolist() == expected, (text, start, end, pieces)
        assert len(ids) == len(expected)


@pytest.mark.parametrize(("template", "second"), [(MARKED, "no"), (UNMARKED, " no")])
def test_answers_of_a_chat(tokenizer, template, second):
    tokenizer.chat_template = template
    said = [("user", "is it so?"), ("assistant", "yes. it is"), ("user", "sure?"), ("assistant", "no")]
    rows = {"messages": [[{"role": role, "content": words} for role, words in said]]}
    encoder = Chats(tokenizer, "messages", 200, True, ChatTemplate(tokenizer))
    assert learned(encoder, rows) == f": yes. it is</s>{second}</s>"


def test_the_answer_of_an_instruction(tokenizer):
    rows = {"prompt": ["say it: "], "completion": ["aye"]}
    encoder = Instructions(tokenizer, {"prompt": "prompt"}, "completion", 100, True)
    assert learned(encoder, rows) == " aye</s>"  # a space before an answer is its own


def test_tags_stand_on_the_first_pieces_of_words(tokenizer):
    out = SampleWriter()
    labels = LabelMap("single_label_classification", 2, ("o", "x"))
    encoder = TokenClassifier(tokenizer, "tokens", "tags", labels, 6, False)
    encoder.encode({"tokens": [["assist", "user", "b"], ["b"]], "tags": [["x", "o", "x"], ["x"]]}, 0, out)
    assert out.truncated == 1
    samples = out.finish()
    assert [PIECES[i] for i in samples.input_ids[:6]] == ["<s>", "as", "sis", "t", "us", "</s>"]
    assert samples.token_labels.tolist() == [IGNORE, 1, IGNORE, IGNORE, 0, IGNORE, IGNORE, 1, IGNORE]


def test_tags_of_words_whose_beginning_was_cut(tokenizer):
    tokenizer.truncation_side = "left"
    out = SampleWriter()
    labels = LabelMap("single_label_classification", 2, ("o", "x"))
    encoder = TokenClassifier(tokenizer, "tokens", "tags", labels, 6, False)
    encoder.encode({"tokens": [["assist", "user", "b"]], "tags": [["x", "o", "x"]]}, 0, out)
    samples = out.finish()
    assert [PIECES[i] for i in samples.input_ids] == ["<s>", "t", "us", "er", "b", "</s>"]
    assert samples.token_labels.tolist()[2:] == [0, IGNORE, 1, IGNORE]


class Joining(Longest):
    """Puts a blank before each word but the first, as no word has by itself."""

    def _encode_plus(self, text, *args, is_split_into_words=False, **kw):
        text = " ".join(text) if is_split_into_words and isinstance(text[0], str) else text
        return super()._encode_plus(text, *args, is_split_into_words=is_split_into_words, **kw)


def test_pieces_that_are_no_words_pieces_are_not_guessed_at():
    labels = LabelMap("single_label_classification", 2, ("o", "x"))
    encoder = TokenClassifier(Joining(), "tokens", "tags", labels, 20, False)
    with pytest.raises(UserError, match="Joining is a Python tokenizer that does not cut a list of words"):
        encoder.encode({"tokens": [["as", "yes"]], "tags": [["x", "o"]]}, 0, SampleWriter())


def test_what_is_cut_is_counted():
    out = SampleWriter()
    encoder = SourceTarget(ByT5Tokenizer(), "source", "target", None, "", 8, 8)
    encoder.encode({"source": ["short", "much longer", "seven.."], "target": ["short", "short", "longer, too"]}, 0, out)
    assert (out.truncated, out.longest) == (1, 12)
    assert (out.truncated_targets, out.longest_target) == (1, 12)
