"""Logits of a training step that are made when somebody looks: read late, read as a mapping, converted by accelerate.
All against stock transformers."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from automodel.models import lazy_logits
from automodel.models.drop_in import loss_alone, path_taken, speed_up
from automodel.models.lazy_logits import Promise
from automodel.models.task_head import NEXT_TOKEN
from drop_in_pairs import CLOSE, batch, both
from tiny_models import tiny

KEPT = batch()["attention_mask"].bool()


@pytest.fixture
def models(tmp_path):
    """(the stock model, ours), both in training."""
    tiny("llama", "causal-lm")[1].save_pretrained(tmp_path)
    return tuple(model.train() for model in both(tmp_path, "causal-lm"))


class ThroughData(torch.optim.SGD):
    """As optimizers were written once: autograd's counter of changes does not see it."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"])


def adam8(parameters, lr):
    return pytest.importorskip("bitsandbytes").optim.AdamW8bit(parameters, lr=lr, min_8bit_size=1)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, ThroughData, adam8])
def test_logits_that_are_read_after_the_step_are_those_of_the_call(models, optimizer):
    for step in range(2):
        logits = []
        for model in models:
            steps = optimizer(model.parameters(), lr=1e-2)
            output = model(**batch(seed=step))
            before = model.lm_head.weight.detach().clone()
            output.loss.backward()
            steps.step()
            steps.zero_grad()
            assert not torch.equal(model.lm_head.weight, before)
            logits.append(output.logits)
        assert path_taken(models[1])[0] == "packed"
        torch.testing.assert_close(logits[1][KEPT], logits[0][KEPT], rtol=1e-3, atol=1e-4)


def test_a_head_is_copied_only_where_its_optimizer_steps_and_logits_may_still_be_read(models, monkeypatch):
    model, copies = models[1], []
    monkeypatch.setattr(lazy_logits, "_copy", lambda tensor: copies.append(tensor.shape) or tensor.detach().clone())
    everything = torch.optim.SGD(model.parameters(), lr=1e-2)
    body = torch.optim.SGD(model.model.parameters(), lr=1e-2)
    model(**batch()).loss.backward()
    everything.step()  # nobody holds the output
    output = model(**batch())
    output.loss.backward()
    body.step()  # nobody changes the head
    assert output.logits.isfinite().all()
    everything.step()  # they are made
    assert copies == []
    held = [model(**batch(seed=seed)) for seed in range(3)]
    sum(output.loss for output in held).backward()
    everything.step()
    everything.step()
    assert copies == [(99, 32)]  # one for all


def test_logits_of_a_head_that_changed_otherwise_are_refused(models):
    for change in (lambda w: w.data.mul_(2), lambda w: setattr(w, "data", w.data + 1)):
        output = models[1](**batch())
        change(models[1].lm_head.weight)
        with pytest.raises(RuntimeError, match=r"output.logits.*before lm_head changes"):
            assert output.logits is None
    output = models[1](**batch())
    with torch.no_grad():
        models[1].lm_head.weight[5, 5] += 1
    with pytest.raises(RuntimeError, match=r"output.logits"):
        assert output.logits is None
    assert output.loss.isfinite()


def test_an_output_that_is_let_go_takes_its_promise_along(models):
    output = models[1](**batch())
    promise = weakref.ref(dict(output.items())["logits"].later)
    gc.disable()
    try:
        del output
        assert promise() is None
    finally:
        gc.enable()


def test_as_a_mapping_it_holds_tensors(models):
    expected = models[0](**batch()).logits.detach()
    ways = {
        "get": lambda out: out.get("logits"),
        "items": lambda out: dict(out.items())["logits"],
        "values": lambda out: list(out.values())[1],
        "dict": lambda out: dict(out)["logits"],
        "pytree": lambda out: torch.utils._pytree.tree_leaves(out)[1],
        "copy": lambda out: copy.copy(out).logits,
    }
    for name, way in ways.items():
        logits = way(models[1](**batch()))
        assert isinstance(logits, torch.Tensor), name
        assert (logits.shape, logits.dtype, logits.device) == (expected.shape, expected.dtype, expected.device)
        assert logits.requires_grad, name
        torch.testing.assert_close(logits.detach()[KEPT], expected[KEPT], **CLOSE)
        torch.testing.assert_close(torch.stack([logits, logits])[1][KEPT], expected[KEPT], **CLOSE)
        assert (logits.detach().numpy().argmax(-1) == logits.argmax(-1).numpy()).all()
    assert models[1](**batch()).get("past_key_values") is None
    assert models[1](**batch()).get("nothing", 3) == 3


def test_pickles_hold_the_logits(models):
    output = models[1](**batch())
    with torch.no_grad():
        again = pickle.loads(pickle.dumps(output))
    assert type(again) is type(output)
    assert torch.equal(again.logits, output.logits)


