"""The steps of several ranks on a GPU, on two real processes without one (gloo, fp32): the captured step without its
graphs (flat gradients, sums piece by piece, one flat update), and the sharded step with fused blocks. Both give the
losses and the weights of the plain step of one process."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tiny_runs as tiny
from automodel.distributed.processes import Processes
from automodel.distributed.shards import whole_of
from automodel.distributed.world import World
from automodel.engine import gradient_pieces
from automodel.engine.prepare import prepare_run
from automodel.engine.sharded import ShardedStep
from automodel.engine.steps import make_step, make_step_loader
from automodel.engine.together import TogetherOnHost
from automodel.plan.check import load_run_config
from many_runs import TOLERANCE

pytestmark = pytest.mark.slow

STEPS = 10
WEIGHTS = 3e-5
"""Where a gradient is nearly zero AdamW makes a part of a step, of 1e-3, of its rounding. On a processor without
AVX-512 one element of 4,096 is 1.05e-5 away."""
# 41 rows and 8 in a step: the sixth step has one, and one rank none.
COMMON = (
    f"step_scheduler: {{max_steps: {STEPS}, global_batch_size: 8}}\noptimizer: {{lr: 1e-3, weight_decay: 0.01}}\n"
    "checkpoint: {enabled: false}\n"
)
WORDS = "model: {llama}\ntask: causal-lm\ndataset: {{path: {texts}}}\n"
CLASSES = "model: {bert}\ntask: text-classification\ndataset: {{path: {rows}}}\n"
TOPICS = "model: {qwen}\ntask: text-classification\ndataset: {{path: {rows}}}\n"
UNTIED = "model: {qwen}\ntask: causal-lm\ndataset: {{path: {texts}}}\n"
SHARDS = "distributed: {{strategy: fsdp2}}\n"
RUNS = {
    "words": WORDS + "dataloader: {{batch_size: 4}}\n",
    "words-accumulated": WORDS + "dataloader: {{batch_size: 1}}\n",
    "words-stock": WORDS + "dataloader: {{batch_size: 4}}\n",
    "classes": CLASSES + "dataloader: {{batch_size: 4}}\nloss_fn: {{class_weights: [1.0, 3.0]}}\n",
    "classes-accumulated": CLASSES + "dataloader: {{batch_size: 2}}\n",
    "adapter": WORDS + "dataloader: {{batch_size: 4}}\npeft: {{dim: 4}}\n",
    "words-shards": WORDS + "dataloader: {{batch_size: 4}}\n" + SHARDS,
    "words-shards-accumulated": WORDS + "dataloader: {{batch_size: 1}}\n" + SHARDS,
    "words-shards-again": WORDS
    + "dataloader: {{batch_size: 2}}\ntraining_optimizations: {{precision: fp32, gradient_checkpointing: full}}\n"
    + SHARDS,
    "untied": UNTIED + "dataloader: {{batch_size: 4}}\n",
    "topics-shards": TOPICS + "dataloader: {{batch_size: 4}}\n" + SHARDS,
    "adapter-shards": WORDS + "dataloader: {{batch_size: 4}}\npeft: {{dim: 4}}\n" + SHARDS,
    "topics-adapter-shards": TOPICS + "dataloader: {{batch_size: 4}}\npeft: {{dim: 4}}\n" + SHARDS,
    "clipped": WORDS
    + "dataloader: {{batch_size: 4}}\ntraining_optimizations: {{precision: fp32, gradient_clipping: 0.05}}\n",
}


def make_models(folder: Path) -> dict[str, Path]:
    """Wide enough for fused blocks, whose weights fill blocks of the flat buffer."""
    import transformers as t

    torch.manual_seed(0)
    words, tokenizer = tiny.make_tokenizer(), tiny.make_tokenizer(decoder=True)
    usual = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
    llama = t.LlamaConfig(
        num_key_value_heads=2, intermediate_size=64, vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=3,
        bos_token_id=2, tie_word_embeddings=True, **usual,
    )  # fmt: skip
    bert = t.BertConfig(
        intermediate_size=128, vocab_size=len(words), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **usual
    )
    qwen = t.Qwen3Config(
        num_key_value_heads=2, head_dim=16, intermediate_size=64, vocab_size=len(tokenizer), pad_token_id=0,
        eos_token_id=3, bos_token_id=2, tie_word_embeddings=False, **usual,
    )  # fmt: skip
    for name, model, own in (
        ("llama", t.LlamaForCausalLM(llama), tokenizer),
        ("qwen", t.Qwen3ForCausalLM(qwen), tokenizer),
        ("bert", t.BertForMaskedLM(bert), words),
    ):
        model.save_pretrained(folder / name)
        own.save_pretrained(folder / name)
    texts = [{"text": row["text"]} for row in tiny.reviews(41, seed=2)]
    return {
        "llama": folder / "llama",
        "bert": folder / "bert",
        "qwen": folder / "qwen",
        "rows": tiny.write_jsonl(folder / "rows.jsonl", tiny.reviews(41)),
        "texts": tiny.write_jsonl(folder / "texts.jsonl", texts),
    }


def train(name: str, folder: Path, ranks=None) -> tuple[list[list[float]], dict[str, torch.Tensor], Any]:
    """One process by the plain step, several by the parts of the captured one."""
    cfg = load_run_config([folder / f"{name}.yaml"])
    prepared = prepare_run(cfg) if ranks is None else prepare_run(cfg, ranks=ranks)
    as_on_a_gpu = {} if ranks is None else {"fused_kernels": name != "words-stock", "capture": "shards" not in name}
    plan = dataclasses.replace(prepared.plan, word_rows=0, pooled_last_block=False, **as_on_a_gpu)
    prepared = dataclasses.replace(prepared, plan=plan)
    _, step = make_step(prepared)
    found = []
    loader = make_step_loader(prepared)
    for index, batch in zip(range(STEPS), loader, strict=False):
        result = step(index, batch)
        found.append([float(result.loss), float(result.grad_norm), result.tokens])
    step.model.eval()
    with torch.no_grad(), step.compute():
        batch = loader.collate([0])
        found.append([float(step.loss.scaled_sum(step.forward(batch), batch, torch.ones(()))), 0, 0])
    kept = {**step.weights(), **{f"state {name}": tensor for name, tensor in step.state()[0].items()}}
    return found, {name: whole_of(tensor).clone() for name, tensor in kept.items()}, step


def one_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2)
    gradient_pieces.PIECE_BYTES, gradient_pieces.SMALLEST_BYTES = 1 << 14, 1 << 12
    ranks = Processes(World(rank, 2, rank, 2))
    early = {}
    for name in RUNS:
        losses, weights, step = train(name, folder, ranks)
        assert isinstance(step, ShardedStep if "shards" in name else TogetherOnHost)
        swapped = sum("forward" in module.__dict__ for module in step.model.modules())
        assert (swapped > 0) == (name != "words-stock")
        if isinstance(step, TogetherOnHost):
            early[name] = [len(step.pieces.early), step.pieces.came_early]
            head = step.model.get_output_embeddings()
            sent_early = {id(place.parameter) for piece in step.pieces.early for place in piece.places}
            assert (head is not None and id(head.weight) in sent_early) == (name == "untied")
        (folder / f"{name}.{rank}.json").write_text(json.dumps(losses))
        torch.save(weights, folder / f"{name}.{rank}.pt")
        step.finish()
    (folder / f"early.{rank}.json").write_text(json.dumps(early))
    ranks.close()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("captured")
    places = make_models(folder)
    for name, text in RUNS.items():
        (folder / f"{name}.yaml").write_text(tiny.in_fp32(text.format(**places) + COMMON))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
        mp.start_processes(one_rank, (folder,), nprocs=2, start_method="fork")
        for name in RUNS:
            losses, weights, _ = train(name, folder)
            (folder / f"{name}.json").write_text(json.dumps(losses))
            torch.save(weights, folder / f"{name}.pt")
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_learn_what_one_process_learns(trained, name):
    wanted = json.loads((trained / f"{name}.json").read_text())
    weights = torch.load(trained / f"{name}.pt")
    for rank in range(2):
        got = json.loads((trained / f"{name}.{rank}.json").read_text())
        for one, other in zip(wanted, got, strict=True):
            assert one[:2] == pytest.approx(other[:2], abs=TOLERANCE, rel=TOLERANCE)
            assert one[2] == other[2]
        own = torch.load(trained / f"{name}.{rank}.pt")
        assert own.keys() == weights.keys()
        for key in weights:
            torch.testing.assert_close(own[key], weights[key], atol=WEIGHTS, rtol=TOLERANCE)
    assert abs(wanted[STEPS - 1][0] - wanted[0][0]) > 100 * TOLERANCE  # something was learned


def test_weights_of_the_ranks_are_equal_to_the_bit(trained):
    for name in RUNS:
        one, other = (torch.load(trained / f"{name}.{rank}.pt") for rank in range(2))
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_pieces_are_complete_while_others_are_still_made(trained):
    for rank in range(2):
        for name, (pieces, came) in json.loads((trained / f"early.{rank}.json").read_text()).items():
            # Below an adapter's first layer nothing is trained, so that nobody asks for the gradient of its input.
            assert pieces >= 1, name
            assert came == (pieces - 1 if name == "adapter" else pieces), name
