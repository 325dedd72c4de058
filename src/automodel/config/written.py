"""How values are written where people and files keep them: `${NAME}` as it was typed, and secrets hidden.

A value that came from the environment may be a password, so no file, script, log line or error holds it: they hold
`${NAME}`. What looks like a secret although it was typed out (a password in an address, a token, the value of a key
called `api_key`) is written as `<hidden secret>`, and a config that is read back says where that stands.

The config itself is written key by key (dump.py). `as_written` is for sentences: it puts `${NAME}` in place of the
values of variables that the config has used for text. Plain words stay, since a variable with the value `data` would
change every sentence about data; they are hidden only where the variable's name says that it holds a secret.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any
from urllib.parse import quote

HIDDEN = "<hidden secret>"
REFERENCE = re.compile(r"\$\$\{|\$\{([^}]*)\}?")
"""`${NAME}`, `${NAME,default}`, and the literal `$${`."""

_OF_SECRETS = (
    r"(?:password|passwd|pwd|passphrase|secret|credentials?|api_?key|access_?key(?:_id)?|secret_?key|private_?key|"
    r"auth|authorization|(?:auth|access|api|bearer|hf|hub|session|refresh|security|id)_?token)"
)
_SECRET_KEY = re.compile(rf"(?:.*[_.-])?{_OF_SECRETS}|token|use_auth_token", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(
    r"SECRET|PASSW|APIKEY|(?:^|_)(?:KEY|TOKEN|PASS|AUTH|PAT|CREDENTIALS?)(?:_|$)|_PWD(?:_|$)", re.IGNORECASE
)
_TOKENS = re.compile(
    r"\b(?:hf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{16,}|sk-(?=[\w-]*\d)(?:(?=[\w-]*[A-Z])[\w-]{16,}|[a-z0-9]{32,})|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
    r"|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{30,}|dapi[a-f0-9]{32}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
)
"""Tokens of Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, Google and Databricks, and JSON Web Tokens. `sk-` also
begins ordinary names (Slovak data), which have no digit, or no capital letter and fewer than 32 letters."""
_IN_ADDRESS = re.compile(r"(?P<scheme>\b[A-Za-z][\w+.-]*://)(?P<who>[^/\s'\"<>]+)@")
_IN_QUERY = re.compile(
    rf"(?P<key>[?&](?:[\w.-]*?(?:{_OF_SECRETS}|token|sig|signature)|key)=)(?P<value>[^&\s'\"#<>]+)", re.IGNORECASE
)
_BEARER = re.compile(r"\b(?P<kind>Bearer|Basic)\s+(?P<value>(?=[\w.~+/=-]*\d)[\w.~+/=-]{16,})", re.IGNORECASE)
"""With a digit: "basic responsibilities" is English."""

_used: set[str] = set()
"""Names of the variables that configs of this process have used for text."""


def variables_in(text: str) -> list[str]:
    """Names of the variables that a text refers to."""
    inside = (found[1] for found in REFERENCE.finditer(text) if found[0] != "$${")
    return [name.partition(",")[0].strip() for name in inside]


def note_used(text: str) -> None:
    """From here on, sentences have the references of this text in place of the values."""
    _used.update(variables_in(text))


def is_secret_key(key: str) -> bool:
    """Whether what stands under a key is a secret, by its name: `api_key`, `hf_token`, `password`."""
    return _SECRET_KEY.fullmatch(key) is not None


def hide(value: Any, key: str = "") -> Any:
    """A value as a file may hold it: the secrets in its texts hidden, in lists and mappings too."""
    if isinstance(value, dict):
        return {inner: hide(item, str(inner)) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return [hide(item, key) for item in value]
    return hide_secrets(value, key) if isinstance(value, str) else value


def hide_secrets(text: str, key: str = "") -> str:
    """A text without what looks like a secret, however it came there. References to variables stay."""
    if key and text and is_secret_key(key) and not _is_reference(text):
        return HIDDEN
    text = REFERENCE.sub(_without_default, text)
    text = _IN_ADDRESS.sub(_without_password, text)
    text = _IN_QUERY.sub(lambda found: found["key"] + _kept_or_hidden(found["value"]), text)
    text = _BEARER.sub(lambda found: f"{found['kind']} {HIDDEN}", text)
    return _TOKENS.sub(HIDDEN, text)


def as_written(text: str) -> str:
    """A sentence with `${NAME}` in place of the values of variables, and without secrets."""
    values = {form: name for name in sorted(_used) if _may_be_told_apart(name) for form in _forms(os.environ[name])}
    for value in sorted(values, key=len, reverse=True):  # one may be a part of another
        if value in text:
            alone = rf"(?<![A-Za-z0-9]){re.escape(value)}(?![A-Za-z0-9])"
            text = re.sub(alone, lambda _, name=values[value]: f"${{{name}}}", text)
    return hide_secrets(text)


def hide_in_setting(setting: str) -> str:
    """`section.key=value` without its secret."""
    path, equals, value = setting.partition("=")
    if not equals:
        return hide_secrets(setting)
    return f"{path}={hide_secrets(value, path.rpartition('.')[2])}"


def _may_be_told_apart(name: str) -> bool:
    """Whether the value of a variable, where it stands in a sentence, comes from the variable and not from us."""
    value = os.environ.get(name, "")
    if _SECRET_VARIABLE.search(name):
        return len(value) >= 3
    word = value.replace("_", "").isalpha() and (value.islower() or value.isupper() or value.istitle())
    number = re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value) and len(value) < 6
    return len(value) >= 4 and not word and not number


def _forms(value: str) -> set[str]:
    """A value as sentences may have it: as it is, in Python's or JSON's quotes, and in an address."""
    return {value, repr(value)[1:-1], json.dumps(value)[1:-1], quote(value), quote(value, safe="")}


def _is_reference(text: str) -> bool:
    return REFERENCE.fullmatch(text) is not None and text.endswith("}") and _without_default_text(text) == text


def _without_default(found: re.Match[str]) -> str:
    return _without_default_text(found[0])


def _without_default_text(reference: str) -> str:
    """`${API_KEY,abc}` has a secret as its default."""
    name, comma, default = reference.removeprefix("${").removesuffix("}").partition(",")
    secret = comma and default.strip() and _SECRET_VARIABLE.search(name) and reference.endswith("}")
    return f"${{{name},{HIDDEN}}}" if secret else reference


def _without_password(found: re.Match[str]) -> str:
    """`user:password@` keeps the user; a lone name before the `@` of a web address is a token."""
    user, colon, password = found["who"].partition(":")
    if colon:
        return f"{found['scheme']}{user}:{_kept_or_hidden(password)}@"
    is_token = found["scheme"].startswith("http") and user != "git"
    return f"{found['scheme']}{_kept_or_hidden(user) if is_token else user}@"


def _kept_or_hidden(value: str) -> str:
    return value if REFERENCE.sub("", value) == "" else HIDDEN
