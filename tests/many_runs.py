"""The same small runs on one, two and four ranks, in every layout; started once for all tests of this folder.

Real processes on the CPU, with gloo, in fp32 and without dropout. The data end in an epoch's last step of one document,
so that with several ranks some have none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import tiny_runs as tiny
from automodel.checkpoint.catalog import Checkpoint

STEPS = 10
SAVED = 5
TOLERANCE = 1e-5  # fp32; sums in another order

COMMON = (
    f"step_scheduler: {{max_steps: {STEPS}, log_every_steps: 1, global_batch_size: 8, val_every_steps: 5, "
    f"ckpt_every_steps: {SAVED}}}\n"
    "checkpoint: {keep_last: 10}\n"
    "dataloader: {batch_size: 2}\n"
    "optimizer: {lr: 1e-3, weight_decay: 0.01}\n"
    f"{tiny.FP32}"
)

# 41 rows and 8 in a step: the sixth step has one.
RUNS = {
    "classes": (
        "model: {bert}\ntask: text-classification\ndataset: {{path: {rows}}}\nvalidation_dataset: {{path: {test}}}\n"
        "loss_fn: {{class_weights: [1.0, 3.0]}}\n"
    ),
    "padded": (
        "model: {bert}\ntask: text-classification\ndataset: {{path: {rows}}}\nvalidation_dataset: {{path: {test}}}\n"
        "packed_sequence: {{enabled: false}}\n"
    ),
    "words": "model: {llama}\ntask: causal-lm\ndataset: {{path: {texts}}}\nvalidation_dataset: {{path: {texts}}}\n",
    "bins": (
        "model: {llama}\ntask: causal-lm\ndataset: {{path: {texts}}}\nvalidation_dataset: {{path: {texts}}}\n"
        "packed_sequence: {{packed_sequence_size: 48}}\n"
    ),
    "adapter": (
        "model: {llama}\ntask: causal-lm\ndataset: {{path: {texts}}}\nvalidation_dataset: {{path: {texts}}}\n"
        "peft: {{dim: 4}}\n"
    ),
    "qlora": (
        "model: {llama}\ntask: causal-lm\ndataset: {{path: {texts}}}\nvalidation_dataset: {{path: {texts}}}\n"
        "peft: {{dim: 4}}\nquantization: {{load_in_4bit: true, bnb_4bit_use_double_quant: true}}\n"
    ),
    "dora": (
        "model: {bert}\ntask: text-classification\ndataset: {{path: {rows}}}\nvalidation_dataset: {{path: {test}}}\n"
        "peft: {{dim: 4, use_dora: true}}\n"
    ),
    "topics": (
        "model: {qwen}\ntask: text-classification\ndataset: {{path: {rows}}}\nvalidation_dataset: {{path: {test}}}\n"
    ),
}
PER_BIN = ("batch_size: 2", "batch_size: 1")

LAYOUTS = {
    "ddp": "strategy: ddp, dp_size: none",
    "fsdp": "_target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager, dp_size: none",
    "hsdp": "strategy: fsdp2, dp_replicate_size: 2, reduce_dtype: float32",
    "tp": "strategy: fsdp2, tp_size: 2",
    "sp": "tp_size: 2, sequence_parallel: true",
    "cp": "cp_size: 2",
    "tpcp": "dp_size: 1, tp_size: 2, cp_size: 2",
}

PLAIN = ["classes", "padded", "words", "bins"]
PLAIN_ON_FOUR = ["classes", "bins"]  # two cores: four ranks cost twice as much as two
SHARDED = {
    2: ["words-fsdp", "adapter-fsdp", "qlora-fsdp", "dora-fsdp", "adapter-tp", "topics-sp", "words-tp", "classes-cp"],
    4: ["classes-hsdp", "bins-tp", "words-tpcp", "words-fsdp", "adapter-fsdp", "qlora-fsdp"],
}
"""`run-layout`, by the number of ranks."""


def start(ranks: int, folder: Path, names: list[str]) -> str:
    """The runs, on so many ranks, and what they said."""
    command = [sys.executable, str(Path(__file__).parent / "distributed" / "train_many.py")]
    if ranks > 1:
        options = ["--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, "-m", "torch.distributed.run", *options, command[1]]
    files = [str(folder / f"{name}.yaml") for name in names]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "AUTOMODEL_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [*command, str(folder / f"on{ranks}"), *files], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def make_runs(folder: Path) -> Path:
    """on1/…, on2/…, on4/…."""
    places = {
        "bert": tiny.make_model_folder(folder / "bert"),
        "llama": tiny.make_model_folder(folder / "llama", "llama", tie_word_embeddings=True),
        "qwen": make_qwen(folder / "qwen"),
        "rows": tiny.write_jsonl(folder / "rows.jsonl", tiny.reviews(41)),
        "test": tiny.write_jsonl(folder / "test.jsonl", tiny.reviews(11, seed=1)),
        "texts": tiny.write_jsonl(folder / "texts.jsonl", [{"text": row["text"]} for row in tiny.reviews(41, seed=2)]),
    }
    for name, text in RUNS.items():
        common = COMMON.replace(*PER_BIN) if name == "bins" else COMMON
        for suffix, layout in {"": LAYOUTS["ddp"], **{f"-{key}": value for key, value in LAYOUTS.items()}}.items():
            (folder / f"{name}{suffix}.yaml").write_text(
                text.format(**places) + common + f"distributed: {{{layout}}}\n"
            )
    start(1, folder, list(RUNS))
    start(2, folder, [*PLAIN, *SHARDED[2]])
    start(4, folder, [*PLAIN_ON_FOUR, *SHARDED[4]])
    return folder


def make_qwen(folder: Path) -> Path:
    """Qwen3: heads have norms of their own. Its two tables are not tied."""
    import transformers as t

    torch.manual_seed(1)
    tokenizer = tiny.make_tokenizer(decoder=True)
    config = t.Qwen3Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        max_position_embeddings=128, head_dim=8, vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=3,
        bos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    t.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def saved(folder: Path, step: int, group: str = "model") -> dict[str, torch.Tensor]:
    return Checkpoint(step, folder / "run" / "steps" / f"step-{step:08d}").tensors(group)


def accuracies(folder: Path, since: int) -> dict[int, float]:
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return {v["step"]: round(v["accuracy"], 6) for v in lines if v["split"] == "validation" and v["step"] > since}


def assert_same(expected: Path, found: Path, since: int = 0) -> None:
    for split in ("train", "validation"):
        wanted, got = tiny.losses(expected, split), tiny.losses(found, split)
        assert wanted.keys() == got.keys()
        assert all(abs(wanted[step] - got[step]) < TOLERANCE for step in wanted if step > since), (wanted, got)
    assert accuracies(expected, since) == accuracies(found, since)
    for group in ("model", "optimizer"):
        wanted, got = saved(expected, STEPS, group), saved(found, STEPS, group)
        assert wanted.keys() == got.keys()
        for name in wanted:
            torch.testing.assert_close(got[name], wanted[name], atol=TOLERANCE, rtol=TOLERANCE)
