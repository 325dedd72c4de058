"""Generating text, one padded batch at a time, with the model's stock attention and its key/value cache.

A causal model is padded on the left, so that every row ends where its answer begins; an encoder-decoder on the right.
Greedy decoding is the default whatever the model's own generation config prefers: the same prompt gives the same
answer. Of that config only what is part of the model counts, and not what somebody likes: two answers for each prompt
would not even belong to the prompts that they are put beside.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from automodel.config.errors import UserError
from automodel.data.batch import PaddedBatch
from automodel.models.forward import stock_attention
from automodel.models.quiet import quiet_transformers
from automodel.models.task_head import TaskHead

# What of a generation config the model was trained with: how its texts begin and end, and tokens that it must not make.
PART_OF_THE_MODEL = (
    "bos_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
    "begin_suppress_tokens",
)  # fmt: skip

SHOWS = 0.25
"""Of the logits' spread. Rounding in bf16 stays below a tenth of it, and padding that is read changes all of them."""


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
        """For transformers' `GenerationConfig`."""
        drawn = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p or 1.0, "top_k": 0}
        return {"num_beams": self.num_beams, "use_cache": True, **(drawn if self.temperature else {})}


def prompts_together(
    lengths: Sequence[int], batch_size: int, new_tokens: int, room: int | None, pad: bool = True
) -> list[list[int]]:
    """Prompts that share a batch, longest first. A batch is as wide as its longest prompt, and nothing is written past
    the model's last position: a prompt that leaves less room than `new_tokens` takes only those of its own length
    along, so that everybody's answer is as long as it would be alone. So does every prompt where none may be padded."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        widest = lengths[batches[-1][0]] if batches else 0
        tight = not pad or (room is not None and widest + new_tokens > room)
        if not batches or len(batches[-1]) == batch_size or (tight and lengths[index] < widest):
            batches.append([])
        batches[-1].append(index)
    return batches


def reads_padding(model: Any, prompt_T: Tensor, pad_token: int, pads: int) -> bool:
    """Whether padding before a prompt changes what the model says next, whatever the mask says: no mask reaches XLNet's
    positions, nor RecurrentGemma's memory while it writes. Tried out with two tokens, because no config tells."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=2, pad_token_id=pad_token, do_sample=False, use_cache=True)
    said = []
    with torch.inference_mode(), stock_attention(model), quiet_transformers(), _generating_by(config, model):
        for before in (0, pads):
            ids_BS = torch.cat([prompt_T.new_full((before,), pad_token), prompt_T])[None]
            mask_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device)[None] >= before
            how: Any = {"return_dict_in_generate": True, "output_logits": True}
            made = model.generate(input_ids=ids_BS, attention_mask=mask_BS.long(), **how)
            said.append(torch.cat(made.logits).float())
    alone, behind = said
    return bool((alone - behind).abs().max() > SHOWS * alone.std())


def generate_batch(
    model: Any,
    tokenizer: Any,
    batch: PaddedBatch,
    sampling: Sampling,
    stops: Sequence[int],
    max_positions: int | None,
    head: TaskHead,
    on_text: Callable[[str], None] | None = None,
) -> list[tuple[str, bool]]:
    """For each row: the text after the prompt, and whether the model ended it itself. `on_text` is given the text of a
    single row in pieces, as they are made."""
    causal = head.next_token
    width = batch.input_ids_BS.shape[1]
    longest = sampling.max_new_tokens
    if causal and max_positions is not None:
        longest = min(longest, max_positions - width)
    with torch.inference_mode(), stock_attention(model), quiet_transformers():
        config = _settings(model.generation_config, tokenizer, sampling, stops, longest)
        with _generating_by(config, model):
            output_BS = model.generate(
                input_ids=batch.input_ids_BS,
                attention_mask=batch.attention_mask_BS,
                generation_config=config,
                streamer=None if on_text is None else _streamer(tokenizer, on_text, stops),
            )
    return [_answer(tokenizer, row, stops, config) for row in output_BS[:, width if causal else 1 :].tolist()]


def _settings(own: Any, tokenizer: Any, sampling: Sampling, stops: Sequence[int], longest: int) -> Any:
    """What is part of the model, out of its `own` settings, and what was asked for."""
    from transformers import GenerationConfig

    # Some models must not make a special token (Marian its padding, for which it has no weights). Words are taste.
    special = set(tokenizer.all_special_ids)
    never = [ids for ids in own.bad_words_ids or () if special.issuperset(ids)]
    return GenerationConfig(
        **{name: getattr(own, name) for name in PART_OF_THE_MODEL},
        **sampling.keywords(),
        bad_words_ids=never or None,
        max_new_tokens=longest,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=list(stops) or None,
    )


@contextmanager
def _generating_by(config: Any, model: Any) -> Generator[None]:
    """transformers fills whatever a config leaves open from the model's own, which is therefore put aside."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


def _streamer(tokenizer: Any, on_text: Callable[[str], None], stops: Sequence[int]) -> Any:
    from transformers import TextStreamer

    class Pieces(TextStreamer):
        def put(self, value: Tensor) -> None:
            if not self.next_tokens_are_prompt:  # which is left out as a whole
                value = value[~torch.isin(value, torch.tensor(stops, dtype=value.dtype))]  # a stop may be a word
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            on_text(text)

    return Pieces(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _answer(tokenizer: Any, ids: list[int], stops: Sequence[int], config: Any) -> tuple[str, bool]:
    end = next((place for place, token in enumerate(ids) if token in stops), None)
    by_the_limit = config.forced_eos_token_id is not None and end == config.max_new_tokens - 1  # as BART's texts end
    return tokenizer.decode(ids[:end], skip_special_tokens=True), end is not None and not by_the_limit
