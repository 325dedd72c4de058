"""Every precision on a real GPU, captured and eager, through `finetune`: the losses of the plain fp32 step, nearly.

A small BERT with random weights and no dropout, 40 steps over the same batches. The truth is the eager fp32 run. What
is allowed is the largest difference of any step's loss; losses fall from 0.7 to below 0.2, so that rounding has room to
add up. (On a CPU, autocast to bf16 differed by 0.001, pure bf16 by 0.006.)

    fp32       0.002    the same arithmetic in another order (captured), TF32 off
    tf32       0.01     products with 10 bits of mantissa, everything else fp32
    fp16       0.01     10 bits everywhere but in masters, sums and losses; 0.15 where steps were skipped: a later start
    bf16       0.03     7 bits, the same places
    bf16-pure  0.06     7 bits for weights and moments too
"""

import json

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    import tiny_runs as tiny
    from automodel.engine.captured import CapturedStep
    from automodel.engine.prepare import prepare_run
    from automodel.engine.run import finetune
    from automodel.engine.steps import make_step, make_step_loader
    from automodel.plan.check import load_run_config

STEPS = 40
ALLOWED = {"fp32": 0.002, "tf32": 0.01, "fp16": 0.01, "bf16": 0.03, "bf16-pure": 0.06}
ALLOWED_AFTER_SKIPS = 0.15


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of width 128 (the fused blocks want more than the other tests' 32), data, and a config."""
    root = tmp_path_factory.mktemp("precisions")
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256}
    tiny.make_model_folder(root / "model", classifier=True, num_labels=2, **sizes)
    tiny.write_jsonl(root / "train.jsonl", tiny.reviews(160))
    tiny.write_jsonl(root / "test.jsonl", tiny.reviews(32, seed=1))
    (root / "run.yaml").write_text(
        f"model: {root / 'model'}\ntask: text-classification\ndataset: {{path: {root / 'train.jsonl'}}}\n"
        f"validation_dataset: {{path: {root / 'test.jsonl'}}}\ndataloader: {{batch_size: 16, num_workers: 0}}\n"
        f"optimizer: {{lr: 5e-4, weight_decay: 0.01}}\nlr_scheduler: {{warmup_ratio: 0.1}}\n"
        f"step_scheduler: {{max_steps: {STEPS}, log_every_steps: 1, val_every_steps: {STEPS}}}\n"
    )
    return root


def configured(folder, name: str, *settings: str):
    return load_run_config([folder / "run.yaml"], [f"checkpoint.checkpoint_dir={folder / name}", *settings])


def train(folder, monkeypatch, name: str, *settings: str):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
    finished = finetune(configured(folder, name, *settings), overwrite=True)
    losses = list(tiny.losses(folder / name).values())
    assert len(losses) == STEPS
    return losses, finished, json.loads((folder / name / "run" / "plan.json").read_text())


@pytest.fixture(scope="module")
def truth(folder):
    with pytest.MonkeyPatch.context() as patch:
        losses, _, plan = train(
            folder, patch, "truth", "training_optimizations.precision=fp32", "training_optimizations.capture=false"
        )
    assert not plan["capture"]
    assert losses[0] > 0.5
    assert losses[-1] < 0.2, "nothing was learned, so agreement would prove little"
    return losses


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("capture", ["true", "false"])
@pytest.mark.parametrize("precision", list(ALLOWED))
def test_losses_follow_fp32(folder, truth, monkeypatch, precision, capture, accumulation):
    before = torch.get_float32_matmul_precision()
    losses, finished, plan = train(
        folder, monkeypatch, f"{precision}-{capture}-{accumulation}", f"training_optimizations.precision={precision}",
        f"training_optimizations.capture={capture}", f"dataloader.batch_size={16 // accumulation}",
        f"step_scheduler.grad_acc_steps={accumulation}",
    )  # fmt: skip
    assert torch.get_float32_matmul_precision() == before
    assert plan["precision"] == precision
    assert plan["capture"] == (capture == "true")
    assert plan["fused_kernels"] == (capture == "true" and precision in ("bf16", "bf16-pure", "fp16"))
    worst = max(abs(a - b) for a, b in zip(losses, truth))
    print(f"{precision} capture={capture} accumulation={accumulation}: largest difference {worst:.5f}")
    skipped = finished.summary["skipped_steps"]
    assert worst < (ALLOWED_AFTER_SKIPS if skipped else ALLOWED[precision]), (worst, losses, truth)
    assert losses[-1] < 0.5 * losses[0]
    assert finished.summary["validation"]["accuracy"] > 0.9
    # fp16 may skip a few steps while its scale settles; nothing else ever does.
    assert skipped <= (5 if precision == "fp16" else 0)


