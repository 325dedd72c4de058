"""MLflow, by default into a local store in `run/mlruns`.

Only the client API is used: the fluent one (`mlflow.start_run`) keeps global state, which a library has no business
touching. Local paths use the file store, because it needs nothing but `mlflow-skinny`; a database store needs the full
package. Newer MLflow (3.17 was tried) refuses the file store unless MLFLOW_ALLOW_FILE_STORE is set, which this sink
does for local paths only. A resumed run goes on in its old MLflow run, whose id is kept in `run/mlflow.json`; MLflow
cannot delete points, so steps done twice show twice there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel.config.written import as_written
from automodel.metrics.config import MlflowConfig

if TYPE_CHECKING:
    from mlflow import MlflowClient

# A server that is gone should cost seconds once, not the minutes of MLflow's seven retries of 120 s each.
_IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15"}
_LONGEST_PARAMETER = 6000  # MLflow refuses longer values
_PARAMETERS_AT_ONCE = 100

ENDINGS = {"interrupted": "KILLED", "diverged": "FAILED", "out of memory": "FAILED"}
"""What MLflow calls the status of a run; other ones are finished."""


class MlflowTracker:
    """Logs to an MLflow server or a local store."""

    name = "mlflow"

    def __init__(
        self, config: MlflowConfig, resume_step: int | None = None, info: Callable[[str], None] | None = None
    ) -> None:
        self.config = config
        self.resume_step = resume_step
        self._info = info or (lambda text: None)
        self._client: MlflowClient | None = None
        self._run_id = ""

    def start(self, run_dir: Path, config: dict[str, Any], plan: dict[str, Any]) -> None:
        uri = self.config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or str(Path(run_dir) / "mlruns")
        uri = _as_uri(uri)
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        for variable, value in _IMPATIENT.items():
            os.environ.setdefault(variable, value)
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        remembered = Path(run_dir) / "mlflow.json"
        if self.resume_step is not None and remembered.exists():
            self._run_id = json.loads(remembered.read_text())["run_id"]
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = self._new_run(self._client, config, plan)
            remembered.write_text(json.dumps({"run_id": self._run_id, "tracking_uri": as_written(uri)}))
        self._info(f"mlflow: recording in experiment '{self.config.experiment_name}' at {uri}")

    def _new_run(self, client: MlflowClient, config: dict[str, Any], plan: dict[str, Any]) -> str:
        experiment = client.get_experiment_by_name(self.config.experiment_name)
        experiment_id = (
            experiment.experiment_id if experiment else client.create_experiment(self.config.experiment_name)
        )
        run = client.create_run(experiment_id, run_name=self.config.run_name, tags=dict(self.config.tags))
        decisions = {f"plan.{name}": value for name, value in _flat(plan).items() if not name.startswith("decisions")}
        _log_parameters(client, run.info.run_id, _flat(config) | decisions)
        return run.info.run_id

    def log(self, step: int, values: Mapping[str, float], split: str) -> None:
        if self._client is None:
            raise RuntimeError("log() before start()")
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(f"{split}/{name}", float(value), now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, summary: dict[str, Any]) -> None:
        if self._client is None:
            return
        for name, value in _flat(summary).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._client.log_metric(self._run_id, f"summary/{name}", float(value))
        status = str(summary.get("status", "finished"))
        self._client.set_tag(self._run_id, "status", status)
        self._client.set_terminated(self._run_id, ENDINGS.get(status, "FINISHED"))
        self._client = None


def _as_uri(uri: str) -> str:
    """A plain path becomes a file: URI, so that a path with spaces or a drive letter is not misread."""
    return uri if "://" in uri or uri.startswith(("file:", "databricks")) else Path(uri).resolve().as_uri()


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as dotted names; lists stay values."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            flat |= _flat(inner, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = inner
    return flat


def _log_parameters(client: MlflowClient, run_id: str, parameters: dict[str, Any]) -> None:
    from mlflow.entities import Param

    entries = []
    for name, value in parameters.items():
        if value is None:
            continue
        text = str(value)
        if len(text) > _LONGEST_PARAMETER:
            text = text[: _LONGEST_PARAMETER - 1] + "…"
        entries.append(Param(_allowed(name), text))
    for first in range(0, len(entries), _PARAMETERS_AT_ONCE):
        client.log_batch(run_id, params=entries[first : first + _PARAMETERS_AT_ONCE])


def _allowed(name: str) -> str:
    """MLflow takes letters, digits and `_-. :/` in names."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name)[:250]
