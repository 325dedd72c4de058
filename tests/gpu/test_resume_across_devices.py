"""Started here, continued there: GPU and CPU, captured and eager.

Fifteen steps on one, fifteen on the other, against thirty on the first alone; dropout off, a constant learning rate.
In fp32 they differ by the order of sums, in bf16 by its rounding (a CPU without AMX goes on in fp32). All in one
process, for the device's time: a run on the CPU is one whose plan sees no GPU.
"""

import json

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    from rich.console import Console

    import tiny_runs as tiny
    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config
    from automodel.plan.hardware import Hardware

HALF, WHOLE = 15, 30
GPU, EAGER, CPU = "gpu", "gpu-eager", "cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("across")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    tiny.make_model_folder(root / "model", classifier=True, num_labels=2, **sizes)
    tiny.write_jsonl(root / "train.jsonl", tiny.reviews(64))
    (root / "run.yaml").write_text(
        f"model: {root / 'model'}\ntask: text-classification\ndataset: {{path: {root / 'train.jsonl'}}}\n"
        "dataloader: {batch_size: 16, num_workers: 0}\noptimizer: {lr: 1e-3, weight_decay: 0.01}\n"
        "lr_scheduler: constant\nstep_scheduler: {log_every_steps: 1, ckpt_every_steps: 100}\n"
    )
    return root


def train(folder, name: str, where: str, steps: int, *settings: str) -> str:
    """Starts the run, or continues it; returns what was printed."""
    out = folder / name
    resume = out.exists()
    if where == EAGER:
        settings = (*settings, "training_optimizations.capture=false")
    cfg = load_run_config(
        [folder / "run.yaml"], [f"step_scheduler.max_steps={steps}", f"checkpoint.checkpoint_dir={out}", *settings]
    )
    printed = folder / "printed.txt"
    with pytest.MonkeyPatch.context() as patch, printed.open("w") as file:
        patch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
        if where == CPU:
            no_gpu = Hardware("cpu", "CPU of the test", 0, 16.0, False, False, 2)
            patch.setattr("automodel.engine.prepare.read_hardware", lambda: no_gpu)
        finetune(cfg, resume=resume, console=Console(file=file, width=400))
    plan = json.loads((out / "run" / "plan.json").read_text())
    assert (plan["device"], plan["capture"]) == ("cpu" if where == CPU else "cuda", where == GPU)
    return printed.read_text()


@pytest.mark.parametrize(("first", "second"), [(GPU, CPU), (CPU, GPU), (GPU, EAGER), (EAGER, GPU), (EAGER, EAGER)])
def test_fp32_goes_on(folder, first, second):
    name = f"{first}-{second}"
    exact = "training_optimizations.precision=fp32"
    train(folder, f"{name}-whole", first, WHOLE, exact)
    train(folder, name, first, HALF, exact)
    printed = train(folder, name, second, WHOLE, exact)
    whole, joined = tiny.losses(folder / f"{name}-whole"), tiny.losses(folder / name)
    assert list(joined) == list(range(1, WHOLE + 1))
    assert joined == pytest.approx(whole, rel=2e-3, abs=5e-4)
    assert joined[WHOLE] < 0.8 * joined[1], "nothing was learned, so agreement would prove little"
    assert ("dropout is drawn in another way" in printed) == (first != second)
    assert "The run was in" not in printed, "fp32 everywhere"


@pytest.mark.parametrize(("first", "second"), [(GPU, CPU), (CPU, GPU)])
def test_the_default_precision_of_each_goes_on(folder, first, second):
    """bf16 over fp32 masters on the GPU with row-wise updated embeddings; what the CPU's plan says on the CPU."""
    name = f"auto-{first}-{second}"
    train(folder, f"{name}-whole", first, WHOLE)
    train(folder, name, first, HALF)
    before = json.loads((folder / name / "run" / "plan.json").read_text())["precision"]
    printed = train(folder, name, second, WHOLE)
    after = json.loads((folder / name / "run" / "plan.json").read_text())["precision"]
    whole, joined = tiny.losses(folder / f"{name}-whole"), tiny.losses(folder / name)
    assert joined == pytest.approx(whole, rel=0.03, abs=0.02)
    assert (f"The run was in {before} so far and continues in {after}" in printed) == (before != after)


def test_fp16_keeps_its_loss_scale_between_captured_and_eager(folder):
    fp16 = "training_optimizations.precision=fp16"
    train(folder, "fp16", GPU, 6, fp16)

    def saved(step: int) -> dict:
        path = folder / "fp16" / "run" / "steps" / f"step-{step:08d}" / "state.json"
        return json.loads(path.read_text())["step"]

    first = saved(6)
    train(folder, "fp16", EAGER, 12, fp16)
    second = saved(12)
    assert first["loss_scale"][0] == second["loss_scale"][0] * 2.0 ** (second["skipped"] - first["skipped"])
    assert second["steps"] + second["skipped"] == 12
    if second["skipped"] == first["skipped"]:
        assert second["loss_scale"][1] == first["loss_scale"][1] + 6
    train(folder, "fp16", GPU, 18, fp16)
    third = saved(18)
    assert third["steps"] + third["skipped"] == 18
    assert all(value == value and value < 2 for value in tiny.losses(folder / "fp16").values())
