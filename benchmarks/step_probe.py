"""Where the time of a captured step goes: `python benchmarks/step_probe.py [distilbert-b8 …]` on a GPU.

Random weights, lengths of the named workload. Prints ms per step (steady state), first-epoch time with captures, peak
memory, and the kernels of one replay by total time. `--together` times the step that several ranks take, with a real
NCCL group of this one rank; their word tables are summed and updated whole, so compare with `--plain-embeddings`.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from automodel.tasks.registry import task_named

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

CLASSIFY, WRITE = "text-classification", "causal-lm"
PROFILED = 20  # steps, at most


@dataclass(frozen=True)
class Work:
    """A model of a known shape, and batches of documents of known lengths."""

    model: str
    batch: int
    lengths: tuple[float, float, int, int]
    """(mu, sigma, shortest, longest) of the lognormal."""
    task: str = CLASSIFY
    rows: int = 1000
    pure: bool = False
    """Weights, gradients and moments in bf16."""
    learned: float = 1.0
    """Share of a document's last tokens that carry labels."""
    bucket: int = 0
    eight_bit: bool = False
    checkpointing: str = "none"
    offload: bool = False
    """Inputs of checkpointed layers wait in host memory."""
    fp8: bool = False
    lora: int = 0
    """Rank of adapters on every linear layer of the blocks; 0: the model itself is trained."""
    packed: str = ""
    """`nf4`: the frozen weights under them, doubly quantised."""
    resident: bool = False
    """Whether those are kept expanded."""
    gates_kept: bool = False
    """As the plan decides it for few tokens on a large GPU."""


TIGHT: dict[str, Any] = {"task": WRITE, "rows": 16, "pure": True, "eight_bit": True}
LARGE: dict[str, Any] = {"task": WRITE, "rows": 8, "pure": True}
LORA: dict[str, Any] = {"task": WRITE, "rows": 8, "pure": True, "lora": 16}
QLORA: dict[str, Any] = {**LORA, "packed": "nf4"}
SMALL: dict[str, Any] = {"eight_bit": True, "checkpointing": "full", "offload": True}
SHORT, SQUAD, FULL = (5.4, 0.55, 16, 512), (5.1, 0.35, 16, 512), (9.0, 0.0, 4096, 4096)
LONG = (9.0, 0.0, 32_768, 32_768)
"""One document a step."""
WORKLOADS = {
    "distilbert-b8": Work("distilbert", 8, SHORT),
    "distilbert-b32": Work("distilbert", 32, SHORT),
    "bert-base-b32": Work("bert", 32, SHORT),
    "modernbert-base-b16": Work("modernbert", 16, (6.2, 0.6, 64, 2048)),
    "qwen3-cls-b16": Work("qwen3-0.6b", 16, SHORT),
    "llama1b-squad-b8": Work("llama-1b", 8, SQUAD, WRITE, rows=256, bucket=128, gates_kept=True),
    "llama1b-squad-b8-bf16": Work("llama-1b", 8, SQUAD, WRITE, rows=256, bucket=128, gates_kept=True, pure=True),
    "llama1b-squad-b8-answers": Work("llama-1b", 8, SQUAD, WRITE, rows=256, bucket=128, gates_kept=True, learned=0.1),
    "llama1b-4k": Work("llama-1b", 2, FULL, WRITE, rows=16),
    "llama1b-4k-bf16": Work("llama-1b", 2, FULL, WRITE, rows=16, pure=True),
    "llama1b-4k-tight": Work("llama-1b", 2, FULL, **TIGHT, checkpointing="full"),
    "llama1b-4k-tight-offload": Work("llama-1b", 2, FULL, **TIGHT, checkpointing="full", offload=True),
    "llama1b-4k-tight-selective": Work("llama-1b", 2, FULL, **TIGHT, checkpointing="selective"),
    "llama1b-4k-tight-none": Work("llama-1b", 2, FULL, **TIGHT),
    "qwen3-8b-bf16": Work("qwen3-8b", 2, FULL, **LARGE),
    "qwen3-8b-fp8": Work("qwen3-8b", 2, FULL, **LARGE, fp8=True),
    "qwen3-8b-lora-4k": Work("qwen3-8b", 2, FULL, **LORA),
    "qwen3-8b-lora-4k-fp8": Work("qwen3-8b", 2, FULL, **LORA, fp8=True),
    "qwen3-8b-qlora-4k": Work("qwen3-8b", 2, FULL, **QLORA, resident=True),
    "qwen3-8b-qlora-4k-packed": Work("qwen3-8b", 2, FULL, **QLORA),
    "qwen3-8b-qlora-4k-tight": Work("qwen3-8b", 2, FULL, **QLORA, **SMALL),
    "qwen3-8b-qlora-1k-tight": Work("qwen3-8b", 1, (9.0, 0.0, 1024, 1024), **QLORA, **SMALL),
    "qwen3-8b-lora-short": Work("qwen3-8b", 8, SQUAD, **{**LORA, "rows": 128}, bucket=128),
    "llama1b-short16k": Work("llama-1b", 93, SQUAD, WRITE, rows=744, bucket=512),
    "gemma2-2b-squad-b8": Work("gemma2-2b", 8, SQUAD, WRITE, rows=64, bucket=128, pure=True),
    "llama1b-32k": Work("llama-1b", 1, LONG, WRITE, rows=4),
    "llama1b-32k-selective": Work("llama-1b", 1, LONG, WRITE, rows=4, checkpointing="selective"),
    "llama1b-32k-full": Work("llama-1b", 1, LONG, WRITE, rows=4, checkpointing="full"),
    "llama1b-32k-tight": Work("llama-1b", 1, LONG, **{**TIGHT, "rows": 4}, checkpointing="full", offload=True),
}


