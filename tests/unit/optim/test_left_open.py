"""Numbers that the section gives reach the optimizer; those it leaves open are the optimizer's own."""

import inspect

import pytest
import torch
from torch import nn

from automodel.config.dump import to_plain
from automodel.data.config import DatasetConfig
from automodel.models.config import ModelConfig
from automodel.optim.build import build_optimizer, left_open, parameter_groups, set_lr
from automodel.optim.config import OptimizerConfig
from automodel.plan.check import load_run_config
from automodel.plan.config import RunConfig
from automodel.plan.remarks import how_it_learns

TORCH_CLASSES = [
    cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
]


class Adapted(nn.Module):
    """A hidden layer's adapter, and something that Muon leaves to AdamW."""

    def __init__(self):
        super().__init__()
        layer = nn.Module()
        torch.manual_seed(0)
        layer.lora_A, layer.lora_B = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(8, 4))
        self.layers = nn.ModuleList([layer])
        self.norm = nn.LayerNorm(8)


def rates(optimizer, model):
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: float(g["lr"]) for g in optimizer.param_groups for p in g["params"]}


@pytest.mark.parametrize("muon_lr", [None, 5e-3])
def test_lora_plus_counts_with_muon_too(muon_lr):
    """The group's own factor was overwritten: B learned as fast as A, and the plan said 16 times as fast."""
    model = Adapted()
    cfg = OptimizerConfig(name="muon", lr=1e-3, muon_lr=muon_lr)
    optimizer = build_optimizer(model, cfg, adapter_b_ratio=16.0)
    factor = 1.0 if muon_lr is None else 5.0
    expected = {"layers.0.lora_A": factor, "layers.0.lora_B": 16 * factor, "norm.weight": 1.0, "norm.bias": 1.0}
    for lr in (1e-3, 2e-4):  # as it is built, and later in the schedule
        if lr != 1e-3:
            set_lr(optimizer, lr)
        assert rates(optimizer, model) == pytest.approx({name: lr * times for name, times in expected.items()})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    twin = Adapted()
    pair = [
        torch.optim.Muon([p], lr=lr * expected[name], weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        for name, p in twin.named_parameters()
        if "lora" in name
    ]
    for net in (model, twin):
        torch.manual_seed(1)
        for name, p in net.named_parameters():
            p.grad = torch.randn_like(p) if "lora" in name else None
    for part in (optimizer, *pair):
        part.step()
    for name, p in twin.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], p)
        assert "lora" not in name or not torch.equal(p, before[name])


@pytest.mark.parametrize(
    ("cfg", "cls"),
    [
        (OptimizerConfig(name="adagrad", eps=1e-8), torch.optim.Adagrad),
        (OptimizerConfig(name="rmsprop", eps=1e-8), torch.optim.RMSprop),
        (OptimizerConfig(target="torch.optim.Adadelta", eps=1e-8), torch.optim.Adadelta),
        (OptimizerConfig(target="torch.optim.NAdam", eps=1e-8, betas=(0.9, 0.999)), torch.optim.NAdam),
    ],
)
def test_a_number_that_is_adams_default_is_used_where_it_is_given(cfg, cls):
    """It was taken for "not given", and run/config.yaml recorded what was not used."""
    optimizer = build_optimizer(nn.Linear(3, 3), cfg, cls if cfg.target else None)
    assert type(optimizer) is cls
    assert all(group["eps"] == 1e-8 for group in optimizer.param_groups)


@pytest.mark.parametrize("cls", TORCH_CLASSES, ids=lambda cls: cls.__name__)
def test_what_is_left_open_is_the_classs_own(cls):
    target = f"torch.optim.{cls.__name__}"
    net = nn.Linear(3, 3)
    cfg = OptimizerConfig(target=target, decay_norms_and_biases=True)
    ours, bare = build_optimizer(net, cfg, cls), cls(net.parameters(), lr=cfg.lr)
    keys = [key for key in ("betas", "eps", "weight_decay") if key in bare.defaults]
    for group in ours.param_groups:
        assert {key: group[key] for key in keys} == {key: bare.defaults[key] for key in keys}
    known = left_open(cfg)
    assert {key: known[key] for key in keys} == {key: bare.defaults[key] for key in keys}


