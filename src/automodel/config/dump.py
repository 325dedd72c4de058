"""A config back into YAML: what `config show` prints and the run folder keeps.

`load_config` reads it back to the same value, where the environment has the same variables: `${NAME}` is written as it
was typed. What looks like a secret is not written (written.py). Keys that are absent and keys that are null by default
mean the same, so the latter are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from automodel.config.fields import fields_of
from automodel.config.gate import unused_keys
from automodel.config.section import Section, Typed, WholeFile
from automodel.config.tree import plain_value
from automodel.config.written import HIDDEN, hide, hide_secrets


def dump_config(config: Section) -> str:
    """The config as YAML, defaults filled in, `_target_` and the arguments of targets as a file spells them."""
    return yaml.dump(to_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def as_setting(key: str, value: Any) -> str:
    """`key=value` as the command line takes it. `value`: as a file has it."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**9)
    return f"{key}={text}".removesuffix("\n...\n").rstrip()  # the end of a document, after a bare scalar


def to_plain(config: Section, *, filled: bool = False) -> dict[str, Any]:
    """The config as dicts, lists and scalars under the keys of a file. `filled`: with the values of variables, which no
    file may have."""
    typed = config.typed if isinstance(config, WholeFile) and not filled else {}
    return _section(config, typed, "")


def typed_at(config: Section, path: str, value: Any) -> Any:
    """What stands in a file for the value at a path: `${NAME}` where that was typed."""
    typed = config.typed.get(path) if isinstance(config, WholeFile) else None
    return hide(typed.text if typed is not None and typed.value == value else value, path.rpartition(".")[2])


def with_hidden_secrets(config: Section) -> list[str]:
    """The keys whose values are secrets that were typed out, so that no file has them."""
    return [path for path, text in _leaves(to_plain(config)) if isinstance(text, str) and HIDDEN in text]


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if inner is None:
        yield path, tree
    else:
        for key, value in inner:
            yield from _leaves(value, f"{path}.{key}".removeprefix("."))


def _section(config: Section, typed: Mapping[str, Typed], path: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, f in fields_of(type(config)).items():
        value = getattr(config, name)
        if name in unused_keys(config):
            continue
        if value is None and f.nullable and (f.default is None or f.section is not None):
            continue
        out[f.key] = _plain(value, typed, f"{path}.{name}".removeprefix("."))
    return out | _plain(getattr(config, "extra", {}), typed, path)


def _plain(value: Any, typed: Mapping[str, Typed], path: str) -> Any:
    key = path.rpartition(".")[2]
    if path in typed and typed[path].value == value:
        return hide(typed[path].text, key)
    if isinstance(value, Section):
        return _section(value, typed, path)
    if isinstance(value, tuple | list):
        return [_plain(item, typed, f"{path}.{number}") for number, item in enumerate(value)]
    if isinstance(value, dict):
        return {str(key): _plain(item, typed, f"{path}.{key}".removeprefix(".")) for key, item in value.items()}
    return hide_secrets(value.replace("${", "$${"), key) if isinstance(value, str) else value


class _Dumper(yaml.SafeDumper):
    """Quotes whatever our reader would otherwise take for a number, a truth value or null."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "'" if not isinstance(plain_value(text), str) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
