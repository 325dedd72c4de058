"""Compiling inside a real run, on the CPU: tried before step 1, told in the plan, and done without where it fails."""

from __future__ import annotations

import io
import json
from functools import partial

import pytest
import torch
from rich.console import Console

import tiny_runs as tiny
from automodel.engine import compiled as room
from automodel.engine.run import finetune
from automodel.models.compiled_blocks import compile_blocks
from automodel.plan import compile_pays
from automodel.plan.check import load_run_config


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A function that trains a tiny model for six steps, with blocks compiled by the given backend, or not at all."""
    tiny.make_model_folder(tmp_path / "model")
    tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.reviews(24))
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache" / "compiled"))

    def run(name: str, backend=None, *overrides: str):
        (tmp_path / "run.yaml").write_text(
            f"model: {tmp_path / 'model'}\ntask: text-classification\ndataset: {tmp_path / 'rows.jsonl'}\n"
            f"validation_dataset: {tmp_path / 'rows.jsonl'}\n"
            f"checkpoint: {{checkpoint_dir: {tmp_path / name}}}\n"
            "step_scheduler: {max_steps: 6, log_every_steps: 1}\ndataloader: {batch_size: 4}\n" + tiny.FP32
        )
        torch.compiler.reset()
        if backend is not None:
            # The plan itself never compiles on the CPU.
            verdict = lambda wish, *others, **more: (wish is not False, "the test wants it")  # noqa: E731
            monkeypatch.setattr(compile_pays, "_verdict", verdict)
            monkeypatch.setattr(room, "compile_blocks", partial(compile_blocks, backend=backend))
        told = io.StringIO()
        finetune(load_run_config([tmp_path / "run.yaml"], overrides), console=Console(file=told, width=400))
        folder = tmp_path / name
        plan = json.loads((folder / "run" / "plan.json").read_text())
        line = next(d for d in plan["decisions"] if d["name"] == "compile")
        return tiny.losses(folder), plan, line, told.getvalue()

    yield run
    torch.compiler.reset()


def test_a_compiled_run_learns_the_same_and_says_what_it_cost(runs, tmp_path):
    plain, plan, line, _ = runs("plain")
    assert (plan["compile"], line["value"]) == (False, "off")
    ours, plan, line, told = runs("compiled", "aot_eager")
    assert ours == pytest.approx(plain, rel=1e-5)
    assert (plan["compile"], plan["compile_mode"], plan["pooled_last_block"]) == (True, "default", False)
    assert "the test wants it; took" in line["reason"]
    assert "compile: on (the test wants it; took" in told
    (record,) = (tmp_path / "cache").rglob("automodel/*.json")
    assert json.loads(record.read_text())["cold_s"] >= 0


def test_a_compiler_that_fails_costs_nothing_but_a_line(runs, tmp_path):
    def broken(graph, inputs):
        raise FileNotFoundError("no C compiler here")

    plain, _, _, _ = runs("plain")
    ours, plan, line, told = runs("failed", broken)
    assert ours == plain, "bit for bit the run that was never compiled"
    assert plan["compile"] is False
    assert plan["pooled_last_block"] is True, "the plan is made anew, with everything that compiling excluded"
    assert line["reason"].startswith("it was tried and failed: FileNotFoundError: no C compiler here")
    assert "compile: off (it was tried and failed" in told
    assert not list((tmp_path / "cache").rglob("automodel/*.json")), "nothing was measured"


@pytest.mark.slow
def test_a_backward_pass_that_fails_is_found_before_the_first_step(runs):
    """AOT compiles the backward pass apart from the forward one, and later."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def forward_only(graph, inputs):
        return make_boxed_func(graph.forward)

    def refuse(*values):
        raise RuntimeError("no backward today")

    refusing = make_boxed_func(refuse)
    backend = aot_autograd(fw_compiler=forward_only, bw_compiler=lambda graph, inputs: refusing)
    ours, plan, line, _ = runs("failed", backend)
    assert plan["compile"] is False
    assert "no backward today" in line["reason"]
    assert len(ours) == 6
