"""The exporter interface, its configuration section `observe`, and scalars from events."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol, TypeAlias

from pydantic import Field

from geo_ray.base.model import MessageWords, PathText, StrictModel
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.totals import LinkTotals


class OtlpConfig(StrictModel):
    """Traces of rounds to an OpenTelemetry collector, by OTLP over HTTP.

    Authentication headers come from the variable OTEL_EXPORTER_OTLP_HEADERS.
    """

    kind: Literal["otlp"]
    endpoint: Annotated[
        str,
        Field(pattern=r"^https?://"),
        MessageWords("an address that begins with http:// or https://"),
    ] = Field(
        "http://127.0.0.1:4318/v1/traces", description="address of the collector with its path"
    )
    timeout_s: float = Field(5.0, gt=0, description="longest wait for a request in seconds")


class TensorboardConfig(StrictModel):
    """Scalars to TensorBoard files."""

    kind: Literal["tensorboard"]
    dir: PathText | None = Field(
        None, description="directory; null: `tensorboard` in the run's directory"
    )
    every_s: float = Field(1.0, ge=0, description="seconds between two values of one scalar")


class MlflowConfig(StrictModel):
    """Scalars to MLflow. Credentials come from its variables, such as MLFLOW_TRACKING_TOKEN."""

    kind: Literal["mlflow"]
    tracking_uri: str | None = Field(None, description="address; null: MLFLOW_TRACKING_URI")
    experiment: str = Field("geo_ray", description="experiment; created if it does not exist")
    every_s: float = Field(5.0, ge=0, description="seconds between two values of one scalar")


class WandbConfig(StrictModel):
    """Scalars to Weights & Biases. The key comes from the variable WANDB_API_KEY."""

    kind: Literal["wandb"]
    project: str = Field("geo_ray", description="project")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: write files into the run's directory, for `wandb sync`"
    )
    every_s: float = Field(5.0, ge=0, description="seconds between two values of one scalar")


AnyExport = Annotated[
    OtlpConfig | TensorboardConfig | MlflowConfig | WandbConfig, Field(discriminator="kind")
]


class ObserveConfig(StrictModel):
    """Exports of a run while it is running."""

    export: tuple[AnyExport, ...] = Field(
        (), description="exporters; a kind may be named several times"
    )


Scalar: TypeAlias = str | int | float | bool
"""Value of a hyperparameter."""


@dataclass(frozen=True, slots=True)
class ExportOrder:
    """The exported run.

    Attributes:
        run_dir: directory of the run.
        base_dir: base of relative paths of its configuration.
        origin_unix_s: time of day of its second 0.
        hyperparameters: its configuration, by key such as ``optimizer.lr``.
    """

    run_dir: Path
    base_dir: Path
    origin_unix_s: float
    hyperparameters: Mapping[str, Scalar] = field(default_factory=dict)


class Exporter(Protocol):
    """Receives the events of one run in order, in one thread. May block, and may raise."""

    def feed(self, event: Event) -> None:
        """Receive the next event."""

    def flush(self) -> None:
        """Export buffered data; called after a while without events."""

    def close(self) -> None:
        """Export all data and stop; the last call."""


@dataclass(frozen=True, slots=True)
class ScalarValue:
    """One value of a scalar.

    Attributes:
        name: ``loss/us-east``.
        value: finite.
        step: step of the region, or the highest of all regions.
        t_s: seconds of the run.
    """

    name: str
    value: float
    step: int
    t_s: float


class ScalarFold:
    """Folds events into scalars.

    Args:
        every_s: minimum seconds of the run between two values of one scalar; values of
            evaluations are all given, with the learning rates and batch sizes of that moment.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._given_s: dict[str, float] = {}
        self._steps: dict[str, int] = {}
        self._left_out: dict[str, ScalarValue] = {}  # newest learning rates and batch sizes
        self._wan = LinkTotals()
        self._wan_bytes = 0

    def feed(self, event: Event) -> tuple[ScalarValue, ...]:
        """Process the next event; give its scalars."""
        match event.kind:
            case "run_started":
                self._wan.restart()
                return ()
            case "step":
                region = event["region"]
                self._steps[region] = event["step"]
                busy_s = (event["compute_s"] or 0.0) + (event["wait_s"] or 0.0)
                values = {
                    f"loss/{region}": event["loss"],
                    f"wait_share/{region}": (event["wait_s"] or 0.0) / busy_s if busy_s else None,
                }
                settings = {
                    f"learning_rate/{region}": event.fields.get("learning_rate"),
                    f"batch_size/{region}": event["samples"],
                }
                given = self._thinned(values | settings, event["step"], event.t_s)
                self._note(settings, given, event)
                return given
            case "exchange":
                region, start_s = event["region"], event["start_s"]
                values = {
                    f"exchange_s/{region}": None if start_s is None else event.t_s - start_s,
                    f"staleness/{region}": event["staleness"],
                }
                return self._thinned(values, self._steps.get(region, 0), event.t_s)
            case "wan":
                new = self._wan.feed(event["src"], event["dst"], event["bytes_by_class"])
                self._wan_bytes += sum(new.values())
                step = max(self._steps.values(), default=0)
                return self._thinned({"wan_bytes": float(self._wan_bytes)}, step, event.t_s)
            case "eval":
                whose = "" if event["region"] is None else f"/{event['region']}"
                values = {f"eval/{name}{whose}": v for name, v in event["metrics"].items()}
                left_out, self._left_out = self._left_out, {}
                return (
                    *self._finite(values, event["step"], event.t_s),
                    *left_out.values(),
                )
            case _:
                return ()

    def _note(
        self, settings: Mapping[str, float | None], given: tuple[ScalarValue, ...], event: Event
    ) -> None:
        """Hold the newest settings that were left out, until the next evaluation."""
        for each in given:
            self._left_out.pop(each.name, None)
        names = {each.name for each in given}
        left_out = {name: value for name, value in settings.items() if name not in names}
        for each in self._finite(left_out, event["step"], event.t_s):
            self._left_out[each.name] = each

    def _thinned(
        self, values: dict[str, float | None], step: int, t_s: float
    ) -> tuple[ScalarValue, ...]:
        due = {
            name: value
            for name, value in values.items()
            if t_s - self._given_s.get(name, -math.inf) >= self._every_s
        }
        self._given_s.update(dict.fromkeys(due, t_s))
        return self._finite(due, step, t_s)

    def _finite(
        self, values: Mapping[str, float | None], step: int, t_s: float
    ) -> tuple[ScalarValue, ...]:
        return tuple(
            ScalarValue(name, float(value), step, t_s)
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        )
