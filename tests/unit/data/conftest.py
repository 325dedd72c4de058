"""Small stores with known content, shared by the data room's tests."""

from __future__ import annotations

import numpy as np
import pytest

from automodel.data.batch import IGNORE
from automodel.data.samples import SampleWriter
from automodel.data.store import TokenStore
from automodel.tasks.registry import task_named


def make_store(task: str, count: int = 23, seed: int = 0, longest: int = 17, pairs: bool = False) -> TokenStore:
    """Random documents of 2..longest tokens with the labels of the task."""
    random = np.random.default_rng(seed)
    writer = SampleWriter()
    for row in range(count):
        length = int(random.integers(2, longest + 1))
        ids = random.integers(1, 100, length)
        parts: dict = {}
        if pairs:
            parts["token_types"] = (np.arange(length) >= length // 2).astype(np.uint8)
        if task == "text-classification":
            parts["label"] = int(random.integers(0, 3))
        elif task == "multi-label":
            parts["label"] = [float(x) for x in random.integers(0, 2, 4)]
        elif task == "seq2seq":
            parts["target_ids"] = random.integers(1, 100, int(random.integers(1, 6)))
        elif task == "causal-lm":
            labels = ids.copy()
            labels[: int(random.integers(0, length - 1))] = IGNORE
            parts["token_labels"] = labels
        else:
            parts["token_labels"] = np.where(random.random(length) < 0.5, IGNORE, random.integers(0, 5, length))
            parts["token_labels"][0] = 1
        writer.add(row, ids, **parts)
    return TokenStore.in_memory(writer.finish())


@pytest.fixture
def store_of():
    return make_store


def word_piece_tokenizer():
    """A BERT-like tokenizer whose vocabulary is a few words and the letters, so that other words fall into pieces."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "the", *letters, *(f"##{c}" for c in letters)]
    vocabulary = {word: i for i, word in enumerate(words)}
    inner = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = BertPreTokenizer()
    special = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    inner.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(chat: bool = False, bos: bool = False):
    """A decoder's tokenizer: one token for each byte, and ChatML markers where `chat` is wanted."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}
    inner = Tokenizer(BPE(vocabulary, []))
    inner.pre_tokenizer = ByteLevel(add_prefix_space=False)
    inner.decoder = ByteLevelDecoder()
    inner.add_special_tokens([AddedToken(t, special=True) for t in ("<|end|>", "<|im_start|>", "<|im_end|>", "<s>")])
    if bos:
        special = [("<s>", inner.token_to_id("<s>"))]
        inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
    end = "<|im_end|>" if chat else "<|end|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=end, pad_token="<|end|>", bos_token="<s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    if chat:
        tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="session")
def bert_like():
    return word_piece_tokenizer()


@pytest.fixture(scope="session")
def gpt_like():
    return byte_tokenizer()


@pytest.fixture(scope="session")
def gpt_like_with_start():
    return byte_tokenizer(bos=True)


@pytest.fixture(scope="session")
def chat_like():
    return byte_tokenizer(chat=True)


@pytest.fixture
def prepare_rows(tmp_path):
    """`prepare` on rows given as records, written to a file in the test's folder."""
    import json

    from automodel.data.config import DatasetConfig
    from automodel.data.prepare import prepare

    def prepared(rows, tokenizer, task="text-classification", *, name="data.jsonl", positions=512, types=2, **settings):
        keys = ("like", "num_labels", "problem_type", "role", "known_labels")
        options = {key: settings.pop(key) for key in keys if key in settings}
        if rows is not None:
            path = tmp_path / name
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            settings["path"] = str(path)
        cfg = DatasetConfig(cache_dir=str(tmp_path / "cache"), **settings)
        return prepare(
            cfg,
            row_format=task_named(task).rows,
            tokenizer=tokenizer,
            max_positions=positions,
            type_vocab_size=types,
            **options,
        )

    return prepared
