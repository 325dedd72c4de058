"""`automodel launch`: the files it writes really run, under stand-ins for Slurm's commands and under a local Ray."""

from __future__ import annotations

import os
import re
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


HOSTILE = 'x"""\nimport os; os.system("touch INJECTED")\n"""; $(touch INJECTED) `touch INJECTED` \' #'


def launched(folder, *typed) -> str:
    """What `automodel launch` says, in this process."""
    from typer.testing import CliRunner

    from automodel.cli.launch import app

    return CliRunner().invoke(app, [str(word) for word in typed], catch_exceptions=False).output


def test_no_name_and_no_value_becomes_code(folder, monkeypatch):
    """Every text of a config or command line that a script or manifest holds stays one text."""
    import ast

    from automodel.distributed.kubernetes import KubernetesJob, manifest

    monkeypatch.chdir(folder)
    (folder / "run.yaml").rename(folder / "a'b $(touch INJECTED).yaml")
    config, setting = folder / "a'b $(touch INJECTED).yaml", f"wandb.notes={HOSTILE}"
    launched(folder, "ray", "-c", config, "--workers", 1, "--name", HOSTILE, "-o", "run.ray.py", setting)
    tree = ast.parse((folder / "run.ray.py").read_text())
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert sorted(calls) == [
        "FailureConfig",
        "RunConfig",
        "ScalingConfig",
        "TorchConfig",
        "TorchTrainer",
        "trainer.fit",
    ]
    assert [type(node) for node in tree.body if isinstance(node, ast.Import)] == []
    assert setting in [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]

    launched(folder, "slurm", "-c", config, "--gpus-per-node", 0, "--name", HOSTILE, "-o", "run.sbatch", setting)
    script = (folder / "run.sbatch").read_text()
    assert re.fullmatch(r"#SBATCH --job-name=[\w.+-]+", script.splitlines()[1])
    (folder / "bin" / "srun").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    shown = folder / "bin" / "show"
    shown.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    shown.chmod(0o755)
    (folder / "run.sbatch").write_text(script.replace(f"exec {sys.executable}", f"exec {shown}"))
    done = subprocess.run(
        ["bash", "run.sbatch"], env={**os.environ, **environment(folder), "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert yaml.safe_load(done.stdout)[-1] == setting, done.stdout + done.stderr

    kubernetes = ("kubernetes", "-c", config, "--gpus-per-node", 0, "--image", HOSTILE, "--name", HOSTILE)
    launched(folder, *kubernetes, "--namespace", "n", "-o", "run.k8s.yaml", setting)
    _, job = yaml.safe_load_all((folder / "run.k8s.yaml").read_text())
    container = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    assert container["image"] == HOSTILE
    assert container["command"][2].endswith(" finetune llm -c /etc/automodel/run.yaml --resume-or-start")
    assert not (folder / "INJECTED").exists()

    pods = manifest(KubernetesJob("n", "i", "", arguments=("--trust", "a; touch INJECTED")))
    assert "--resume-or-start --trust 'a; touch INJECTED'" in " ".join(pods.split())


@pytest.mark.parametrize(
    "option", [["--partition", "a --uid=0"], ["--time", "1:00\nrm -rf x"], ["--sbatch", "--comment=a\nrm -rf x"]]
)
def test_an_option_of_slurm_is_one_option(folder, option):
    from automodel.config.errors import UserError

    with pytest.raises(UserError, match="is not one option of Slurm"):
        launched(folder, "slurm", "-c", folder / "run.yaml", *option)
    assert not (folder / "run.sbatch").exists()


KUBECTL = """
import os, sys
with open(os.environ["APPLIED"], "a") as file:
    print(*sys.argv[1:], sys.stdin.read() if sys.argv[-1] == "-" else "", file=file)
"""


def test_kubernetes_gets_variables_from_a_secret_and_no_file_has_them(folder):
    (folder / "bin" / "kubectl").write_text(f"#!{sys.executable}\n{KUBECTL}")
    (folder / "bin" / "kubectl").chmod(0o755)
    more = {"TEAM_TOKEN": "s3cret: 'value'", "APPLIED": str(folder / "applied"), **environment(folder)}
    typed = ("launch", "kubernetes", "-c", folder / "run.yaml", "--image", "i", "--gpus-per-node", "0")
    typed += ("--claim", "c", "--namespace", "team", "wandb.notes=${TEAM_TOKEN}", "wandb.group=${UNSET,none}")
    said = tiny.automodel(*typed, **more)
    text = (folder / "run.k8s.yaml").read_text()
    assert "s3cret" not in text + said.stdout + said.stderr
    assert 'kubectl create secret generic run-variables -n team --from-literal=TEAM_TOKEN="$TEAM_TOKEN"' in said.stdout
    config, job = yaml.safe_load_all(text)
    assert yaml.safe_load(config["data"]["run.yaml"])["wandb"]["notes"] == "${TEAM_TOKEN}"
    pod = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    reference = {"secretKeyRef": {"name": "run-variables", "key": "TEAM_TOKEN"}}
    assert {"name": "TEAM_TOKEN", "valueFrom": reference} in pod["containers"][0]["env"]

    said = tiny.automodel(*typed, "--submit", **more)
    secret, manifest = (folder / "applied").read_text().splitlines()
    assert manifest.split() == ["apply", "-f", str(folder / "run.k8s.yaml")]
    made = yaml.safe_load(secret.removeprefix("apply -f - "))
    assert (made["kind"], made["metadata"]) == ("Secret", {"name": "run-variables", "namespace": "team"})
    assert made["stringData"] == {"TEAM_TOKEN": more["TEAM_TOKEN"]}
    assert "s3cret" not in said.stdout + said.stderr


@pytest.mark.parametrize("kind", [["slurm"], ["ray"], ["kubernetes", "--image", "i"]])
def test_a_secret_that_was_typed_out_is_not_put_into_a_file(folder, kind):
    from automodel.config.errors import UserError

    one_rank = ["--workers", "1"] if kind == ["ray"] else ["--gpus-per-node", "0"]
    with pytest.raises(UserError, match="mlflow.tracking_uri: this looks like a secret") as caught:
        launched(folder, *kind, *one_rank, "-c", folder / "run.yaml", "mlflow.tracking_uri=https://me:pa55word@host")
    assert "pa55word" not in str(caught.value)
    assert sorted(path.name for path in folder.glob("run.*")) == ["run.yaml"]
