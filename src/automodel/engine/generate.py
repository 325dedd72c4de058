"""Generating text, one padded batch at a time, with the model's stock attention and its key/value cache.

A causal model is padded on the left, so that every row ends where its answer begins; an encoder-decoder on the right.
Greedy decoding is the default whatever the model's own generation config prefers: the same prompt gives the same
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from automodel.config.errors import UserError
from automodel.data.batch import PaddedBatch
from automodel.models.forward import stock_attention
from automodel.models.quiet import quiet_transformers

# What models prefer in their generation configs. A penalty on words that were there already (Qwen2.5: 1.1) would keep
# a model from answering in the words of its prompt.
_PLAIN: dict[str, Any] = {
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": None, "typical_p": 1.0, "min_p": None,
    "bad_words_ids": None, "exponential_decay_length_penalty": None,
}  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    max_new_tokens: int
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_p: float | None = None
    num_beams: int = 1
    seed: int = 42

    def check(self) -> None:
        wrong = [
            (self.max_new_tokens < 1, "--max-new-tokens must be at least 1", self.max_new_tokens),
            (not 0 <= self.temperature < float("inf"), "--temperature must be 0 or more", self.temperature),
            (self.num_beams < 1, "--num-beams must be at least 1", self.num_beams),
            (self.top_p is not None and not 0 < self.top_p <= 1, "--top-p must lie in (0, 1]", self.top_p),
        ]
        for is_wrong, message, value in wrong:
            if is_wrong:
                raise UserError(f"{message}; got {value}.")
        if self.top_p is not None and not self.temperature:
            raise UserError("--top-p only matters when tokens are drawn: give a --temperature above 0 too.")

    def keywords(self) -> dict[str, Any]:
        """For transformers' `generate`. What does not apply is cleared: a model's own settings must not leak in."""
        if self.temperature:
            drawn = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p or 1.0, "top_k": 0}
        else:
            drawn = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {**_PLAIN, **drawn, "num_beams": self.num_beams, "use_cache": True}


def prompts_together(lengths: Sequence[int], batch_size: int, new_tokens: int, room: int | None) -> list[list[int]]:
    """Prompts that share a batch, longest first. A batch is as wide as its longest prompt, and nothing is written past
    the model's last position: a prompt that leaves less room than `new_tokens` takes only those of its own length
    along, so that everybody's answer is as long as it would be alone."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        widest = lengths[batches[-1][0]] if batches else 0
        tight = room is not None and widest + new_tokens > room
        if not batches or len(batches[-1]) == batch_size or (tight and lengths[index] < widest):
            batches.append([])
        batches[-1].append(index)
    return batches


def generate_batch(
    model: Any,
    tokenizer: Any,
    batch: PaddedBatch,
    sampling: Sampling,
    stops: Sequence[int],
    max_positions: int | None,
    task: str,
    on_text: Callable[[str], None] | None = None,
) -> list[tuple[str, bool]]:
    """For each row: the text after the prompt, and whether the model ended it itself. `on_text` is given the text of a
    single row in pieces, as they are made."""
    causal = task == "causal-lm"
    width = batch.input_ids_BS.shape[1]
    longest = sampling.max_new_tokens
    if causal and max_positions is not None:
        longest = min(longest, max_positions - width)
    with torch.inference_mode(), stock_attention(model), quiet_transformers():
        output_BS = model.generate(
            input_ids=batch.input_ids_BS,
            attention_mask=batch.attention_mask_BS,
            max_new_tokens=longest,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=list(stops) or None,
            streamer=None if on_text is None else _streamer(tokenizer, on_text),
            **sampling.keywords(),
        )
    return [_answer(tokenizer, row, stops) for row in output_BS[:, width if causal else 1 :].tolist()]


def _streamer(tokenizer: Any, on_text: Callable[[str], None]) -> Any:
    from transformers import TextStreamer

    class Pieces(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            on_text(text)

    return Pieces(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _answer(tokenizer: Any, ids: list[int], stops: Sequence[int]) -> tuple[str, bool]:
    end = next((place for place, token in enumerate(ids) if token in stops), None)
    return tokenizer.decode(ids[:end], skip_special_tokens=True), end is not None
