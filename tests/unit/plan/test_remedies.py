"""What a plan says where a run needs more memory than there is: whether it can fit, and which keys need less."""

import dataclasses
import re

import numpy as np
import pytest
from rich.console import Console

from automodel.adapters.config import PeftConfig
from automodel.config.errors import EXIT_BAD_INPUT, UserError
from automodel.data.config import DataloaderConfig, DatasetConfig
from automodel.distributed.layout import Layout
from automodel.engine import run
from automodel.models.config import ModelConfig, QuantizationConfig
from automodel.optim.config import OptimizerConfig
from automodel.plan.config import RunConfig, StepSchedulerConfig, TrainingOptimizations
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware
from automodel.plan.memory import ModelShape
from automodel.tasks.registry import CAUSAL_LM

SHAPE_8B = ModelShape(36, 4096, 4096, 1024, 32, 12_288, 151_936, rms=True, gated=True, head_norms=True)
MODEL = ModelFacts(
    "qwen3", "qwen3", 8_190_735_360, True, "packs", can_fuse=True, fused_in_words="norms", shape=SHAPE_8B
)
LENGTHS = np.full(64, 512)
DATA = DataFacts(64, int(LENGTHS.sum()), 512, 512, False, lengths=LENGTHS)
CPU = Hardware("cpu", "Test CPU", 0, 24.0, False, False, 2)


def gpu(memory: float) -> Hardware:
    return Hardware("cuda", "Test GPU", 1, memory, True, True, 8, fp8=True)


def plan(
    hardware=CPU, model=MODEL, optimizer="adamw", peft=None, quantization=None, batch=2, accumulation=None, **options
):
    cfg = RunConfig(
        model=ModelConfig(pretrained_model_name_or_path="qwen3"),
        dataset=DatasetConfig(path="data.jsonl"),
        dataloader=DataloaderConfig(batch_size=batch),
        step_scheduler=StepSchedulerConfig(max_steps=10, grad_acc_steps=accumulation),
        optimizer=OptimizerConfig(name=optimizer),
        training_optimizations=TrainingOptimizations(**options),
        peft=peft,
        quantization=quantization,
    )
    return make_plan(cfg, CAUSAL_LM, hardware, model, DATA)


def memory_of(made):
    return next(decision for decision in made.decisions if decision.name == "memory")


def remedies_of(made) -> dict[str, float]:
    """What each remedy is said to need, in GiB."""
    (listed,) = re.findall(r"To need less: (.*)\.$", memory_of(made).reason)
    return {key: float(size) for key, size in re.findall(r"([^ ,][^(]*) \(([\d.]+) GiB(?:, fits)?\)", listed)}


def test_what_cannot_fit_says_so_and_names_what_needs_less():
    made = plan()
    line = memory_of(made)
    assert line.value == "137 GiB, and there are 24 GiB"
    assert "; this cannot fit. To need less: " in line.reason
    remedies = remedies_of(made)
    assert {"training_optimizations.gradient_checkpointing=full", "optimizer.name=adafactor", "peft={}"} <= {*remedies}
    assert "optimizer.name=adamw_8bit" not in remedies  # for GPUs
    assert list(remedies.values()) == sorted(remedies.values())
    smallest = (
        r"To need less: peft=\{\} quantization\.load_in_4bit=true training_optimizations\.gradient_checkpointing=full"
    )
    assert re.search(smallest + r" \([\d.]+ GiB, fits\), peft=\{\}", line.reason)
    assert made.cannot_fit.startswith("the run needs about 137 GiB of memory, and Test CPU has 24 GiB. To need less: ")


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("optimizer.name=adafactor", {"optimizer": "adafactor"}),
        ("training_optimizations.gradient_checkpointing=full", {"gradient_checkpointing": True}),
        ("training_optimizations.precision=bf16-pure", {"precision": "bf16-pure"}),
        (
            "half dataloader.batch_size with twice step_scheduler.grad_acc_steps",
            {"batch": 16, "accumulation": 2},
        ),
    ],
)
def test_a_remedy_needs_what_is_said_of_it(key, changes):
    before = plan(batch=32)
    after = plan(**{"batch": 32, **changes})
    assert remedies_of(before)[key] == pytest.approx(after.memory_gib, rel=0.01)
    assert key not in memory_of(after).reason or key.startswith("half")


