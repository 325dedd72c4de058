"""Log lines of captured steps, whose host is several steps ahead: each has the numbers of its own steps.

pytest -m gpu tests/gpu/test_log_lines_gpu.py
"""

from __future__ import annotations

import json

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    import tiny_runs as tiny
    from automodel.engine.observe import Observer
    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    class Numbers(Observer):
        """Loss and norm of every step, copied on the device."""

        def __init__(self):
            self.losses, self.norms = [], []

        def step_ends(self, result, pauses):
            self.losses.append(result.loss.clone())
            self.norms.append(result.grad_norm.clone())


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("capture", ["true", "false"])
def test_lines_are_about_their_own_steps(tmp_path, monkeypatch, every, capture):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    config = tiny.write_run(tmp_path, rows=240)
    settings = [
        "dataloader.batch_size=4", "step_scheduler.max_steps=60", f"step_scheduler.log_every_steps={every}",
        f"checkpoint.checkpoint_dir={tmp_path / 'out'}", "step_scheduler.ckpt_every_steps=25",
        f"training_optimizations.capture={capture}",
    ]  # fmt: skip
    seen = Numbers()
    finetune(load_run_config([config], settings), observer=seen)
    losses, norms = torch.stack(seen.losses).tolist(), torch.stack(seen.norms).flatten().tolist()
    rows = map(json.loads, (tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines())
    lines = [row for row in rows if "grad_norm" in row]
    assert [line["step"] for line in lines] == sorted({*range(every, 61, every), 60})
    before = 0
    for line in lines:
        step = line["step"]
        assert line["loss"] == pytest.approx(sum(losses[before:step]) / (step - before), rel=1e-6)
        assert line["grad_norm"] == pytest.approx(norms[step - 1], rel=1e-6)
        before = step
