"""FlatAdamW is clip_grad_norm_ and torch.optim.AdamW, on both paths; plus what only it can do."""

import pytest
import torch
import torch.nn.functional as F

from automodel.kernels.flat_adamw import FlatAdamW
from automodel.kernels.flat_parameters import BLOCK
from flattened import flattened

DECAY, LR = 0.1, 1e-2
EPS = 1e-6  # torch's default of 1e-8 makes whole steps of gradients that are pure rounding noise


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Embedding(60, 24),
        torch.nn.Linear(24, 97),  # 2328 elements: two blocks, the second one with an odd tail
        torch.nn.LayerNorm(97),
        torch.nn.Linear(97, 3),
    )


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 60, (7,), generator=generator), torch.randint(0, 3, (7,), generator=generator)


def loss_of(net, step):
    ids, labels = batch(step)
    return F.cross_entropy(net(ids).float(), labels)


def torch_adamw(net, lr=LR):
    named = list(net.parameters())
    groups = [
        {"params": [p for p in named if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, eps=EPS, foreach=False)


def train_torch(net, optimizer, steps, max_norm=None, scheduler=None):
    norms = []
    for step in steps:
        loss_of(net, step).backward()
        if max_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return norms


def train_flat(net, optimizer, steps):
    norms = []
    for step in steps:
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm.item())
    return norms


def assert_same_parameters(a, b, atol=1e-6):
    for (name, p), q in zip(a.named_parameters(), b.parameters()):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
def test_equals_clipping_and_adamw(path, max_norm):
    ours, theirs = model(), model()
    norms = train_torch(theirs, torch_adamw(theirs), range(8), max_norm)
    found = train_flat(ours, flattened(ours, lr=LR, eps=EPS, weight_decay=DECAY, max_norm=max_norm), range(8))
    assert_same_parameters(ours, theirs)
    if max_norm is not None:
        assert found == pytest.approx(norms, rel=1e-6)


def test_learning_rate_table_equals_a_scheduler(path):
    factors = torch.linspace(1, 0, 6)
    ours, theirs = model(), model()
    optimizer = torch_adamw(theirs)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[min(step, 5)].item())
    train_torch(theirs, optimizer, range(8), 1.0, scheduler)
    train_flat(ours, flattened(ours, lr=LR, eps=EPS, weight_decay=DECAY, max_norm=1.0, lr_factors=factors), range(8))
    assert_same_parameters(ours, theirs)


