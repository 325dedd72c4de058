"""`automodel launch slurm|kubernetes|ray -c run.yaml [--submit]`: the same run, started by somebody else's scheduler.

Each writes one file that a person can read and change, and with `--submit` hands it to the scheduler's own command. The
config is read first, and layouts that so many ranks cannot have are refused, before anything waits in a queue.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from automodel.cli.options import TAKES_SETTINGS, Files, RemoteData, Trust, allowed, files_and_settings
from automodel.config.errors import EXIT_FAILED, UserError
from automodel.config.gate import trust_arguments
from automodel.config.writable import require_writable

if TYPE_CHECKING:
    from automodel.plan.config import RunConfig


class Schedulers(TyperGroup):
    """Says which there are, where another is asked for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            known = ", ".join(self.commands)
            raise UserError(f"`automodel launch {args[0]}` is not known. There are: {known}.")
        return super().resolve_command(ctx, args)


app = typer.Typer(no_args_is_help=True, help="Run on a cluster: Slurm, Kubernetes or Ray.", cls=Schedulers)

Out = Annotated[Path | None, typer.Option("--out", "-o", help="File to write; beside the config by default.")]
Submit = Annotated[bool, typer.Option("--submit", help="Hand it to the scheduler, too.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the job; the config's by default.")]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Machines.")]
Gpus = Annotated[int, typer.Option("--gpus-per-node", min=0, help="GPUs of a machine, a rank each; 0: one rank, CPU.")]


@app.callback()
def launch() -> None:
    """Run on a cluster: Slurm, Kubernetes or Ray."""


@app.command("slurm", context_settings=TAKES_SETTINGS)
def slurm(
    context: typer.Context,
    config: Files = None,
    nodes: Nodes = 1,
    gpus_per_node: Gpus = 8,
    tasks_per_node: Annotated[
        int | None, typer.Option("--tasks-per-node", min=1, help="Ranks of a machine; one for each GPU by default.")
    ] = None,
    time: Annotated[str, typer.Option("--time", help="Limit of one start; the run goes on in the next.")] = "04:00:00",
    grace: Annotated[int, typer.Option("--grace", min=1, help="Seconds before the limit at which it saves.")] = 300,
    requeues: Annotated[int, typer.Option("--requeues", min=0, help="How often it may go on.")] = 100,
    partition: Annotated[str | None, typer.Option("--partition", help="Slurm partition.")] = None,
    account: Annotated[str | None, typer.Option("--account", help="Slurm account.")] = None,
    sbatch: Annotated[list[str] | None, typer.Option("--sbatch", help="One more #SBATCH option.")] = None,
    setup: Annotated[list[str] | None, typer.Option("--setup", help="Line to run first, e.g. `module load …`.")] = None,
    name: Name = None,
    out: Out = None,
    submit: Submit = False,
    trust: Trust = None,
    allow_remote_data: RemoteData = False,
) -> None:
    """Write an sbatch script that saves before its time is up and goes back into the queue."""
    from automodel.distributed.slurm import SlurmJob, slurm_script

    config, settings = files_and_settings(config, context.args, "launch slurm")
    trusted = allowed(trust, allow_remote_data)
    ranks = tasks_per_node or max(1, gpus_per_node)
    for option, value in (("--partition", partition), ("--account", account), ("--time", time)):
        _refuse_parts(option, value or "", r"\S+")
    for option in sbatch or ():
        _refuse_parts("--sbatch", option, r"--?\w[^\n\r]*")
    _check(config, settings, trusted, nodes * ranks)
    _refuse_secrets(settings)
    job = SlurmJob(
        name or config[0].stem,
        _command(config, settings, trusted),
        sys.executable,
        Path.cwd(),
        nodes,
        ranks,
        gpus_per_node > 0,
        time,
        grace,
        requeues,
        partition,
        account,
        tuple(sbatch or ()),
        tuple(setup or ()),
    )
    path = _write(out or config[0].with_suffix(".sbatch"), slurm_script(job))
    _hand_over(["sbatch", str(path)], submit)


@app.command("kubernetes", context_settings=TAKES_SETTINGS)
def kubernetes(
    context: typer.Context,
    image: Annotated[str, typer.Option("--image", help="Container image with automodel in it.")],
    config: Files = None,
    nodes: Nodes = 1,
    gpus_per_node: Gpus = 8,
    claim: Annotated[
        str | None, typer.Option("--claim", help="PersistentVolumeClaim with the data and the run folder.")
    ] = None,
    mount: Annotated[str, typer.Option("--mount", help="Where it is mounted; the command runs there.")] = "/data",
    namespace: Annotated[str | None, typer.Option("--namespace", help="Kubernetes namespace.")] = None,
    grace: Annotated[int, typer.Option("--grace", min=31, help="Seconds that a pod has for saving.")] = 600,
    restarts: Annotated[int, typer.Option("--restarts", min=0, help="How often failed pods are started again.")] = 10,
    name: Name = None,
    out: Out = None,
    submit: Submit = False,
    trust: Trust = None,
    allow_remote_data: RemoteData = False,
) -> None:
    """Write a manifest: the config, and a PyTorchJob of Kubeflow's training operator."""
    from automodel.config.dump import dump_config, with_hidden_secrets
    from automodel.distributed.kubernetes import KubernetesJob, manifest, secret, secret_command

    config, settings = files_and_settings(config, context.args, "launch kubernetes")
    trusted = allowed(trust, allow_remote_data)
    cfg = _check(config, settings, trusted, nodes * max(1, gpus_per_node))
    if claim is None and (nodes > 1 or cfg.checkpoint.enabled):
        print(
            "warning: without --claim the run folder is inside the pods: it is lost with them, and several nodes would "
            "not see one folder.",
            file=sys.stderr,
        )
    for key in with_hidden_secrets(cfg):
        raise _holds_a_secret(key)
    text = dump_config(cfg)
    more = trust_arguments(trusted)
    job = KubernetesJob(
        _dns_name(name or config[0].stem), image, text, nodes, gpus_per_node, claim, mount, namespace,
        grace, restarts, more, _variables_of(text),
    )  # fmt: skip
    path = _write(out or config[0].with_suffix(".k8s.yaml"), manifest(job))
    if job.variables:
        if not submit:
            print(f"Make the Secret with the values of its variables first: {secret_command(job)}")
        _hand_over(["kubectl", "apply", "-f", "-"], submit, secret(job, os.environ))
    _hand_over(["kubectl", "apply", "-f", str(path)], submit)


