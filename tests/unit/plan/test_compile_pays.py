"""When compiling pays, and what the plan says about it."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from automodel.config.errors import UserError
from automodel.data.config import DatasetConfig
from automodel.kernels import obstacles
from automodel.models.config import ModelConfig
from automodel.plan import compile_pays, compile_record
from automodel.plan.check import load_run_config
from automodel.plan.compile_pays import (
    COLD_S,
    PAYS,
    WARM_S,
    CompileFacts,
    asked_compile,
    estimate,
    saved_seconds,
    used_mode,
)
from automodel.plan.compile_record import read_compile_facts, record_key, remember_compile, use_compiled_folder
from automodel.plan.config import CompileConfig, RunConfig, StepSchedulerConfig, TrainingOptimizations
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware
from automodel.tasks.registry import TEXT_CLASSIFICATION

CPU = Hardware("cpu", "Test CPU", 0, 24.0, False, False, 2)
H200 = Hardware("cuda", "NVIDIA H200", 1, 140.0, True, True, 16)
ALBERT = ModelFacts("albert", "albert", 12_000_000, True, "packs")
BERT = dataclasses.replace(ALBERT, name="bert", model_type="bert", can_fuse=True, can_pool=True)
DATA = DataFacts(rows=1000, tokens=241_000, longest=512, max_length=512, has_validation=True)
BASE = CompileFacts(blocks=12, width=768)


def config(**sections) -> RunConfig:
    sections.setdefault("model", ModelConfig(pretrained_model_name_or_path="albert"))
    return RunConfig(dataset=DatasetConfig(path="data.csv"), **sections)


def decided(cfg=None, hardware=H200, model=ALBERT, facts=BASE, data=DATA):
    plan = make_plan(cfg or config(), TEXT_CLASSIFICATION, hardware, model, data, facts)
    return plan, next(d for d in plan.decisions if d.name == "compile")


def steps(count, **more):
    return config(step_scheduler=StepSchedulerConfig(max_steps=count, **more))


def test_a_short_run_is_not_compiled_and_the_plan_tells_the_arithmetic():
    plan, line = decided(steps(125))
    each = saved_seconds(BASE, 8 * 241, "bf16")
    assert not plan.compile
    assert line.value == "off"
    assert line.reason.startswith(f"125 steps × {each * 1e3:.2g} ms saved = {125 * each:.1f} s; compiling costs about")


def test_the_decision_turns_exactly_where_the_arithmetic_does():
    each = saved_seconds(BASE, 8 * 241, "bf16")
    enough = int(PAYS * COLD_S / each) + 1
    assert not decided(steps(enough - 1))[0].compile
    plan, line = decided(steps(enough))
    assert (plan.compile, plan.compile_mode, line.value) == (True, "default", "on")
    assert f"must pay {PAYS:g} times over" in line.reason
    assert decided(steps(-(-enough // 4), grad_acc_steps=4))[0].compile, "micro-batches are what is saved in"
    assert "4 micro-batches" in decided(steps(50, grad_acc_steps=4))[1].reason


def test_more_tokens_wider_and_fp32_blocks_save_more():
    at = saved_seconds(BASE, 2000, "bf16")
    assert saved_seconds(BASE, 4000, "bf16") > at
    assert saved_seconds(dataclasses.replace(BASE, width=1024), 2000, "bf16") > at
    assert saved_seconds(BASE, 2000, "tf32") > at
    assert saved_seconds(dataclasses.replace(BASE, blocks=24), 2000, "bf16") == pytest.approx(2 * at)


def test_a_measured_compile_takes_the_place_of_the_constants():
    def cost(mode="default", **measured):
        facts = dataclasses.replace(BASE, **measured)
        return estimate(facts, mode, steps=1, accumulation=1, tokens=100, precision="bf16")

    assert cost().cost_s == COLD_S
    assert cost("max-autotune-no-cudagraphs").cost_s > 2 * COLD_S
    assert cost(cold_s=60.0).cost_s == WARM_S
    assert cost(cold_s=2.0).cost_s == 2.0, "a warm cache is never slower than none"
    assert cost(cold_s=60.0, warm_s=3.0).cost_s == 3.0
    assert "with its cache on disk, as measured here" in cost(cold_s=60.0, warm_s=3.0).words
    between = int(PAYS * WARM_S / saved_seconds(BASE, 8 * 241, "bf16")) + 1
    assert not decided(steps(between))[0].compile
    assert decided(steps(between), facts=dataclasses.replace(BASE, cold_s=60.0))[0].compile


def test_fused_blocks_are_never_compiled_by_themselves():
    plan, line = decided(steps(10**6), model=BERT)
    assert (plan.fused_kernels, plan.compile) == (True, False)
    assert "fused kernels are what compiling would make" in line.reason


@pytest.mark.parametrize(
    "section",
    [
        {"compile": CompileConfig(enabled=True)},
        {"training_optimizations": TrainingOptimizations(use_compile=True)},
    ],
)
def test_forced_on_compiles_stock_blocks_instead_of_fused_ones(section):
    plan, line = decided(config(**section), model=BERT)
    assert (plan.compile, plan.fused_kernels, plan.pooled_last_block, plan.capture) == (True, False, False, True)
    assert line.reason.startswith("asked for; 375 steps ×")
    kernels = next(d for d in plan.decisions if d.name == "kernels")
    assert (kernels.value, "compile was asked for" in kernels.reason) == ("stock", True)


def test_forced_on_outside_a_captured_step():
    eager = config(
        training_optimizations=TrainingOptimizations(capture=False, use_compile=True),
        compile=CompileConfig(mode="max-autotune"),
    )
    plan, line = decided(eager, model=BERT)
    assert (plan.compile, plan.compile_mode, plan.capture) == (True, "max-autotune-no-cudagraphs", False)
    assert not plan.pooled_last_block, "its boundaries are read on the host"
    assert line.value == "on, max-autotune-no-cudagraphs"


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        ("default", "default"),
        ("reduce-overhead", "default"),
        ("max-autotune", "max-autotune-no-cudagraphs"),
        ("max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"),
    ],
)
def test_modes_with_cuda_graphs_leave_the_graphs_to_the_step(asked, used):
    mode, remark = used_mode(asked)
    assert mode == used
    assert ("CUDA graphs record whole steps" in remark) == (asked != used)
    plan, line = decided(config(compile=CompileConfig(enabled=True, mode=asked)))
    assert plan.compile_mode == used
    assert remark in line.reason


def test_every_other_reason_to_leave_it():
    long = steps(10**6)
    forced_off = dataclasses.replace(long, compile=CompileConfig(enabled=False))
    assert decided(forced_off)[1].reason == "turned off"
    assert "on the CPU" in decided(long, hardware=CPU)[1].reason
    assert decided(config(compile=CompileConfig(enabled=True)), hardware=CPU)[1].reason.startswith("asked for, but on")
    assert "does not tell enough" in decided(long, facts=CompileFacts())[1].reason
    lacking = dataclasses.replace(BASE, obstacle="Triton is not installed")
    assert decided(long, facts=lacking)[1].reason == "Triton is not installed"
    forced = config(compile=CompileConfig(enabled=True))
    assert decided(forced, facts=lacking)[1].reason == "asked for, but Triton is not installed"
    eager = dataclasses.replace(long, training_optimizations=TrainingOptimizations(capture=False))
    assert "compile.enabled: true compiles them" in decided(eager)[1].reason


def test_a_resumed_run_goes_on_as_it_began():
    """A cache that is warm by now must not change the dropout of the second half."""
    assert decided(steps(10), facts=dataclasses.replace(BASE, begun=True))[0].compile
    assert not decided(steps(10**6), facts=dataclasses.replace(BASE, begun=False))[0].compile
    forced = config(compile=CompileConfig(enabled=True))
    assert decided(forced, facts=dataclasses.replace(BASE, begun=False))[0].compile


def test_every_token_count_anew_is_said():
    _, line = decided(config(compile=CompileConfig(enabled=True, dynamic=False)))
    assert "dynamic is false" in line.reason


def test_every_spelling_is_understood(tmp_path):
    def load(text):
        (tmp_path / "run.yaml").write_text(f"model: albert\ndataset: data.csv\ntask: text-classification\n{text}\n")
        return load_run_config([tmp_path / "run.yaml"])

    assert load("").compile == CompileConfig(enabled="auto", mode="default", dynamic=None, fullgraph=False)
    for text, wish in (
        ("compile: true", True),
        ("compile: auto", None),
        ("compile: {enabled: false}", False),
        ("training_optimizations: {use_compile: true}", True),
        ("training_optimizations: {use_compile: true}\ncompile: {mode: max-autotune}", True),
    ):
        assert asked_compile(load(text)) is wish, text
    full = load("compile: {enabled: true, mode: max-autotune, dynamic: false, fullgraph: true}")
    assert full.compile == CompileConfig(enabled=True, mode="max-autotune", dynamic=False, fullgraph=True)
    with pytest.raises(UserError, match="max-autotune"):
        load("compile: {mode: max_autotune}")
    with pytest.raises(UserError, match="here it is `mode` under `compile:`"):
        load("torch_compile_mode: max-autotune")


# The record on disk.


def hf_config(**values):
    settings = {"hidden_size": 768, "num_hidden_layers": 12, "id2label": {0: "no"}} | values
    return SimpleNamespace(to_dict=lambda: settings, **settings)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path))
    monkeypatch.setattr(compile_record, "triton_obstacle", lambda: "")
    return tmp_path


def test_the_first_compile_is_remembered_as_cold_and_the_next_as_warm(cache):
    key = record_key(config(), hf_config(), "GPU")

    def facts(gpu="GPU"):
        return read_compile_facts(config(), hf_config(), "cuda", gpu, None)

    assert (facts().blocks, facts().width, facts().cold_s, facts().warm_s) == (12, 768, None, None)
    remember_compile(key, 31.4)
    assert (facts().cold_s, facts().warm_s) == (31.4, None)
    remember_compile(key, 5.1)
    remember_compile(key, 4.9)
    assert (facts().cold_s, facts().warm_s) == (31.4, 4.9)
    assert facts("another GPU").cold_s is None
    (file,) = cache.rglob("*.json")
    file.write_text("not json")
    assert facts().cold_s is None, "a damaged record is no record"


def test_the_key_knows_what_compiled_code_depends_on():
    key = record_key(config(), hf_config(), "GPU")
    assert record_key(config(), hf_config(id2label={0: "yes"}), "GPU") == key
    others = [
        record_key(config(), hf_config(hidden_size=1024), "GPU"),
        record_key(config(), hf_config(), "another"),
        record_key(config(compile=CompileConfig(mode="max-autotune")), hf_config(), "GPU"),
        record_key(config(training_optimizations=TrainingOptimizations(precision="tf32")), hf_config(), "GPU"),
    ]
    assert len({key, *others}) == 5


def test_torchs_cache_is_kept_where_a_reboot_does_not_empty_it(cache, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that it is put back after the test
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    use_compiled_folder()
    import os

    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache / "compiled")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache / "mine"))
    use_compiled_folder()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache / "mine")


def test_a_machine_without_a_c_compiler_is_told_so(monkeypatch):
    monkeypatch.setattr(obstacles.importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(obstacles.shutil, "which", lambda name: None)
    assert "no C compiler" in obstacles.triton_obstacle()
    monkeypatch.setattr(obstacles.shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    assert obstacles.triton_obstacle() == ""
    monkeypatch.setattr(obstacles.importlib.util, "find_spec", lambda name: None)
    assert "Triton is not installed" in obstacles.triton_obstacle()


def test_the_plan_is_json_with_its_mode():
    value = json.loads(json.dumps(decided(steps(10**6))[0].to_json()))
    assert (value["compile"], value["compile_mode"]) == (True, "default")
    assert compile_pays.CUDA_GRAPH_MODES["max-autotune"] == "max-autotune-no-cudagraphs"
