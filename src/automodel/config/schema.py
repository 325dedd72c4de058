"""The config described for machines and for people: JSON Schema for editors, `docs/config.md` for readers.

Both come from the sections themselves (fields.py), so they cannot fall behind. The schema accepts what the loader
accepts: aliases, short forms, `_target_`, and `${VARIABLE}` anywhere.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from automodel.config.fields import Field, doc_of, fields_of, sections_of, takes_extra
from automodel.config.section import Section
from automodel.config.targets import SLOTS
from automodel.config.values import describe, show

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_VARIABLE = {"$ref": "#/$defs/variable"}


def json_schema(root: type[Section]) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a config file."""
    sections = {section for _, section in sections_of(root, items=True)} - {root}
    definitions: dict[str, Any] = {
        "variable": {
            "type": "string",
            "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*(,[^}]*)?\}",
            "description": "A value from the environment: ${NAME} or ${NAME,default}.",
        }
    }
    for section in sorted(sections, key=lambda s: s.__name__):
        definitions[section.__name__] = _section_schema(section)
    whole = _section_schema(root)
    for key, home in root.HOMES.items():
        outer, _, inner = home.partition(".")
        nested = fields_of(root)[outer].section
        assert nested is not None
        there = _section_schema(nested)["properties"][inner]
        whole["properties"][key] = {**there, "description": f"Another place for `{home}`."}
    return {"$schema": DRAFT, "title": root.__name__, **whole, "$defs": definitions}


