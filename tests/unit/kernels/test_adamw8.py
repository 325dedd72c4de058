"""8-bit moments: the book, the arithmetic of the kernel against the book's own search, whole steps, bitsandbytes."""

import pytest
import torch

from automodel.kernels import adamw8
from automodel.kernels.adamw8 import STRIP, book, dequantise_reference, quantise_reference
from automodel.kernels.flat_adamw import FlatAdamW

LR = 1e-2


@pytest.mark.parametrize("signed", [True, False])
def test_the_book_is_the_published_one(signed):
    entries = book(signed)
    assert len(entries) == 256
    assert torch.equal(entries, entries.sort().values)
    assert entries[-1] == 1.0
    assert entries[adamw8.SIGNED_ZERO if signed else 0] == 0.0
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    torch.testing.assert_close(entries, functional.create_dynamic_map(signed), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_is_to_the_nearest_entry(signed):
    torch.manual_seed(0)
    values = torch.randn(4000) * torch.rand(4000) ** 6
    values = values if signed else values.square()
    codes, scales = quantise_reference(values, signed)
    assert codes.dtype == torch.uint8
    assert scales.shape == (-(-4000 // STRIP),)
    each = scales.repeat_interleave(STRIP)[:4000]
    errors = (values / each)[:, None] - book(signed)[None, :]
    nearest = errors.abs().min(dim=1).values
    found = (dequantise_reference(codes, scales, signed) - values).abs() / each
    floor = 0.0 if signed else book(False)[1].item()  # what is not zero does not become zero
    assert (found <= nearest + floor + 1e-7).all()


def test_second_moments_do_not_vanish():
    values = torch.full((STRIP,), 1e-12)
    values[0] = 1.0
    values[1] = 0.0
    codes, _ = quantise_reference(values, signed=False)
    assert codes[1] == 0
    assert (codes[2:] == 1).all()


@pytest.mark.parametrize("signed", [True, False])
def test_the_kernels_arithmetic_is_the_books(interpreter, signed):
    """Every code goes through the book and back; and shares all over the range round as the search does."""
    from unit.kernels.eight_bit_probe import probe

    shares = torch.cat([book(signed), 10 ** (-7.5 * torch.rand(3000)), torch.zeros(8)]).clamp(-1, 1)
    if signed:
        shares = torch.cat([shares, -shares])
    shares = torch.nn.functional.pad(shares, (0, -len(shares) % STRIP)).view(-1, STRIP)
    shares = shares[:, : STRIP - 1]
    shares = torch.cat([shares, torch.ones(len(shares), 1)], dim=1).contiguous()  # each strip's scale is 1
    codes, _ = quantise_reference(shares, signed)
    found_codes, values = probe(shares, signed)
    assert (found_codes.int() - codes.int()).abs().max() <= 1
    assert (found_codes != codes).float().mean() < 2e-3  # halves, one digit after the last
    torch.testing.assert_close(values, book(signed)[found_codes.long()], rtol=3e-7, atol=1e-13)


def model(dtype=torch.float32):
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(40, 129), torch.nn.GELU(), torch.nn.LayerNorm(129), torch.nn.Linear(129, 40)
    )  # 5,160 elements: three blocks and an odd tail
    return net.to(dtype)


def loss_of(net, step):
    generator = torch.Generator().manual_seed(step % 7)
    x = torch.randn(16, 40, generator=generator)
    target = x.roll(1, dims=1).square()
    return (net(x.to(next(net.parameters()).dtype)).float() - target).square().mean()


def flat(net, **options):
    narrow = [p for p in net.parameters() if p.numel() >= adamw8.SMALLEST]
    return FlatAdamW(net.parameters(), lr=LR, weight_decay=0.01, max_norm=1.0, eight_bit=narrow, **options)


def train(net, optimizer, steps):
    losses = []
    for step in steps:
        loss = loss_of(net, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("form", ["masters", "pure", "fp32"])
def test_the_kernel_takes_the_references_steps(monkeypatch, interpreter, form):
    """From the same gradients, so that one code next door in one step is all that rounding can do."""
    nets = [model(torch.bfloat16 if form == "pure" else torch.float32) for _ in range(2)]
    copy = torch.bfloat16 if form == "masters" else None
    optimizers = [flat(net, copy_dtype=copy) for net in nets]
    for step in range(4):
        for net in nets:
            generator = torch.Generator().manual_seed(step)
            for p in net.parameters():
                spread = torch.rand(p.shape, generator=generator)
                p.grad = (torch.randn(p.shape, generator=generator) * spread).to(p.dtype)
        optimizers[0].step()
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        optimizers[1].step()
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        states = [o.state_dict()["state"] for o in optimizers]
        for index, entry in states[0].items():
            for key, tensor in entry.items():
                other = states[1][index][key]
                if key.endswith("_code"):
                    assert (tensor.int() - other.int()).abs().max() <= 1
                    assert (tensor != other).float().mean() < 3e-3, key
                else:
                    torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-7)
        optimizers[1].load_state_dict(optimizers[0].state_dict())
        if form == "pure":
            nets[1].load_state_dict(nets[0].state_dict())
    for p, q in zip(nets[0].parameters(), nets[1].parameters()):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-5)


def test_small_parameters_have_32_bits(path):
    net = model(torch.bfloat16)
    optimizer = flat(net)
    train(net, optimizer, range(2))
    entries = list(optimizer.state_dict()["state"].values())
    assert entries[0]["exp_avg_code"].dtype == torch.uint8
    assert entries[0]["exp_avg_code"].shape == (129, 40)
    assert entries[0]["exp_avg_scale"].shape == (21,)
    assert entries[1]["exp_avg"].dtype == torch.float32
    assert "exp_avg" not in entries[0]
    assert optimizer.flat.exp_avg.numel() == 0  # no third copy


def test_accumulated_gradients_are_zeroed(path):
    net = model()
    optimizer = flat(net, flat_gradients=True)
    train(net, optimizer, range(1))
    loss_of(net, 1).backward()
    optimizer.step()
    assert all(not p.grad.any() for p in net.parameters())


def test_a_step_that_is_skipped_changes_nothing(path):
    net = model()
    optimizer = flat(net, skip_nonfinite=True)
    train(net, optimizer, range(2))
    before = optimizer.state_dict()["state"]
    weights = [p.detach().clone() for p in net.parameters()]
    for p in net.parameters():
        p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    for index, entry in optimizer.state_dict()["state"].items():
        assert all(torch.equal(tensor, before[index][key]) for key, tensor in entry.items())
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), weights))