def test_tf32_is_really_on_and_really_off(folder):
    """A product whose inputs need more than 10 bits tells which one ran."""
    from automodel.engine.step import fp32_products

    a = torch.full((256, 256), 1.0 + 2.0**-13, device="cuda")
    exact = 256 * (1.0 + 2.0**-13) ** 2
    with fp32_products(tf32=False):
        assert abs(float((a @ a)[0, 0]) - exact) < 1e-3
    with fp32_products(tf32=True):
        assert abs(float((a @ a)[0, 0]) - exact) > 0.01


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("capture", ["true", "false"])
def test_fp16_recovers_from_a_scale_that_is_far_too_large(folder, monkeypatch, capture, accumulation):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
    cfg = configured(
        folder, "scale", "training_optimizations.precision=fp16", f"training_optimizations.capture={capture}",
        f"dataloader.batch_size={16 // accumulation}", f"step_scheduler.grad_acc_steps={accumulation}",
        "step_scheduler.max_steps=80", "step_scheduler.val_every_steps=80",
    )  # fmt: skip
    prepared = prepare_run(cfg)
    torch.manual_seed(0)
    _, step = make_step(prepared)
    captured = isinstance(step, CapturedStep)
    assert captured == (capture == "true")
    start = 2.0**34
    if captured:
        step.optimizer.device_state.loss_scale.copy_(torch.tensor([start, 0.0]))
    else:
        step.scaler = torch.amp.GradScaler("cuda", init_scale=start)

    def scale_now() -> float:
        return float(step.optimizer.loss_scale) if captured else step.scaler.get_scale()

    fresh = {name: tensor.clone() for name, tensor in step.weights().items()}
    scales, losses, norms, lrs = [], [], [], []
    for index, batch in zip(range(80), make_step_loader(prepared)):
        result = step(index, batch)
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
        lrs.append(result.lr)
        scales.append(scale_now())
        if index == 0:
            assert all(torch.equal(tensor, fresh[name]) for name, tensor in step.weights().items())
            assert not torch.isfinite(result.grad_norm)
    skipped = step.skipped_steps()
    # Halved in every skipped step, and nowhere else (it grows only after 2,000 good ones).
    assert 5 <= skipped <= 34, scales
    assert scales == sorted(scales, reverse=True)
    assert scales[-1] == start / 2.0**skipped
    assert all(torch.tensor(losses).isfinite())
    assert torch.tensor(norms[-20:]).isfinite().all()
    assert losses[-1] < 0.5 * losses[0], losses
    weights = step.weights()
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert any(not torch.equal(tensor, fresh[name]) for name, tensor in weights.items())
    if captured:
        # The device's learning rate is the one that is reported, skipped steps or not.
        group = step.optimizer.device_state.settings[0]
        powers = step.optimizer.device_state.powers[0]
        assert float(group[1]) * (1 - float(powers[0])) == pytest.approx(lrs[-1], rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        ((), "bf16"),
        (("model.torch_dtype=torch.bfloat16",), "bf16"),
        (("model.torch_dtype=torch.float32", "training_optimizations.tf32=true"), "tf32"),
        (("training_optimizations.fp16=true",), "fp16"),
        (("training_optimizations.bf16=false",), "fp32"),
    ],
)
def test_the_references_keys(folder, monkeypatch, settings, precision):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
    assert prepare_run(configured(folder, "keys", *settings)).plan.precision == precision
