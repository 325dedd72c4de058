"""FSDP2 on a GPU, with the one rank that there is: NCCL, weights gathered in bf16, and the losses of the plain step, by
stock blocks and by fused ones."""

import dataclasses

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    import torch.distributed as dist

    import tiny_runs as tiny
    from automodel.distributed.layout import Layout
    from automodel.engine.prepare import prepare_run
    from automodel.engine.steps import make_step, make_step_loader
    from automodel.plan.check import load_run_config

STEPS = 10
ALLOWED = {"fp32": 1e-3, "bf16": 0.03, "bf16-pure": 0.05}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("sharded")
    tiny.make_model_folder(root / "model", "llama", tie_word_embeddings=True)
    tiny.write_jsonl(root / "train.jsonl", [{"text": row["text"]} for row in tiny.reviews(48)])
    make_wide_model(root / "wide")
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{root / 'meet'}", rank=0, world_size=1)
    yield root
    dist.destroy_process_group()


def make_wide_model(folder):
    """Wide enough for flash attention and fused blocks."""
    import transformers as t

    torch.manual_seed(0)
    tokenizer = tiny.make_tokenizer(decoder=True)
    config = t.Qwen3Config(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        intermediate_size=512, max_position_embeddings=128, vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=3,
        bos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    t.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def losses(folder, layout, precision, *settings, model="model", **plan):
    path = folder / "run.yaml"
    path.write_text(
        f"model: {folder / model}\ntask: causal-lm\ndataset: {{path: {folder / 'train.jsonl'}}}\n"
        "optimizer: {lr: 1e-3}\ndataloader: {batch_size: 4}\nstep_scheduler: {max_steps: 10, grad_acc_steps: 2}\n"
        f"training_optimizations: {{capture: false, precision: {precision}}}\n"
    )
    prepared = prepare_run(load_run_config([path], list(settings)))
    prepared = dataclasses.replace(prepared, layout=layout, plan=dataclasses.replace(prepared.plan, **plan))
    model, step = make_step(prepared)
    loader = make_step_loader(prepared)
    found = [float(step(index, batch).loss) for index, batch in zip(range(STEPS), loader, strict=False)]
    return found, model, step


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
def test_losses_are_those_of_the_plain_step(folder, monkeypatch, precision):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
    plain, _, _ = losses(folder, Layout(), precision)
    sharded, model, step = losses(folder, Layout(fsdp=True), precision)
    assert max(abs(a - b) for a, b in zip(plain, sharded, strict=True)) < ALLOWED[precision]
    assert plain[-1] < plain[0]
    assert all(parameter.is_cuda for parameter in model.parameters())
    assert step.loaded.streamed


def test_parts_in_host_memory(folder, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
    plain, _, _ = losses(folder, Layout(), "bf16")
    offloaded, model, _ = losses(folder, Layout(fsdp=True), "bf16", "distributed.cpu_offload=true")
    assert max(abs(a - b) for a, b in zip(plain, offloaded, strict=True)) < ALLOWED["bf16"]
    assert not any(parameter.is_cuda for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
@pytest.mark.parametrize("again", ["none", "full"])
def test_fused_blocks_of_shards(folder, monkeypatch, precision, again):
    """Gathered weights lie anywhere; what is computed with them is what stock blocks compute."""
    monkeypatch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
    plain, _, _ = losses(folder, Layout(), precision, model="wide")
    checkpointing = f"training_optimizations.gradient_checkpointing={again}"
    fused, model, step = losses(folder, Layout(fsdp=True), precision, checkpointing, model="wide", fused_kernels=True)
    assert all("forward" in layer.__dict__ for layer in model.model.layers)
    assert max(abs(a - b) for a, b in zip(plain, fused, strict=True)) < ALLOWED[precision]
    assert plain[-1] < plain[0]
    model.eval()
    loader = make_step_loader(planned(folder, fused_kernels=True))
    batch = loader.collate([0, 1, 2]).to("cuda")
    with torch.no_grad():
        total = step.loss.scaled_sum(step.forward(batch), batch, torch.ones((), device="cuda"))
    assert torch.isfinite(total)


def test_fused_blocks_of_shards_under_an_adapter(folder, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
    plain, _, _ = losses(folder, Layout(), "bf16", "peft.dim=8", model="wide")
    fused, _, _ = losses(folder, Layout(fsdp=True), "bf16", "peft.dim=8", model="wide", fused_kernels=True)
    assert max(abs(a - b) for a, b in zip(plain, fused, strict=True)) < ALLOWED["bf16"]
    assert plain[-1] < plain[0]


def planned(folder, **plan):
    prepared = prepare_run(load_run_config([folder / "run.yaml"]))
    return dataclasses.replace(prepared, plan=dataclasses.replace(prepared.plan, **plan))