def make_model(kind: str):
    import transformers as t

    if kind == "distilbert":
        return t.DistilBertForSequenceClassification(t.DistilBertConfig(num_labels=2))
    if kind == "bert":
        return t.BertForSequenceClassification(t.BertConfig(num_labels=2))
    if kind == "qwen3-0.6b":
        config = t.Qwen3Config(
            hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, vocab_size=151_936, num_labels=2, pad_token_id=None,
        )  # fmt: skip
        return t.Qwen3ForSequenceClassification(config)
    if kind == "qwen3-8b":
        config = t.Qwen3Config(
            hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, vocab_size=151_936, tie_word_embeddings=False, pad_token_id=None,
            max_position_embeddings=40_960, rope_theta=1_000_000.0,
        )  # fmt: skip
        with torch.device("cuda"):
            return t.Qwen3ForCausalLM(config)
    if kind == "gemma2-2b":
        with torch.device("cuda"):
            return t.Gemma2ForCausalLM(t.Gemma2Config(pad_token_id=None))  # the defaults are the 2B model
    if kind == "llama-1b":
        config = t.LlamaConfig(
            hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
            num_key_value_heads=8, head_dim=64, vocab_size=128_256, tie_word_embeddings=True, pad_token_id=None,
            max_position_embeddings=131_072, rope_theta=500_000.0,
        )  # fmt: skip
        with torch.device("cuda"):
            return t.LlamaForCausalLM(config)
    return t.ModernBertForSequenceClassification(t.ModernBertConfig(num_labels=2))