def test_a_torch_scheduler_reaches_the_device(path):
    ours, theirs = model(), model()
    optimizers = flattened(ours, lr=LR, eps=EPS, weight_decay=DECAY), torch_adamw(theirs)
    for net, optimizer in zip((ours, theirs), optimizers):
        train_torch(net, optimizer, range(4), None, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    assert_same_parameters(ours, theirs)


@pytest.mark.parametrize("direction", ["to torch", "from torch"])
def test_states_move_between_this_and_torch(direction):
    ours, theirs = model(), model()
    flat, plain = flattened(ours, lr=LR, eps=EPS, weight_decay=DECAY), torch_adamw(theirs)
    if direction == "to torch":
        train_flat(ours, flat, range(3))
        theirs.load_state_dict(ours.state_dict())
        plain.load_state_dict(flat.state_dict())
    else:
        train_torch(theirs, plain, range(3))
        ours.load_state_dict(theirs.state_dict())
        flat.load_state_dict(plain.state_dict())
    train_flat(ours, flat, range(3, 6))
    train_torch(theirs, plain, range(3, 6))
    assert_same_parameters(ours, theirs)
    assert int(flat.step_count) == 6


def test_resuming_with_a_bf16_model_is_exact():
    whole, first, second = model(), model(), model()
    options = {"lr": LR, "eps": EPS, "weight_decay": DECAY, "max_norm": 1.0, "copy_dtype": torch.bfloat16}
    complete = flattened(whole, **options)
    train_flat(whole, complete, range(9))
    optimizer = flattened(first, **options)
    train_flat(first, optimizer, range(5))
    saved = optimizer.state_dict()
    optimizer = flattened(second, **options)
    optimizer.load_state_dict(saved)
    train_flat(second, optimizer, range(5, 9))
    for p, q in zip(whole.parameters(), second.parameters()):
        assert torch.equal(p, q)
    assert torch.equal(optimizer.device_state.powers, complete.device_state.powers)  # 0.9**5 is none of five products


def test_the_model_computes_with_rounded_weights(path):
    net, exact = model(), model()
    optimizer = flattened(net, lr=LR, eps=EPS, weight_decay=DECAY, max_norm=1.0, copy_dtype=torch.bfloat16)
    weights = optimizer.full_precision_weights(net)
    for step in range(3):
        # the same gradients for the fp32 model: those of the rounded weights
        loss_of(net, step).backward()
        for p, q in zip(net.parameters(), exact.parameters()):
            assert p.dtype == p.grad.dtype == torch.bfloat16
            q.grad = p.grad.float()
        if step == 0:
            reference = torch_adamw(exact)
        torch.nn.utils.clip_grad_norm_(exact.parameters(), 1.0)
        reference.step()
        optimizer.step()
        optimizer.zero_grad()
    for (name, p), q in zip(net.named_parameters(), exact.parameters()):
        torch.testing.assert_close(weights[name], q.detach(), rtol=1e-5, atol=1e-6)
        # the interpreter truncates where hardware rounds to nearest: one unit in the last place
        torch.testing.assert_close(p.detach().float(), weights[name], rtol=2**-7, atol=1e-6)


def test_some_parameters_may_stay_in_full_precision(path):
    net = model()
    groups = [
        {"params": [p for p in net.parameters() if p.ndim >= 2]},
        {"params": [p for p in net.parameters() if p.ndim < 2], "full_precision": True, "weight_decay": 0.0},
    ]
    optimizer = FlatAdamW(groups, lr=LR, max_norm=1.0, copy_dtype=torch.bfloat16)
    before = [p.detach().clone() for p in net.parameters()]
    gradients = [torch.randn_like(p) for p in net.parameters()]
    for p, g in zip(net.parameters(), gradients):
        p.grad = g
    optimizer.step()
    expected = torch.stack([g.float().square().sum() for g in gradients]).sum().sqrt()
    assert optimizer.grad_norm.item() == pytest.approx(expected.item(), rel=1e-5)
    for p, old in zip(net.parameters(), before):
        assert p.dtype == (torch.bfloat16 if p.ndim >= 2 else torch.float32)
        assert not torch.equal(p, old)


def test_parameters_without_a_gradient_are_left_alone(path):
    net = model()
    optimizer = flattened(net, lr=LR, weight_decay=DECAY, max_norm=1.0)
    before = [p.detach().clone() for p in net.parameters()]
    loss_of(net, 0).backward()
    net[0].weight.grad = None
    optimizer.step()
    same = [torch.equal(p, old) for p, old in zip(net.parameters(), before)]
    assert same == [True, False, False, False, False, False, False]


def test_flat_gradients_accumulate_in_place_and_are_zeroed(path):
    ours, theirs = model(), model()
    optimizer = flattened(ours, lr=LR, eps=EPS, weight_decay=DECAY, max_norm=0.5, flat_gradients=True)
    plain = torch_adamw(theirs)
    places = [p.grad.data_ptr() for p in ours.parameters()]
    for step in range(0, 6, 2):
        for net in (ours, theirs):
            (loss_of(net, step) / 2).backward()
            (loss_of(net, step + 1) / 2).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
        optimizer.step()
        assert all(not p.grad.any() for p in ours.parameters())
    assert_same_parameters(ours, theirs)
    assert places == [p.grad.data_ptr() for p in ours.parameters()]
    ours[0].weight.grad = None
    with pytest.raises(RuntimeError, match="stay in place"):
        optimizer.step()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_bad_step_is_skipped_on_request_and_counted(path, bad):
    net = model()
    optimizer = flattened(net, lr=LR, weight_decay=DECAY, skip_nonfinite=True)
    before = [p.detach().clone() for p in net.parameters()]
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    net[1].bias.grad[3] = bad
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before))
    assert (int(optimizer.step_count), int(optimizer.device_state.skipped)) == (0, 1)
    net[1].bias.grad[3] = 1.0
    optimizer.step()
    assert not torch.equal(net[1].bias, before[2])
    assert (int(optimizer.step_count), int(optimizer.device_state.skipped)) == (1, 1)


def test_without_the_request_nan_spreads_as_in_torch(path):
    net = model()
    optimizer = flattened(net, lr=LR, max_norm=1.0)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    net[1].bias.grad[3] = float("nan")
    optimizer.step()
    assert all(p.isnan().all() for p in net.parameters())


def test_loss_scale_is_undone_halved_and_saved(path):
    ours, theirs = model(), model()
    options = {"lr": LR, "eps": EPS, "weight_decay": DECAY, "max_norm": 0.5}
    scaled = flattened(ours, initial_loss_scale=1024.0, **options)
    plain = flattened(theirs, **options)
    for step in range(3):
        (loss_of(ours, step) * scaled.loss_scale).backward()
        loss_of(theirs, step).backward()
        for optimizer in (scaled, plain):
            optimizer.step()
            optimizer.zero_grad()
        assert scaled.grad_norm.item() == pytest.approx(plain.grad_norm.item(), rel=1e-5)
    assert_same_parameters(ours, theirs)
    (loss_of(ours, 3) * float("inf")).backward()
    scaled.step()
    assert scaled.loss_scale.item() == 512.0
    assert scaled.state_dict()["extra"]["loss_scale"].tolist() == [512.0, 0.0]
    assert_same_parameters(ours, theirs)


