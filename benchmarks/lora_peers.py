"""LoRA by transformers and PEFT, as their users run it: `python benchmarks/lora_peers.py qwen3-8b-lora-short` on a GPU.

The same model shape, lengths and adapters as the workload of that name in `step_probe.py`: random weights in bf16, rank
16 on every linear layer of the blocks, adapters in fp32 under autocast (PEFT's own default), padded to the longest
document of each batch, SDPA with cuDNN's kernels off (they plan anew for every shape), AdamW fused, clipping at 1.
Prints ms a step (median), real tokens a second, and peak memory. PEFT and accelerate must be importable.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from step_probe import WORKLOADS, Work, make_model, write_row

WARM_UP = 4


def padded(documents: list[np.ndarray], device: str) -> tuple[dict[str, torch.Tensor], int]:
    """(input_ids, attention_mask and labels of a batch, real tokens)."""
    longest = max(map(len, documents))
    ids = torch.zeros((len(documents), longest), dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, document in enumerate(documents):
        tokens = torch.from_numpy(document)
        ids[row, : len(tokens)], labels[row, : len(tokens)], mask[row, : len(tokens)] = tokens, tokens, 1
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: tensor.to(device) for name, tensor in batch.items()}, sum(map(len, documents))


def batches(work: Work, count: int) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(0)
    mu, sigma, low, high = work.lengths
    lengths = np.clip(rng.lognormal(mu, sigma, work.batch * count).astype(int), low, high)
    documents = [rng.integers(1000, 30_000, length) for length in lengths]
    return [documents[i : i + work.batch] for i in range(0, len(documents), work.batch)]


def make_peft(work: Work) -> Any:
    import peft

    model = make_model(work.model).to("cuda", torch.bfloat16)
    config = peft.LoraConfig(r=work.lora, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).train()


def measure(name: str, options: argparse.Namespace) -> None:
    work = WORKLOADS[name]
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = make_peft(work)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=2e-5, fused=True)
    times, tokens = [], 0
    for step, documents in enumerate(batches(work, options.steps + WARM_UP)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        batch, count = padded(documents, "cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if step >= WARM_UP:
            times.append((time.perf_counter() - start) * 1e3)
            tokens += count
    trained, peak = sum(p.numel() for p in learned), torch.cuda.max_memory_allocated() / 2**30
    print(
        f"{name}: transformers + PEFT, {trained:,} trained; {statistics.median(times):.1f} ms/step "
        f"(min {min(times):.1f}); {tokens / sum(times):.2f}k tokens a second; peak {peak:.2f} GiB",
        flush=True,
    )
    write_row(
        options, name, "hf-peft", ms_per_step=round(statistics.median(times), 3),
        ms_p20=round(float(np.percentile(times, 20)), 3), ms_p80=round(float(np.percentile(times, 80)), 3),
        tokens_per_s=round(tokens / sum(times) * 1e3), peak_gib=round(peak, 3), precision="bf16",
        setup=f"transformers + PEFT, r{work.lora} on all linears, padded, SDPA without cuDNN, fused AdamW",
        steps=options.steps,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=["qwen3-8b-lora-short"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--write", help="results file to merge rows into")
    parser.add_argument("--commit", help="commit to note in the rows")
    options = parser.parse_args()
    for name in options.names:
        measure(name, options)


if __name__ == "__main__":
    main()
