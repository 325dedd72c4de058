"""What the verbs share on the command line: settings such as `optimizer.lr=1e-5` or `--optimizer.lr 1e-5`.

Verbs that take settings let typer leave unknown arguments alone and hand them to `collect_overrides`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from automodel.config.errors import UserError

CONFIG_ENDINGS = (".yaml", ".yml", ".json")

Files = Annotated[
    list[Path] | None,
    typer.Option(
        "--config", "-c", help="YAML file; several are layered, later ones win. A file may stand without -c.",
    ),
]  # fmt: skip
"""The config of a verb; `files_and_settings` finds those that are given without `-c`."""

Trust = Annotated[list[str] | None, typer.Option("--trust", help="Package whose names `_target_` may use.")]
RemoteData = Annotated[bool, typer.Option("--allow-remote-data", help="Fetch the addresses in data_files.")]

TAKES_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""`context_settings` of a verb that takes settings."""


def is_config_file(argument: str) -> bool:
    return argument.endswith(CONFIG_ENDINGS) and "=" not in argument and not argument.startswith("-")


def files_and_settings(given: list[Path] | None, args: list[str], verb: str) -> tuple[list[Path], list[str]]:
    """The config files of `-c` and those that stand alone (`plan run.yaml`), and the settings. Raises `UserError`
    where there is no file, or an argument is neither."""
    files, rest = list(given or ()), []
    for number, arg in enumerate(args):
        before = args[number - 1] if number else ""
        is_value = before.startswith("--") and "=" not in before  # `--dataset.path data.json`
        if is_config_file(arg) and not is_value:
            files.append(Path(arg))
        else:
            rest.append(arg)
    settings = collect_overrides(rest)
    if not files:
        raise UserError(
            f"no config file is given. Write `automodel {verb} -c run.yaml`; `automodel examples` has some."
        )
    return files, settings


def allowed(trust: list[str] | None, remote_data: bool) -> list[str]:
    """What the command line allows that no file can."""
    from automodel.config.gate import REMOTE_DATA

    return [*(trust or []), *([REMOTE_DATA] if remote_data else [])]


def collect_overrides(args: list[str], measures: bool = False) -> list[str]:
    """The arguments typer left over, each as `section.key=value`. Raises `UserError` for anything else. `measures`: the
    verb reads the sections of validation data, so hints name those."""
    overrides: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("-"):
            overrides.append(_plain(arg))
            continue
        path, equals, value = arg.lstrip("-").partition("=")
        if not arg.startswith("--") or "." not in path:
            raise UserError(_unknown_flag(arg, path, value or _value_after(rest), measures))
        if not equals:
            value = _value_after(rest)
            if value is None:
                raise UserError(f"`{arg}` has no value. Write `{arg} value` or `{path}=value`.")
            rest.pop(0)
        overrides.append(f"{path}={value}")
    return overrides


def _value_after(rest: list[str]) -> str | None:
    """The next argument, where it can be a value: not another option, but `-1` and `-0.5` are values."""
    if not rest or (rest[0].startswith("-") and not rest[0][1:2].isdigit()):
        return None
    return rest[0]


def _plain(arg: str) -> str:
    if "=" in arg:
        return arg
    if arg.endswith(CONFIG_ENDINGS):
        raise UserError(f"`{arg}`: give config files with -c, e.g. `-c {arg}`.")
    raise UserError(f"`{arg}` sets nothing. Write `section.key=value`, e.g. `optimizer.lr=1e-5`.")


def _unknown_flag(arg: str, name: str, value: str | None, measures: bool) -> str:
    # Only now, since it reads every section's class; a right command line never needs it.
    from automodel.config.names import FAMILIAR, homes_of, near
    from automodel.plan.config import RunConfig

    key = name.replace("-", "_")
    home = (
        FAMILIAR.get(key) or next(iter(homes_of(RunConfig, key)), None) or FAMILIAR.get(near(key, list(FAMILIAR)) or "")
    )
    flag = arg.partition("=")[0]
    if home and measures and f"validation_{home}" in homes_of(RunConfig, home.rpartition(".")[2]):
        home = f"validation_{home}"
    if home:
        return f"there is no option `{flag}`. Did you mean `{home}={value or '…'}`?"
    return f"there is no option `{flag}`. Settings are written `section.key=value`, e.g. `optimizer.lr=1e-5`."
