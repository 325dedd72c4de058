"""Weights & Biases.

Training must never wait for a person, so this sink never prompts. The mode is, first found: `WANDB_MODE`, then
`wandb.mode`, then online where a login is found. Online without a login, or with a server that does not answer, records
offline instead and says how to upload later.

Steps are logged as a metric of their own (`step`) rather than wandb's internal counter: the counter refuses to go back,
which a resumed run must. An online run goes on under its old id, kept in `run/wandb.json`; an offline one cannot be
appended to, so its continuation is a second run in the same group.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from automodel.config.errors import UserError
from automodel.config.written import hide_in_setting
from automodel.metrics.config import WandbConfig

_MODES = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled"}
_INIT_TIMEOUT_S = 30  # wandb's own 90 s is long for a person who looks at a standing terminal


class WandbTracker:
    """Logs to Weights & Biases, online or to files for `wandb sync`."""

    name = "wandb"

    def __init__(
        self, config: WandbConfig, resume_step: int | None = None, info: Callable[[str], None] | None = None
    ) -> None:
        self.config = config
        self.resume_step = resume_step
        self._info = info or (lambda text: None)
        self._run: Any = None
        self._asked_mode = _asked_mode(config)  # a bad WANDB_MODE is found while the trackers are built

    def start(self, run_dir: Path, config: dict[str, Any], plan: dict[str, Any]) -> None:
        import wandb

        mode, why_offline = self._asked_mode, ""
        if mode in (None, "online"):
            mode = "online" if _logged_in(wandb) else "offline"
            why_offline = "no login found (run `wandb login` or set WANDB_API_KEY)" if mode == "offline" else ""
        if mode == "online":
            try:
                self._run = self._init(wandb, run_dir, "online", config, plan)
            except wandb.errors.Error as error:
                mode, why_offline = "offline", f"the server could not be used ({str(error).splitlines()[0]})"
        if mode != "online":
            self._run = self._init(wandb, run_dir, str(mode), config, plan)
        self._run.define_metric("*", step_metric="step")
        self._announce(str(mode), why_offline)

    def _init(self, wandb: Any, run_dir: Path, mode: str, config: dict[str, Any], plan: dict[str, Any]) -> Any:
        remembered = Path(run_dir) / "wandb.json"
        old = json.loads(remembered.read_text()) if self.resume_step is not None and remembered.exists() else {}
        continues = mode == "online" and old.get("mode") == "online"
        run_id = old["id"] if continues else secrets.token_hex(4)
        group = self.config.group or old.get("group") or (run_id if mode == "offline" else None)
        parent = Path(self.config.dir) if self.config.dir else Path(run_dir)
        parent.mkdir(parents=True, exist_ok=True)
        with _arguments_without_secrets():
            run = wandb.init(
                project=self.config.project,
                name=self.config.name,
                tags=list(self.config.tags) or None,
                entity=self.config.entity,
                group=group,
                notes=self.config.notes,
                dir=str(parent),
                mode=mode,
                id=run_id,
                resume="allow" if continues else None,
                config={"run": config, "plan": plan, "resumed_at_step": self.resume_step},
                # Quiet, and hands off stdout: the progress bar owns the terminal.
                settings=wandb.Settings(silent=True, console="off", init_timeout=_INIT_TIMEOUT_S),
            )
        remembered.write_text(json.dumps({"id": run_id, "mode": mode, "group": None if self.config.group else group}))
        return run

    def _announce(self, mode: str, why_offline: str) -> None:
        if mode == "online":
            self._info(f"wandb: recording at {self._run.url}")
        elif mode == "offline":
            because = f": {why_offline}" if why_offline else ""
            folder = Path(self._run.dir).parent
            self._info(f"wandb: recording offline{because}. Upload later with: wandb sync {shlex.quote(str(folder))}")
        else:
            self._info("wandb: disabled by its mode; nothing is recorded")

    def log(self, step: int, values: Mapping[str, float], split: str) -> None:
        if self._run is None:
            raise RuntimeError("log() before start()")
        self._run.log({"step": step} | {f"{split}/{name}": float(value) for name, value in values.items()})

    def finish(self, summary: dict[str, Any]) -> None:
        if self._run is not None:
            self._run.summary.update(summary)
            self._run.finish()
            self._run = None


@contextmanager
def _arguments_without_secrets() -> Generator[None]:
    """Settings of this command without their secrets: wandb records the command line when a run begins."""
    before = sys.argv
    sys.argv = [before[0], *map(hide_in_setting, before[1:])] if before else before
    try:
        yield
    finally:
        sys.argv = before


def _asked_mode(config: WandbConfig) -> str | None:
    """What the user asked for; the environment is closer to the moment than the file, so it wins."""
    mode = os.environ.get("WANDB_MODE") or config.mode
    if mode is None:
        return None
    if mode not in _MODES:
        raise UserError(f"WANDB_MODE={mode}: use one of {', '.join(sorted(set(_MODES.values())))}, or unset it")
    return _MODES[mode]


def _logged_in(wandb: Any) -> bool:
    """Whether credentials are found (environment, settings, netrc); asks neither the person nor the server."""
    silent_before = os.environ.get("WANDB_SILENT")
    os.environ["WANDB_SILENT"] = "true"
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # wandb before 0.20 has no `prompt`, but a property
        return wandb.api.api_key is not None
    finally:
        if silent_before is None:
            del os.environ["WANDB_SILENT"]
        else:
            os.environ["WANDB_SILENT"] = silent_before
