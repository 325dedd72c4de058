"""`automodel.AutoModelFor…` in somebody's own loop, against the same code with transformers' classes (CPU, fp32):
logits where there are tokens, gradients of every parameter, losses, generated tokens, saved folders, whole loops."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import accelerate
import pytest
import torch
import transformers
from torch.optim import AdamW

import automodel
from automodel.models import drop_in
from automodel.models.drop_in import loss_alone, path_taken
from automodel.models.lazy_logits import Promise
from drop_in_pairs import CLASS, CLOSE, FUSABLE, assert_same, batch, both
from tiny_models import tiny, tiny_config

LANGUAGE = ["llama", "qwen3", "mistral", "gemma3_text", "gpt2", "gpt_neox", "gemma2"]
GEMMA2 = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}


@pytest.fixture
def folder(tmp_path):
    """(kind, task, overrides) to a saved model."""

    def saved(kind, task, **overrides):
        if kind == "gemma2":
            settings = {**tiny_config("llama").to_dict(), **GEMMA2, **overrides}
            keep = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                    "head_dim", "intermediate_size", "max_position_embeddings", "bos_token_id", "eos_token_id",
                    *GEMMA2, *overrides)  # fmt: skip
            config = transformers.AutoConfig.for_model("gemma2", **{k: settings[k] for k in keep})
            torch.manual_seed(0)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / kind)
        else:
            tiny(kind, task, **overrides)[1].save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return saved


@pytest.fixture
def fused_on_cpu(monkeypatch):
    """As if kernels ran here: the fused blocks, on their torch references."""
    monkeypatch.setattr(drop_in, "kernels_run", lambda model: True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", LANGUAGE)
def test_language_models(folder, kind, side, training):
    stock, ours = both(folder(kind, "causal-lm"), "causal-lm")
    assert isinstance(ours, type(stock))
    assert isinstance(ours, transformers.PreTrainedModel)
    stock.train(training), ours.train(training)
    assert_same(stock, ours, batch(side=side), "packed" if training else "stock")
    with loss_alone(ours):
        loss = ours(**batch(side=side)).loss
    assert path_taken(ours)[0] == "packed"
    torch.testing.assert_close(loss, stock(**batch(side=side)).loss, **CLOSE)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_language_models_with_fused_blocks(folder, kind, side, training, fused_on_cpu):
    stock, ours = both(folder(kind, "causal-lm", **FUSABLE), "causal-lm")
    stock.train(training), ours.train(training)
    for seed in (1, 2):
        assert_same(stock, ours, batch(side=side, seed=seed), "fused" if training else "stock")


@pytest.mark.parametrize("task", ["text-classification", "token-classification"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "modernbert", "llama", "gpt2"])
def test_classifiers(folder, kind, task):
    overrides = {"pad_token_id": 3} if kind in ("llama", "gpt2") else {}
    path = folder(kind, task, num_labels=3, **overrides)
    stock, ours = both(path, task)
    assert_same(stock, ours, batch(task, pad=stock.config.pad_token_id))
    if kind in ("llama", "gpt2"):
        assert_same(stock, ours, batch(task, side="left", pad=3))


@pytest.mark.parametrize("task", ["text-classification", "token-classification"])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_classifiers_with_fused_blocks(folder, kind, task, fused_on_cpu):
    wide = {**FUSABLE, "pad_token_id": 3} if kind == "llama" else {"hidden_size": 64}
    stock, ours = both(folder(kind, task, num_labels=3, **wide), task)
    stock.train(), ours.train()
    assert_same(stock, ours, batch(task, pad=stock.config.pad_token_id), "fused")


def test_token_types_travel_along(folder):
    stock, ours = both(folder("bert", "text-classification", num_labels=3), "text-classification")
    inputs = batch("text-classification")
    inputs["token_type_ids"] = (torch.arange(13) > 2).long().expand(3, 13) * inputs["attention_mask"]
    assert_same(stock, ours, inputs)


@pytest.mark.parametrize("labels", [torch.tensor([0.5, 1.5, -2.0]), torch.eye(3)])
def test_other_problems_of_classification(folder, labels):
    count = 1 if labels.dim() == 1 else 3
    stock, ours = both(folder("bert", "text-classification", num_labels=count), "text-classification")
    assert_same(stock, ours, {**batch("text-classification"), "labels": labels})
    assert ours.config.problem_type == stock.config.problem_type


@pytest.mark.parametrize("count", [7, torch.tensor(7)])
def test_losses_of_accumulated_batches_are_divided_by_what_the_caller_counted(folder, count):
    stock, ours = both(folder("llama", "causal-lm"), "causal-lm")
    assert_same(stock, ours, {**batch(), "num_items_in_batch": count})
    ours.train()
    labels = int((batch()["labels"] != -100).sum())
    summed, mean = (ours(**batch(), num_items_in_batch=n).loss.item() for n in (count, None))
    assert summed * 7 == pytest.approx(mean * labels, rel=1e-5)


def test_positions_of_the_caller_are_used(folder):
    stock, ours = both(folder("gpt2", "causal-lm"), "causal-lm")
    inputs = batch(side="left")
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    assert_same(stock, ours, inputs)


def test_documents_in_one_row(folder, monkeypatch):
    """Without a mask, positions that start anew separate documents, as in stock transformers without a cache."""
    monkeypatch.setattr(drop_in, "_check", lambda *args: None)  # which sends unpadded batches on the CPU to stock
    stock, ours = both(folder("llama", "causal-lm"), "causal-lm")
    ids = batch(rows=(13,))["input_ids"]
    positions = torch.cat([torch.arange(6), torch.arange(7)])[None]
    given = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    torch.testing.assert_close(ours(**given).logits, stock(**given).logits, **CLOSE)
    assert path_taken(ours)[0] == "packed"
    plain = ours(input_ids=ids, use_cache=False).logits
    assert not torch.allclose(plain[:, 6:], stock(**given).logits[:, 6:], atol=1e-4)


STOCK_CALLS = {
    "a cache": {"use_cache": True},
    "attentions": {"output_hidden_states": True},
    "part of the logits": {"logits_to_keep": 2, "labels": None},
    "a tuple": {"return_dict": False},
    "labels on padding": {"labels": torch.ones(3, 13, dtype=torch.int64)},
    "a mask with gaps": {"attention_mask": torch.tensor([1, 0, 1] * 4 + [1]).expand(3, 13), "labels": None},
    "no label at all": {"labels": torch.full((3, 13), -100)},
}


@pytest.mark.parametrize("what", STOCK_CALLS)
def test_everything_else_is_the_stock_forward_exactly(folder, what):
    stock, ours = both(folder("llama", "causal-lm"), "causal-lm")
    given = {**batch(), **STOCK_CALLS[what]}
    theirs, mine = stock(**given), ours(**given)
    assert path_taken(ours)[0] == "stock"
    assert type(mine) is type(theirs)
    for a, b in zip(*(output if isinstance(output, tuple) else output.values() for output in (mine, theirs))):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b) or (a.isnan() & b.isnan()).all()


@pytest.mark.parametrize("fused", [False, True])
def test_a_call_walks_over_the_modules_once(folder, fused, monkeypatch):
    """0.2 ms for 28 layers. What a call can be refused for without is asked before."""
    if fused:
        monkeypatch.setattr(drop_in, "kernels_run", lambda model: True)
    _, ours = both(folder("llama", "causal-lm", **FUSABLE), "causal-lm")
    ours.train()(**batch())  # blocks are made
    walk, walks = torch.nn.Module.modules, []

    def counted(module):
        walks.extend([module] if module is ours else [])
        return walk(module)

    monkeypatch.setattr(torch.nn.Module, "modules", counted)
    ours(**batch())
    assert path_taken(ours)[0] == ("fused" if fused else "packed")
    assert len(walks) == 1
    ours(**batch(rows=(13, 13)))
    assert path_taken(ours) == ("stock", "on the CPU, a batch without padding gains nothing")
    given = batch()
    del given["labels"]
    ours.eval()(**given)
    assert path_taken(ours) == ("stock", "the cache may be wanted; use_cache=False says it is not")
    assert len(walks) == 1


def test_embeddings_for_ids_hooks_and_eager_attention_are_stock(folder):
    path = folder("llama", "causal-lm")
    stock, ours = both(path, "causal-lm")
    inputs = batch()
    ids = inputs.pop("input_ids")
    embedded = {"inputs_embeds": stock.get_input_embeddings()(ids), **inputs}
    assert torch.equal(ours(**embedded).logits, stock(**embedded).logits)
    seen = []
    handle = ours.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    ours(input_ids=ids, **inputs)
    assert seen == [(3, 13, 32)]
    assert path_taken(ours) == ("stock", "there are hooks inside the model")
    handle.remove()
    ours(input_ids=ids, **inputs)
    assert path_taken(ours)[0] == "packed"
    eager = automodel.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    eager(input_ids=ids, **inputs)
    assert path_taken(eager) == ("stock", "attention is eager")


def test_a_head_that_changes_between_two_calls(folder):
    """What the loss knows of the head is asked for at every call: the cap may be turned off, `forward` replaced."""
    stock, ours = both(folder("gemma2", "causal-lm", final_logit_softcapping=0.5), "causal-lm")
    stock.train(), ours.train()
    assert_same(stock, ours, batch())
    for model in (stock, ours):
        model.config.final_logit_softcapping = None
    assert_same(stock, ours, batch())
    for model in (stock, ours):
        product = model.lm_head.forward
        model.lm_head.forward = lambda hidden, product=product: 2 * product(hidden)
    assert_same(stock, ours, batch())


def test_hidden_states_that_were_asked_for_once_leave_no_hooks_that_matter(folder):
    stock, ours = both(folder("llama", "causal-lm"), "causal-lm")
    ours(**batch(), output_hidden_states=True, output_attentions=True)
    assert path_taken(ours)[0] == "stock"
    assert_same(stock, ours, batch(), "packed")


@pytest.mark.parametrize("kind", LANGUAGE)
def test_generates_the_same_tokens(folder, kind):
    stock, ours = both(folder(kind, "causal-lm"), "causal-lm")
    inputs = batch(side="left")
    del inputs["labels"]
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ours.train()(**batch()).loss.backward()  # a step in between changes nothing
    ours.eval()
    assert torch.equal(ours.generate(**inputs, **settings), stock.generate(**inputs, **settings))


@pytest.mark.parametrize("fused", [False, True])
def test_a_plain_loop_learns_the_same_and_saves_a_stock_model(folder, tmp_path, fused, monkeypatch):
    if fused:
        monkeypatch.setattr(drop_in, "kernels_run", lambda model: True)
    path = folder("qwen3", "causal-lm", **FUSABLE)
    losses = []
    for model in both(path, "causal-lm"):
        model.train()
        optimizer, losses_here = AdamW(model.parameters(), lr=1e-3), []
        for step in range(10):
            loss = model(**batch(seed=step % 3)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses_here.append(float(loss.detach()))
        losses.append(losses_here)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[1][-1] < losses[1][0]
    assert path_taken(model)[0] == ("fused" if fused else "packed")
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(again) is transformers.Qwen3ForCausalLM
    assert again.config.architectures == ["Qwen3ForCausalLM"]
    assert again.state_dict().keys() == transformers.AutoModelForCausalLM.from_pretrained(path).state_dict().keys()
    ids = batch()["input_ids"]
    assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_gradient_checkpointing_recomputes_what_was_computed(folder, kind, reentrant, fused, monkeypatch):
    if fused:
        monkeypatch.setattr(drop_in, "kernels_run", lambda model: True)
    stock, ours = both(folder(kind, "causal-lm", **(FUSABLE if kind == "llama" else {})), "causal-lm")
    stock.train(), ours.train()
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        ours.enable_input_require_grads()
    stock(**batch()).loss.backward()
    loss = ours(**batch()).loss
    assert path_taken(ours)[0] == ("fused" if fused and kind == "llama" and not reentrant else "packed")
    ours.eval()  # whatever happens in between
    ours(**batch(seed=5))
    ours.generate(batch()["input_ids"][:1, :4], max_new_tokens=2, pad_token_id=0)
    ours.train()
    loss.backward()
    for (name, expected), found in zip(stock.named_parameters(), ours.parameters()):
        torch.testing.assert_close(found.grad, expected.grad, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


def test_logits_of_a_training_step_are_made_when_somebody_looks(folder):
    stock, ours = both(folder("llama", "causal-lm"), "causal-lm")
    ours.train()
    output = ours(**batch())
    assert isinstance(dict(output.items())["logits"], Promise)
    rebuilt = type(output)(dict(output.items()))
    theirs = stock(**batch())
    kept = batch()["attention_mask"].bool()
    for logits in (rebuilt.logits, output["logits"], output[1], output.to_tuple()[1]):
        torch.testing.assert_close(logits[kept], theirs.logits[kept], **CLOSE)
    assert output[0] is output.loss
    output.logits.sum().backward()
    assert ours.lm_head.weight.grad is not None
    assert isinstance(dict(ours.eval()(**batch()).items())["logits"], torch.Tensor)


def test_copies_and_pickles_go_on_by_themselves(folder):
    stock, ours = both(folder("llama", "causal-lm"), "causal-lm")
    ours(**batch())
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        with torch.no_grad():
            other.lm_head.weight.zero_()
        assert not other(**batch()).logits.any()
        assert path_taken(other)[0] == "packed"
        assert_same(stock, ours, batch())


def test_moving_a_model_makes_its_blocks_anew(folder, fused_on_cpu):
    stock, ours = both(folder("llama", "causal-lm", **FUSABLE), "causal-lm")
    assert_same(stock, ours, batch(), "fused")
    stock, ours = stock.double().float(), ours.double().float()
    with torch.no_grad():
        stock.model.layers[0].self_attn.q_proj.weight.mul_(2)
        ours.model.layers[0].self_attn.q_proj.weight.mul_(2)
    assert_same(stock, ours, batch(), "fused")


def test_a_frozen_model_keeps_stock_blocks(folder, fused_on_cpu):
    stock, ours = both(folder("llama", "causal-lm", **FUSABLE), "causal-lm")
    for model in (stock, ours):
        model.model.embed_tokens.requires_grad_(False)
    assert_same(stock, ours, batch(), "packed")
    unwanted = automodel.AutoModelForCausalLM.from_pretrained(ours.config._name_or_path, use_liger_kernel=False)
    unwanted.train()(**batch())
    assert path_taken(unwanted)[0] == "packed"


def test_two_passes_before_one_backward(folder, fused_on_cpu):
    stock, ours = both(folder("llama", "causal-lm", **FUSABLE), "causal-lm")
    for model in (stock, ours):
        model.train()
        (model(**batch(seed=1)).loss + 2 * model(**batch(seed=2)).loss).backward()
    for (name, expected), found in zip(stock.named_parameters(), ours.parameters()):
        torch.testing.assert_close(found.grad, expected.grad, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("kind", "task"), [("llama", "causal-lm"), ("llama", "text-classification"), ("bert", "text-classification")]
)
def test_autocast(folder, kind, task, fused, tied, monkeypatch):
    """Dtypes as in stock code; errors against fp32 as small as its own; two calls, so that nothing is kept of one."""
    if fused:
        monkeypatch.setattr(drop_in, "kernels_run", lambda model: True)
    wide = {"hidden_size": 64} if kind == "bert" else {**FUSABLE, "pad_token_id": 3, "tie_word_embeddings": tied}
    stock, ours = both(folder(kind, task, num_labels=3, **wide), task)
    inputs, results = batch(task, pad=stock.config.pad_token_id), []
    for model, on in ((stock, False), (stock, True), (ours, True), (ours, True)):
        model.train()
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            output = model(**inputs)
        output.loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((output.loss.item(), output.logits, gradients))
    (loss, logits, exact), (_, theirs, rough), *mine = results
    assert path_taken(ours)[0] == ("fused" if fused else "packed")
    kept = inputs["attention_mask"].bool() if logits.dim() == 3 else ...
    for found in mine:
        assert found[0] == pytest.approx(loss, rel=2e-2)
        assert found[1].dtype == theirs.dtype == torch.bfloat16
        error, allowed = ((x.float() - logits)[kept].norm() for x in (found[1], theirs))
        assert error < 3 * allowed + 0.02 * logits[kept].norm()
        assert found[2].keys() == exact.keys()
        whole = torch.stack([g.norm() for g in exact.values()]).norm()
        for name, expected in exact.items():
            assert found[2][name].dtype == torch.float32
            error, allowed = ((g[name] - expected).norm() for g in (found[2], rough))
            assert error < 3 * allowed + 0.03 * expected.norm() + 2e-3 * whole, name
    assert all(isinstance(p, torch.nn.Parameter) for p in ours.parameters())


def test_a_signature_that_other_libraries_read_is_the_stock_one(folder):
    import inspect

    stock, ours = both(folder("bert", "text-classification", num_labels=3), "text-classification")
    assert inspect.signature(ours.forward) == inspect.signature(stock.forward)
    ids, mask = batch()["input_ids"], batch()["attention_mask"]
    assert torch.equal(ours(ids, mask).logits, ours(ids, attention_mask=mask).logits)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("kind", "task"), [("llama", "causal-lm"), ("bert", "text-classification")])
def test_hf_trainer_does_the_same_with_it(folder, tmp_path, kind, task, fused, monkeypatch):
    """Accumulated, with evaluation and checkpoints: everything Trainer does with a model."""
    from transformers import Trainer, TrainingArguments

    if fused:
        monkeypatch.setattr(drop_in, "kernels_run", lambda model: True)
    wide = (FUSABLE if kind == "llama" else {"hidden_size": 64, "num_labels": 3}) if fused or kind == "bert" else {}
    rows = []
    for seed in range(8):
        made = batch(task, rows=(3 + seed % 4,), seed=seed)
        rows.append({k: v[0] for k, v in made.items()})

    def collate(items):
        width = max(len(item["input_ids"]) for item in items)
        fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        return {
            k: torch.stack([torch.nn.functional.pad(i[k], (0, width - len(i[k])), value=fill[k]) for i in items])
            if items[0][k].dim()
            else torch.stack([i[k] for i in items])
            for k in fill
        }

    settings = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "logging_steps": 1,
        "learning_rate": 1e-3, "use_cpu": True, "report_to": [], "save_steps": 2, "eval_strategy": "steps",
        "eval_steps": 2, "disable_tqdm": True, "lr_scheduler_type": "constant", "max_grad_norm": 1.0,
    }  # fmt: skip
    found = []
    for name, model in zip(("stock", "ours"), both(folder(kind, task, **wide), task)):
        arguments = TrainingArguments(str(tmp_path / name), **settings)
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collate)
        trainer.train()
        history = trainer.state.log_history
        losses = [entry[key] for entry in history for key in ("loss", "eval_loss") if key in entry]
        found.append((losses, torch.tensor(trainer.predict(rows).predictions)))
    (expected, stock_logits), (losses, logits) = found
    assert any("blocks fused" if fused else "stock blocks" in said for said in model._automodel_calls.said)
    assert losses == pytest.approx(expected, rel=2e-4)
    assert logits.shape == stock_logits.shape
    torch.testing.assert_close(logits, stock_logits, rtol=1e-3, atol=1e-3)
    again = getattr(transformers, CLASS[task]).from_pretrained(tmp_path / "ours" / "checkpoint-4")
    for (name, ours), stock in zip(model.named_parameters(), again.parameters()):
        assert torch.equal(ours, stock), name


def test_a_compiled_model_is_the_stock_one(folder):
    stock, ours = both(folder("llama", "causal-lm"), "causal-lm")
    compiled = torch.compile(ours, backend="eager", fullgraph=False)
    torch.testing.assert_close(compiled(**batch()).loss, stock(**batch()).loss, **CLOSE)
    assert path_taken(ours)[1] == "it was not called yet"


def test_transforms_of_torch_func_are_of_the_stock_model(folder):
    given, gradients = batch(), []
    for model in both(folder("llama", "causal-lm"), "causal-lm"):
        values = {name: p.detach() for name, p in model.named_parameters()}
        loss = partial(torch.func.functional_call, model, kwargs=given)
        gradients.append(torch.func.grad(lambda p, loss=loss: loss(p, ()).loss)(values))
    torch.testing.assert_close(*gradients, **CLOSE)


def test_weights_that_accelerate_fetches_module_by_module(folder):
    stock, ours = both(folder("llama", "causal-lm"), "causal-lm")
    accelerate.cpu_offload(ours, execution_device="cpu")
    given = batch()
    assert torch.equal(ours(**given).logits, stock(**given).logits)
    assert path_taken(ours) == ("stock", "weights are fetched when their module is called (accelerate's offloading)")


def test_adapters_of_peft_train_without_padding(folder):
    peft = pytest.importorskip("peft")
    path = folder("llama", "causal-lm")
    results = []
    for model in both(path, "causal-lm"):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.1)
        adapted.train()
        loss = adapted(**batch()).loss
        loss.backward()
        gradients = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
        results.append((loss.detach(), gradients))
    assert path_taken(model)[0] == "packed"
    torch.testing.assert_close(results[1][0], results[0][0], **CLOSE)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, **CLOSE)
