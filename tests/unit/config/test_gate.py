"""Attacks on the gate, and the targets that must pass it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from automodel.config.errors import ConfigError, UserError
from automodel.config.gate import canonical, resolve_target
from automodel.config.load import load_config
from automodel.config.targets import NAMED_ARGUMENTS, OPTIMIZER_NAMES, SLOTS
from automodel.plan.config import RunConfig

SMALL = "model: bert\ndataset: reviews.csv\n"


def problems(tmp_path: Path, text: str, settings: tuple[str, ...] = (), trust: tuple[str, ...] = ()) -> list[str]:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    try:
        load_config(RunConfig, [path], settings, trust)
    except ConfigError as error:
        return [f"{p.path}: {p.message}" for p in error.problems]
    return []


ATTACKS = [
    "os.system",
    "subprocess.Popen",
    "builtins.eval",
    "torch.load",
    "torch.hub.load",
    "pickle.loads",
    "transformers.utils.logging.os.system",
    "datasets.os.system",
    "datasets.load.importlib.import_module",
    "torch.optim.optimizer.functools.partial",
    "torch.optim.lr_scheduler.types.FunctionType",
    "torch.optim.adamw.torch.hub.load",
    "torch.optim.Optimizer",
    "torch.optim.lr_scheduler.LambdaLR",
    "torch.optim._functional.adam",
    "torch.optim.AdamW.__init__",
    "torch.optim.AdamW.step.__globals__",
    "torch.optim.adamw",
    "torch.optim.LBFGS",
    "automodel.config.gate.importlib.import_module",
    "automodel.cli.main.main",
    "automodel.config.read.yaml.load",
    "datasets.disable_caching",
    "transformers.AutoTokenizer.from_pretrained",
    "transformers.AutoModel.from_pretrained",
    "transformers.pipeline",
    "torchdata.stateful_dataloader.stateful_dataloader.os.system",
    "nemo_automodel.components._peft.os.system",
    "nemo_automodel._private.thing",
    "..os.system",
    "os.system; import os",
    "",
]


@pytest.mark.parametrize("target", ATTACKS)
@pytest.mark.parametrize("slot", sorted(SLOTS))
def test_attacks_are_refused_in_every_slot(slot, target):
    with pytest.raises(ConfigError) as caught:
        resolve_target(target, slot)
    assert caught.value.problems[0].path == "_target_"


def test_refusing_imports_nothing():
    """A fresh interpreter: whatever a file names, no module outside the trusted roots is loaded, torch included."""
    script = (
        "import sys\n"
        "from automodel.config.gate import resolve_target\n"
        "from automodel.config.errors import ConfigError\n"
        "before = set(sys.modules)\n"
        "for target in ['antigravity.x', 'this.s', 'my_package.make', 'transformers.utils.logging.os.system',\n"
        "               'datasets.os.system', 'torch.hub.load']:\n"
        "    for slot in ('dataset', 'model', 'optimizer', 'dataloader'):\n"
        "        try: resolve_target(target, slot)\n"
        "        except ConfigError: continue\n"
        "        sys.exit(f'{target} passed as {slot}')\n"
        "loaded = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "sys.exit(str(loaded) if loaded else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_known_targets_need_no_import():
    script = (
        "import sys, pathlib, tempfile\n"
        "from automodel.plan.check import load_run_config\n"
        "path = pathlib.Path(tempfile.mkdtemp()) / 'run.yaml'\n"
        "path.write_text('''\n"
        "model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, name: x}\n"
        "dataset: {_target_: nemo_automodel.components.datasets.llm.squad.make_squad_dataset, path: squad}\n"
        "optimizer: {_target_: torch.optim.AdamW, lr: 1e-5}\n"
        "dataloader: {_target_: torchdata.stateful_dataloader.StatefulDataLoader}\n"
        "distributed: {_target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager}\n"
        "fp8: {_target_: nemo_automodel.components.quantization.fp8.FP8Config}\n"
        "peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig}\n"
        "quantization: {_target_: transformers.BitsAndBytesConfig, load_in_4bit: true}\n"
        "''')\n"
        "load_run_config([path])\n"
        "heavy = {'torch', 'transformers', 'datasets', 'nemo_automodel', 'torchdata'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("lr_scheduler", "lr_scheduler: {_target_: torch.optim.lr_scheduler.LambdaLR}"),
        ("wandb", "wandb: {_target_: os.system}"),
        ("", "_target_: os.system"),
        ("wandb.tags.0", "wandb: {tags: [{_target_: os.system}]}"),
        ("optimizer.foreach", "optimizer: {_target_: torch.optim.AdamW, foreach: {_target_: os.system}}"),
        ("optimizer.foreach.0.a", "optimizer: {foreach: [{a: {_target_: os.system}}]}"),
        ("mlflow.tags", "mlflow: {tags: {_target_: os.system}}"),
        ("validation_dataset.column_mapping", "validation_dataset: {column_mapping: {_target_: os.system}}"),
    ],
)
def test_nested_targets_are_refused(tmp_path, section, line):
    path = f"{section}._target_" if section else "_target_"
    found = problems(tmp_path, SMALL + line + "\n")
    assert found == [
        f"{path}: nothing here takes a `_target_`. Remove it; only the sections that say so build objects."
    ]


def test_nested_targets_from_the_command_line_are_refused(tmp_path):
    assert problems(tmp_path, SMALL, ("optimizer.foreach={_target_: os.system}",))
    assert problems(tmp_path, SMALL, ("optimizer.foreach.x._target_=os.system",))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "optimizer: {_target_: torch.optim.AdamW, wieght_decay: 0.1}",
            "optimizer.wieght_decay: `AdamW` takes no such argument; did you mean `weight_decay`?",
        ),
        (
            "optimizer: {_target_: torch.optim.AdamW, params: []}",
            (
                "optimizer.params: `AdamW` takes no such argument; it takes amsgrad, betas, capturable, "
                "differentiable, eps, foreach, fused, lr, maximize, weight_decay."
            ),
        ),
        (
            "optimizer: {_target_: torch.optim.NAdam, momentum_dcay: 0.1}",
            "optimizer.momentum_dcay: `NAdam` takes no such argument; did you mean `momentum_decay`?",
        ),
        (
            "optimizer: {_target_: torch.optim.AdmW}",
            "optimizer._target_: `torch.optim` has no `AdmW`; did you mean `AdamW`?",
        ),
        (
            "optimizer: {_target_: torch.optim.LBFGS}",
            (
                "optimizer._target_: `torch.optim.LBFGS` does not work here: it runs the model several times for each "
                "step. Use `torch.optim.AdamW`, for example."
            ),
        ),
        (
            "optimizer: {_target_: bitsandbytes.optim.AdamW8bit}",
            (
                "optimizer._target_: `bitsandbytes.optim.AdamW8bit` is outside the trusted packages (automodel, "
                "nemo_automodel, torch.optim, torchdata, transformers, datasets). If it is your own code, add "
                "`--trust bitsandbytes` to the command line."
            ),
        ),
        (
            "distributed: {_target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manger}",
            (
                "distributed._target_: `nemo_automodel.components.distributed.fsdp2.FSDP2Manger` cannot be used here. "
                "Did you mean `nemo_automodel.components.distributed.fsdp2.FSDP2Manager`?"
            ),
        ),
        (
            "optimizer: {_target_: torch.optim.optimizer.functools.partial}",
            (
                "optimizer._target_: `torch.optim.optimizer.functools.partial` leaves the trusted packages at "
                "`functools`, the module `functools`."
            ),
        ),
        (
            "dataloader: {_target_: torch.optim.AdamW}",
            (
                "dataloader._target_: `torch.optim.AdamW` cannot be used here. This takes "
                "`torchdata.stateful_dataloader.StatefulDataLoader`."
            ),
        ),
    ],
)
def test_messages(tmp_path, line, message):
    assert problems(tmp_path, SMALL + line + "\n") == [message]


# --- what must pass --------------------------------------------------------------------------------------------------


def test_torch_s_other_optimizers_pass(tmp_path):
    import torch

    assert problems(tmp_path, SMALL + "optimizer: {_target_: torch.optim.NAdam, momentum_decay: 0.01}\n") == []
    assert resolve_target("torch.optim.NAdam", "optimizer", ["momentum_decay"]) is torch.optim.NAdam


def test_the_table_agrees_with_torch():
    """The arguments written down for known optimizers are the ones torch takes."""
    for name, arguments in SLOTS["optimizer"].arguments.items():
        real = set(inspect.signature(resolve_target(name, "optimizer")).parameters) - {"params"}
        assert real == arguments, name
    assert set(OPTIMIZER_NAMES.values()) <= {*SLOTS["optimizer"].arguments, *NAMED_ARGUMENTS}


@pytest.mark.parametrize("slot", sorted(SLOTS))
def test_every_known_target_is_really_there(slot):
    """The table of names is a promise: each leads to one callable, whichever way it is spelt."""
    for target, name in SLOTS[slot].known.items():
        found = resolve_target(target, slot)
        assert callable(found), target
        assert found == resolve_target(name, slot), target


def test_spellings_of_one_target_are_the_same():
    ours = "automodel.AutoModelForCausalLM.from_pretrained"
    for name in (
        "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "nemo_automodel.components._transformers.auto_model.NeMoAutoModelForCausalLM.from_pretrained",
        "automodel.NeMoAutoModelForCausalLM.from_pretrained",
        ours,
    ):
        assert canonical(name) == ours
    assert canonical("my.own.Thing") == "my.own.Thing"


@pytest.fixture
def my_package(tmp_path, monkeypatch):
    package = tmp_path / "packages" / "my_package_for_the_gate"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import os, torch\n"
        "from os import system\n"
        "from torch.optim import AdamW\n"
        "def make(path, n_rows, colour='red', tokenizer=None): return path\n"
        "class Mine(torch.optim.SGD): pass\n"
        "_hidden = make\n"
        "value = 3\n"
    )
    (package / "broken.py").write_text("raise RuntimeError('no')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    yield package.name
    for name in [m for m in sys.modules if m.startswith(package.name)]:
        del sys.modules[name]


def test_trust_widens_the_roots_from_the_command_line_only(tmp_path, my_package):
    text = f"model: bert\ndataset: {{_target_: {my_package}.make, path: x, n_rows: 3}}\n"
    assert "outside the trusted packages" in problems(tmp_path, text)[0]
    assert my_package not in sys.modules
    assert "a file cannot widen" in problems(tmp_path, text + f"trust: [{my_package}]\n")[-1]
    assert problems(tmp_path, text, trust=(my_package,)) == []
    assert resolve_target(f"{my_package}.make", "dataset", ["n_rows"], [my_package])("x", 3) == "x"


def test_arguments_of_trusted_code_are_bound_before_the_call(tmp_path, my_package):
    text = f"model: bert\ndataset:\n  _target_: {my_package}.make\n  revision: x\n  color: 3\n"
    assert problems(tmp_path, text, trust=(my_package,)) == [
        "dataset._target_: `make` also needs `n_rows`, `path`; add them to the section.",
        "dataset.revision: `make` does not take it. Remove it.",
        "dataset.color: `make` takes no such argument; did you mean `colour`?",
    ]
    text = f"model: bert\ndataset:\n  _target_: {my_package}.make\n  dataset_name: x\n  n_rows: 3\n  split: test\n"
    assert problems(tmp_path, text, trust=(my_package,)) == []


@pytest.mark.parametrize(
    ("name", "slot", "reason"),
    [
        ("os.system", "dataset", "leaves the trusted packages at `os`"),
        ("system", "dataset", "only another name for something in `posix`"),
        ("_hidden", "dataset", "private name"),
        ("value", "dataset", "only another name for something in `an unknown place`"),
        ("make", "optimizer", "is a function. This takes an optimizer class"),
        ("make", "model", "is a function. This takes an auto class"),
        ("broken.thing", "dataset", "cannot be imported: RuntimeError: no"),
        ("nothing", "dataset", "has no `nothing`"),
        ("make", "dataloader", "cannot be used here"),
    ],
)
def test_trusted_code_passes_the_same_checks(my_package, name, slot, reason):
    with pytest.raises(ConfigError, match=reason.replace("(", r"\(")):
        resolve_target(f"{my_package}.{name}", slot, (), [my_package])


def test_trusted_optimizers(my_package):
    assert resolve_target(f"{my_package}.Mine", "optimizer", ["momentum"], [my_package]).__name__ == "Mine"
    assert resolve_target(f"{my_package}.AdamW", "optimizer", [], [my_package]).__name__ == "AdamW"


def test_a_trusted_package_that_is_not_installed():
    with pytest.raises(ConfigError, match="there is no package `nobody_has_this`"):
        resolve_target("nobody_has_this.make", "dataset", (), ["nobody_has_this"])


@pytest.mark.parametrize("root", ["os", "subprocess", "builtins", "not a name", "os.path"])
def test_trust_has_limits(root):
    with pytest.raises(UserError, match="--trust"):
        resolve_target("torch.optim.AdamW", "optimizer", (), [root])
