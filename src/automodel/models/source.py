"""Where a model's files come from: a local folder, the hub's cache, or the hub.

transformers retries an unreachable hub for about 25 seconds for every file, even when the file is cached. So the hub is
looked for once (`config/hub.py`): if it is not there, cached models load from the cache at once, and for anything else
the person learns what was tried and what to do.
"""

from __future__ import annotations

import logging
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel.config.errors import UserError
from automodel.config.hub import hub_answers, turned_off_by, why_no_hub
from automodel.config.run_folders import could_be_on_hub, folder_or_hub, trained_from_same_name
from automodel.models.config import ModelConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A name that can be loaded, and the keywords for transformers' `from_pretrained`."""

    name: str
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def keywords_for_adapters(self) -> dict[str, Any]:
        """Beside PEFT, transformers looks for an adapter of the same name first; of `keywords` it takes none for that,
        and asks a hub that does not answer again and again."""
        if not self.keywords.get("local_files_only"):
            return {}
        known = {name: self.keywords[name] for name in ("local_files_only", "cache_dir") if name in self.keywords}
        return {"adapter_kwargs": known}

    @property
    def trusted(self) -> bool:
        """Whether code that comes with it may run."""
        return bool(self.keywords.get("trust_remote_code"))

    @property
    def folder(self) -> Path | None:
        return Path(self.name) if os.path.isdir(self.name) else None

    @property
    def good_weights(self) -> str:
        """Where to get weights that are damaged here."""
        if any(Path(self.name, "run", "steps").glob("step-*")):
            config = shlex.quote(os.path.join(self.name, "run", "config.yaml"))
            return f"the run exports them again: automodel finetune llm -c {config} --resume"
        return "download or save them again"


def find_model(cfg: ModelConfig) -> Source:
    """Where the model is; raises a `UserError` that says what was tried."""
    return _find(cfg.pretrained_model_name_or_path, cfg, "model.pretrained_model_name_or_path", "config.json")


def find_tokenizer(cfg: ModelConfig) -> Source:
    """Where the tokenizer is: its own name if it has one, else the model's."""
    if cfg.tokenizer is None:
        return _find(cfg.pretrained_model_name_or_path, cfg, "model.pretrained_model_name_or_path", None)
    return _find(cfg.tokenizer, cfg, "model.tokenizer", None)


def _find(name: str, cfg: ModelConfig, key: str, must_hold: str | None) -> Source:
    folder = os.path.expanduser(name)
    if trained_from_same_name(name):
        raise UserError(f"{key}: {folder_or_hub(name)}")
    if os.path.isdir(folder):
        if must_hold and not os.path.isfile(os.path.join(folder, must_hold)):
            raise UserError(
                f"{key}: the folder {folder!r} holds no {must_hold}, so it is not a Hugging Face model folder "
                f"(it holds: {_listing(folder)}). Point it at the folder that `save_pretrained` wrote."
                + (" Where the model of that name on the hub is meant, rename the folder." * could_be_on_hub(name))
            )
        return Source(folder, {"trust_remote_code": cfg.trust_remote_code})
    if os.path.isfile(folder):
        raise UserError(
            f"{key}: {name!r} is a file; give the folder it lies in (with config.json and model.safetensors)"
        )
    if _looks_like_a_path(name):
        raise UserError(
            f"{key}: there is no folder {folder!r} (looked from {os.getcwd()!r}). Correct the path, or give a hub name "
            "such as distilbert-base-uncased."
        )
    _require_possible_name(name, key)
    keywords: dict[str, Any] = {"trust_remote_code": cfg.trust_remote_code}
    if cfg.cache_dir:
        keywords["cache_dir"] = cfg.cache_dir
    if cfg.revision and key != "model.tokenizer":
        keywords["revision"] = cfg.revision
    if cfg.local_files_only or not hub_answers():
        keywords["local_files_only"] = True
        _require_cached(name, cfg, key, keywords)
    return Source(name, keywords)


def _require_cached(name: str, cfg: ModelConfig, key: str, keywords: dict[str, Any]) -> None:
    """The hub is out of reach: the cache must have the model."""
    from huggingface_hub import constants, try_to_load_from_cache

    revision, cache_dir = keywords.get("revision"), keywords.get("cache_dir")
    for file in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        if isinstance(try_to_load_from_cache(name, file, cache_dir=cache_dir, revision=revision), str):
            if not cfg.local_files_only:
                logger.info("%s: %s comes from the cache", why_no_hub(), name)
            return
    why = "`local_files_only` is set" if cfg.local_files_only else why_no_hub()
    variable = "" if cfg.local_files_only else turned_off_by().partition("=")[0]
    check = (
        f"Check the name, unset {variable} where there is a connection"
        if variable
        else ("Check the name and the connection")
    )
    at = f" at revision {revision}" if revision else ""
    raise UserError(
        f"{key}: {name!r}{at} is neither a local folder nor in the cache ({cache_dir or constants.HF_HUB_CACHE}), and "
        f"{why}. {check}, or download it where there is one "
        f"(`hf download {shlex.quote(name)}`) and point {key} at that folder."
    )


def _require_possible_name(name: str, key: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(
            f"{key}: {name!r} is no folder here (looked from {os.getcwd()!r}), and the hub has no names like that: "
            "they are `owner/name`, of letters, digits, '-', '_' and '.'. A branch, tag or commit goes into "
            "model.revision."
        ) from error


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~", "\\")) or name.count("/") > 1 or "\\" in name or name.endswith("/")


def _listing(folder: str) -> str:
    names = sorted(os.listdir(folder))
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "") if names else "nothing"
