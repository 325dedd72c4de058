"""Our AdamW with 8-bit moments on a real GPU: the kernel against the reference, captured, saved, resumed.

pytest -m gpu tests/gpu/test_adamw8_gpu.py
"""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    from rich.console import Console

    import tiny_runs as tiny
    from automodel.config.errors import UserError
    from automodel.engine.run import finetune
    from automodel.kernels import adamw
    from automodel.kernels.adamw8 import SMALLEST, quantise_reference
    from automodel.kernels.flat_adamw import FlatAdamW
    from automodel.plan.check import load_run_config

SHAPES = [(1000, 513), (257, 1024), (513,), (64, 64), (4096, 1024)]


def make(form: str, device="cuda"):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if form == "pure" else torch.float32
    parameters = [torch.nn.Parameter(torch.randn(s, device=device).mul_(0.1).to(dtype)) for s in SHAPES]
    narrow = [p for p in parameters if p.numel() >= SMALLEST]
    groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]
    copy = torch.bfloat16 if form == "masters" else None
    return parameters, FlatAdamW(groups, lr=1e-3, max_norm=1.0, copy_dtype=copy, eight_bit=narrow)


def give_gradients(parameters, step: int) -> None:
    generator = torch.Generator("cuda").manual_seed(step)
    for p in parameters:
        spread = torch.rand(p.shape, generator=generator, device="cuda") ** 4
        p.grad = (torch.randn(p.shape, generator=generator, device="cuda") * spread).to(p.dtype)


@pytest.mark.parametrize("form", ["masters", "pure", "fp32"])
def test_the_kernel_takes_the_references_steps(monkeypatch, form):
    """From the same state in every step; codes may be one off where a half goes the other way."""
    ours, optimizer = make(form)
    theirs, reference = make(form)
    for step in range(6):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        with monkeypatch.context() as patch:
            patch.setattr(adamw, "runs_triton", lambda tensor: False)
            reference.step()
        found, exact = optimizer.state_dict()["state"], reference.state_dict()["state"]
        for index, entry in exact.items():
            for key, tensor in entry.items():
                other = found[index][key]
                if key.endswith("_code"):
                    assert (tensor.int() - other.int()).abs().max() <= 1, key
                    assert (tensor != other).float().mean() < 5e-3, key
                else:
                    torch.testing.assert_close(other, tensor, rtol=1e-4, atol=1e-7)
        for p, q in zip(ours, theirs):
            torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-5)
        reference.load_state_dict(optimizer.state_dict())
        for p, q in zip(ours, theirs):
            q.data.copy_(p.data)


def test_a_step_allocates_nothing_of_size():
    parameters = [torch.nn.Parameter(torch.zeros(4096, 4096, device="cuda", dtype=torch.bfloat16)) for _ in range(4)]
    before = torch.cuda.memory_allocated()
    optimizer = FlatAdamW(parameters, lr=1e-3, max_norm=1.0, eight_bit=parameters)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    assert held < 2.2 * 4 * 4096**2  # two codes for each parameter, and scales; weights have only moved
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 2**20


def test_codes_of_a_real_spread():
    """Moments of 12 decades: the kernel's codes are the nearest entries."""
    parameters, optimizer = make("fp32")
    generator = torch.Generator("cuda").manual_seed(3)
    for p in parameters:
        p.grad = 10 ** (-9 * torch.rand(p.shape, generator=generator, device="cuda"))
    optimizer.step()
    clip = float(optimizer.device_state.settings[0, 7])
    for place in optimizer.flat.places:
        if place.parameter.numel() >= SMALLEST:
            kept, g = optimizer.moments_of(place), place.parameter.grad * clip
            for key, values, signed in (("exp_avg", 0.1 * g, True), ("exp_avg_sq", 0.001 * g * g, False)):
                codes, scales = quantise_reference(values, signed)
                torch.testing.assert_close(kept[f"{key}_scale"], scales, rtol=1e-5, atol=0)
                assert (kept[f"{key}_code"].int() - codes.int()).abs().max() <= 1
                assert (kept[f"{key}_code"] != codes).float().mean() < 5e-3


