"""A config back into YAML: what `config show` prints and the run folder keeps.

`load_config` reads it back to the same value. Keys that are absent and keys that are null by default mean the same,
so the latter are left out.
"""

from __future__ import annotations

from typing import Any

import yaml

from automodel.config.fields import fields_of
from automodel.config.gate import unused_keys
from automodel.config.section import Section
from automodel.config.tree import plain_value


def dump_config(config: Section) -> str:
    """The config as YAML, defaults filled in, `_target_` and the arguments of targets as a file spells them."""
    return yaml.dump(to_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def as_setting(key: str, value: Any) -> str:
    """`key=value` as the command line takes it. `value`: as a file has it."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**9)
    return f"{key}={text}".removesuffix("\n...\n").rstrip()  # the end of a document, after a bare scalar


def to_plain(config: Section) -> dict[str, Any]:
    """The config as dicts, lists and scalars under the keys of a file."""
    out: dict[str, Any] = {}
    for name, f in fields_of(type(config)).items():
        value = getattr(config, name)
        if name in unused_keys(config):
            continue
        if value is None and f.nullable and (f.default is None or f.section is not None):
            continue
        out[f.key] = _plain(value)
    return out | _plain(getattr(config, "extra", {}))


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return to_plain(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value.replace("${", "$${") if isinstance(value, str) else value


class _Dumper(yaml.SafeDumper):
    """Quotes whatever our reader would otherwise take for a number, a truth value or null."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "'" if not isinstance(plain_value(text), str) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