def test_loss_scale_grows_after_many_good_steps(path):
    net = model()
    optimizer = flattened(net, lr=LR, initial_loss_scale=1024.0)
    optimizer.device_state.loss_scale[1] = 1999.0
    loss_of(net, 0).backward()
    optimizer.step()
    assert optimizer.device_state.loss_scale.tolist() == [2048.0, 0.0]


def test_pure_bf16_keeps_everything_in_bf16(path):
    net = model().bfloat16()
    optimizer = flattened(net, lr=LR, weight_decay=DECAY, max_norm=1.0)
    assert optimizer.flat.copy is None
    assert optimizer.flat.exp_avg.dtype == torch.bfloat16
    losses = []
    for step in range(12):
        loss = loss_of(net, step % 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_unaligned_and_transposed_gradients_are_taken(path):
    ours, theirs = model(), model()
    flat, plain = flattened(ours, lr=LR, eps=EPS, weight_decay=DECAY, max_norm=1.0), torch_adamw(theirs)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        odd = torch.randn(p.numel() + 1)[1:].view(p.shape)  # 4 bytes past an aligned address
        p.grad = odd if p.ndim == 1 else odd.t().contiguous().t()
        q.grad = odd.clone()
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    plain.step()
    flat.step()
    assert_same_parameters(ours, theirs)


def test_a_model_moved_away_is_noticed():
    net = model()
    optimizer = flattened(net, lr=LR)
    loss_of(net, 0).backward()
    net[1].weight.data = net[1].weight.data.clone()
    with pytest.raises(RuntimeError, match="was moved"):
        optimizer.step()


def test_tied_parameters_stand_once_and_blocks_never_straddle():
    net = model()
    net[1].register_parameter("same", net[0].weight)
    optimizer = flattened(net, lr=LR)
    assert len(optimizer.flat.places) == 7
    assert all(place.start % BLOCK == 0 for place in optimizer.flat.places)
    blocks = optimizer.flat.blocks
    assert int(blocks[2].sum()) == sum(p.numel() for p in net.parameters())


def test_mixed_dtypes_without_a_copy_are_refused():
    net = model()
    net[1].bfloat16()
    with pytest.raises(ValueError, match="one dtype"):
        flattened(net, lr=LR)


def test_a_state_of_another_model_is_refused():
    optimizer = flattened(model(), lr=LR)
    other = flattened(torch.nn.Linear(3, 3), lr=LR)
    with pytest.raises(ValueError, match="groups of"):
        optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("path", ["reference", "interpreter"])
def test_what_is_updated_late_is_updated_the_same(request, path):
    """The embedding and the first matrix wait until the next step begins; losses and weights are plain AdamW's."""
    if path == "interpreter":
        request.getfixturevalue("interpreter")
    results = []
    for late in (False, True):
        net = model()
        parts = [[net[0].weight], [net[1].weight]] if late else []
        optimizer = FlatAdamW(net.parameters(), lr=LR, eps=EPS, weight_decay=DECAY, max_norm=0.5, late=parts)
        losses = []
        for step in range(9):
            for part in range(len(parts)):
                optimizer.update_late(part)
            loss = loss_of(net, step)
            loss.backward()
            before = net[1].weight.detach().clone()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(net[1].weight, before) == late, "only a late parameter waits"
            losses.append(loss.item())
        state = optimizer.state_dict()  # settles
        optimizer.settle()  # and doing it again changes nothing
        results.append((losses, [p.detach().clone() for p in net.parameters()], state["state"][0]["exp_avg"]))
    # The norm is summed up in another order.
    torch.testing.assert_close(results[1], results[0], rtol=0 if path == "reference" else 1e-6, atol=1e-8)


def test_a_late_parameter_without_a_gradient_is_left_with_a_zero_one():
    net = model()
    optimizer = FlatAdamW(net.parameters(), lr=LR, max_norm=1.0, late=[[net[1].weight]])
    loss_of(net, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.flat.late_parts[0].gradients[0].abs().max() > 0
    net[1].weight.requires_grad_(False)
    loss_of(net, 1).backward()
    optimizer.step()
    assert optimizer.flat.late_parts[0].gradients[0].abs().max() == 0
