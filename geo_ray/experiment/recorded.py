"""The parts of a run's configuration that a reader of the run needs.

`RecordedConfig` reads ``config.lock.yaml`` without the classes of strategies, codecs and tasks.
It imports neither PyTorch nor user code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from geo_ray.base.errors import StoreError
from geo_ray.base.model import PathText, StrictModel
from geo_ray.experiment.checkpoint import CheckpointConfig
from geo_ray.experiment.cluster import ClusterConfig, LocalClusterConfig
from geo_ray.experiment.emulation import EmulateConfig, emulated_links
from geo_ray.experiment.regions import Name, RegionConfig, with_copies
from geo_ray.storage.uri import is_s3, parse_s3
from geo_ray.telemetry.summary import Target
from geo_ray.transport.emulation import LinkSpec


class RunConfig(StrictModel):
    """Location of a run's files."""

    dir: PathText = Field(
        "runs",
        description="directory, or s3:// address, in which each run has a directory; `~` and "
        "`${VARIABLE}` are replaced",
    )
    again: Literal["new", "resume"] = Field(
        "new",
        description="behaviour of `geo-ray train CONFIG` if `run.dir` has a run with that `name`: "
        "new creates another run with a number; resume continues that run from its newest "
        "checkpoint or, without a checkpoint, from the beginning",
    )
    unattended_s: float | None = Field(
        3600.0,
        ge=1,
        description="seconds without a watching process after which a run on an existing cluster "
        "is saved and ended; null: never",
    )

    @model_validator(mode="after")
    def _address(self) -> Self:
        if is_s3(self.dir):
            try:
                parse_s3(self.dir)
            except StoreError as error:  # not as of the key, whose value would be repeated
                raise ValueError(f"`dir`: {error.message}") from None
        return self

    def problems(self, *, keeps_best: bool) -> Iterator[str]:
        """Yield options that need a shared directory if the run's directory is in a bucket."""
        if keeps_best and is_s3(self.dir):
            yield (
                "train.keep_best: its candidates need a directory that all nodes share, and "
                "run.dir is in a bucket: omit keep_best, or set run.dir to such a directory"
            )


class RecordedTrain(StrictModel):
    """The keys of ``train`` that a reader of a run needs."""

    model_config = ConfigDict(extra="ignore")

    steps: int
    target: Target | None = None


class RecordedAverager(StrictModel):
    """The keys of ``averager`` that a reader of a run needs."""

    model_config = ConfigDict(extra="ignore")

    region: str | None = None
    standby: str | None = None


class RecordedConfig(StrictModel):
    """The keys of ``config.lock.yaml`` that a reader of the run needs; ignores all others."""

    model_config = ConfigDict(extra="ignore")

    name: Name
    regions: Annotated[tuple[RegionConfig, ...], AfterValidator(with_copies)] = Field(min_length=1)
    train: RecordedTrain
    averager: RecordedAverager = RecordedAverager()
    emulate: EmulateConfig | None = None
    cluster: ClusterConfig = LocalClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()

    @property
    def region_names(self) -> tuple[str, ...]:
        """Names of the regions, in the order of the file."""
        return tuple(region.name for region in self.regions)

    def links(self) -> Mapping[tuple[str, str], LinkSpec]:
        """All emulated links by (source, destination)."""
        return emulated_links(self.emulate, self.regions)