@dataclass
class Probe:
    """A captured step and an epoch of batches for it."""

    step: Any
    batches: list[Any]
    fused: int
    bucket: int
    estimate: float
    """GiB, as the plan would say."""

    def epoch(self) -> tuple[float, list[torch.Tensor]]:
        """Seconds and losses of one pass over the batches."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses = [self.step(i, b).loss for i, b in enumerate(self.batches)]
        torch.cuda.synchronize()
        return time.perf_counter() - start, losses


def make_step(work: Work, options: argparse.Namespace) -> tuple[Any, Any, int]:
    """(step, model, fused blocks): as `engine/steps.py` makes them, from random weights."""
    from automodel.adapters.attach import attach, resolve
    from automodel.adapters.config import PeftConfig
    from automodel.adapters.packed_linear import Packing, pack_layers
    from automodel.engine.captured import CapturedStep
    from automodel.kernels.flat_adamw import FlatAdamW
    from automodel.kernels.late_update import LateUpdates, late_parameters
    from automodel.kernels.side_stream import SideStream
    from automodel.models.checkpointing import use_gradient_checkpointing
    from automodel.models.forward import make_loss_forward
    from automodel.models.fp8 import let_go_of_bf16, use_fp8
    from automodel.models.fuse import fuse, layers_of
    from automodel.models.recompute import use_own_checkpoints
    from automodel.optim.build import parameter_groups
    from automodel.optim.config import LRSchedulerConfig, OptimizerConfig
    from automodel.optim.quantized import eight_bit_parameters
    from automodel.optim.schedule import Schedule
    from automodel.tasks.loss_config import LossConfig

    torch.manual_seed(0)
    model = make_model(work.model).to("cuda", torch.bfloat16 if work.pure else torch.float32).train()
    if work.packed:
        pack_layers(model, Packing(work.packed, double=True, resident=work.resident), "cuda", torch.bfloat16, ())
    if work.lora:
        attach(
            model, resolve(PeftConfig(dim=work.lora, alpha=32), model, task_named(work.task).head.adapter_type, "base")
        )
    if work.checkpointing != "none":
        use_gradient_checkpointing(model, work.checkpointing)
        use_own_checkpoints(model, work.offload)
    at_once = options.plain_update or work.eight_bit or work.checkpointing != "none" or work.lora
    layers = [] if at_once else layers_of(model)
    waits = work.task == CLASSIFY and not options.plain_embeddings and not options.together
    optimizer = FlatAdamW(
        parameter_groups(model, OptimizerConfig(weight_decay=0.01)), lr=2e-5, max_norm=1.0,
        copy_dtype=None if work.pure and not work.lora else torch.bfloat16,
        lr_factors=torch.ones(10_000, dtype=torch.float64),
        lazy=model.get_input_embeddings().weight if waits else None, late=late_parameters(layers),
        eight_bit=eight_bit_parameters(model) if work.eight_bit else (), placed=options.together,
    )  # fmt: skip
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")
    side = None if work.offload and work.lora else SideStream()  # it would keep the inner tensors of a layer longer
    fused = fuse(model, seed, side, work.lengths[3], gates_kept=work.gates_kept)
    if work.fp8:
        print(f"{len(use_fp8(model))} products in FP8")
        if work.lora:
            let_go_of_bf16(model)
    forward = make_loss_forward(model, task_named(work.task).head, "packed", swapped=bool(fused))
    step = (together(model, options.wire) if options.together else CapturedStep)(
        model, forward, task_named(work.task).loss(LossConfig(), None, 2 if work.task == CLASSIFY else None), optimizer,
        Schedule(LRSchedulerConfig(name="constant"), 10_000), peak_lr=2e-5, seed=seed, accumulates=False,
        device="cuda", side=side,
        late=LateUpdates(optimizer, layers, side.stream) if layers else None,
    )  # fmt: skip
    return step, model, fused


def together(model: Any, wire: str) -> Any:
    """The step that several ranks take, for the one that there is: a real NCCL group, all sums made, nobody else."""
    import tempfile

    import torch.distributed as dist

    from automodel.distributed.processes import Processes
    from automodel.distributed.world import World
    from automodel.engine.together import TogetherStep, wire_dtype
    from automodel.models.compiled_blocks import repeated_blocks

    if not dist.is_initialized():
        meet = Path(tempfile.mkdtemp()) / "meet"
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{meet}", rank=0, world_size=1)
    return partial(TogetherStep, ranks=Processes(World()), wire=wire_dtype(wire), blocks=repeated_blocks(model))


def make_rows(work: Work, rng: np.random.Generator) -> tuple[Any, np.ndarray]:
    """(store, lengths): random tokens; a classifier's label is planted, a language model repeats every third word."""
    from automodel.data.samples import SampleWriter
    from automodel.data.store import TokenStore

    mu, sigma, low, high = work.lengths
    lengths = np.clip(rng.lognormal(mu, sigma, work.rows).astype(int), low, high)
    writer = SampleWriter()
    for row, length in enumerate(lengths):
        ids = rng.integers(1000, 30000, length)
        if work.task == WRITE:
            ids[2::3] = 1234
            labels = np.full(length, -100)
            first = length - max(2, round(work.learned * length))
            labels[first:] = ids[first:]
            writer.add(row, ids, token_labels=labels)
            continue
        ids[1:9] = 2000 + row % 2
        writer.add(row, ids.tolist(), label=row % 2)
    return TokenStore.in_memory(writer.finish()), lengths


