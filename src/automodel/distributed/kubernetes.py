"""A Kubernetes manifest: the run's config as a ConfigMap, and a PyTorchJob of the Kubeflow training operator.

One pod a node; in each, torchrun starts a rank for every GPU, and the ranks meet at the master pod, whose address the
operator sets. A pod that is to be moved gets SIGTERM, saves, and ends within the grace period; the operator starts pods
again that failed, and `--resume-or-start` continues from the last complete checkpoint. The run folder must therefore be
on a volume that all pods share.

The config keeps `${NAME}` as it was typed. Pods get the values from a Secret, to which the manifest refers and which is
not part of it: no file has the values.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

CONFIG_FOLDER = "/etc/automodel"
PORT = 23456


@dataclass(frozen=True)
class KubernetesJob:
    """What the manifest says."""

    name: str
    image: str
    config: str
    """The resolved config, as YAML, with `${NAME}` as it was typed."""
    nodes: int = 1
    gpus_per_node: int = 8
    claim: str | None = None
    """A PersistentVolumeClaim for data and run folder."""
    mount: str = "/data"
    """Where it is mounted, and where the command runs."""
    namespace: str | None = None
    grace: int = 600
    """Seconds that a pod has for saving."""
    restarts: int = 10
    arguments: Sequence[str] = ()
    """More of `automodel finetune llm`."""
    variables: Sequence[str] = ()
    """Variables of the config, whose values are in the Secret."""

    @property
    def secret(self) -> str:
        """The name of the Secret."""
        return f"{self.name}-variables"


def secret(job: KubernetesJob, environment: Mapping[str, str]) -> str:
    """The Secret with the values that the variables have here. For `kubectl`'s standard input, never for a file."""
    meta = {"name": job.secret} | ({"namespace": job.namespace} if job.namespace else {})
    values = {name: environment[name] for name in job.variables}
    return json.dumps({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": values})


def secret_command(job: KubernetesJob) -> str:
    """The command that makes the Secret from the variables of a shell."""
    where = ["-n", job.namespace] if job.namespace else []
    literals = [f'--from-literal={name}="${name}"' for name in job.variables]
    return " ".join([shlex.join(["kubectl", "create", "secret", "generic", job.secret, *where]), *literals])


def manifest(job: KubernetesJob) -> str:
    """The manifest, for `kubectl apply -f`."""
    meta: dict[str, Any] = {"name": job.name}
    if job.namespace:
        meta["namespace"] = job.namespace
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**meta, "name": f"{job.name}-config"},
        "data": {"run.yaml": job.config},
    }
    replicas = {"Master": _replica(job, 1)}
    if job.nodes > 1:
        replicas["Worker"] = _replica(job, job.nodes - 1)
    pytorch_job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": meta,
        "spec": {
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": job.restarts},
            "pytorchReplicaSpecs": replicas,
        },
    }
    return yaml.dump_all([config, pytorch_job], Dumper=_Dumper, sort_keys=False, width=100)


def _replica(job: KubernetesJob, count: int) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": f"{job.name}-config"}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # loaders and NCCL; the default is 64 MB
    ]
    mounts = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    if job.claim:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": job.claim}})
        mounts.append({"name": "data", "mountPath": job.mount})
    from_secret = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": job.secret, "key": name}}} for name in job.variables
    ]
    container: dict[str, Any] = {
        "name": "pytorch",  # the operator looks for this name
        "image": job.image,
        "command": ["sh", "-c", _command(job)],
        # How long torchrun waits for ranks that save; a little less than the pod has.
        "env": [
            {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(max(1, job.grace - 30))},
            *from_secret,
        ],
        "ports": [{"name": "pytorchjob-port", "containerPort": PORT}],
        "volumeMounts": mounts,
    }
    if job.claim:
        container["workingDir"] = job.mount
    if job.gpus_per_node:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.gpus_per_node}}
    spec = {"terminationGracePeriodSeconds": job.grace, "containers": [container], "volumes": volumes}
    return {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": spec}}


def _command(job: KubernetesJob) -> str:
    """RANK is the pod's number here; torchrun gives each of its ranks its own."""
    torchrun = (
        f"torchrun --nnodes={job.nodes} --nproc-per-node={job.gpus_per_node or 1} --node-rank=$RANK "
        "--master-addr=$MASTER_ADDR --master-port=$MASTER_PORT"
    )
    run = shlex.join(["finetune", "llm", "-c", f"{CONFIG_FOLDER}/run.yaml", "--resume-or-start", *job.arguments])
    return f"exec {torchrun} -m automodel {run}"


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks: people read manifests."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
