"""A tiny tokenizer that keeps the marks of every family's chat template as tokens, line ends among them, with the
template of one family out of TRL's package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tiny_runs import make_tokenizer

_TRL = find_spec("trl")
TEMPLATES = Path(_TRL.origin).parent / "chat_templates" if _TRL is not None and _TRL.origin else Path()
MARKS = (
    "<|im_start|>", "<|im_end|>", "<end_of_turn>", "<start_of_turn>", "<|end|>", "<|user|>", "<|assistant|>",
    "<|start|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|return|>", "<|channel|>", "<|message|>",
    "<|eot|>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<turn|>", "<|turn>",
    "<|START_OF_TURN_TOKEN|>", "<think>", "</think>", "<|observation|>", "<|system|>", "[gMASK]", "<sop>", "\n",
    "<|call|>", "<tool_call>", "</tool_call>",
)  # fmt: skip


def words(family: str):
    """The tokenizer with one family's template."""
    made = make_tokenizer(decoder=True)
    made.add_special_tokens({"bos_token": "<bos>", "additional_special_tokens": list(MARKS)})
    made.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    return made
