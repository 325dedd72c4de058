"""Where an answer ends: at every token that the chat template closes a turn with, named in the tokenizer's settings or
not."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from automodel.data.chat import ChatTemplate
from automodel.data.language import Chats
from automodel.engine.prompts import PromptWriter

TURNS = "{% for m in messages %}<turn>{{ m.content }}<close>\n{% endfor %}{% if add_generation_prompt %}<turn>"


@pytest.mark.parametrize(("rest", "stops"), [
    ("{% endif %}", {"<eos>", "<close>"}),
    ("{% else %}<eos>{% endif %}", {"<eos>", "<close>"}),
], ids=["a token without a name", "ended twice"])  # fmt: skip
def test_every_token_that_closes_a_turn_ends_an_answer(rest, stops):
    inner = Tokenizer(WordLevel({"x": 0, "[UNK]": 1}, unk_token="[UNK]"))
    inner.pre_tokenizer = Whitespace()
    inner.add_special_tokens([AddedToken(text, special=True) for text in ("<eos>", "<turn>", "<close>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="[UNK]")
    tokenizer.chat_template = TURNS + rest
    assert "<close>" not in tokenizer.all_special_tokens
    writer = PromptWriter(tokenizer, Chats(tokenizer, "messages", 8, True, ChatTemplate(tokenizer)))
    assert set(tokenizer.convert_ids_to_tokens(writer.stops())) == stops
