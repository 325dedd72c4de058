"""Bins of so many tokens on a real GPU: every bin is the same captured graph, with the losses of plain steps."""

import itertools
import random

import pytest
import torch

import tiny_runs as tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RUN = """
model: {model}
task: {task}
dataset: {{path: {data}, max_length: 64}}
checkpoint: {{checkpoint_dir: {out}}}
optimizer: {{lr: 1e-3}}
packed_sequence: {{packed_sequence_size: 256}}
step_scheduler: {{num_epochs: 3}}
"""


def run_of(folder, kind: str, task: str, *settings: str):
    from automodel.engine.prepare import prepare_run
    from automodel.engine.steps import make_fitting_step, make_step_loader
    from automodel.plan.check import load_run_config

    (folder / "run.yaml").write_text(
        RUN.format(model=folder / kind, task=task, data=folder / f"{task}.jsonl", out=folder / "out")
    )
    prepared = prepare_run(load_run_config([folder / "run.yaml"], list(settings)))
    prepared, _model, step = make_fitting_step(prepared)
    loader = make_step_loader(prepared)
    results = [step(i, batch) for i, batch in enumerate(itertools.islice(loader, prepared.plan.total_steps))]
    return prepared.plan, step, [float(r.loss) for r in results]


@pytest.mark.parametrize(
    ("kind", "task", "most_shapes"), [("distilbert", "text-classification", 1), ("llama", "causal-lm", 8)]
)
@pytest.mark.parametrize("bins", [1, 3])
def test_bins_are_one_graph_and_lose_nothing(tmp_path, monkeypatch, kind, task, most_shapes, bins):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    tiny.make_model_folder(tmp_path / kind, kind)
    tiny.write_jsonl(tmp_path / "text-classification.jsonl", tiny.reviews(300))
    chance = random.Random(0)
    words = [" ".join(chance.choices(tiny.NEUTRAL, k=chance.randint(1, 40))) for _ in range(300)]
    tiny.write_jsonl(tmp_path / "causal-lm.jsonl", [{"prompt": "what is good ?", "completion": text} for text in words])
    settings = [f"dataloader.batch_size={bins}"]
    plan, step, losses = run_of(tmp_path, kind, task, *settings)
    assert plan.capture
    assert plan.bucket_tokens == 256
    assert len(step.statics) <= most_shapes
    precise = [*settings, "training_optimizations.capture=false", "training_optimizations.precision=fp32"]
    _, _, plain = run_of(tmp_path, kind, task, *precise)
    assert len(plain) == len(losses) == plan.total_steps
    assert losses == pytest.approx(plain, rel=0.05, abs=0.02)