def test_an_adapter_needs_about_what_is_said_of_it():
    trained = dataclasses.replace(MODEL, trained=43_646_976, adapter_in_words="rank 16")
    for key, quantization in (
        ("peft={}", None),
        ("peft={} quantization.load_in_4bit=true", QuantizationConfig(load_in_4bit=True, resident=False)),
    ):
        after = plan(model=trained, peft=PeftConfig(dim=16), quantization=quantization)
        assert remedies_of(plan())[key] == pytest.approx(after.memory_gib, rel=0.1)


def test_on_a_gpu_what_counts_is_what_no_smaller_batch_changes():
    halved = plan(gpu(140.0), batch=64)
    assert not halved.cannot_fit
    assert "; this may not fit. To need less: " in memory_of(halved).reason
    assert plan(gpu(80.0), batch=1).cannot_fit
    assert "optimizer.name=adamw_8bit" in plan(gpu(80.0), batch=1).cannot_fit


def test_a_run_that_fits_names_no_remedy():
    made = plan(gpu(140.0), batch=1)
    assert memory_of(made).value.endswith(" of 140 GiB")
    assert "fit" not in memory_of(made).reason
    assert made.cannot_fit == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_a_dry_run_shows_the_plan_and_ends_as_wrong_input_does(monkeypatch, capsys, as_json):
    made = plan()
    cfg = RunConfig(model=ModelConfig(pretrained_model_name_or_path="x"), dataset=DatasetConfig(path="x"))
    monkeypatch.setattr(run, "planned", lambda *_: type("Prepared", (), {"plan": made}))
    with pytest.raises(UserError, match=r"the run needs about 137 GiB of memory, and Test CPU has 24 GiB\.") as caught:
        run.dry_run(cfg, as_json=as_json)
    assert caught.value.exit_code == EXIT_BAD_INPUT == 2
    assert "memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("resident", "label"),
    [
        (True, "frozen weights (bf16, expanded from NF4) 15.3 GiB"),
        (False, "frozen weights (products in NF4) 6.1 GiB"),
    ],
)
def test_frozen_weights_are_called_what_they_are_held_in(resident, label):
    trained = dataclasses.replace(MODEL, trained=43_646_976, adapter_in_words="rank 16")
    four = QuantizationConfig(load_in_4bit=True, resident=resident)
    made = plan(gpu(140.0), model=trained, peft=PeftConfig(dim=16), quantization=four)
    assert label in memory_of(made).reason
    base = next(decision for decision in made.decisions if decision.name == "base")
    assert base.value == ("bf16, expanded from NF4" if resident else "NF4")


def test_a_run_that_cannot_fit_is_warned_and_not_refused(tmp_path, monkeypatch):
    """An estimate never stops a run."""
    import tiny_runs as tiny
    from automodel.engine import prepare
    from automodel.plan.check import load_run_config

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    path = tiny.write_run(tmp_path, text="step_scheduler: {max_steps: 2}\ndataloader: {batch_size: 4}\n")
    monkeypatch.setattr(prepare, "read_hardware", lambda: dataclasses.replace(CPU, memory_gib=1e-4))
    with (tmp_path / "said").open("w") as file:
        done = run.finetune(load_run_config([path]), console=Console(file=file, width=400))
    assert done.exit_code == 0
    assert "[WARN] the run needs about" in (tmp_path / "said").read_text()


def test_ranks_on_one_processor_share_its_memory():
    cfg = RunConfig(model=ModelConfig(pretrained_model_name_or_path="x"), dataset=DatasetConfig(path="x"))
    made = make_plan(cfg, CAUSAL_LM, CPU, MODEL, DATA, layout=Layout(replicas=2))
    assert "each of the 2 ranks needs as much of the same memory" in memory_of(made).reason
    assert "ranks" not in memory_of(plan()).reason


def test_a_processor_without_amx_is_not_said_to_have_no_bf16():
    """Zen 4 has bf16 products in AVX-512; what decides is how fast they are."""
    precision = next(decision for decision in plan().decisions if decision.name == "precision")
    assert (precision.value, precision.reason) == (
        "fp32",
        "bf16 was not measured: the products of this run are not known",
    )
