"""Export of scalars to MLflow; a resumed run continues its MLflow run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from geo_ray.telemetry.events import Event
from geo_ray.telemetry.export.base import ExportOrder, MlflowConfig, ScalarFold, ScalarValue

_BATCH: Final = 900  # MLflow accepts 1,000 metrics per request
_PARAM_BATCH: Final = 100  # and as many parameters or tags
_LONGEST: Final = 500  # characters of a value
_CHANGED: Final = "geo_ray.changed."
_TAG: Final = "geo_ray.run_dir"
_PARAMS: Final = ("strategy", "task", "seed", "digest", "averager")


class MlflowExporter:
    """See `Exporter`.

    Args:
        config: location of the server or store.
        order: the run.
    """

    def __init__(self, config: MlflowConfig, order: ExportOrder) -> None:
        self._client = MlflowClient(config.tracking_uri)
        self._experiment = config.experiment
        self._order = order
        self._fold = ScalarFold(config.every_s)
        self._waiting: list[ScalarValue] = []
        self._run_id: str | None = None
        self._status = "KILLED"  # status of a run that ends without an event

    def feed(self, event: Event) -> None:
        """See `Exporter.feed`."""
        if event.kind == "run_started":
            self._begin(event)
        elif event.kind in ("run_finished", "run_failed"):
            self._status = "FINISHED" if event.kind == "run_finished" else "FAILED"
        self._waiting += self._fold.feed(event)
        if len(self._waiting) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """See `Exporter.flush`."""
        waiting, self._waiting = self._waiting, []
        if self._run_id is None or not waiting:
            return
        origin_s = self._order.origin_unix_s
        metrics = [
            Metric(each.name, each.value, round(1000 * (origin_s + each.t_s)), each.step)
            for each in waiting
        ]
        for first in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _BATCH])

    def close(self) -> None:
        """See `Exporter.close`."""
        try:
            self.flush()
        finally:
            if self._run_id is not None:
                self._client.set_terminated(self._run_id, self._status)

    def _begin(self, event: Event) -> None:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            experiment_id = self._client.create_experiment(self._experiment)
        else:
            experiment_id = found.experiment_id
        path = str(self._order.run_dir)
        earlier = self._client.search_runs([experiment_id], f"tags.`{_TAG}` = '{path}'")
        if earlier:
            self._run_id = str(earlier[0].info.run_id)
            self._client.update_run(self._run_id, status="RUNNING")
            self._note_changes(self._run_id, earlier[0].data.params)
            return
        made = self._client.create_run(experiment_id, run_name=event["run"])
        self._run_id = str(made.info.run_id)
        logged = {name: event.fields.get(name) for name in _PARAMS}
        logged["regions"] = " ".join(event["regions"])
        params = {name: str(v)[:_LONGEST] for name, v in logged.items() if v is not None}
        params |= self._hyperparameters()
        self._client.log_batch(self._run_id, tags=[RunTag(_TAG, path)])
        self._log_params(self._run_id, params)

    def _hyperparameters(self) -> dict[str, str]:
        return {
            _key(name): str(value)[:_LONGEST] for name, value in self._order.hyperparameters.items()
        }

    def _note_changes(self, run_id: str, logged: Mapping[str, str]) -> None:
        """Log what a resume changed: as tags, since MLflow refuses to change a parameter."""
        now = self._hyperparameters()
        self._log_params(run_id, {name: v for name, v in now.items() if name not in logged})
        changed = [
            RunTag(f"{_CHANGED}{name}", value)
            for name, value in now.items()
            if logged.get(name, value) != value
        ]
        for first in range(0, len(changed), _PARAM_BATCH):
            self._client.log_batch(run_id, tags=changed[first : first + _PARAM_BATCH])

    def _log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        listed = [Param(name, value) for name, value in params.items()]
        for first in range(0, len(listed), _PARAM_BATCH):
            self._client.log_batch(run_id, params=listed[first : first + _PARAM_BATCH])


def _key(name: str) -> str:
    """Return a name with the characters that MLflow accepts."""
    return re.sub(r"[^\w./: -]", "_", name)[:250]
