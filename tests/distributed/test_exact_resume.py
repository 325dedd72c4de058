"""A run with dropout that was cut short goes on with the very numbers of the one that was left alone: losses, weights,
optimizer and generators, to the last bit. Plain, captured (without its graphs) and sharded steps, on one rank and on
two, with a step in between that has too few documents for all micro-batches of all ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console

import tiny_runs as tiny
from automodel.distributed.processes import Processes
from automodel.distributed.world import World
from automodel.engine import run as engine_run
from automodel.engine import steps
from automodel.engine.observe import Observer
from automodel.plan.check import load_run_config
from many_runs import saved

STEPS, CUT = 9, 6
# 43 rows and 8 in a step: the sixth step has three; of two ranks, one has two micro-batches and the other one. With 14
# in a step the fourth and the eighth have one, and a rank has none.
ROWS = 43
COMMON = (
    f"step_scheduler: {{max_steps: {STEPS}, log_every_steps: 1, global_batch_size: 8, ckpt_every_steps: {CUT}}}\n"
    f"checkpoint: {{keep_last: 10}}\noptimizer: {{lr: 1e-3, weight_decay: 0.01}}\n{tiny.FP32}"
)
AT_ONCE = COMMON.replace("global_batch_size: 8", "global_batch_size: 14") + "dataloader: {batch_size: 7}\n"
SINGLY = COMMON + "dataloader: {batch_size: 1}\n"
CLASSES = "model: {bert}\ntask: text-classification\ndataset: {{path: {rows}}}\n"
WORDS = "model: {llama}\ntask: causal-lm\ndataset: {{path: {texts}}}\n"
SHARDS = "distributed: {{strategy: fsdp2}}\n"
RUNS = {
    "plain": CLASSES,
    "captured": CLASSES,
    "captured-at-once": CLASSES,
    "captured-stock": CLASSES,
    "captured-adapter": WORDS + "peft: {{dim: 4, dropout: 0.2}}\n",
    "shards": CLASSES + SHARDS,
}
ON = [(1, "plain"), (1, "captured"), (1, "shards"), *((2, name) for name in RUNS)]


class OtherDraws(Observer):
    """Layers that draw from the generators of Python and NumPy, as some models' do: so every step draws from both."""

    def __init__(self):
        self.drawn: list[list[float]] = []

    def step_begins(self) -> None:
        self.drawn.append([random.random(), random.gauss(), np.random.rand(), np.random.randn()])


def make_places(folder: Path) -> dict[str, Path]:
    """Wide enough for fused blocks."""
    import transformers as t

    wide = {"hidden_size": 64, "intermediate_size": 128}
    tiny.make_model_folder(folder / "bert", dropout=0.2, **wide)
    torch.manual_seed(0)
    tokenizer = tiny.make_tokenizer(decoder=True)
    config = t.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=len(tokenizer), pad_token_id=0,
        eos_token_id=3, bos_token_id=2, max_position_embeddings=128, attention_dropout=0.2, **wide,
    )  # fmt: skip
    t.LlamaForCausalLM(config).save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    texts = [{"text": row["text"]} for row in tiny.reviews(ROWS, seed=2)]
    return {
        "bert": folder / "bert",
        "llama": folder / "llama",
        "rows": tiny.write_jsonl(folder / "rows.jsonl", tiny.reviews(ROWS)),
        "texts": tiny.write_jsonl(folder / "texts.jsonl", texts),
    }


def train(name: str, folder: Path, out: Path, ranks: Processes, resume: bool = False) -> list[list[float]]:
    """The real command's way, with the plan that a GPU would have had for its steps."""
    prepare = engine_run.prepare_or_step_aside

    def as_on_a_gpu(*args):
        prepared = prepare(*args)
        changed = {"capture": "captured" in name, "fused_kernels": name in ("captured", "captured-at-once")}
        return dataclasses.replace(prepared, plan=dataclasses.replace(prepared.plan, word_rows=0, **changed))

    cfg = load_run_config([folder / f"{name}.yaml"], [f"checkpoint.checkpoint_dir={out}"])
    drawn = OtherDraws()
    with pytest.MonkeyPatch.context() as patch, open(os.devnull, "w") as nowhere:
        patch.setattr(engine_run, "prepare_or_step_aside", as_on_a_gpu)
        patch.setattr(steps, "fits", lambda *args: True)  # a GPU's question
        engine_run.finetune(cfg, resume=resume, ranks=ranks, console=Console(file=nowhere), observer=drawn)
    return drawn.drawn


def one_rank(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    place = folder / f"on{size}"
    dist.init_process_group("gloo", init_method=f"file://{folder / f'meet{size}'}", rank=rank, world_size=size)
    ranks = Processes(World(rank, size, rank, size))
    for name in [name for ranks_of_it, name in ON if ranks_of_it == size]:
        alone, again = place / name / "alone", place / name / "again"
        drawn = train(name, folder, alone, ranks)
        if ranks.first:
            shutil.copytree(alone, again)
            shutil.rmtree(again / "run" / "steps" / f"step-{STEPS:08d}")
        ranks.barrier()
        drawn_again = train(name, folder, again, ranks, resume=True)
        (place / name / f"drawn.{rank}.json").write_text(json.dumps([drawn[CUT:], drawn_again]))
    ranks.close()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exact")
    places = make_places(folder)
    for name, text in RUNS.items():
        (folder / f"{name}.yaml").write_text(text.format(**places) + (AT_ONCE if "at-once" in name else SINGLY))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
        for size in (1, 2):
            mp.start_processes(one_rank, (size, folder), nprocs=size, start_method="fork")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), ON)
def test_a_cut_run_goes_on_with_the_very_numbers(trained, size, name):
    alone, again = (trained / f"on{size}" / name / which for which in ("alone", "again"))
    wanted = tiny.losses(alone)
    assert len(wanted) == STEPS
    assert tiny.losses(again) == wanted
    for rank in range(size):
        drawn, drawn_again = json.loads((trained / f"on{size}" / name / f"drawn.{rank}.json").read_text())
        assert len(drawn) == STEPS - CUT
        assert drawn_again == drawn, f"rank {rank}"
    for group in ("model", "optimizer", "rng"):
        expected, found = saved(alone, STEPS, group), saved(again, STEPS, group)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected), group
        assert group != "rng" or size == 1 or not torch.equal(found["torch"], found["torch.1"])