# Whole runs.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import transformers as t

    root = tmp_path_factory.mktemp("eight-bits")
    tokenizer = tiny.make_tokenizer(decoder=True)
    torch.manual_seed(0)
    config = t.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=512, max_position_embeddings=128, pad_token_id=0, eos_token_id=3, bos_token_id=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    t.LlamaForCausalLM(config).save_pretrained(root / "llama")
    tokenizer.save_pretrained(root / "llama")
    tiny.write_jsonl(root / "train.jsonl", tiny.reviews(64))
    return root


def run(folder, name: str, *settings: str, steps=20, resume=False):
    text = folder / "run.yaml"
    text.write_text(
        f"model: {folder / 'llama'}\ntask: causal-lm\ndataset: {{path: {folder / 'train.jsonl'}}}\n"
        "dataloader: {batch_size: 16, num_workers: 0}\noptimizer: {name: adamw_8bit, lr: 3e-4, weight_decay: 0.01}\n"
        f"lr_scheduler: constant\nstep_scheduler: {{log_every_steps: 1, max_steps: {steps}, ckpt_every_steps: 10}}\n"
    )
    out, printed = folder / name, folder / "printed.txt"
    with pytest.MonkeyPatch.context() as patch, printed.open("w") as file:
        patch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
        cfg = load_run_config([text], (f"checkpoint.checkpoint_dir={out}", *settings))
        finetune(cfg, console=Console(file=file, width=400), resume=resume)
    assert "could not be captured" not in printed.read_text()
    return tiny.losses(out), json.loads((out / "run" / "plan.json").read_text())


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure", "fp16"])
def test_learns_like_32_bits(folder, precision):
    precise = f"training_optimizations.precision={precision}"
    ours, plan = run(folder, f"eight-{precision}", precise)
    assert plan["capture"]
    assert plan["optimizer"]["bits"] == 8
    plain, _ = run(folder, f"plain-{precision}", precise, "optimizer.name=adamw")
    assert ours == pytest.approx(plain, rel=0.04, abs=0.02)
    assert ours[20] < 0.9 * ours[1]


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_learns_like_bitsandbytes(folder):
    ours, _ = run(folder, "ours")
    theirs, plan = run(folder, "theirs", "training_optimizations.capture=false")
    assert not plan["capture"]
    assert ours == pytest.approx(theirs, rel=0.04, abs=0.02)


@pytest.mark.parametrize("how", ["step_scheduler.grad_acc_steps=1", "step_scheduler.grad_acc_steps=2"])
def test_resumes_exactly(folder, how):
    name = how[-1]
    run(folder, f"halves-{name}", how, steps=10)
    shutil.copytree(folder / f"halves-{name}", folder / f"again-{name}")
    # Two continuations of one state: they begin alike to the last bit, and then differ by the order of atomic sums.
    once, _ = run(folder, f"halves-{name}", how, steps=20, resume=True)
    again, _ = run(folder, f"again-{name}", how, steps=20, resume=True)
    whole, _ = run(folder, f"whole-{name}", how, steps=20)
    noise = max(abs(once[s] - again[s]) for s in range(11, 21)) + max(abs(once[s] - whole[s]) for s in range(1, 11))
    assert once[11] == pytest.approx(again[11], rel=1e-5)
    assert [once[s] for s in range(11, 21)] == pytest.approx([whole[s] for s in range(11, 21)], abs=4 * noise + 1e-3)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_another_form_is_refused_by_name(folder):
    """The same optimizer of the config, but bitsandbytes' where steps are not captured."""
    run(folder, "mixed", steps=10)
    with pytest.raises(UserError, match=r"holds the state of adamw-8bit, but this run's optimizer is bitsandbytes\."):
        run(folder, "mixed", "training_optimizations.capture=false", steps=20, resume=True)
