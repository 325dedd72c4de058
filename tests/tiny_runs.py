"""Small real runs for tests: a model folder with a tokenizer, data files, and the YAML that ties them together.

Everything is made here; nothing is downloaded. The task is learnable: `good` words mean label 1, `bad` ones label 0.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

GOOD = ["good", "great", "fine", "lovely", "superb", "happy", "bright", "warm"]
BAD = ["bad", "awful", "poor", "ugly", "dull", "sad", "dark", "cold"]
NEUTRAL = [
    "the",
    "a",
    "film",
    "plot",
    "actor",
    "scene",
    "was",
    "is",
    "and",
    "with",
    "story",
    "music",
    "camera",
    "very",
    "quite",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CHAT = ["user", "assistant", "system", "question", "answer", ":", ".", "?", ",", "capital", "of", "what"]

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '[CLS] ' + m['role'] + ' : ' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + ' [SEP]' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + ' [SEP]' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[CLS] assistant : ' }}{% endif %}"
)

FP32 = "training_optimizations: {precision: fp32}\n"
"""In the YAML of a test whose subject is not the precision: left open, it is bf16 on some processors."""


def make_tokenizer(decoder: bool = False):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    words = SPECIAL + GOOD + BAD + NEUTRAL + CHAT
    vocabulary = {w: i for i, w in enumerate(dict.fromkeys(words))}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = WhitespaceSplit()
    if not decoder:
        inner.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        eos_token="[SEP]" if decoder else None,
        model_max_length=128,
    )
    if decoder:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model_folder(
    folder: Path, kind: str = "bert", seed: int = 0, dropout: float = 0.0, classifier: bool = False, **extra
) -> Path:
    """A folder with random tiny weights of a base model (encoder) or a causal LM, and its tokenizer. `classifier`: a
    BERT that has its head already. `extra`: keys of the config; for BERT they may be sizes too."""
    import torch
    import transformers as t

    torch.manual_seed(seed)
    decoder = kind in ("llama", "gpt2", "qwen2")
    tokenizer = make_tokenizer(decoder)
    size = {"vocab_size": len(tokenizer), "pad_token_id": 0}
    if kind == "bert":
        usual = {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
            "max_position_embeddings": 128, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
        }  # fmt: skip
        config = t.BertConfig(**usual | size | extra)
        model = t.BertForSequenceClassification(config) if classifier else t.BertForMaskedLM(config)
    elif kind == "distilbert":
        config = t.DistilBertConfig(
            dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=128, dropout=dropout,
            attention_dropout=dropout, seq_classif_dropout=dropout, **size, **extra,
        )  # fmt: skip
        model = t.DistilBertForMaskedLM(config)
    elif kind == "llama":
        config = t.LlamaConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
            max_position_embeddings=128, attention_dropout=dropout, eos_token_id=3, bos_token_id=2, **size, **extra,
        )  # fmt: skip
        model = t.LlamaForCausalLM(config)
    elif kind == "t5":
        config = t.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=dropout, decoder_start_token_id=0,
            eos_token_id=3, **size, **extra,
        )  # fmt: skip
        model = t.T5ForConditionalGeneration(config)
    elif kind == "bart":
        config = t.BartConfig(
            d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=128, dropout=dropout, bos_token_id=2,
            eos_token_id=3, decoder_start_token_id=3, forced_eos_token_id=3, **size, **extra,
        )  # fmt: skip
        model = t.BartForConditionalGeneration(config)
    else:
        raise ValueError(kind)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def reviews(count: int, seed: int = 0, longest: int = 30) -> list[dict]:
    chance = random.Random(seed)
    rows = []
    for index in range(count):
        label = index % 2
        length = chance.randint(3, longest)
        words = [chance.choice((GOOD if label else BAD) if chance.random() < 0.4 else NEUTRAL) for _ in range(length)]
        words[0] = chance.choice(GOOD if label else BAD)
        rows.append({"text": " ".join(words), "label": label})
    return rows


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def in_fp32(text: str) -> str:
    """A YAML's text that asks for fp32, unless it has training_optimizations of its own."""
    return text if "training_optimizations:" in text else FP32 + text


def write_run(
    folder: Path, *, kind: str = "bert", rows: int = 48, validation: int = 16, text: str = "", **model
) -> Path:
    """A model folder, train.jsonl, test.jsonl and run.yaml in `folder`; `text` is appended to the YAML. The run is in
    fp32, whatever the processor; a `text` with training_optimizations says the precision itself."""
    make_model_folder(folder / "model", kind, **model)
    write_jsonl(folder / "train.jsonl", reviews(rows))
    write_jsonl(folder / "test.jsonl", reviews(16, seed=1))
    path = folder / "run.yaml"
    path.write_text(
        f"model: {folder / 'model'}\n"
        "task: text-classification\n"
        f"dataset: {{path: {folder / 'train.jsonl'}}}\n"
        f"validation_dataset: {{path: {folder / 'test.jsonl'}}}\n"
        f"checkpoint: {{checkpoint_dir: {folder / 'out'}}}\n"
        "optimizer: {lr: 1e-3}\n" + in_fp32(text)
    )
    return path


def automodel(*arguments: object, cwd: Path | None = None, check: bool = True, **environment: str):
    """Runs the real command in its own process, offline, with its token cache in the temporary folder."""
    command = [sys.executable, "-m", "automodel", *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", **environment}
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    if check and result.returncode != 0:
        raise AssertionError(f"{' '.join(command)}\nexit {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result


def losses(run_folder: Path, split: str = "train") -> dict[int, float]:
    lines = (run_folder / "run" / "metrics.jsonl").read_text().splitlines()
    values = [json.loads(line) for line in lines]
    return {v["step"]: v["loss"] for v in values if v["split"] == split}
