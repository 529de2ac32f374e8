"""Export of scalars to Weights & Biases: one run there per run."""

from __future__ import annotations

import hashlib
from typing import Any

import wandb

from geo_ray.telemetry.events import Event
from geo_ray.telemetry.export.base import ExportOrder, ScalarFold, WandbConfig


class WandbExporter:
    """See `Exporter`.

    Args:
        config: its project.
        order: the run.
    """

    def __init__(self, config: WandbConfig, order: ExportOrder) -> None:
        self._config, self._order = config, order
        self._fold = ScalarFold(config.every_s)
        self._run: Any = None
        self._exit_code = 255  # exit code of a run that ends without an event

    def feed(self, event: Event) -> None:
        """See `Exporter.feed`."""
        if event.kind == "run_started" and self._run is None:
            self._begin(event)
        elif event.kind in ("run_finished", "run_failed"):
            self._exit_code = 0 if event.kind == "run_finished" else 1
        values = self._fold.feed(event)
        if self._run is not None and values:
            row = {each.name: each.value for each in values}
            self._run.log({**row, "step": values[0].step, "t_s": values[0].t_s})

    def flush(self) -> None:
        """See `Exporter.flush`; its own process does that."""

    def close(self) -> None:
        """See `Exporter.close`."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)

    def _begin(self, event: Event) -> None:
        path = str(self._order.run_dir)
        self._run = wandb.init(
            project=self._config.project,
            name=event["run"],
            id=hashlib.sha256(path.encode()).hexdigest()[:16],
            resume="allow",
            mode=self._config.mode,
            dir=path,
            config={
                **{
                    name: event.fields.get(name)
                    for name in ("strategy", "task", "seed", "digest", "regions", "averager")
                },
                **self._order.hyperparameters,
            },
            allow_val_change=True,  # a resume may change the configuration
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("*", step_metric="step")
