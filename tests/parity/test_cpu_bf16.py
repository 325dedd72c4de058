"""Products in bf16 on the CPU against transformers under autocast: gradients, loss curves, and what stays in fp32.

Two runs of autocast that differ only by the attention that transformers takes are the measure: what bf16 rounds is
drawn anew in each of them. Our own products may be no farther from either than these are apart, with a third for luck.
"""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console
from torch import nn

import tiny_runs as tiny
from automodel.engine.run import finetune
from automodel.kernels.cpu_products import Bf16Copies, Bf16Products, OnednnProducts, has_onednn
from automodel.models.cpu_linears import CpuLinear, use_cpu_products
from automodel.plan.check import load_run_config
from tiers import quick
from tiny_models import tiny as tiny_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a run takes the GPU that is here")

STEPS = 30
FAMILIES = ["bert", "distilbert", "roberta", "electra", "modernbert", "llama", "qwen3", "gemma", "gpt2", "mistral"]


def written(folder, kind: str) -> tuple[str, list[dict]]:
    """A folder with weights that both sides begin with, and the training rows."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = tiny.make_model_folder(folder / "model", kind)
    rows = tiny.reviews(STEPS * 8)
    tiny.write_jsonl(folder / "train.jsonl", rows)
    torch.manual_seed(7)
    tokenizer = AutoTokenizer.from_pretrained(model)
    stock = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2, pad_token_id=tokenizer.pad_token_id)
    stock.save_pretrained(folder / "start")
    tokenizer.save_pretrained(folder / "start")
    return str(folder / "start"), rows


def autocast_curve(start: str, rows: list[dict], attention: str) -> list[float]:
    """Thirty steps of plain transformers under autocast: AdamW, clipping and rate as in the run below."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(start)
    model = AutoModelForSequenceClassification.from_pretrained(start, attn_implementation=attention)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        batch = rows[step * 8 : (step + 1) * 8]
        inputs = tokenizer([row["text"] for row in batch], padding=True, return_tensors="pt")
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**inputs).logits
        loss = nn.functional.cross_entropy(logits.float(), torch.tensor([row["label"] for row in batch]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def our_curve(folder, start: str, *settings: str) -> list[float]:
    (folder / "run.yaml").write_text(
        f"task: text-classification\nmodel: {start}\ndataset: {{path: {folder}/train.jsonl}}\n"
        "dataloader: {shuffle: false, batch_size: 8}\noptimizer: {lr: 1e-3, weight_decay: 0.0}\n"
        f"step_scheduler: {{max_steps: {STEPS}, log_every_steps: 1}}\nlr_scheduler: {{name: constant}}\n"
        f"checkpoint: {{checkpoint_dir: {folder}/out, enabled: false}}\n"
        "training_optimizations: {precision: bf16}\n"
    )
    finetune(load_run_config([folder / "run.yaml"], settings), overwrite=True, console=Console(file=io.StringIO()))
    assert json.loads((folder / "out" / "run" / "plan.json").read_text())["own_products"]
    return list(tiny.losses(folder / "out").values())


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", quick(["bert", "distilbert", "llama"], "bert", "llama"))
@pytest.mark.parametrize("packed", ["true", "false"], ids=["packed", "padded"])
def test_thirty_steps_are_as_near_as_two_runs_of_autocast(tmp_path, kind, packed):
    start, rows = written(tmp_path, kind)
    eager, sdpa = (autocast_curve(start, rows, attention) for attention in ("eager", "sdpa"))
    ours = our_curve(tmp_path, start, f"packed_sequence.enabled={packed}", "dataloader.group_by_length=false")
    assert ours[-1] < 0.9 * ours[0], "nothing was learned, so nearness would prove little"
    allowed = max(4 / 3 * apart(eager, sdpa), 0.01)
    assert min(apart(ours, eager), apart(ours, sdpa)) <= allowed, (apart(eager, sdpa), ours, eager)


def gradients_of(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def passes(model, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits = model(input_ids=ids).logits
    model.zero_grad()
    logits.float().square().mean().backward()
    return logits.detach().float(), gradients_of(model)


@pytest.mark.parametrize("kind", quick(FAMILIES, "bert", "modernbert", "gemma", "gpt2"))
def test_swapped_linears_are_near_fp32_and_onednns_equal_it(kind):
    """Stock modules with swapped linear layers. Every parameter that had a gradient has one."""
    _, model = tiny_model(kind, "text-classification")
    ids = torch.randint(5, 30, (1, 12), generator=torch.Generator().manual_seed(0))
    exact_logits, exact = passes(model, ids)
    for products, bound in ((OnednnProducts(), 1e-4), (Bf16Products(), 0.05)):
        if isinstance(products, OnednnProducts) and not has_onednn():
            continue
        _, ours = tiny_model(kind, "text-classification")
        ours.load_state_dict(model.state_dict())
        copies = Bf16Copies() if isinstance(products, Bf16Products) else None
        use_cpu_products(ours, products, copies, whole_layers=False, linears=True)
        if copies is not None:
            copies.refresh()
        assert any(isinstance(m.__dict__.get("forward"), CpuLinear) for m in ours.modules())
        logits, found = passes(ours, ids)
        assert found.keys() == exact.keys()
        size = torch.cat([g.flatten() for g in exact.values()]).norm()
        error = torch.cat([(found[n] - g).flatten() for n, g in exact.items()]).norm()
        assert error <= bound * size
        assert (logits - exact_logits).norm() <= bound * exact_logits.norm()


def test_heads_norms_and_embeddings_stay_in_fp32():
    _, model = tiny_model("bert", "text-classification")
    use_cpu_products(model, Bf16Products(), Bf16Copies(), whole_layers=False, linears=True)
    swapped = {name for name, m in model.named_modules() if isinstance(m.__dict__.get("forward"), CpuLinear)}
    linears = {name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert swapped == {name for name in linears if ".encoder.layer." in name}
    assert linears - swapped == {"bert.pooler.dense", "classifier"}


def test_a_resumed_run_goes_on_exactly(tmp_path):
    """Copies are made of the masters that the checkpoint holds: the losses are those of the whole run, to the bit."""
    start, _ = written(tmp_path, "bert")
    enabled = ("checkpoint.enabled=true", "step_scheduler.ckpt_every_steps=10", "checkpoint.keep_last=10")
    whole = our_curve(tmp_path, start, *enabled)
    cut = tmp_path / "out" / "run" / "steps"
    for folder in cut.iterdir():
        if folder.name.endswith(("20", "30")):
            for file in sorted(folder.rglob("*"), reverse=True):
                file.unlink()
            folder.rmdir()
    cfg = load_run_config([tmp_path / "run.yaml"], enabled)
    finetune(cfg, resume=True, console=Console(file=io.StringIO()))
    assert list(tiny.losses(tmp_path / "out").values()) == whole


def test_fresh_copies_before_every_forward_pass(tmp_path):
    """An update between two passes is seen by the second one, also where the optimizer does not count its changes."""
    start, _ = written(tmp_path, "bert")
    first, second = our_curve(tmp_path, start)[:2]
    frozen = our_curve(tmp_path, start, "optimizer.lr=1e-20")
    assert frozen[0] == first
    assert frozen[1] != second
