"""Adapters on a GPU: the losses of the CPU's fp32 run, nearly, in every precision; the step is captured, the blocks are
fused in half precision, and what is recomputed or accumulated learns the same."""

import json

import pytest
import torch

from automodel.models.task_head import NEXT_TOKEN
from automodel.tasks.registry import CAUSAL_LM

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
    assert plan["step"]["value"] == "captured"


def test_accumulated_micro_batches_have_the_losses_of_the_cpu(folder, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
    twice = ["dataloader.batch_size=4", "step_scheduler.grad_acc_steps=2", "peft.loraplus_lr_ratio=4"]
    out, truth = folder / "twice", folder / "twice-truth"
    settings = ["training_optimizations.precision=bf16", *twice, f"checkpoint.checkpoint_dir={out}"]
    finetune(load_run_config([folder / "run.yaml"], settings))
    settings = ["training_optimizations.precision=fp32", *twice, f"checkpoint.checkpoint_dir={truth}"]
    tiny.automodel("finetune", "llm", "-c", folder / "run.yaml", *settings, CUDA_VISIBLE_DEVICES="")
    ours, theirs = tiny.losses(out), tiny.losses(truth)
    assert max(abs(ours[step] - theirs[step]) for step in theirs) < 0.05


@pytest.mark.parametrize("resident", ["true", "false"])
def test_a_run_over_packed_weights_has_the_losses_of_the_cpu(folder, monkeypatch, resident):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
    four = f"quantization={{load_in_4bit: true, bnb_4bit_use_double_quant: true, resident: {resident}}}"
    out, truth = folder / f"packed-{resident}", folder / "packed-truth"
    settings = ["training_optimizations.precision=bf16", four, f"checkpoint.checkpoint_dir={out}"]
    finetune(load_run_config([folder / "run.yaml"], settings))
    if not truth.exists():
        settings = ["training_optimizations.precision=fp32", four, f"checkpoint.checkpoint_dir={truth}"]
        tiny.automodel("finetune", "llm", "-c", folder / "run.yaml", *settings, CUDA_VISIBLE_DEVICES="")
    ours, theirs = tiny.losses(out), tiny.losses(truth)
    assert max(abs(ours[step] - theirs[step]) for step in theirs) < 0.05
    plan = {d["name"]: d for d in json.loads((out / "run" / "plan.json").read_text())["decisions"]}
    assert plan["step"]["value"] == "captured"
    assert plan["base"]["value"] == ("bf16, expanded from " if resident == "true" else "") + "NF4, doubly quantised"


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


SIZE = {
    "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "vocab_size": 512, "max_position_embeddings": 512, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def adapted(kind, device, dtype, packing=None):
    """A small model with an adapter that is not zero; the frozen half of it has been in bf16 once, on every device."""
    from transformers import AutoConfig

    from automodel.adapters.attach import attach, resolve, trained_tensors
    from automodel.adapters.config import PeftConfig
    from automodel.adapters.packed_linear import pack_layers
    from automodel.models.auto import class_for

    torch.manual_seed(0)
    model = class_for(NEXT_TOKEN).from_config(AutoConfig.for_model(kind, **SIZE))
    model = model.to(torch.bfloat16).to(dtype).train()
    if packing is not None:
        pack_layers(model, packing, device, dtype, ())
    model = model.to(device)
    attach(model, resolve(PeftConfig(dim=8, alpha=16), model, "CAUSAL_LM", "base"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in trained_tensors(model).items():
            if name.endswith("lora_B"):
                tensor.copy_(0.05 * torch.randn(tensor.shape, generator=generator))
    return model


def batches(count=6):
    import numpy as np

    from automodel.data.batch import StepBatch
    from automodel.data.collate import PackedCollator
    from automodel.data.samples import SampleWriter
    from automodel.data.store import TokenStore

    rng, writer = np.random.default_rng(0), SampleWriter()
    for row in range(4 * count):
        ids = rng.integers(10, 500, rng.integers(5, 200))
        ids[2::3] = 7 + row % 2
        writer.add(row, ids, token_labels=ids)
    collate = PackedCollator(
        TokenStore.in_memory(writer.finish()), place="next_token", pool="last", bucket_tokens=256, max_seqlen=256,
        micro_batch_size=4, sort_tokens=True, longest_first=True,
    )  # fmt: skip
    return [StepBatch((collate(list(range(4 * i, 4 * i + 4))),), 0, i) for i in range(count)]


def captured_losses(model, steps, checkpointing="none", offload=False, then=None):
    from automodel.engine.captured import CapturedStep
    from automodel.kernels.flat_adamw import FlatAdamW
    from automodel.kernels.side_stream import SideStream
    from automodel.models.checkpointing import use_gradient_checkpointing
    from automodel.models.forward import make_loss_forward
    from automodel.models.fuse import fuse
    from automodel.models.recompute import use_own_checkpoints
    from automodel.optim.build import parameter_groups
    from automodel.optim.config import LRSchedulerConfig, OptimizerConfig
    from automodel.optim.schedule import Schedule
    from automodel.tasks.loss_config import LossConfig

    if checkpointing != "none":
        use_gradient_checkpointing(model, checkpointing)
        use_own_checkpoints(model, offload)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = FlatAdamW(
        parameter_groups(model, OptimizerConfig()), lr=1e-3, max_norm=1.0, copy_dtype=torch.bfloat16,
        lr_factors=torch.ones(100, dtype=torch.float64),
    )  # fmt: skip
    seed, side = torch.zeros(1, dtype=torch.int64, device="cuda"), SideStream()
    assert fuse(model, seed, side, 256) == SIZE["num_hidden_layers"]
    if then is not None:
        assert then(model)
    step = CapturedStep(
        model, make_loss_forward(model, NEXT_TOKEN, "packed", swapped=True),
        CAUSAL_LM.loss(LossConfig(), None, None), optimizer, Schedule(LRSchedulerConfig(name="constant"), 100),
        peak_lr=1e-3, seed=seed, accumulates=False, device="cuda", side=side,
    )  # fmt: skip
    warnings = []
    step.warn = warnings.append
    losses = torch.stack([step(i, b).loss.clone() for i, b in enumerate(steps * 3)]).tolist()
    assert not warnings
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name
            assert parameter.grad is None, name
    return losses


def eager_losses(model, steps):
    from automodel.engine.step import TrainStep
    from automodel.models.forward import make_forward
    from automodel.optim.build import build_optimizer
    from automodel.optim.config import LRSchedulerConfig, OptimizerConfig
    from automodel.optim.schedule import Schedule
    from automodel.tasks.loss_config import LossConfig

    step = TrainStep(
        model, make_forward(model, NEXT_TOKEN, "packed"), CAUSAL_LM.loss(LossConfig(), None, None),
        build_optimizer(model, OptimizerConfig(lr=1e-3)), Schedule(LRSchedulerConfig(name="constant"), 100),
        peak_lr=1e-3, max_norm=1.0, precision="fp32", device="cuda",
    )  # fmt: skip
    return [float(step(i, b).loss) for i, b in enumerate(steps * 3)]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(("checkpointing", "offload"), [("none", False), ("full", False), ("full", True)])
def test_captured_fused_steps_learn_what_plain_fp32_steps_learn(kind, checkpointing, offload):
    steps = batches()
    ours = captured_losses(adapted(kind, "cuda", torch.bfloat16), steps, checkpointing, offload)
    theirs = eager_losses(adapted(kind, "cuda", torch.float32), steps)
    assert theirs[-1] < theirs[0] - 0.3
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.03


@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("nf4", False), ("fp4", True), ("int8", False)])
@pytest.mark.parametrize("shape", [(512, 256), (96, 37)])
def test_weights_in_few_bits_are_those_of_the_cpu(kind, double, shape):
    from automodel.kernels.packed import expand_reference, pack

    torch.manual_seed(0)
    weight = (torch.randn(shape) * 0.02).to(torch.bfloat16)
    here, there = pack(weight, kind, double), pack(weight.cuda(), kind, double)
    assert (here.codes != there.codes.cpu()).float().mean() < 1e-3
    for dtype in (torch.bfloat16, torch.float32):
        found = there.expand(dtype)
        torch.testing.assert_close(found.float(), expand_reference(there).to(dtype).float(), rtol=2e-7, atol=1e-9)


def test_packed_and_resident_bases_learn_the_same_in_captured_steps():
    from automodel.adapters.config import Packing

    steps, found = batches(), []
    for resident in (True, False):
        packing = Packing("nf4", double=True, resident=resident)
        found.append(captured_losses(adapted("qwen3", "cuda", torch.bfloat16, packing), steps))
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    exact = captured_losses(adapted("qwen3", "cuda", torch.bfloat16), steps)
    assert 1e-4 < abs(found[0][0] - exact[0]) < 0.2
    assert found[0][-1] < found[0][0] - 0.3


def test_a_packed_base_is_recomputed_with_its_inputs_on_the_host():
    from automodel.adapters.config import Packing

    packing = Packing("nf4", double=True)
    steps = batches()
    plain = captured_losses(adapted("qwen3", "cuda", torch.bfloat16, packing), steps)
    again = captured_losses(adapted("qwen3", "cuda", torch.bfloat16, packing), steps, "full", offload=True)
    assert plain == pytest.approx(again, abs=0.01)


def test_an_fp8_base_learns_nearly_the_same(monkeypatch):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")
    from automodel.kernels import fp8_linear
    from automodel.models import fp8

    monkeypatch.setattr(fp8_linear, "SMALLEST_WIDTH", 256)
    steps, exact = batches(), adapted("qwen3", "cuda", torch.bfloat16)
    expected = captured_losses(exact, steps)
    rounded = captured_losses(adapted("qwen3", "cuda", torch.bfloat16), steps, then=fp8.use_fp8)
    assert max(abs(a - b) for a, b in zip(expected, rounded, strict=True)) < 0.1
    assert expected != rounded


def test_adapters_inside_the_products_of_an_mlp():
    """B beside the weights of gate and up, A below that of down: what passes of their own add."""
    from automodel.kernels.frozen import Below, Beside, Held
    from automodel.kernels.lora_linear import LowRank, lora_joined_linear, lora_swiglu_linear

    torch.manual_seed(0)
    rows, wide, inner, rank = 333, 256, 768, 16

    def leaf(*shape):
        return (0.1 * torch.randn(*shape, device="cuda")).bfloat16().requires_grad_()

    x, gate, up, down = leaf(rows, wide), *(leaf(inner, wide).detach() for _ in range(2)), leaf(wide, inner).detach()
    adapters = [LowRank(leaf(rank, wide), leaf(inner, rank), 0.5, first) for first in (0, inner)]
    last = LowRank(leaf(rank, inner), leaf(wide, rank), 2.0)
    learned = [x, *(a.a_RI for a in adapters), *(a.b_OR for a in adapters), last.a_RI, last.b_OR]
    upstream, found = torch.randn(rows, wide, device="cuda").bfloat16(), []
    for bases in ((Held(torch.cat([gate, up])), Held(down)), (Beside([gate, up], 2 * rank), Below(down, rank))):
        inner_TG, _ = lora_joined_linear(x, bases[0], None, adapters)
        y = lora_swiglu_linear(inner_TG, bases[1], None, "silu", last)
        found.append((y, *torch.autograd.grad(y, learned, upstream)))
    for apart, inside in zip(*found, strict=True):
        assert (apart - inside).norm() <= 0.01 * apart.norm()
