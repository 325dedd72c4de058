"""Optimizers and gradient checkpointing on a real GPU.

    pytest -m gpu tests/gpu/test_optimizers.py

8-bit and paged optimizers come from bitsandbytes; where it is not installed, their tests are skipped and say so. State
is compared bit for bit, with gradients that are given and not computed: no kernel of a model is in the way. Whole runs
are compared with their tolerance.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import json

import pytest
import torch

from automodel.models.task_head import NEXT_TOKEN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    from rich.console import Console

    import tiny_runs as tiny
    from automodel.checkpoint.store import CheckpointStore
    from automodel.engine.run import finetune
    from automodel.optim.build import build_optimizer, load_state_tensors, set_lr, state_tensors
    from automodel.optim.config import OptimizerConfig
    from automodel.plan.check import load_run_config
    from automodel.plan.hardware import read_hardware

PLAIN = ["adamw", "lion", "adafactor", "muon", "sgd", "rmsprop", "adagrad"]
LIBRARY = ["adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit"]
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed (automodel-finetune[quant])"
)


def make_net(dtype):
    """Matrices large enough to be paged (100,000 elements and more)."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(384, 384) for _ in range(2))
    net = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(400, 384), "layers": layers, "norm": torch.nn.LayerNorm(384)}
    )
    return net.to("cuda", dtype)


def give_gradients(net, optimizer, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator("cuda").manual_seed(step)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator, device="cuda").to(p.dtype)
        set_lr(optimizer, 1e-3 / (1 + step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*PLAIN, *(pytest.param(name, marks=needs_library) for name in LIBRARY)])
def test_state_continues_exactly_through_a_checkpoint(tmp_path, name, dtype):
    cfg = OptimizerConfig(name=name, weight_decay=0.01, extra={"momentum": 0.9} if name == "sgd" else {})
    net = make_net(getattr(torch, dtype))
    optimizer = build_optimizer(net, cfg)
    give_gradients(net, optimizer, 0, 4)
    tensors, values = state_tensors(optimizer, net)
    store = CheckpointStore(tmp_path)
    store.save(4, {"optimizer": tensors}, {"values": values})
    saved, _ = store.latest()
    twin = make_net(getattr(torch, dtype))
    twin.load_state_dict(net.state_dict())
    other = build_optimizer(twin, cfg)
    load_state_tensors(other, twin, saved.tensors("optimizer"), saved.state()["values"])
    give_gradients(net, optimizer, 4, 3)
    give_gradients(twin, other, 4, 3)
    for (path, a), b in zip(net.named_parameters(), twin.parameters()):
        assert torch.isfinite(a).all(), path
        assert torch.equal(a, b), path
    if name.startswith("paged"):
        assert all(
            getattr(o.state[n.layers[0].weight]["state1"], "is_paged", False)
            for o, n in ((optimizer, net), (other, twin))
        )
    if name.endswith("8bit"):
        assert other.state[twin.layers[0].weight]["state1"].dtype == torch.uint8
        assert other.state[twin.embed.weight]["state1"].dtype == torch.float32


@needs_library
@pytest.mark.parametrize(("paged", "plain"), [("paged_adamw_32bit", "adamw"), ("paged_lion_32bit", "lion")])
def test_paged_and_plain_compute_the_same(paged, plain):
    """The plan takes the plain one where its state fits."""
    nets = [make_net(torch.float32), make_net(torch.float32)]
    for net, name in zip(nets, (paged, plain)):
        give_gradients(net, build_optimizer(net, OptimizerConfig(name=name, weight_decay=0.1)), 0, 5)
    for a, b in zip(*(net.parameters() for net in nets)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# Whole runs.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A decoder of a size that has fused blocks, without dropout, and an encoder with it."""
    import transformers as t

    root = tmp_path_factory.mktemp("optimizers")
    tokenizer = tiny.make_tokenizer(decoder=True)
    size = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    torch.manual_seed(0)
    llama = t.LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, eos_token_id=3,
        bos_token_id=2, **size,
    )  # fmt: skip
    t.LlamaForCausalLM(llama).save_pretrained(root / "llama")
    tokenizer.save_pretrained(root / "llama")
    encoder_tokenizer = tiny.make_tokenizer()
    bert = t.BertConfig(vocab_size=len(encoder_tokenizer), max_position_embeddings=128, pad_token_id=0, **size)
    t.BertForMaskedLM(bert).save_pretrained(root / "bert")
    encoder_tokenizer.save_pretrained(root / "bert")
    tiny.write_jsonl(root / "train.jsonl", tiny.reviews(64))
    return root