@app.command("ray", context_settings=TAKES_SETTINGS)
def ray(
    context: typer.Context,
    config: Files = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Ranks.")] = 8,
    cpu: Annotated[bool, typer.Option("--cpu", help="Workers without GPUs.")] = False,
    restarts: Annotated[int, typer.Option("--restarts", min=0, help="How often failed workers start again.")] = 3,
    address: Annotated[
        str | None, typer.Option("--address", help="Ray's job address; a local Ray is started without one.")
    ] = None,
    name: Name = None,
    out: Out = None,
    submit: Submit = False,
    trust: Trust = None,
    allow_remote_data: RemoteData = False,
) -> None:
    """Write a Ray Train script."""
    from automodel.cli.ray_train import RayJob, ray_script

    config, settings = files_and_settings(config, context.args, "launch ray")
    trusted = allowed(trust, allow_remote_data)
    _check(config, settings, trusted, workers)
    _refuse_secrets(settings)
    command = _command(config, settings, trusted)
    job = RayJob(name or config[0].stem, command, Path.cwd(), workers, not cpu, restarts)
    path = _write(out or config[0].with_suffix(".ray.py"), ray_script(job))
    local = [sys.executable, str(path)]
    remote = ["ray", "job", "submit", "--address", address or "", "--", "python", str(path)]
    _hand_over(remote if address else local, submit)


def _check(files: list[Path], settings: list[str], trust: list[str], ranks: int) -> RunConfig:
    """The config, if so many ranks can train it."""
    from automodel.plan.check import load_run_config
    from automodel.plan.layout import check_layout

    cfg = load_run_config(files, settings, trust)
    check_layout(cfg, ranks)
    return cfg


def _command(files: list[Path], settings: list[str], trust: list[str]) -> list[str]:
    """What every rank runs. It continues what an earlier start has left."""
    named = [argument for file in files for argument in ("-c", str(file.absolute()))]
    return ["finetune", "llm", *named, "--resume-or-start", *trust_arguments(trust), *settings]


def _write(path: Path, text: str) -> Path:
    """The file; one that somebody has changed since is not overwritten."""
    require_writable(path, "--out")
    if path.exists() and path.read_text() != text:
        raise UserError(f"{path} exists and says something else. Name another with --out, or remove it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"Wrote {path}")
    return path


OF_EVERY_PROCESS = ("HOME", "HOSTNAME", "LANG", "LOGNAME", "PATH", "PWD", "SHELL", "TMPDIR", "USER")
"""Variables that every pod sets itself. This machine's values, such as its `PATH`, would break the pod."""


def _variables_of(text: str) -> list[str]:
    """The variables of a config whose values pods must get. One that is not set here has a default in the config."""
    from automodel.config.written import variables_in

    names = list(dict.fromkeys(variables_in(text)))
    own = [name for name in names if name in OF_EVERY_PROCESS]
    if own:
        listed = ", ".join(f"${{{name}}}" for name in own)
        print(f"warning: {listed} in the config will have the values of the pods.", file=sys.stderr)
    return [name for name in names if name in os.environ and name not in own]


def _refuse_secrets(settings: list[str]) -> None:
    """A script holds the settings as they were typed."""
    from automodel.config.written import HIDDEN, hide_in_setting

    for setting in settings:
        if HIDDEN in hide_in_setting(setting):
            raise _holds_a_secret(setting.partition("=")[0])


def _holds_a_secret(key: str) -> UserError:
    return UserError(
        f"{key}: this looks like a secret, and the file for the scheduler would hold it. Put it into a variable of the "
        f"environment and write '{key}=${{NAME}}', or `${{NAME}}` in the config."
    )


def _refuse_parts(option: str, value: str, form: str) -> None:
    """A line break in an option would be a line of the script, and a space another option."""
    if value and not re.fullmatch(form, value):
        raise UserError(f"{option} {value!r} is not one option of Slurm. Give it without line breaks and spaces.")


def _hand_over(command: list[str], submit: bool, text: str | None = None) -> None:
    """Runs the scheduler's command, or says it. `text`: what its standard input gets, which no file holds."""
    if not submit:
        if text is None:
            print(f"Submit it: {shlex.join(command)}")
        return
    if shutil.which(command[0]) is None:
        raise UserError(
            f"--submit: there is no `{command[0]}` on this machine. The file is written; submit it elsewhere."
        )
    code = subprocess.run(command, input=text, text=True, check=False).returncode
    if code:
        print(f"error: `{shlex.join(command)}` ended with exit code {code}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED)


def _dns_name(text: str) -> str:
    """A name that Kubernetes takes."""
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in text.lower()).strip("-")
    return name[:50] or "automodel"
