"""Adapters on a GPU: the losses of the CPU's fp32 run, nearly, in every precision; the step is eager and says why."""

import json

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    import tiny_runs as tiny
    from automodel.adapters.lora import lora_linear, lora_linear_reference
    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

ALLOWED = {"fp32": 0.002, "bf16": 0.03, "fp16": 0.01}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    tiny.write_run(root, text="peft: {dim: 4}\nstep_scheduler: {max_steps: 20, log_every_steps: 1}\n")
    return root


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_losses_are_those_of_the_cpu(folder, monkeypatch, precision):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
    settings = [f"training_optimizations.precision={precision}", f"checkpoint.checkpoint_dir={folder / precision}"]
    finetune(load_run_config([folder / "run.yaml"], settings))
    truth = folder / "truth"
    if not truth.exists():
        settings = ["training_optimizations.precision=fp32", f"checkpoint.checkpoint_dir={truth}"]
        tiny.automodel("finetune", "llm", "-c", folder / "run.yaml", *settings, CUDA_VISIBLE_DEVICES="")
    ours, theirs = tiny.losses(folder / precision), tiny.losses(truth)
    assert max(abs(ours[step] - theirs[step]) for step in theirs) < ALLOWED[precision]
    plan = {d["name"]: d for d in json.loads((folder / precision / "run" / "plan.json").read_text())["decisions"]}
    assert plan["step"]["value"] == "eager"
    assert "adapters are not recorded yet" in plan["step"]["reason"]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_the_product_is_the_references(dtype, tolerance):
    found = []
    for function in (lora_linear, lora_linear_reference):
        torch.manual_seed(0)
        made = {"device": "cuda", "dtype": dtype}
        x, a, b = (torch.randn(*shape, **made, requires_grad=True) for shape in ((300, 64), (8, 64), (96, 8)))
        y = function(x, torch.randn(96, 64, **made), torch.randn(96, **made), a, b, 0.5)
        y.sum().backward()
        found.append((y, x.grad, a.grad, b.grad))
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()