def make_probe(name: str, options: argparse.Namespace) -> Probe:
    from automodel.data.batch import StepBatch
    from automodel.data.collate import PackedCollator
    from automodel.models.families import packing_support

    work, rng = WORKLOADS[name], np.random.default_rng(0)
    store, lengths = make_rows(work, rng)
    bucket = options.bucket or work.bucket or 2 ** round(np.log2(max(1.0, work.batch * lengths.mean() / 32)))
    step, model, fused = make_step(work, options)
    collate = PackedCollator(
        store,
        place=task_named(work.task).rows.labels,
        pool=packing_support(model.config, task_named(work.task).head).pooling or "last",
        bucket_tokens=int(bucket),
        max_seqlen=work.lengths[3],
        micro_batch_size=work.batch,
        sort_tokens=True,
        longest_first=True,
    )
    order = rng.permutation(work.rows)
    groups = [order[i : i + work.batch] for i in range(0, work.rows - work.batch + 1, work.batch)]
    batches = [StepBatch((collate(g),), 0, i) for i, g in enumerate(groups)]
    return Probe(step, batches, fused, int(bucket), estimated_gib(work, model, batches))


def estimated_gib(work: Work, model: Any, batches: list[Any]) -> float:
    """What `plan/memory.py` expects of this step."""
    from automodel.adapters.config import Packing
    from automodel.models.load import count_parameters
    from automodel.optim.kinds import ADAMW, ADAMW_8BIT
    from automodel.plan.memory import GIB, Setting, estimate, shape_of

    micro = [b.micro_batches[0] for b in batches]
    setting = Setting(
        precision="bf16" if work.lora or not work.pure else "bf16-pure", captured=True, fused=True,
        kind=ADAMW_8BIT if work.eight_bit else ADAMW, checkpointing=work.checkpointing,  # ty: ignore[invalid-argument-type]
        tokens=max(m.input_ids_T.numel() for m in micro), device="cuda", stored_logits=False, offload=work.offload,
        rows=max(m.read_positions_R.numel() for m in micro) if work.task == WRITE else 0,
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad) if work.lora else 0,
        packing=Packing(work.packed, double=True, resident=work.resident) if work.packed else None,
        gates_kept=work.gates_kept,
    )  # fmt: skip
    return (
        estimate(shape_of(model.config), count_parameters(model.config, task_named(work.task).head), setting).total
        / GIB
    )


def write_row(options: argparse.Namespace, name: str, provider: str, **values: Any) -> None:
    """Merges a row into the results file that was named, if one was."""
    if not options.write:
        return
    import transformers

    from automodel.benchmark.rows import merge_into

    row = {
        "workload": name, "provider": provider, **values,
        "date": time.strftime("%Y-%m-%d"), "commit": options.commit, "torch": torch.__version__,
        "transformers": transformers.__version__, "gpu": torch.cuda.get_device_name(0),
        "command": " ".join(["python", *sys.argv]),
    }  # fmt: skip
    merge_into(Path(options.write), [row])


def in_words(work: Work) -> str:
    """The setup of a workload."""
    parts = [f"LoRA r{work.lora} on all linears" if work.lora else "full"]
    parts += [f"{work.packed} base{', resident' if work.resident else ''}"] if work.packed else []
    parts += ["FP8"] if work.fp8 else []
    parts += [f"checkpointing {work.checkpointing}"] if work.checkpointing != "none" else []
    parts += ["inputs on the host"] if work.offload else []
    parts += ["8-bit moments"] if work.eight_bit else []
    return ", ".join([*parts, "random weights, captured steps (step_probe)"])


