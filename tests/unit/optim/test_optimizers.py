"""Every optimizer by its names: what it computes, what it takes, and that its state survives exactly."""

import sys
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

from automodel.config.errors import UserError
from automodel.config.targets import NAMED_ARGUMENTS, OPTIMIZER_NAMES
from automodel.optim import kinds
from automodel.optim.build import build_optimizer, load_state_tensors, set_lr, state_tensors
from automodel.optim.config import OptimizerConfig
from automodel.optim.kinds import KINDS, Kind
from automodel.optim.lion import Lion
from automodel.optim.muon import hidden_matrices
from automodel.optim.quantized import CLASSES, eight_bit_parameters
from automodel.plan.check import load_run_config

ON_THE_CPU = {
    "adamw": {},
    "sgd": {"momentum": 0.9},
    "lion": {},
    "adafactor": {"beta1": 0.9},
    "muon": {"momentum": 0.9},
    "rmsprop": {"centered": True},
    "adagrad": {},
}


class Model(nn.Module):
    """Embedding, two hidden layers with norms, a head: one parameter of each sort. Large enough for 8-bit blocks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)) for _ in "ab")
        self.head = nn.Linear(64, 5)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return Model().to(dtype)


def train(net, optimizer, steps, first=0, scaled=1.0):
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 64, (32,), generator=generator)
        loss = nn.functional.cross_entropy(net(ids).float(), ids % 5)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        set_lr(optimizer, 1e-2 * scaled / (1 + step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def test_the_tables_of_names_agree():
    names = set(get_args(get_type_hints(OptimizerConfig)["name"]))
    assert names == set(KINDS) == set(OPTIMIZER_NAMES)
    assert {kind for kind in KINDS.values() if not kind.plain} == set(CLASSES)
    assert set(OPTIMIZER_NAMES.values()) - {"torch.optim.AdamW", "torch.optim.SGD"} == set(NAMED_ARGUMENTS)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adamw_torch_fused", Kind("adamw")),
        ("adamw_bnb_8bit", Kind("adamw", bits=8)),
        ("paged_adamw", Kind("adamw", paged=True)),
        ("paged_adamw_8bit", Kind("adamw", bits=8, paged=True)),
        ("paged_lion_32bit", Kind("lion", paged=True)),
        ("lion_32bit", Kind("lion")),
    ],
)
def test_names_mean_what_they_mean_in_trainer(name, kind):
    assert KINDS[name] == kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ON_THE_CPU)
def test_it_learns_and_continues_exactly_from_its_state(name, dtype):
    cfg = OptimizerConfig(name=name, lr=1e-2, weight_decay=0.01, extra=ON_THE_CPU[name])
    net = model(dtype)
    optimizer = build_optimizer(net, cfg)
    losses = train(net, optimizer, 4)
    assert losses[-1] < losses[0]
    tensors, values = state_tensors(optimizer, net)
    twin = model(dtype)
    twin.load_state_dict(net.state_dict())
    other = build_optimizer(twin, cfg)
    load_state_tensors(other, twin, {k: t.clone() for k, t in tensors.items()}, dict(values))
    assert train(net, optimizer, 3, first=4) == train(twin, other, 3, first=4)
    for a, b in zip(net.parameters(), twin.parameters()):
        assert torch.equal(a, b)


def test_lion_is_the_sign_of_a_momentum():
    p = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = Lion([p], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    weight, momentum = p.detach().clone(), torch.zeros(3)
    for g in (torch.tensor([0.5, -1.0, 0.0]), torch.tensor([-3.0, 0.2, 0.0])):
        p.grad = g.clone()
        optimizer.step()
        update = (0.9 * momentum + 0.1 * g).sign()
        weight = weight * (1 - 0.1 * 0.5) - 0.1 * update
        momentum = 0.99 * momentum + 0.01 * g
    torch.testing.assert_close(p.detach(), weight)
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], momentum)


def test_adafactor_is_trainers():
    """HF Trainer's `optim: adafactor` neither scales by the weights nor makes its own rate."""
    from transformers import Adafactor

    net, theirs = model(), model()
    ours = build_optimizer(net, OptimizerConfig(name="adafactor", lr=1e-2))
    reference = Adafactor(theirs.parameters(), lr=1e-2, scale_parameter=False, relative_step=False)
    assert train(net, ours, 3) == train(theirs, reference, 3)


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest():
    net = model()
    names = {n for n, p in net.named_parameters() if p in hidden_matrices(net)}
    assert names == {f"layers.{i}.{j}.weight" for i in (0, 1) for j in (1, 2)}
    optimizer = build_optimizer(net, OptimizerConfig(name="muon", lr=1e-2, muon_lr=2e-2, weight_decay=0.1))
    train(net, optimizer, 1)
    kept = {n: set(optimizer.state[p]) for n, p in net.named_parameters()}
    assert all(kept[n] == {"momentum_buffer"} for n in names)
    assert all(kept[n] == {"step", "exp_avg", "exp_avg_sq"} for n in kept if n not in names)
    set_lr(optimizer, 1e-3)
    assert [g["lr"] for g in optimizer.param_groups] == [2e-3, 1e-3, 1e-3]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.1, 0.0]
    with pytest.raises(UserError, match="no such matrix of this model is trained"):
        build_optimizer(nn.Linear(3, 3), OptimizerConfig(name="muon"))


