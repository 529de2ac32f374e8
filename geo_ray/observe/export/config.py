"""The ``observe`` section of a configuration: which other programs are told of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from geo_ray.config.annotations import MessageWords
from geo_ray.config.base import PathText, StrictModel


class OtlpConfig(StrictModel):
    """Traces of rounds to a collector of OpenTelemetry, by OTLP over HTTP.

    What it wants for authentication is in OTEL_EXPORTER_OTLP_HEADERS, as for any program.
    """

    kind: Literal["otlp"]
    endpoint: Annotated[
        str,
        Field(pattern=r"^https?://"),
        MessageWords("an address that begins with http:// or https://"),
    ] = Field("http://127.0.0.1:4318/v1/traces", description="of the collector, with its path")
    timeout_s: float = Field(5.0, gt=0, description="of a request")


class TensorboardConfig(StrictModel):
    """Scalars to files that TensorBoard shows."""

    kind: Literal["tensorboard"]
    dir: PathText | None = Field(
        None, description="directory; null: `tensorboard` in the run's directory"
    )
    every_s: float = Field(1.0, ge=0, description="seconds between two values of one scalar")


class MlflowConfig(StrictModel):
    """Scalars to MLflow. Who may write there is in its own variables, as MLFLOW_TRACKING_TOKEN."""

    kind: Literal["mlflow"]
    tracking_uri: str | None = Field(None, description="where; null: as MLFLOW_TRACKING_URI says")
    experiment: str = Field("geo_ray", description="its experiment, which is made if need be")
    every_s: float = Field(5.0, ge=0, description="seconds between two values of one scalar")


class WandbConfig(StrictModel):
    """Scalars to Weights & Biases. The key is in WANDB_API_KEY."""

    kind: Literal["wandb"]
    project: str = Field("geo_ray", description="its project")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: to files in the run's directory, for `wandb sync`"
    )
    every_s: float = Field(5.0, ge=0, description="seconds between two values of one scalar")


AnyExport = Annotated[
    OtlpConfig | TensorboardConfig | MlflowConfig | WandbConfig, Field(discriminator="kind")
]


class ObserveConfig(StrictModel):
    """Who else is told of the run while it goes on."""

    export: tuple[AnyExport, ...] = Field((), description="the programs; each may be there again")