def measure(name: str, probe: Probe, options: argparse.Namespace) -> None:
    gc.collect()  # an earlier model's memory is not this one's
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    first, losses = probe.epoch()
    count = len(probe.batches)
    times = [probe.epoch()[0] / count * 1e3 for _ in range(5)]
    values = torch.stack(losses).tolist()
    tokens = sum(b.num_tokens for b in probe.batches) / count
    padded = sum(b.micro_batches[0].input_ids_T.numel() for b in probe.batches) / count
    gib = 2**30
    print(
        f"{name}: fused {probe.fused} blocks, bucket {probe.bucket}, {len(probe.step.graphs)} graphs; "
        f"first epoch {first:.2f} s; {np.median(times):.3f} ms/step (min {min(times):.3f}); "
        f"{tokens:.0f} tokens ({padded / tokens - 1:.1%} tail), {tokens / np.median(times):.1f}k a second; "
        f"loss {np.mean(values[:5]):.3f} -> {np.mean(values[-5:]):.3f}; "
        f"peak {torch.cuda.max_memory_allocated() / gib:.2f} GiB (estimate {probe.estimate:.2f}), "
        f"reserved {torch.cuda.max_memory_reserved() / gib:.2f}",
        flush=True,
    )
    write_row(
        options, name, "automodel-together" if options.together else "automodel",
        ms_per_step=round(float(np.median(times)), 3), ms_p20=round(float(np.percentile(times, 20)), 3),
        ms_p80=round(float(np.percentile(times, 80)), 3), tokens_per_s=round(tokens / float(np.median(times)) * 1e3),
        peak_gib=round(torch.cuda.max_memory_allocated() / gib, 3),
        peak_reserved_gib=round(torch.cuda.max_memory_reserved() / gib, 3), estimated_gib=round(probe.estimate, 3),
        first_step_s=round(first, 2), precision="bf16", setup=in_words(WORKLOADS[name]), steps=6 * count,
        final_loss=round(float(np.mean(values[-5:])), 4),
    )  # fmt: skip


def print_profile(probe: Probe, options: argparse.Namespace) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        steps = probe.batches[:PROFILED]
        for i, b in enumerate(steps):
            probe.step(i, b)
        torch.cuda.synchronize()
    if options.trace:
        found.export_chrome_trace(options.trace)
    kernels = sorted(found.key_averages(), key=lambda e: -e.device_time_total)
    total = sum(e.device_time_total for e in kernels) / len(steps) / 1e3
    print(f"  kernels: {total:.3f} ms and {sum(e.count for e in kernels) / len(steps):.0f} launches a step")
    for e in kernels[: options.rows]:
        print(f"  {e.device_time_total / len(steps):8.1f} us {e.count / len(steps):6.1f}x {e.key[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=["distilbert-b8"])
    parser.add_argument("--bucket", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rows", type=int, default=30)
    parser.add_argument("--plain-embeddings", action="store_true", help="every row of the word table in every update")
    parser.add_argument("--plain-update", action="store_true", help="the whole update at the end of a step")
    parser.add_argument("--write", help="results file to merge rows into (benchmarks/results/h200.json)")
    parser.add_argument("--commit", help="commit to note in the rows")
    parser.add_argument("--trace", help="also write the profile as a Chrome trace")
    parser.add_argument("--together", action="store_true", help="the step of several ranks (ddp), on this one")
    parser.add_argument("--wire", choices=("fp32", "bf16"), default="fp32", help="what --together sums gradients in")
    parser.add_argument("--fp8-fast", action="store_true", help="fast accumulation in backward products of FP8, too")
    options = parser.parse_args()
    if options.fp8_fast:
        from automodel.kernels import fp8_linear

        fp8_linear.FAST_BACKWARD = True
    for name in options.names:
        probe = make_probe(name, options)
        measure(name, probe, options)
        if options.profile:
            print_profile(probe, options)
        del probe  # before the next model is made


if __name__ == "__main__":
    main()