def test_muon_equals_torchs_own_pair():
    """The parts are torch's; joining them changes nothing."""
    net, apart = model(), model()
    joined = build_optimizer(net, OptimizerConfig(name="muon", lr=1e-2))
    matrices = hidden_matrices(apart)
    pair = [
        torch.optim.Muon(list(matrices), lr=1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in apart.parameters() if p not in matrices], lr=1e-2, weight_decay=0.0, fused=True),
    ]

    class Pair:
        param_groups = [g for part in pair for g in part.param_groups]  # noqa: RUF012

        def step(self):
            for part in pair:
                part.step()

        def zero_grad(self, set_to_none):
            apart.zero_grad(set_to_none)

    assert train(net, joined, 4) == train(apart, Pair(), 4)


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    for name in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(
        UserError, match=r"come from bitsandbytes, which is not installed: pip install 'automodel-finetune\[qu"
    ):
        build_optimizer(model(), OptimizerConfig(name="adamw_8bit"))


def written(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: bert\ndataset: x.csv\n{text}\n")
    return load_run_config([path])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer: paged_adamw_32bit", {"name": "paged_adamw_32bit"}),
        ("optim: paged_adamw_32bit", {"name": "paged_adamw_32bit"}),
        ("optimizer: {optim: lion_32bit, betas: [0.9, 0.99]}", {"name": "lion_32bit", "betas": (0.9, 0.99)}),
        ("optimizer: {name: sgd, momentum: 0.9}", {"extra": {"momentum": 0.9}}),
        ("optimizer: {name: muon, muon_lr: 1e-3, ns_steps: 4}", {"muon_lr": 1e-3, "extra": {"ns_steps": 4}}),
        ("optimizer: {lr: 1e-3}\noptim: adafactor", {"lr": 1e-3, "name": "adafactor"}),
    ],
)
def test_ways_to_write_it(tmp_path, text, expected):
    optimizer = written(tmp_path, text).optimizer
    assert {key: getattr(optimizer, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim: paged_adamw_23bit", "optimizer.name: there is no 'paged_adamw_23bit' here.*`paged_adamw_32bit`"),
        ("optimizer: adamw\noptim: lion", "optim: is another name for `optimizer.name`, which is given too"),
        ("optimizer: {name: lion, eps: 1e-6}", "optimizer.eps: `Lion` has no such setting"),
        ("optimizer: {name: adamw_8bit, amsgrad: true}", "optimizer.amsgrad: `AdamW8bit` takes no such argument"),
        ("optimizer: {muon_lr: 1e-3}", "optimizer.muon_lr: `AdamW` has no such setting"),
        ("optimizer: {_target_: torch.optim.Muon}", "takes matrices only; `name: muon` gives the other parameters"),
    ],
)
def test_wrong_ways_are_told(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        written(tmp_path, text)


@pytest.mark.parametrize("name", [n for n, kind in KINDS.items() if not kind.plain])
def test_bitsandbytes_continues_exactly(name):
    """On the CPU, where bitsandbytes runs too: 8-bit blocks, 32-bit word tables, plain pages."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (automodel-finetune[quant])")
    cfg = OptimizerConfig(name=name, lr=1e-2, weight_decay=0.01)
    net = model()
    optimizer = build_optimizer(net, cfg)
    losses = train(net, optimizer, 4)
    assert losses[-1] < losses[0]
    tensors, values = state_tensors(optimizer, net)
    assert tensors["state1/embed.weight"].dtype == torch.float32
    expected = torch.uint8 if kinds.KINDS[name].bits == 8 else torch.float32
    assert tensors["state1/layers.0.1.weight"].dtype == expected
    twin = model()
    twin.load_state_dict(net.state_dict())
    other = build_optimizer(twin, cfg)
    load_state_tensors(other, twin, {k: t.clone() for k, t in tensors.items()}, dict(values))
    assert train(net, optimizer, 3, first=4) == train(twin, other, 3, first=4)


def test_what_our_8_bit_adamw_keeps_in_32_bits():
    """Word tables, unless they are the head as well; biases and norms."""
    net = model()
    narrow = {id(p) for p in eight_bit_parameters(net)}
    assert id(net.embed.weight) not in narrow
    assert id(net.layers[0][1].weight) in narrow
    assert all(p.ndim == 2 for p in net.parameters() if id(p) in narrow)
    net.get_output_embeddings = lambda: net.embed
    assert id(net.embed.weight) in {id(p) for p in eight_bit_parameters(net)}


def test_bitsandbytes_32_bit_forms_are_ours():
    """A paged optimizer of 32 bits is replaced by the plain one where paging is not needed: the same numbers."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (automodel-finetune[quant])")
    for paged, plain in (("paged_adamw_32bit", "adamw"), ("paged_lion_32bit", "lion")):
        nets = [model(), model()]
        for net, name in zip(nets, (paged, plain)):
            train(net, build_optimizer(net, OptimizerConfig(name=name, lr=1e-2, weight_decay=0.1)), 4)
        for a, b in zip(*(net.parameters() for net in nets)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
