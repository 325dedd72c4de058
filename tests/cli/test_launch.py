"""`automodel launch`: the files it writes really run, under stand-ins for Slurm's commands and under a local Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

import tiny_runs as tiny

SETTINGS = (
    "step_scheduler: {max_steps: 90, log_every_steps: 1, global_batch_size: 4, ckpt_every_steps: 80, "
    "val_every_steps: 90}\n"
    "dataloader: {batch_size: 2}\n"
)

SRUN = """
import os, subprocess, sys
at = sys.argv.index("bash")
tasks = int(os.environ["SLURM_NTASKS"])
ranks = [
    subprocess.Popen(sys.argv[at:], env={**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
    for rank in range(tasks)
]
sys.exit(max(rank.wait() for rank in ranks))
"""
SCONTROL = """
import os, sys
if sys.argv[1] == "show":
    print("127.0.0.1")
else:
    with open(os.environ["REQUEUED"], "a") as file:
        print(*sys.argv[1:], file=file)
"""
SBATCH = """
import os, sys
with open(os.environ["SUBMITTED"], "w") as file:
    print(*sys.argv[1:], file=file)
print("Submitted batch job 4242")
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny.write_run(tmp_path, text=SETTINGS)
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("sbatch", SBATCH)):
        path = tmp_path / "bin" / name
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o755)
    return tmp_path


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "AUTOMODEL_CACHE": str(folder / "cache"),
        "REQUEUED": str(folder / "requeued"),
        "SUBMITTED": str(folder / "submitted"),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **more,
    }


def run_script(folder: Path, **more: str) -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", str(folder / "run.sbatch")],
        env={**os.environ, **environment(folder, **more)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_slurm_saves_before_its_time_is_up_requeues_and_goes_on(folder):
    done = tiny.automodel(
        "launch", "slurm", "-c", folder / "run.yaml", "--gpus-per-node", "0", "--tasks-per-node", "2", "--submit",
        "--partition", "long", "--sbatch=--constraint=avx", "optimizer.lr=2e-3", **environment(folder),
    )  # fmt: skip
    assert "Submitted batch job 4242" in done.stdout
    assert (folder / "submitted").read_text().strip() == str(folder / "run.sbatch")
    script = (folder / "run.sbatch").read_text()
    for line in ("--ntasks-per-node=2", "--signal=USR1@300", "--requeue", "--partition=long", "--constraint=avx"):
        assert f"#SBATCH {line}\n" in script
    assert "--gpus-per-node" not in script

    job = run_script(folder)
    for line in job.stdout:
        if line.startswith("[Step 3/"):
            break
    tasks = [child for child in psutil.Process(job.pid).children(recursive=True) if "automodel" in child.cmdline()]
    assert len(tasks) == 2
    for task in tasks:
        task.send_signal(signal.SIGUSR1)
    said = job.communicate(timeout=60)[0]
    assert job.returncode == 130, said
    assert said.count("Stopped by SIGUSR1") == 1
    assert (folder / "requeued").read_text() == f"requeue {os.getpid()}\n"

    again = run_script(folder, SLURM_RESTART_COUNT="1")
    said = again.communicate(timeout=120)[0]
    assert again.returncode == 0, said
    assert "Resuming after step" in said
    assert list(tiny.losses(folder / "out")) == list(range(1, 91))
    assert (folder / "out" / "model.safetensors").exists()
    assert len((folder / "requeued").read_text().splitlines()) == 1
    command = ("finetune", "llm", "-c", folder / "run.yaml", "--resume-or-start", "optimizer.lr=2e-3")
    restarted = tiny.automodel(*command, **environment(folder))
    assert "is finished (90 steps); nothing to do" in restarted.stdout


def test_a_config_with_spaces_in_its_name_becomes_a_script_that_can_be_submitted(folder, monkeypatch):
    from typer.testing import CliRunner

    from automodel.cli.launch import app

    monkeypatch.chdir(folder)
    (folder / "run.yaml").rename("my first run.yaml")
    typed = ["slurm", "-c", "my first run.yaml", "--gpus-per-node", "0"]
    said = CliRunner().invoke(app, typed, catch_exceptions=False).output
    assert "Submit it: sbatch 'my first run.sbatch'" in said
    assert "#SBATCH --job-name=my-first-run\n" in (folder / "my first run.sbatch").read_text()


def test_kubernetes_gets_the_config_and_a_pytorchjob(folder):
    out = folder / "job.yaml"
    done = tiny.automodel(
        "launch", "kubernetes", "-c", folder / "run.yaml", "--image", "registry/automodel:1", "--nodes", "2",
        "--gpus-per-node", "1", "--claim", "shared", "--name", "My Run", "-o", out, "optimizer.lr=2e-3",
    )  # fmt: skip
    assert f"kubectl apply -f {out}" in done.stdout
    config, job = yaml.safe_load_all(out.read_text())
    assert config["kind"] == "ConfigMap"
    assert yaml.safe_load(config["data"]["run.yaml"])["optimizer"]["lr"] == 2e-3
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["metadata"]["name"] == "my-run"
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: replica["replicas"] for name, replica in replicas.items()} == {"Master": 1, "Worker": 1}
    pod = replicas["Worker"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    command = container["command"][2]
    assert "--nnodes=2 --nproc-per-node=1 --node-rank=$RANK" in command
    assert "-m automodel finetune llm -c /etc/automodel/run.yaml --resume-or-start" in command
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {"config": "/etc/automodel", "shared-memory": "/dev/shm", "data": "/data"}
    # The config that went in is one that automodel reads.
    (folder / "from_map.yaml").write_text(config["data"]["run.yaml"])
    tiny.automodel("config", "validate", "-c", folder / "from_map.yaml")


def test_what_cannot_work_is_refused_before_it_waits_in_a_queue(folder):
    cases = {
        ("slurm", "--nodes", "3", "--gpus-per-node", "1"): "4 cannot be shared by 3 ranks",
        ("slurm", "optimzer.lr=1"): "did you mean `optimizer`?",
        ("lsf",): "There are: slurm, kubernetes, ray.",
    }
    for (kind, *more), message in cases.items():
        done = tiny.automodel("launch", kind, "-c", folder / "run.yaml", *more, check=False)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr
    assert not (folder / "run.sbatch").exists()
    arguments = ("launch", "slurm", "-c", folder / "run.yaml", "--gpus-per-node", "2")
    missing = tiny.automodel(*arguments, "--submit", check=False, PATH="/usr/bin:/bin")
    assert missing.returncode == 2
    assert "there is no `sbatch` on this machine" in missing.stderr
    changed = tiny.automodel(*arguments, "--time", "1:00:00", check=False)
    assert changed.returncode == 2
    assert "exists and says something else" in changed.stderr


@pytest.mark.slow
def test_ray_train_on_a_local_ray(folder):
    done = tiny.automodel(
        "launch", "ray", "-c", folder / "run.yaml", "--workers", "2", "--cpu", "--submit",
        "step_scheduler.max_steps=6", "step_scheduler.ckpt_every_steps=3", **environment(folder),
    )  # fmt: skip
    assert list(tiny.losses(folder / "out")) == list(range(1, 7)), done.stdout + done.stderr
    assert (folder / "out" / "model.safetensors").exists()