class Doubled(torch.autograd.Function):
    """Where torch's hooks for tensors of another kind do not reach."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@pytest.mark.parametrize("through", ["attribute", "get", "items"])
@pytest.mark.parametrize("frozen", ["nothing", "model", "lm_head"])
def test_gradients_go_through_logits_however_they_were_read(models, through, frozen):
    kept, gradients = KEPT.unsqueeze(-1), []
    for model in models:
        if frozen != "nothing":
            getattr(model, frozen).requires_grad_(False)
        output = model(**batch())
        with torch.no_grad():
            read = {"attribute": lambda: output.logits, "get": lambda: output.get("logits")}  # noqa: B023
            logits = read.get(through, lambda: dict(output.items())["logits"])()  # noqa: B023
        doubled = 2 * logits if through == "items" else Doubled.apply(logits)
        (output.loss + (doubled * kept).pow(2).mean()).backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for expected, found in zip(*gradients):
        torch.testing.assert_close(found, expected, **CLOSE)


def test_a_gradient_that_would_be_lost_is_refused(models):
    output = models[1](**batch())
    with pytest.raises(RuntimeError, match="give it output.logits instead"):
        Doubled.apply(dict(output.items())["logits"]).sum().backward()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_inference_mode(models, training, autocast):
    """Its tensors do not count changes, and under autocast a head is such a tensor."""
    outputs = []
    for model in models:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast), loss_alone(model):
            output = model.train(training)(**batch())
            outputs.append((output.loss, output.logits))
    assert path_taken(models[1])[0] == "packed"
    (loss, expected), (found_loss, found) = outputs
    exact = {"rtol": 0.05, "atol": 0.05} if autocast else CLOSE
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found[KEPT], expected[KEPT], **exact)
    torch.testing.assert_close(found_loss, loss, **(exact | {"check_dtype": not autocast}))


def test_a_model_that_was_made_in_inference_mode():
    with torch.inference_mode():
        stock, ours = (tiny("llama", "causal-lm")[1].train() for _ in range(2))
        ours = speed_up(ours, NEXT_TOKEN)
        assert ours.lm_head.weight.is_inference()
        expected = stock(**batch()).logits
        with loss_alone(ours):
            output, another = ours(**batch()), ours(**batch())
        assert path_taken(ours)[0] == "packed"
        torch.testing.assert_close(output.logits[KEPT], expected[KEPT], **CLOSE)
        ours.lm_head.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"output.logits.*before lm_head changes"):
            assert another.logits is None


@pytest.mark.parametrize("look", [torch.no_grad, torch.inference_mode])
def test_a_first_look_without_gradients_does_not_take_them_from_others(models, look):
    gradients = []
    for model in models:
        output = model(**batch())
        with look():
            output.logits.argmax(-1)
        assert output.logits.requires_grad
        (output.loss + output.logits[KEPT].logsumexp(-1).mean()).backward()
        gradients.append([p.grad for p in model.parameters()])
    for expected, found in zip(*gradients):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_converts_logits_without_making_them(models, precision):
    accelerate = pytest.importorskip("accelerate")
    outputs = []
    for model in models:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
        prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        for seed in range(2):
            output = prepared(**batch(seed=seed))
            if model is models[1]:
                assert dict(output.items())["logits"].later.make is not None
            accelerator.backward(output.loss)
            optimizer.step()
            optimizer.zero_grad()
        gathered = accelerator.gather(prepared(**batch(seed=seed)))
        assert isinstance(gathered.logits, torch.Tensor)
        outputs.append(output)
    accelerate.state.AcceleratorState._reset_state(True)
    assert isinstance(dict(outputs[1].items())["logits"], Promise)
    logits = [output.logits for output in outputs]
    assert logits[0].dtype == logits[1].dtype == torch.float32
    exact = CLOSE if precision == "no" else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(logits[1][KEPT], logits[0][KEPT], **exact)


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}, {}])
def test_ddp_passes_logits_on_without_making_them(models, tmp_path, options):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/met", rank=0, world_size=1)
    try:
        gradients = []
        for model in models:
            parallel = nn.parallel.DistributedDataParallel(model, **options)
            for seed in range(2):
                output = parallel(**batch(seed=seed))
                if model is models[1]:
                    assert dict(output.items())["logits"].later.make is not None
                output.loss.backward()
            output = parallel(**batch())
            (output.loss + (output.logits * KEPT.unsqueeze(-1)).pow(2).mean()).backward()
            gradients.append([p.grad for p in model.parameters()])
        for expected, found in zip(*gradients):
            torch.testing.assert_close(found, expected, **CLOSE)
    finally:
        torch.distributed.destroy_process_group()


def test_other_modules_see_a_tensor(models):
    head = nn.Linear(99, 2)
    logits = dict(models[1](**batch()).items())["logits"]
    assert head(logits).shape == (3, 13, 2)
    assert "tensor(" in repr(logits)
