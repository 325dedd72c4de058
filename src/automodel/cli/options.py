"""What the verbs share on the command line: settings such as `optimizer.lr=1e-5` or `--optimizer.lr 1e-5`.

Verbs that take settings let typer leave unknown arguments alone and hand them to `collect_overrides`.
"""

from __future__ import annotations

from automodel.config.errors import UserError

TAKES_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""`context_settings` of a verb that takes settings."""


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
    if arg.endswith((".yaml", ".yml", ".json")):
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