def run(folder, name: str, *settings: str, kind="llama", task="text-classification", steps=20, memory=None):
    """(losses, plan, what was printed)."""
    text = folder / f"{kind}-{task}.yaml"
    text.write_text(
        f"model: {folder / kind}\ntask: {task}\ndataset: {{path: {folder / 'train.jsonl'}}}\n"
        "dataloader: {batch_size: 16, num_workers: 0}\noptimizer: {lr: 3e-4, weight_decay: 0.01}\n"
        f"lr_scheduler: constant\nstep_scheduler: {{log_every_steps: 1, max_steps: {steps}}}\n"
    )
    out = folder / f"{kind}-{task}-{name}"
    printed = folder / "printed.txt"
    with pytest.MonkeyPatch.context() as patch, printed.open("w") as file:
        patch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
        if memory is not None:
            small = dataclasses.replace(read_hardware(), memory_gib=memory)
            patch.setattr("automodel.engine.prepare.read_hardware", lambda: small)
        settings = (f"checkpoint.checkpoint_dir={out}", "checkpoint.enabled=false", *settings)
        finetune(load_run_config([text], settings), console=Console(file=file, width=400))
    assert "could not be captured" not in printed.read_text()
    return tiny.losses(out), json.loads((out / "run" / "plan.json").read_text()), printed.read_text()


@pytest.mark.parametrize("name", [*PLAIN[1:], *(pytest.param(name, marks=needs_library) for name in LIBRARY)])
def test_runs_with_each_optimizer(folder, name):
    lr = "optimizer.lr=3e-5" if "lion" in name else "optimizer.lr=1e-3" if name in ("sgd", "adagrad") else "seed=42"
    losses, plan, printed = run(folder, name, f"optim={name}", lr, "step_scheduler.grad_acc_steps=2")
    assert losses[20] < losses[1]
    # Paged for nothing, or of our own.
    assert plan["capture"] == (name in ("paged_adamw_32bit", "adamw_8bit"))
    assert ("not needed" in printed) == (name in ("paged_adamw_32bit", "paged_lion_32bit"))


