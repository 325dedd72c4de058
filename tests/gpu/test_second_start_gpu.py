"""The second start of a config on a GPU reaches its first step sooner: tokens, Triton's kernels and torch.compile's are
on disk. Both starts are processes of their own, with caches that are empty before the first.

pytest -m gpu -s tests/gpu/test_second_start_gpu.py
"""

from __future__ import annotations

import time

import pytest
import torch

import tiny_runs as tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS = 20_000
SETTINGS = "dataloader: {batch_size: 8}\nstep_scheduler: {max_steps: 1}\n"
FRACTION = {"fused": 0.8, "compiled": 0.7}
"""Python and its imports are the same in both starts, and most of what is left of the second one."""


@pytest.mark.parametrize("how", FRACTION)
def test_the_second_start_is_shorter(tmp_path, how):
    more = "compile: true\n" if how == "compiled" else ""
    config = tiny.write_run(tmp_path, kind="llama", text=SETTINGS + more)
    tiny.write_jsonl(tmp_path / "train.jsonl", tiny.reviews(ROWS, longest=250))
    text = config.read_text().replace("text-classification", "causal-lm")
    config.write_text(text.replace(f"validation_dataset: {{path: {tmp_path / 'test.jsonl'}}}\n", ""))
    names = ("AUTOMODEL_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    caches = {name: str(tmp_path / name.lower()) for name in names}
    tiny.automodel(
        "plan", "-c", config, AUTOMODEL_CACHE=str(tmp_path / "other")
    )  # files of the libraries are read once
    seconds = []
    for _ in range(2):
        before = time.perf_counter()
        tiny.automodel("finetune", "llm", "-c", config, "checkpoint.enabled=false", "--overwrite", **caches)
        seconds.append(time.perf_counter() - before)
    print(f"{how}: {seconds[0]:.1f} s to the end of step 1, then {seconds[1]:.1f} s")
    assert seconds[1] < FRACTION[how] * seconds[0]