def test_continues_exactly(path):
    net, twin = model(), model()
    optimizer, other = flat(net), flat(twin)
    train(net, optimizer, range(3))
    twin.load_state_dict(net.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert train(net, optimizer, range(3, 6)) == train(twin, other, range(3, 6))
    with pytest.raises(ValueError, match="keeps exp_avg_code"):
        other.load_state_dict(FlatAdamW(model().parameters()).state_dict() | {"state": {0: {"step": torch.ones(())}}})


def test_put_off_updates_are_refused():
    net = model()
    with pytest.raises(ValueError, match="eight_bit excludes lazy and late"):
        FlatAdamW(net.parameters(), eight_bit=[net[0].weight], late=[[net[0].weight]])


def test_learns_like_bitsandbytes_and_like_32_bits():
    """Fifty steps of a small regression: three optimizers, one course."""
    library = pytest.importorskip("bitsandbytes.optim", reason="bitsandbytes is not installed")
    nets = [model() for _ in range(3)]
    ours = train(nets[0], flat(nets[0]), range(50))
    exact = train(nets[1], FlatAdamW(nets[1].parameters(), lr=LR, weight_decay=0.01, max_norm=1.0), range(50))
    theirs = []
    optimizer = library.AdamW8bit(nets[2].parameters(), lr=LR, weight_decay=0.01)
    for step in range(50):
        loss = loss_of(nets[2], step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(nets[2].parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(loss.item())
    assert ours[-1] < 0.6 * ours[0]
    assert ours == pytest.approx(theirs, rel=0.05)
    assert ours == pytest.approx(exact, rel=0.05)
