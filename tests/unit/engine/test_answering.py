"""In which precision a saved model answers on a CPU; its answers are those of fp32 to within bf16's rounding."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import tiny_runs as tiny
from automodel.engine import answering, product_facts
from automodel.engine.assess import assess
from automodel.engine.predict import Predictor
from automodel.engine.run import finetune
from automodel.kernels.product_speed import Timed
from automodel.models.cpu_block import CpuBlock
from automodel.models.cpu_linears import CpuLinear
from automodel.plan.check import load_run_config

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a run takes the GPU that is here")

FAST_BF16 = Timed((150.0,) * 3, (100.0,) * 3, (640.0,) * 3, 2.0)
SLOW_BF16 = Timed((150.0,) * 3, (100.0,) * 3, (60.0,) * 3, 2.0)
FAST_ONEDNN = Timed((150.0,) * 3, (300.0,) * 3, (60.0,) * 3, 2.0)
TEXTS = [row["text"] for row in tiny.reviews(12)]
CLOSE = 0.02
"""Of probabilities: two layers with numbers of 8 bits."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A classifier's run that leaves its precision open, one that asked for fp32, and a language model's."""
    root = tmp_path_factory.mktemp("answering")
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOMODEL_CACHE", str(root / "cache"))
        for name, kind, task, settings in (
            ("open", "bert", "text-classification", "{}"),
            ("fp32", "bert", "text-classification", "{precision: fp32}"),
            ("chat", "llama", "causal-lm", "{}"),
        ):
            folder = root / name
            folder.mkdir()
            tiny.make_model_folder(folder / "model", kind)
            rows = tiny.reviews(24)
            if task == "causal-lm":
                rows = [{"text": row["text"]} for row in rows]
            tiny.write_jsonl(folder / "rows.jsonl", rows)
            (folder / "run.yaml").write_text(
                f"model: {folder / 'model'}\ntask: {task}\ndataset: {{path: {folder / 'rows.jsonl'}}}\n"
                f"validation_dataset: {{path: {folder / 'rows.jsonl'}}}\nstep_scheduler: {{max_steps: 6}}\n"
                f"optimizer: {{lr: 1e-3}}\ncheckpoint: {{checkpoint_dir: {folder / 'out'}}}\n"
                f"training_optimizations: {settings}\n"
            )
            made[name] = finetune(load_run_config([folder / "run.yaml"]), console=Console(file=io.StringIO())).folder
    return made


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Sets what this machine's speeds are; the products of tiny models count."""
    monkeypatch.setattr(product_facts, "LEAST_OPERATIONS", 0.0)

    def measured(timed):
        monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / str(id(timed))))
        monkeypatch.setattr(product_facts, "time_products", lambda sample, *budget: timed)

    return measured


def kinds_of(model) -> set[str]:
    swaps = {type(m.__dict__.get("forward")) for m in model.modules()}
    return {"whole"} & {"whole" for s in swaps if s is CpuBlock} | {"linears" for s in swaps if s is CpuLinear}


def probabilities(predictor: Predictor) -> torch.Tensor:
    return torch.tensor([list(answer.scores.values()) for answer in predictor.classify(TEXTS)])


def test_the_fastest_precision_answers(runs, measured):
    measured(SLOW_BF16)
    slow = Predictor(runs["open"])
    exact = probabilities(slow)
    assert kinds_of(slow.model) == set()
    measured(FAST_BF16)
    fast = Predictor(runs["open"])
    found = probabilities(fast)
    assert kinds_of(fast.model) == {"whole", "linears"}, "and the last block for the pooled token alone"
    assert not torch.equal(found, exact)
    assert (found - exact).abs().max() < CLOSE
    measured(FAST_ONEDNN)
    other = probabilities(Predictor(runs["open"]))
    assert (other - exact).abs().max() < 1e-5


def test_a_text_alone_gets_the_answer_that_it_gets_among_others(runs, measured):
    measured(FAST_BF16)
    predictor = Predictor(runs["open"])
    together = probabilities(predictor)
    alone = torch.tensor([list(predictor.classify([text])[0].scores.values()) for text in TEXTS])
    assert (alone - together).abs().max() < CLOSE


def test_the_runs_own_precision_and_the_flag(runs, measured):
    measured(FAST_BF16)
    assert kinds_of(Predictor(runs["fp32"]).model) == set()
    assert "linears" in kinds_of(Predictor(runs["fp32"], precision="bf16").model)
    assert kinds_of(Predictor(runs["open"], precision="fp32").model) == set()


def test_evaluations_too(runs, measured):
    measured(SLOW_BF16)
    exact = assess(runs["open"])
    measured(FAST_BF16)
    found = assess(runs["open"])
    assert (exact.precision, found.precision) == ("fp32", "bf16")
    assert found.metrics.values["loss"] == pytest.approx(exact.metrics.values["loss"], abs=CLOSE)
    assert assess(runs["open"], settings=["training_optimizations.precision=fp32"]).precision == "fp32"
    assert assess(runs["fp32"]).precision == "fp32"


def test_language_models(runs, measured):
    measured(SLOW_BF16)
    exact, written = assess(runs["chat"]), Predictor(runs["chat"]).generate(["the film"], max_new_tokens=4)
    measured(FAST_BF16)
    found, predictor = assess(runs["chat"]), Predictor(runs["chat"])
    assert found.metrics.values["loss"] == pytest.approx(exact.metrics.values["loss"], abs=CLOSE)
    answers = predictor.generate(["the film"], max_new_tokens=4)
    assert kinds_of(predictor.model) == {"linears"}
    assert len(answers[0].prediction.split()) == len(written[0].prediction.split())


def test_the_command_line_knows_the_flag(runs, monkeypatch):
    from automodel.cli.predict import app

    asked = []
    load = answering.load_for_answers
    monkeypatch.setattr(
        "automodel.engine.predict.load_for_answers", lambda *how, **more: asked.append(how[2]) or load(*how, **more)
    )
    done = CliRunner().invoke(app, [str(runs["open"]), "good film", "--precision", "bf16"])
    assert done.exit_code == 0, done.output
    assert asked == ["bf16"]
