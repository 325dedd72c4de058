"""Recipes foresee what training launches, kernel by kernel and specialisation by specialisation."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from automodel.kernels.ahead_facts import Facts, Shape, shape_of
from automodel.kernels.ahead_recipes import EXEMPT, RECIPES, recipes_for

KERNELS = Path(__file__).parents[3] / "src/automodel/kernels"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def launched_kernels() -> set[str]:
    """Functions with `@triton.jit` that are launched, not called by others: they are named so."""
    found = set()
    for path in KERNELS.glob("*_triton.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                found.add(node.name)
    return {name for name in found if name.endswith("_kernel")}


def test_every_kernel_has_a_recipe_or_a_reason():
    named = {kernel for recipe in RECIPES for kernel in recipe.kernels}
    missing = launched_kernels() - named - set(EXEMPT)
    assert not missing, f"add a recipe for {missing} (see the top of ahead_recipes.py), or a reason to EXEMPT"
    assert not named & set(EXEMPT)


def test_no_recipe_names_a_kernel_that_is_gone():
    assert {kernel for recipe in RECIPES for kernel in recipe.kernels} | set(EXEMPT) <= launched_kernels()


def test_every_reason_is_given():
    assert all(len(reason) > 10 for reason in EXEMPT.values())


def test_recipes_by_kind_of_blocks():
    names = {recipe.name for recipe in recipes_for(Facts(shape_of({"model_type": "bert"})))}
    assert {"post_norms", "words_and_optimizer"} <= names
    assert "optimizer_alone" not in names
    assert [recipe.name for recipe in recipes_for(Facts(Shape("stock")))] == ["optimizer_alone"]


@pytest.fixture(scope="module")
def report():
    script = Path(__file__).with_name("launches_of.py")
    environment = os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@needs_triton
@pytest.mark.slow
def test_training_launches_nothing_unforeseen(report):
    unforeseen = {case["case"]: case["unforeseen"] for case in report if case["unforeseen"]}
    assert not unforeseen
    assert min(case["launched"] for case in report) >= 3
    assert sum(case["launched"] for case in report) >= 100


@needs_triton
def test_little_is_compiled_for_nothing(report):
    """What nobody can know beforehand: blocks and parameters of the optimizer, whether there will be text pairs, and
    whether there is much memory."""
    unknown = {"square_sums_kernel", "square_run_kernel", "update_kernel", "swiglu_backward_kernel"}
    unknown |= {"add_norm_forward_kernel", "add_norm_backward_kernel"}
    for case in report:
        assert set(case["needless"]) <= unknown, case["case"]


@needs_triton
def test_recipes_launch_what_they_name(report):
    launched = defaultdict(set)
    for case in report:
        for name, kernels in case["by_recipe"].items():
            launched[name].update(kernels)
    assert launched == {recipe.name: set(recipe.kernels) for recipe in RECIPES}


COMPILED_THE_USUAL_WAY = """
import json, os, sys
from triton import knobs
from automodel.kernels import ahead_worker, dispatch
from automodel.kernels.ahead_facts import Facts
from automodel.kernels.ahead_recipes import Bench, recipes_for
import triton.runtime.jit as jit

launch, compiled = jit.JITFunction.run, set()

def compile_only(self, *args, grid, warmup, **options):
    compiled.add(launch(self, *args, grid=grid, warmup=True, **options).hash)

jit.JITFunction.run = compile_only
gpu = ahead_worker.Gpu(90, 132)
facts = Facts.from_json(sys.argv[1]).on(gpu.capability)
with ahead_worker.Recorder(gpu, print):
    knobs.runtime.jit_cache_hook = None
    for recipe in recipes_for(facts):
        recipe.run(Bench(facts))
print(len(compiled))
"""


@needs_triton
@pytest.mark.slow
def test_a_launch_finds_what_was_compiled_ahead(tmp_path):
    """The whole process for the optimizer's kernels, then Triton's own way to compile them: nothing is left to do."""
    facts = Facts(Shape("stock"), precision="fp32").to_json()
    cache, stamp = tmp_path / "triton", tmp_path / "stamp.json"
    environment = os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache)}
    worker = [sys.executable, "-m", "automodel.kernels.ahead_worker", facts, stamp, "90", "132"]
    ahead = subprocess.run(worker, capture_output=True, text=True, timeout=300, env=environment)
    assert stamp.exists(), ahead.stderr[-3000:]
    # Without NVIDIA's driver Triton's launchers cannot be linked; the kernels can.
    assert set(filter(None, ahead.stderr.splitlines())) == set() or "libcuda" in ahead.stderr
    before = {path.name for path in cache.iterdir()}
    assert len(json.loads(stamp.read_text())) >= 3
    usual = [sys.executable, "-c", COMPILED_THE_USUAL_WAY, facts]
    done = subprocess.run(usual, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) == len(json.loads(stamp.read_text()))
    assert {path.name for path in cache.iterdir()} == before
