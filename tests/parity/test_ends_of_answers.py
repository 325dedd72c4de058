"""What is learned at the end of an answer: beside TRL 1.16's own trainer, with answers alone and with whole
conversations.

A template like ChatML's writes a newline behind `<|im_end|>`. TRL's training form of it learns that newline as part of
the answer. A run of a YAML file learns an answer up to the token that ends it: generation stops there, so no model is
ever asked for the newline.
"""

from __future__ import annotations

import json

import pytest
from datasets import Dataset

from automodel.data.batch import IGNORE
from automodel.data.config import DatasetConfig
from automodel.data.prepare import prepare
from automodel.tasks.registry import CAUSAL_LM
from marked_words import words
from tiny_models import tiny

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'automodel-finetune[compare]'")

CHAT = [
    {"role": "user", "content": "what is bad"},
    {"role": "assistant", "content": "good film"},
    {"role": "user", "content": "more plot"},
    {"role": "assistant", "content": "fine actor"},
]
END = {"qwen3_instruct_2507": "<|im_end|>", "lfm2": "<|im_end|>", "gemma3": "<end_of_turn>", "llama3": "<|eot_id|>"}
"""Families of templates, and the token that ends an answer of each. Llama's has no newline behind it."""


def of_trl(family, folder, answers):
    """Tokens and labels of the batch that TRL's trainer makes of the chat."""
    tokenizer = words(family)
    options = {"assistant_only_loss": answers, "report_to": [], "use_cpu": True, "bf16": False, "max_length": None}
    sizes = {"pad_token_id": 0, "vocab_size": len(tokenizer), "max_position_embeddings": 256}
    trainer = trl.SFTTrainer(
        tiny("llama", "causal-lm", **sizes)[1], trl.SFTConfig(str(folder), **options),
        train_dataset=Dataset.from_list([{"messages": CHAT}]), processing_class=tokenizer,
    )  # fmt: skip
    batch = trainer.data_collator([trainer.train_dataset[0]])
    return batch["input_ids"][0].tolist(), batch["labels"][0].tolist()


def of_yaml(family, folder, answers):
    """Tokens and labels that a run of a YAML file has of the chat."""
    (folder / "chat.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    cache = str(folder / "cache")
    cfg = DatasetConfig(path=str(folder / "chat.jsonl"), answer_only_loss=answers, cache_dir=cache)
    store = prepare(cfg, row_format=CAUSAL_LM.rows, tokenizer=words(family), max_positions=256, type_vocab_size=0).store
    return store.input_ids.tolist(), store.token_labels.tolist()


@pytest.mark.parametrize("family", END)
def test_an_answer_is_learned_up_to_its_end_and_by_trl_with_the_newline_behind_it(family, tmp_path):
    ids, ours = of_yaml(family, tmp_path, answers=True)
    same, theirs = of_trl(family, tmp_path, answers=True)
    end, newline = words(family).convert_tokens_to_ids([END[family], "\n"])
    assert ids == same
    by_trl_alone = [place for place, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    behind_an_end = [place + 1 for place, token in enumerate(ours) if token == end]
    assert len(behind_an_end) == 2
    assert by_trl_alone == [place for place in behind_an_end if place < len(ids) and ids[place] == newline]
    assert len(by_trl_alone) == (0 if family == "llama3" else 2)
    assert {ours[place] for place in by_trl_alone} <= {IGNORE}


@pytest.mark.parametrize("family", END)
def test_a_whole_conversation_is_learned_as_trl_learns_it(family, tmp_path):
    ids, ours = of_yaml(family, tmp_path, answers=False)
    assert (ids, ours) == of_trl(family, tmp_path, answers=False)
    assert ours == ids