def _section_schema(section: type[Section]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for f in fields_of(section).values():
        properties[f.key] = _field_schema(f, section)
    for alias, name in section.ALIASES.items():
        properties[alias] = {**properties[name], "description": f"Another name for `{name}`."}
    own = dict(properties)
    for key in section.INLINE:
        inner = {"type": "object", "properties": own, "additionalProperties": False}
        properties[key] = {"description": "More keys of this section.", "anyOf": [inner, {"type": "null"}]}
    schema: dict[str, Any] = {
        "type": "object",
        "description": doc_of(section),
        "properties": properties,
        "additionalProperties": takes_extra(section),
    }
    required = [[f.key, *_aliases_of(section, f.name)] for f in fields_of(section).values() if f.required]
    plain = [names[0] for names in required if len(names) == 1]
    # A key with aliases is there when any of its spellings is.
    several = [{"anyOf": [{"required": [name]} for name in names]} for names in required if len(names) > 1]
    if plain:
        schema["required"] = plain
    if several:
        schema["allOf"] = several
    return schema


def _aliases_of(section: type[Section], name: str) -> list[str]:
    return [alias for alias, real in section.ALIASES.items() if real == name]


def _field_schema(f: Field, section: type[Section]) -> dict[str, Any]:
    if f.section is not None:
        choices: list[dict[str, Any]] = [{"$ref": f"#/$defs/{f.section.__name__}"}]
        if f.section.SHORTHAND:
            choices.append(_leaf_schema(fields_of(f.section)[f.section.SHORTHAND]))
        choices.append({"type": "null"})  # `optimizer:` with nothing after it
        return {"description": f.doc, "anyOf": _flatten(choices)}
    if f.items is not None:
        item: list[dict[str, Any]] = [{"$ref": f"#/$defs/{f.items.__name__}"}]
        if f.items.SHORTHAND:
            item.append(_leaf_schema(fields_of(f.items)[f.items.SHORTHAND]))
        array = {"type": "array", "items": {"anyOf": _flatten(item)}}
        return {"description": f.doc, "anyOf": [array, {"type": "null"}]}
    schema = {"description": f.doc, **_leaf_schema(f)}
    if f.name == "target" and section.SLOT:
        schema["examples"] = sorted(set(SLOTS[section.SLOT].known.values()))
    if not f.required and f.default is not None:
        schema["default"] = list(f.default) if isinstance(f.default, tuple) else f.default
    return schema


def _leaf_schema(f: Field) -> dict[str, Any]:
    schema = TypeAdapter(f.hint).json_schema()
    choices = _flatten([schema])
    if f.nullable:
        choices.append({"enum": ["none", "None"]})
    takes_text = any(c.get("type") == "string" and "enum" not in c and "const" not in c for c in choices)
    if takes_text:
        choices.append({"type": ["number", "boolean"]})  # `name: 2024` is read as text
    else:
        choices.append(_VARIABLE)
    return {"anyOf": choices}


def _flatten(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [inner for choice in choices for inner in (choice["anyOf"] if set(choice) == {"anyOf"} else [choice])]


# --- the page for people ---------------------------------------------------------------------------------------------

_INTRODUCTION = """\
# Config reference

Generated by `automodel config schema --markdown` from the sections themselves; do not edit by hand.

Three lines are a valid file:

```yaml
{example}
```

- Several files are layered, `-c base.yaml -c more.yaml`: mappings merge key by key, later files win.
- Any key can be set on the command line: `optimizer.lr=1e-5` or `--optimizer.lr 1e-5`; list items by number
  (`wandb.tags.0=x`), whole sections in braces (`'dataset={{path: x.csv}}'`), `early_stopping=null` takes one away.
- `wandb:` with nothing after it is the section with its defaults; `wandb: null` is no section.
- `${{NAME}}` and `${{NAME,default}}` come from the environment; `$${{` is a literal `${{`. Whatever is written (run
  folder, report, trackers, scripts, plan, errors) has `${{NAME}}`, never the value. What looks like a secret although
  it was typed out (a password in an address, a token, the value of a key like `api_key`) is written as
  `<hidden secret>`.
- `1e-4` is a number, `none` is null, a whole number may be written `1e5`. Text in quotes is never a number.
- `_target_` names what builds a section. It must be one of the names known here, one of torch's optimizers, or
  belong to a package trusted on the command line (`--trust my_package`); a file cannot widen that.
- Wrong keys, values and targets are errors, all reported at once with their lines; nothing is ignored.
"""


def markdown(root: type[Section]) -> str:
    """The reference page."""
    parts = [_INTRODUCTION.format(example=root.EXAMPLE.strip())]
    for path, section in sections_of(root, items=True):
        parts.append(_section_page(path, section))
    return "\n".join(parts)


def _section_page(path: str, section: type[Section]) -> str:
    doc = doc_of(section)
    lines = [f"## `{path}`" if path else "## The file", "", doc, ""]
    if section.SHORTHAND:
        short = "`- value` in the list" if path.endswith("[]") else f"`{path}: value`"
        lines += [f"Short form: {short} sets `{section.SHORTHAND}`.", ""]
    lines += ["| key | value | default | what it does |", "|---|---|---|---|"]
    for f in fields_of(section).values():
        lines.append(_row(f, section))
    if takes_extra(section):
        lines += ["", "Other keys are arguments of the `_target_`, or attributes of the model's own config."]
    if section.INLINE:
        listed = ", ".join(f"`{key}: {{…}}`" for key in section.INLINE)
        lines += ["", f"The keys may also stand in {listed}."]
    if section.HOMES:
        listed = ", ".join(f"`{key}` (`{home}`)" for key, home in section.HOMES.items())
        lines += ["", f"Also understood here, as in TrainingArguments: {listed}."]
    return "\n".join(lines) + "\n"


def _row(f: Field, section: type[Section]) -> str:
    names = "".join(f"<br>also `{alias}`" for alias in _aliases_of(section, f.name))
    value = "section" if f.section else "a list of sections" if f.items else describe(f.hint, every=True)
    if f.required:
        default = "required"
    elif f.section is not None:
        default = "none" if f.nullable else ""
    else:
        default = "" if f.default is None else f"`{show(f.default) or chr(34) * 2}`"
    cells = [f"`{f.key}`{names}", value, default, f.doc]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
