"""`automodel.AutoModelFor…` in somebody's own loop on a real GPU: fused blocks in bf16 against stock transformers.

    pytest -m gpu tests/gpu/test_drop_in_gpu.py

The measure of an error is what the stock model itself loses when it computes in bf16.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    import transformers

    import automodel
    from automodel.models.drop_in import loss_alone, path_taken

VOCAB = 512
DECODER = {
    "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "vocab_size": VOCAB, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER = {
    "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512, "vocab_size": VOCAB,
    "max_position_embeddings": 512, "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "num_labels": 3,
}  # fmt: skip
WINDOWS = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
KINDS = {
    "llama": DECODER, "qwen3": DECODER, "mistral": {**DECODER, "sliding_window": 32},
    "gemma3_text": {**DECODER, **WINDOWS}, "bert": ENCODER,
}  # fmt: skip
LANGUAGE = ["llama", "qwen3", "mistral", "gemma3_text"]


def folder_of(kind, path, cls, **overrides):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**KINDS[kind], **overrides})
    getattr(transformers, cls).from_config(config).save_pretrained(path)
    return path


def load(home, cls, path, dtype=torch.bfloat16, **keywords):
    return getattr(home, cls).from_pretrained(path, dtype=dtype, **keywords).cuda()


def batch(seed=0, rows=(190, 12, 75, 140, 33), side="right"):
    generator = torch.Generator().manual_seed(seed)
    ids, mask = torch.zeros(len(rows), max(rows), dtype=torch.int64), torch.zeros(len(rows), max(rows)).long()
    for row, length in enumerate(rows):
        here = slice(0, length) if side == "right" else slice(max(rows) - length, max(rows))
        ids[row, here] = torch.randint(5, VOCAB, (length,), generator=generator)
        mask[row, here] = 1
    labels = torch.where(mask.bool(), ids, -100)
    labels[torch.nn.functional.pad(mask, (1, 0))[:, :-1] == 0] = -100
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda(), "labels": labels.cuda()}


def gradients(model, inputs):
    model.zero_grad(set_to_none=True)
    with loss_alone(model):  # logits are compared at tokens only, so padding may be taken out in eval mode, too
        output = model(**inputs)
    output.loss.backward()
    return output, {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def assert_as_good_as_stock(exact, coarse, ours, inputs):
    """Against fp32, ours may be twice as wrong as stock code in bf16, and a little more."""
    wide, exact_g = gradients(exact, inputs)
    rough, coarse_g = gradients(coarse, inputs)
    mine, ours_g = gradients(ours, inputs)
    assert path_taken(ours)[0] == "fused", path_taken(ours)
    assert float(mine.loss) == pytest.approx(float(wide.loss), rel=0.01)
    kept = inputs["attention_mask"].bool() if mine.logits.dim() == 3 else ...
    assert mine.logits.dtype == rough.logits.dtype
    error, allowed = ((t.logits.float() - wide.logits)[kept].norm() for t in (mine, rough))
    assert error < 2 * allowed + 0.005 * wide.logits[kept].norm() + 1e-3
    assert ours_g.keys() == exact_g.keys()
    whole = torch.stack([g.norm() for g in exact_g.values()]).norm()
    for name, expected in exact_g.items():
        error, allowed = ((g[name] - expected).norm() for g in (ours_g, coarse_g))
        assert error < 2 * allowed + 0.02 * expected.norm() + 1e-3 * whole, name


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", LANGUAGE)
def test_language_models_run_fused_blocks(kind, side, training, tmp_path):
    path = folder_of(kind, tmp_path, "AutoModelForCausalLM")
    exact = load(transformers, "AutoModelForCausalLM", path, torch.float32).train(training)
    coarse, ours = (load(home, "AutoModelForCausalLM", path).train(training) for home in (transformers, automodel))
    for seed in (0, 1):
        assert_as_good_as_stock(exact, coarse, ours, batch(seed, side=side))
    full = batch(2, rows=(64, 64))
    assert_as_good_as_stock(exact, coarse, ours, full)


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_classifiers_run_fused_blocks(kind, task, tmp_path):
    cls = f"AutoModelFor{task}"
    path = folder_of(kind, tmp_path, cls, num_labels=3, pad_token_id=0)
    exact = load(transformers, cls, path, torch.float32)
    coarse, ours = load(transformers, cls, path), load(automodel, cls, path)
    inputs = batch()
    classes = torch.tensor([0, 1, 2, 0, 1], device="cuda")
    tags = torch.where(inputs["attention_mask"].bool(), inputs["input_ids"] % 3, -100)
    inputs["labels"] = classes if task.startswith("Sequence") else tags
    assert_as_good_as_stock(exact, coarse, ours, inputs)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_plain_loop_learns_the_same(kind, checkpointing, tmp_path):
    path = folder_of(kind, tmp_path / "start", "AutoModelForCausalLM")
    losses = []
    for home, dtype in (
        (transformers, torch.float32), (transformers, torch.bfloat16), (automodel, torch.bfloat16)
    ):  # fmt: skip
        model = load(home, "AutoModelForCausalLM", path, dtype).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        optimizer, here = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), []
        for step in range(30):
            loss = model(**batch(step % 3)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            here.append(float(loss.detach()))
        losses.append(here)
    assert path_taken(model)[0] == "fused"
    exact, coarse, ours = torch.tensor(losses)
    assert ours[:10].tolist() == pytest.approx(exact[:10].tolist(), rel=0.02)
    assert (ours - exact).abs().mean() < 2 * (coarse - exact).abs().mean() + 0.02
    model.save_pretrained(tmp_path / "end")
    again = load(transformers, "AutoModelForCausalLM", tmp_path / "end").eval()
    ids = batch()["input_ids"][:2, :12]
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)
    settings = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(again.generate(ids, **settings), model.generate(ids, **settings))


def test_dropout_is_drawn_anew_in_every_call(tmp_path):
    path = folder_of("bert", tmp_path, "AutoModelForSequenceClassification", hidden_dropout_prob=0.1)
    model = load(automodel, "AutoModelForSequenceClassification", path).train()
    inputs = {**batch(), "labels": torch.tensor([0, 1, 2, 0, 1], device="cuda")}
    torch.manual_seed(3)
    losses = [float(model(**inputs).loss) for _ in range(6)]
    assert path_taken(model)[0] == "fused"
    assert len(set(losses)) > 3
    torch.manual_seed(3)
    assert [float(model(**inputs).loss) for _ in range(6)] == losses


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "bert"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fp32_weights_under_autocast_are_rounded_once_a_call(kind, dtype, tmp_path):
    cls = "AutoModelForSequenceClassification" if kind == "bert" else "AutoModelForCausalLM"
    path, inputs = folder_of(kind, tmp_path, cls), batch()
    if kind == "bert":
        inputs["labels"] = torch.tensor([0, 1, 2, 0, 1], device="cuda")
    stock, ours = (load(home, cls, path, torch.float32).train() for home in (transformers, automodel))
    found = []
    for model, on in ((stock, False), (stock, True), (ours, True)):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", getattr(torch, dtype), enabled=on):
            output = model(**inputs)
        output.loss.backward()
        found.append((output.loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (loss, exact), (_, rough), (mine, gradients) = found
    assert path_taken(ours)[0] == "fused", path_taken(ours)
    assert mine == pytest.approx(loss, rel=0.01)
    whole = torch.stack([g.norm() for g in exact.values()]).norm()
    for name, expected in exact.items():
        assert gradients[name].dtype == torch.float32
        error, allowed = ((g[name] - expected).norm() for g in (gradients, rough))
        assert error < 3 * allowed + 0.03 * expected.norm() + 2e-3 * whole, name
    with torch.no_grad(), torch.autocast("cuda", getattr(torch, dtype)):
        assert float(ours(**inputs).loss) == pytest.approx(loss, rel=0.01)


def test_a_training_step_does_not_hold_all_logits(tmp_path):
    path = folder_of("llama", tmp_path, "AutoModelForCausalLM", vocab_size=65536)
    model = load(automodel, "AutoModelForCausalLM", path).train()
    inputs = batch(rows=(500,) * 64)
    model(**inputs).loss.backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(**inputs).loss.backward()
    all_logits = 64 * 500 * 65536 * 2
    assert torch.cuda.max_memory_allocated() - before < all_logits