def test_weight_decay_is_read_from_the_class_by_every_spelling_of_it():
    for spelling in ("torch.optim.AdamW", "torch.optim.adamw.AdamW"):
        assert OptimizerConfig(target=spelling).decay == torch.optim.AdamW([torch.ones(1)]).defaults["weight_decay"]
    assert (
        OptimizerConfig(target="torch.optim.Muon").decay
        == torch.optim.Muon([torch.ones(1, 1)]).defaults["weight_decay"]
    )
    assert OptimizerConfig(target="torch.optim.Rprop").decay == 0.0  # it has none


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "sgd", "rmsprop", "adagrad", "adafactor"])
def test_by_name_nothing_decays_and_adams_kin_have_its_numbers(name):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3)])

    cfg = OptimizerConfig(name=name)
    for group in build_optimizer(Hidden(), cfg).param_groups:
        assert group["weight_decay"] == 0.0
        if "betas" in group:
            assert tuple(group["betas"]) == (0.9, 0.999)  # Lion's too, as in HF Trainer
        if "eps" in group and name not in ("adafactor", "muon"):
            assert group["eps"] == left_open(cfg)["eps"] == (1e-10 if name == "adagrad" else 1e-8)


def test_a_class_of_the_users_own_keeps_its_own_weight_decay():
    class Own(torch.optim.SGD):
        def __init__(self, params, lr, weight_decay=0.25):
            super().__init__(params, lr=lr, weight_decay=weight_decay)

    net = nn.Linear(3, 3)
    groups = build_optimizer(net, OptimizerConfig(target="mine.Own"), Own).param_groups
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]
    groups = build_optimizer(net, OptimizerConfig(target="mine.Own", weight_decay=0.0), Own).param_groups
    assert [group["weight_decay"] for group in groups] == [0.0, 0.0]


def line(optimizer: OptimizerConfig) -> str:
    model, dataset = ModelConfig(pretrained_model_name_or_path="x"), DatasetConfig(path="x")
    cfg = RunConfig(model=model, dataset=dataset, optimizer=optimizer)
    return next(d.reason for d in how_it_learns(cfg, 100, None) if d.name == "optimizer")


def test_the_plan_says_whose_weight_decay_it_is():
    assert line(OptimizerConfig(target="torch.optim.AdamW")).startswith(
        "weight decay 0.01 (AdamW's own default), not on norms and biases; "
    )
    assert line(OptimizerConfig(target="torch.optim.AdamW", weight_decay=0.0)).startswith("no weight decay; ")
    assert line(OptimizerConfig(target="torch.optim.SGD")).startswith("no weight decay; ")
    assert line(OptimizerConfig(target="mine.Own")).startswith("weight decay as Own has it, not on norms and biases; ")
    assert line(OptimizerConfig(weight_decay=0.1)).startswith("weight decay 0.1, not on norms and biases; ")


def test_captured_steps_get_numbers():
    from automodel.kernels.flat_adamw import FlatAdamW

    net = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    for cfg, decay in ((OptimizerConfig(), 0.0), (OptimizerConfig(target="torch.optim.AdamW", eps=1e-6), 0.01)):
        groups = FlatAdamW(parameter_groups(net, cfg), lr=1e-3, max_norm=1.0, **cfg.adam).param_groups
        assert [group["weight_decay"] for group in groups] == [decay, 0.0]
        assert {(group["betas"], group["eps"]) for group in groups} == {((0.9, 0.999), cfg.eps or 1e-8)}


def test_a_config_records_what_was_given_and_reads_what_older_versions_recorded(tmp_path):
    def loaded(section: str, *settings: str) -> RunConfig:
        (tmp_path / "run.yaml").write_text(f"model: bert\ndataset: x.csv\noptimizer: {section}\n")
        return load_run_config([tmp_path / "run.yaml"], settings)

    recorded = [to_plain(loaded(section).optimizer) for section in ("{name: adagrad, eps: 1e-8}", "{name: adagrad}")]
    assert [section.get("eps") for section in recorded] == [1e-8, None]
    # Every config had them written out once, also beside classes that have no such setting.
    old = loaded("{_target_: torch.optim.Adadelta, betas: [0.9, 0.999], eps: 1e-8}")
    assert old.optimizer.eps == 1e-8
    assert loaded("adamw", "optimizer.betas.1=0.98").optimizer.betas == (0.9, 0.98)