@needs_library
@pytest.mark.parametrize("name", ["paged_adamw_32bit", "paged_lion_32bit"])
def test_paging_where_memory_is_short(folder, name):
    """The plan believes in a small GPU, so the library's paged optimizer runs; with the same losses."""
    lr = "optimizer.lr=3e-5" if "lion" in name else "optimizer.lr=3e-4"
    exact = ("training_optimizations.precision=fp32", f"optim={name}", lr)
    paged, plan, printed = run(folder, f"{name}-short", *exact, memory=0.01)
    assert plan["optimizer"]["paged"]
    assert "states move between GPU and host" in printed
    plain, plan, _ = run(folder, f"{name}-plenty", *exact, "training_optimizations.capture=false")
    assert not plan["optimizer"]["paged"]
    assert paged == pytest.approx(plain, rel=5e-3, abs=2e-3)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("task", ["text-classification", "causal-lm"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_captured_steps_of_a_decoder_may_be_checkpointed(folder, task, precision, mode):
    """Fused blocks in bf16, stock ones in fp32; the same losses, step by step."""
    settings = (f"training_optimizations.precision={precision}", "step_scheduler.grad_acc_steps=1")
    plain, plan, _ = run(folder, f"{precision}-none-{mode}", *settings, task=task)
    assert (plan["capture"], plan["fused_kernels"]) == (True, precision == "bf16")
    again, plan, _ = run(folder, f"{precision}-{mode}", *settings, f"gradient_checkpointing={mode}", task=task)
    assert (plan["capture"], plan["checkpointing"]) == (True, mode)
    assert plan["fused_kernels"] == (precision == "bf16")
    tolerance = {"rel": 0.02, "abs": 0.01} if precision == "bf16" else {"rel": 2e-3, "abs": 5e-4}
    assert again == pytest.approx(plain, **tolerance)
    assert again[20] < 0.9 * again[1]


def test_accumulation_and_checkpointing_are_captured_together(folder):
    settings = ("step_scheduler.grad_acc_steps=2", "dataloader.batch_size=8")
    plain, _, _ = run(folder, "accumulated-none", *settings, task="causal-lm")
    again, plan, _ = run(folder, "accumulated-full", *settings, "gradient_checkpointing=true", task="causal-lm")
    assert (plan["capture"], plan["checkpointing"]) == (True, "full")
    assert again == pytest.approx(plain, rel=0.02, abs=0.01)


def test_layers_with_dropout_are_checkpointed_eagerly(folder):
    """Every second layer, or every one: with other dropout the second time, gradients and so losses would differ."""
    losses = []
    for mode in ("selective", "full"):
        found, plan, printed = run(folder, mode, f"gradient_checkpointing={mode}", kind="bert")
        assert (plan["capture"], plan["checkpointing"]) == (False, mode)
        assert "layers with dropout" in printed
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=0.02, abs=0.01)
    assert losses[0][20] < losses[0][1]


def test_checkpointing_saves_memory_as_the_estimate_says():
    """Activations of one forward pass of fused blocks: what the allocator holds against the formula, mode by mode."""
    import transformers as t

    from automodel.data.batch import PackedBatch
    from automodel.kernels.flat_parameters import FlatParameters
    from automodel.models.checkpointing import use_gradient_checkpointing
    from automodel.models.forward import make_forward
    from automodel.models.fuse import fuse
    from automodel.models.recompute import use_own_checkpoints
    from automodel.optim.build import parameter_groups
    from automodel.optim.kinds import ADAMW
    from automodel.plan.memory import Setting, activation_bytes, layer_bytes, shape_of

    tokens = 8192
    config = t.LlamaConfig(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1536,
        vocab_size=512, max_position_embeddings=512,
    )  # fmt: skip
    stream = PackedBatch(
        input_ids_T=torch.randint(5, 500, (tokens,)),
        position_ids_T=torch.arange(tokens) % 256,
        cu_seqlens_D=torch.arange(0, tokens + 1, 256, dtype=torch.int32),
        max_seqlen=256,
        read_positions_R=torch.arange(tokens),
        labels_R=torch.zeros(tokens, dtype=torch.long),
        token_type_ids_T=None,
        num_documents=tokens // 256,
        num_tokens=tokens,
        num_labels=tokens,
        token_runs_2T=torch.zeros(2, tokens, dtype=torch.int32),
    ).to("cuda")
    for mode in ("none", "selective", "full"):
        torch.manual_seed(0)
        model = t.LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
        FlatParameters(parameter_groups(model, OptimizerConfig()))
        assert fuse(model, torch.zeros(1, dtype=torch.int64, device="cuda"), None, 256) == 8
        if mode != "none":
            use_gradient_checkpointing(model, mode)
            use_own_checkpoints(model, offload=False)
        forward = make_forward(model, NEXT_TOKEN, "packed", swapped=True)
        forward(stream).float().sum().backward()  # workspaces, tables, gradients
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        logits = forward(stream)
        kept = torch.cuda.memory_allocated() - before - logits.numel() * 2
        shape = shape_of(config)
        setting = Setting("bf16-pure", True, True, ADAMW, mode, tokens, tokens, device="cuda")
        expected = activation_bytes(shape, setting) - (
            tokens * layer_bytes(shape, setting, again=True) if mode != "none" else 0
        )
        assert expected == pytest.approx(kept, rel=0.25), mode
        del logits, forward, model
