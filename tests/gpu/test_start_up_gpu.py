"""Start and end of a run on a GPU: the context that is opened early, what is imported, what a checkpoint holds.

pytest -m gpu tests/gpu/test_start_up_gpu.py
"""

import os
import subprocess
import sys

import pytest
import torch

import tiny_runs as tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEAVY = ("sklearn", "scipy", "pandas", "sympy", "accelerate", "torchao", "torch._dynamo", "torch._inductor")
RUN = f"""
import sys
from automodel.cli.main import main
sys.argv = ["automodel", *sys.argv[1:]]
try:
    main()
except SystemExit as ending:
    assert not ending.code, ending.code
print("heavy:", *[name for name in {HEAVY} if name in sys.modules])
"""


def python(code, *arguments, **env):
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **env}
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_torch_takes_over_the_context_that_was_opened_early():
    printed = python("""
import time
from automodel.engine.gpu_context import open_gpu_context
thread = open_gpu_context()
import torch
thread.join(30)
before = time.perf_counter()
a = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
print("first tensor after", round(time.perf_counter() - before, 3), "s")
torch.testing.assert_close((a @ a).float(), a.float() @ a.float(), atol=1.0, rtol=0.1)
""")
    assert "first tensor after" in printed
    print(printed)


def test_a_run_on_a_gpu_imports_nothing_heavy(tmp_path):
    tiny.write_run(tmp_path, kind="distilbert", text="step_scheduler: {max_steps: 4}\ndataloader: {batch_size: 4}\n")
    arguments = ("finetune", "llm", "-c", tmp_path / "run.yaml", "--overwrite")
    cache = {"AUTOMODEL_CACHE": str(tmp_path / "cache")}
    tiny.automodel(*arguments, **cache)  # the second one finds its tokens in the cache
    assert python(RUN, *arguments, **cache).splitlines()[-1].split()[1:] == []


def test_a_checkpoint_holds_what_the_gpu_held_when_it_began(tmp_path):
    from automodel.checkpoint.store import CheckpointStore

    store = CheckpointStore(tmp_path)
    side = torch.cuda.Stream()
    weight = torch.zeros(1 << 22, device="cuda")
    for step in range(1, 6):
        with torch.cuda.stream(side):  # as a captured step: written on a stream of its own
            for _ in range(50):
                weight += 1
            store.begin(step, {"model": {"w": weight, "part": weight[5:9]}}, {})
            weight += 1000  # while it is being written
            weight -= 1000
    store.wait()
    for checkpoint in store.complete():
        checkpoint.verify()
        tensors = checkpoint.tensors("model")
        assert torch.equal(tensors["w"], torch.full((1 << 22,), 50.0 * checkpoint.step))
        assert tensors["part"].tolist() == [50.0 * checkpoint.step] * 4
    assert [checkpoint.step for checkpoint in store.complete()] == [4, 5]
