"""One form of AdamW on the disk: what the plain step saves the captured step's optimizer takes, and the other way."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from automodel.config.errors import UserError
from automodel.engine.optimizer_state import (
    AdamWRecord,
    load_into_flat,
    load_into_torch,
    record_of_flat,
    record_of_torch,
)
from automodel.kernels.flat_adamw import FlatAdamW

LR, DECAY, CLIP = 1e-2, 0.1, 0.5


class Net(nn.Module):
    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(20, 8)
        self.inner = nn.Linear(8, 8)
        self.out = nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)  # a pooler that nobody reads never gets a gradient

    def forward(self, step: int, detour: bool = False) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        ids, labels = (torch.randint(0, n, (16,), generator=generator) for n in (20, 3))
        hidden = self.words(ids)
        if not detour:
            hidden = torch.tanh(self.inner(hidden))
        return F.cross_entropy(self.out(hidden), labels)


def groups(net: nn.Module) -> list[dict]:
    return [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in net.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


class Plain:
    """torch.optim.AdamW as the plain step uses it."""

    def __init__(self, net: Net, fp16: bool = False):
        self.net, self.skipped = net, 0
        self.optimizer = torch.optim.AdamW(groups(net), lr=LR, fused=True)
        self.scaler = torch.amp.GradScaler("cpu", enabled=fp16)

    def train(self, steps, **how) -> list[float]:
        losses = []
        for step in steps:
            loss = self.net(step, **how)
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self):
        return on_disk(record_of_torch(self.optimizer, self.net, self.scaler, self.skipped))

    def load(self, record):
        load_into_torch(record, self.optimizer, self.net, self.scaler)


class Flat:
    """FlatAdamW as the captured step uses it, without the capture."""

    def __init__(self, net: Net, fp16: bool = False):
        self.net = net
        scale = 2.0**16 if fp16 else None
        self.optimizer = FlatAdamW(groups(net), lr=LR, max_norm=CLIP, initial_loss_scale=scale)

    def train(self, steps, **how) -> list[float]:
        losses = []
        for step in steps:
            loss = self.net(step, **how)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self):
        return on_disk(record_of_flat(self.optimizer, self.net, 77))

    def load(self, record):
        load_into_flat(record, self.optimizer, self.net)


def on_disk(record: AdamWRecord) -> AdamWRecord:
    """Through what a checkpoint does to it: tensors of their own, and JSON."""
    tensors, values = record.to_disk()
    return AdamWRecord.from_disk({k: t.detach().clone() for k, t in tensors.items()}, json.loads(json.dumps(values)))


@pytest.mark.parametrize("first", [Plain, Flat])
@pytest.mark.parametrize("second", [Plain, Flat])
def test_training_goes_on_with_the_other_optimizer(first, second):
    whole = first(Net())
    expected = whole.train(range(10))
    before = first(Net())
    start = before.train(range(5))
    after = second(Net(seed=9))
    after.net.load_state_dict(before.net.state_dict())
    after.load(before.save())
    losses = start + after.train(range(5, 10))
    exact = first is second
    assert losses == (expected if exact else pytest.approx(expected, rel=1e-5))
    for ours, theirs in zip(after.net.parameters(), whole.net.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)
    if first is second is Flat:  # 0.9⁴ is another number than 0.9 · 0.9 · 0.9 · 0.9
        assert torch.equal(after.optimizer.device_state.powers, whole.optimizer.device_state.powers)


def test_without_its_state_training_would_differ():
    """The comparison above can fail: moments matter."""
    expected = Plain(Net()).train(range(10))
    before = Plain(Net())
    before.train(range(5))
    fresh = Flat(Net(seed=9))
    fresh.net.load_state_dict(before.net.state_dict())
    assert fresh.train(range(5, 10)) != pytest.approx(expected[5:], rel=1e-3)


def test_counts_of_single_parameters_survive_between_plain_steps():
    """`inner` has no gradient in two of five steps, `unused` never has one."""
    before = Plain(Net())
    before.train(range(3))
    before.train(range(3, 5), detour=True)
    record = before.save()
    assert record.steps == 5
    assert record.own_steps == {"inner.weight": 3, "inner.bias": 3}
    assert not any("unused" in path for path in record.moments)
    after, flat = Plain(Net()), Flat(Net())
    after.load(record)
    for p, q in zip(before.net.parameters(), after.net.parameters()):
        mine, other = before.optimizer.state.get(p, {}), after.optimizer.state.get(q, {})
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[k], other[k]) for k in mine)
    flat.load(record)
    back = flat.save()
    assert back.own_steps == {}
    assert not back.moments["exp_avg/unused.weight"].any()
    assert torch.equal(back.moments["exp_avg/inner.weight"], record.moments["exp_avg/inner.weight"])


def test_rows_that_wait_are_settled_before_they_are_saved_and_after_they_are_loaded():
    net = Net()
    optimizer = FlatAdamW(groups(net), lr=LR, max_norm=CLIP, lazy=net.words.weight)
    record = AdamWRecord({"exp_avg/words.weight": torch.ones(20, 8), "exp_avg_sq/words.weight": torch.ones(20, 8)}, 7)
    load_into_flat(record, optimizer, net)
    assert optimizer.lazy_rows.last_V.tolist() == [7] * 20
    weights = net.words.weight.detach().clone()
    saved = record_of_flat(optimizer, net, 0)
    assert torch.equal(saved.moments["exp_avg/words.weight"], torch.ones(20, 8))
    assert torch.equal(net.words.weight, weights)


@pytest.mark.parametrize(("first", "second"), [(Plain, Flat), (Flat, Plain), (Flat, Flat), (Plain, Plain)])
def test_the_loss_scale_and_skipped_steps_travel(first, second):
    record = AdamWRecord({}, steps=40, skipped=6, loss_scale=(1024.0, 34.0))
    before, after, wide = first(Net(), fp16=True), second(Net(), fp16=True), second(Net())
    before.load(record)
    before.skipped = 6
    saved = before.save()
    assert (saved.loss_scale, saved.skipped) == ((1024.0, 34.0), 6)
    after.load(saved)
    after.skipped = saved.skipped
    assert after.save().loss_scale == (1024.0, 34.0)
    wide.load(saved)  # into a precision that has no scale
    assert wide.save().loss_scale is None
    fresh = second(Net(), fp16=True)
    fresh.load(AdamWRecord({}, steps=40))  # and from one
    assert fresh.save().loss_scale == (2.0**16, 0.0)


def test_pure_bf16_moments_fit_fp32_and_back():
    net = Net().bfloat16()
    pure = Plain(net)
    pure.train(range(3))
    record = pure.save()
    assert record.moments["exp_avg/out.weight"].dtype == torch.bfloat16
    flat = Flat(Net())
    flat.load(record)
    assert torch.equal(flat.save().moments["exp_avg/out.weight"], record.moments["exp_avg/out.weight"].float())
    again = Plain(Net().bfloat16())
    again.load(flat.save())
    assert torch.equal(again.save().moments["exp_avg/out.weight"], record.moments["exp_avg/out.weight"])
    again.train(range(3, 5))  # torch's fused step insists on one dtype


# Checkpoints of the first version.


@pytest.mark.parametrize("second", [Plain, Flat])
def test_old_plain_checkpoints_load(second):
    before = Plain(Net())
    before.train(range(4))
    names = {p: n for n, p in before.net.named_parameters()}
    tensors = {f"{k}/{names[p]}": t for p, state in before.optimizer.state.items() for k, t in state.items()}
    assert "step/out.weight" in tensors
    record = AdamWRecord.from_disk(tensors, {"optimizer": {}, "scaler": {}})
    after = second(Net(seed=9))
    after.net.load_state_dict(before.net.state_dict())
    after.load(record)
    assert after.train(range(4, 8)) == pytest.approx(Plain(Net()).train(range(8))[4:], rel=1e-5)
    scaled = {
        "scale": 512.0,
        "_growth_tracker": 3,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
    }
    assert AdamWRecord.from_disk(tensors, {"optimizer": {}, "scaler": scaled}).loss_scale == (512.0, 3.0)


@pytest.mark.parametrize("second", [Plain, Flat])
def test_old_captured_checkpoints_load(second):
    before = Flat(Net())
    before.train(range(4))
    tensors = before.save().moments
    record = AdamWRecord.from_disk(tensors, {"step": 4, "skipped": 1, "dropout_seed": 9, "loss_scale": [64.0, 2.0]})
    assert (record.steps, record.skipped, record.dropout_seed, record.loss_scale) == (4, 1, 9, (64.0, 2.0))
    after = second(Net(seed=9))
    after.net.load_state_dict(before.net.state_dict())
    after.load(record)
    assert after.train(range(4, 8)) == pytest.approx(Plain(Net()).train(range(8))[4:], rel=1e-5)


# What does not fit is refused, with words.


@pytest.mark.parametrize(
    ("tensors", "values", "message"),
    [
        ({}, {"version": 3, "form": "adamw"}, "version 3; this automodel reads versions 1 to 2"),
        ({}, {"version": 2, "form": "torch.optim.sgd.SGD"}, "state of torch.optim.sgd.SGD, but this run's optimizer"),
        ({"momentum_buffer/a": torch.zeros(1)}, {"optimizer": {}, "scaler": {}}, "another optimizer"),
    ],
)
def test_what_cannot_be_read_is_named(tensors, values, message):
    with pytest.raises(UserError, match=message):
        AdamWRecord.from_disk(tensors, values)


@pytest.mark.parametrize("kind", [Plain, Flat])
@pytest.mark.parametrize(
    ("moments", "message"),
    [
        ({"exp_avg/other": torch.zeros(2), "exp_avg_sq/other": torch.zeros(2)}, "'other', which this model does not"),
        ({"exp_avg/out.bias": torch.zeros(4)}, r"'out.bias', of shape \(4,\), but the model's is \(3,\)"),
        ({"exp_avg/out.bias": torch.zeros(3)}, "only one of two moments for 'out.bias'"),
    ],
)
def test_a_record_of_another_model_is_refused(kind, moments, message):
    with pytest.raises(UserError, match=message):
        kind(Net()).load(AdamWRecord(moments, 1))


# 8-bit moments.


def in_eight_bits(net: Net, *narrow: str) -> FlatAdamW:
    parameters = dict(net.named_parameters())
    chosen = [parameters[name] for name in narrow or ("words.weight", "inner.weight")]
    return FlatAdamW(groups(net), lr=LR, max_norm=CLIP, eight_bit=chosen)


def train_flat(net: Net, optimizer: FlatAdamW, steps) -> list[float]:
    losses = []
    for step in steps:
        loss = net(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_8_bit_moments_continue_exactly_through_the_disk():
    net, twin = Net(), Net(1)
    optimizer, other = in_eight_bits(net), in_eight_bits(twin)
    train_flat(net, optimizer, range(4))
    tensors, values = record_of_flat(optimizer, net, 7).to_disk()
    assert values["form"] == "adamw-8bit"
    assert tensors["exp_avg_code/words.weight"].dtype == torch.uint8
    assert tensors["exp_avg_sq_scale/words.weight"].shape == (1,)
    tensors, values = {k: t.clone() for k, t in tensors.items()}, json.loads(json.dumps(values))
    twin.load_state_dict(net.state_dict())
    record = AdamWRecord.from_disk(tensors, values)
    load_into_flat(record, other, twin)
    assert record.dropout_seed == 7
    assert train_flat(net, optimizer, range(4, 8)) == train_flat(twin, other, range(4, 8))


def test_8_and_32_bits_refuse_each_other_by_name():
    net = Net()
    eight, plain = in_eight_bits(net), Net(1)
    wide = FlatAdamW(groups(plain), lr=LR)
    coded, full = record_of_flat(eight, net, 0), record_of_flat(wide, plain, 0)
    with pytest.raises(UserError, match=r"state of our AdamW with 8-bit moments, but this run's .* 32-bit moments"):
        load_into_flat(coded, wide, plain)
    with pytest.raises(UserError, match=r"state of AdamW with 32-bit moments, but this run's .* 8-bit moments"):
        load_into_flat(full, eight, net)
    with pytest.raises(UserError, match="state of our AdamW with 8-bit moments"):
        load_into_torch(coded, torch.optim.AdamW(plain.parameters()), plain, torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(UserError, match="kept other parameters in 8 bits"):
        load_into_flat(coded, in_eight_bits(plain := Net(1), "out.weight"), plain)
