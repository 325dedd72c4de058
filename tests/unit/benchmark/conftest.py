"""A comparison's measurements, made from formulas."""

import pytest


def side(provider: str, label: str, *, ms: float, losses: list[float], memory: float = 2.0, precision="fp32") -> dict:
    steps = len(losses)
    seconds = ms * steps / 1e3
    return {
        "provider": provider,
        "method": label,
        "status": "completed",
        "steps": steps,
        "ms_per_step": ms,
        "ms_p20": ms * 0.9,
        "ms_p80": ms * 1.1,
        "ms_mean": ms,
        "tokens_per_s": 1000 / ms,
        "samples_per_s": 8000 / ms,
        "steps_per_s": 1000 / ms,
        "seconds_per_epoch": seconds,
        "training_time": seconds + 1.0,
        "wall_s": seconds + 10.0,
        "flush_s": 0.0,
        "first_step_s": 5.0,
        "imports_s": 3.0,
        "memory_kind": "host",
        "peak_memory_gib": memory,
        "peak_host_gib": memory,
        "peak_allocated_gib": 0.0,
        "peak_reserved_gib": 0.0,
        "gpu_utilization_percent": None,
        "cpu_s": seconds,
        "other_load_percent": 3.0,
        "precision": precision,
        "attention": "sdpa",
        "threads": 2,
        "setup": f"{precision}, as it is",
        "same_order": True,
        "losses": losses,
        "step_ms": [ms] * steps,
        "validation": {"loss": losses[-1], "accuracy": 0.9},
    }


JOB = {
    "task": "text-classification",
    "device": "cpu",
    "precision": "fp32",
    "asked_precision": None,
    "shuffle": False,
    "drawn": [],
    "parameters": 22_700_000,
    "total_steps": 20,
    "steps_per_epoch": 10,
    "warmup_steps": 5,
    "micro_batch_size": 8,
    "grad_acc_steps": 1,
    "optimizer": {"name": "adamw", "lr": 2e-5},
    "lr_scheduler": {"name": "linear"},
}
SYSTEM = {
    "gpu_name": "CPU",
    "gpu_memory_total": 0,
    "processor": "A Processor (family 26, model 2), avx512_bf16",
    "cpu_count": 2,
    "cores": 2,
    "python_version": "3.11.0",
    "torch": "2.13.0",
    "transformers": "5.22.0",
}


@pytest.fixture
def job() -> dict:
    return dict(JOB)


@pytest.fixture
def stock() -> dict:
    return side("hf-trainer", "HF Trainer", ms=40.0, losses=[0.7 - 0.01 * i for i in range(20)], memory=4.0)


@pytest.fixture
def ours() -> dict:
    return side("automodel", "automodel", ms=10.0, losses=[0.7 - 0.01 * i for i in range(20)], memory=3.0)


@pytest.fixture
def document(job, stock, ours) -> dict:
    from automodel.benchmark.compare import results_document

    return results_document(job, dict(SYSTEM), stock, ours, [], ["a note"], "automodel benchmark -c run.yaml")
