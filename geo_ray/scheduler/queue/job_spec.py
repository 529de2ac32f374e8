"""Jobs of the queue: configuration, value, and specification for the schedulers; requests."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self

from pydantic import Field, JsonValue, model_validator

from geo_ray.base.model import StrictModel
from geo_ray.experiment.regions import Name, RegionConfig

_NAME: Final = r"^[a-z0-9]([a-z0-9_-]{0,38}[a-z0-9])?$"
JobName = Annotated[str, Field(pattern=_NAME)]
"""A job name: it is part of the names of its run and its submissions."""


def is_job_name(text: str) -> bool:
    """Whether a text is a valid job name."""
    return re.fullmatch(_NAME, text) is not None


# Tenants declare these values, and all jobs are scheduled together: an extreme value of one job
# would stop the queue for all.
_MOST_WORKERS: Final = 10_000
_MOST_UNITS: Final = 1e6
_MOST_ROWS: Final = 10**9
_MOST_STEPS: Final = 10**12
_MOST_S: Final = 1e9
_MOST_BYTES: Final = 1e15
_MOST_WORTH: Final = 1e12
LEAST_STEP_S: Final = 1e-9
_EPS: Final = 1e-9  # of a whole number of a group's parts on a machine


class RegionNeeds(StrictModel):
    """Resource needs of a job in one of its regions.

    A region that is a process group counts as one worker with all of the group's resources, so that
    it gets all of them or none.
    """

    workers: int = Field(ge=1, le=_MOST_WORKERS, description="configured workers")
    rows: int = Field(ge=1, le=_MOST_ROWS, description="rows per step of all workers")
    cpus: float = Field(ge=0, le=_MOST_UNITS, description="of a worker")
    gpus: float = Field(ge=0, le=_MOST_UNITS, description="of a worker")
    machine_cpus: float = Field(
        0.0, ge=0, le=_MOST_UNITS, description="CPUs that one machine of a group must have"
    )
    machine_gpus: float = Field(
        0.0, ge=0, le=_MOST_UNITS, description="GPUs that one machine of a group must have"
    )
    machines: int = Field(
        0, ge=0, le=_MOST_WORKERS, description="parts of a group, each on one machine; 0: no group"
    )
    server_cpus: float = Field(
        ge=0, le=_MOST_UNITS, description="of the region's servers and bridge"
    )

    @classmethod
    def of(cls, region: RegionConfig, batch_size: int) -> RegionNeeds:
        """Return the needs of a region of a configuration.

        Args:
            region: region section.
            batch_size: `data.batch_size`.
        """
        group = region.group
        if group is not None:
            cpus = group.cpus_per_rank * group.ranks_of_node
            return cls(
                workers=1,
                rows=region.rows_per_step(batch_size),
                cpus=cpus * group.nodes,
                gpus=float(group.gpus_per_node * group.nodes),
                machine_cpus=cpus,
                machine_gpus=float(group.gpus_per_node),
                machines=group.nodes,
                server_cpus=region.cpus_per_server,
            )
        return cls(
            workers=region.workers,
            rows=region.rows_per_step(batch_size),
            cpus=region.cpus_per_worker,
            gpus=region.gpus_per_worker,
            server_cpus=region.cpus_per_server * (region.ps_shards + 1),
        )

    def machines_of(self, cpus: float, gpus: float) -> int:
        """Return the machines that a group needs, if each has some CPUs and GPUs."""
        has = ((cpus, self.machine_cpus), (gpus, self.machine_gpus))
        parts = min((int(own / each + _EPS) for own, each in has if each), default=self.machines)
        return math.ceil(self.machines / max(1, parts))

    def cpus_of(self, workers: int) -> float:
        """Return the CPUs of a number of workers and the servers."""
        return workers * self.cpus + self.server_cpus if workers else 0.0


class JobTiming(StrictModel):
    """Speed of a job: step model and exchange timing of the planner."""

    fixed_s: float = Field(ge=0, le=_MOST_S, description="seconds per step")
    row_s: float = Field(ge=0, le=_MOST_S, description="seconds per row on one worker")
    lan_s: float = Field(0.0, ge=0, le=_MOST_S, description="seconds per worker")
    model_bytes: float = Field(ge=0, le=_MOST_BYTES, description="bytes of a push or a pull")
    every: float = Field(1.0, ge=1e-3, le=_MOST_S, description="steps between exchanges")
    hides: float | None = Field(
        0.0, ge=0, le=_MOST_S, description="steps that can hide an exchange; null: any number"
    )

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if self.fixed_s + self.row_s < LEAST_STEP_S:
            raise ValueError("a step takes no time")
        return self


class JobSpec(StrictModel):
    """Specification of a job for the schedulers."""

    regions: dict[Name, RegionNeeds] = Field(min_length=1)
    steps: int = Field(ge=1, le=_MOST_STEPS, description="of a region")
    speed: JobTiming
    averager: Name = Field(description="configured region of the averager")
    anywhere: bool = Field(False, description="whether its data are available in every region")
    least_regions: int = Field(ge=1, description="minimum number of its regions")
    most_workers: int = Field(
        ge=1, le=_MOST_WORKERS, description="maximum workers over all regions"
    )

    @property
    def rows_per_step(self) -> int:
        """Rows per step over all regions."""
        return sum(each.rows for each in self.regions.values())

    @property
    def rows(self) -> float:
        """Total work in rows."""
        return float(self.steps * self.rows_per_step)

    @property
    def workers(self) -> int:
        """Configured workers of all regions."""
        return sum(each.workers for each in self.regions.values())

    def among(self, regions: Collection[str]) -> JobSpec:
        """Return the job restricted to some of its regions, with fewer rows per step."""
        if self.anywhere or all(name in regions for name in self.regions):
            return self
        there = {name: each for name, each in self.regions.items() if name in regions}
        if not there:
            return self
        away = self.workers - sum(each.workers for each in there.values())
        most = max(len(there), self.most_workers - away)
        return self.model_copy(update={"regions": there, "most_workers": most})

    def needs(self, region: str) -> RegionNeeds:
        """Return the needs in a region; for data everywhere, those of the first region."""
        return self.regions.get(region) or next(iter(self.regions.values()))


class JobValue(StrictModel):
    """Value of a job, depending on its completion time."""

    value: float = Field(1.0, gt=0, le=_MOST_WORTH, description="value on immediate completion")
    deadline_s: float | None = Field(
        None,
        gt=0,
        le=_MOST_S,
        description="seconds from submission until half of the value is lost; null: never",
    )
    urgency: float = Field(
        2.0,
        ge=0,
        le=1e3,
        description="steepness per slot: 0: time does not matter; 5: no value when late",
    )

    def of(self, slots: float, slot_s: float) -> float:
        """Return the value of completion ``slots`` after the arrival slot."""
        if self.deadline_s is None:
            return self.value
        late = self.urgency * (slots - self.deadline_s / slot_s)
        return self.value / (1 + math.exp(min(700.0, late)))


class ValueChange(StrictModel):
    """Changes of a job's value; null: unchanged."""

    value: float | None = Field(None, gt=0, le=_MOST_WORTH)
    deadline_s: float | None = Field(None, gt=0, le=_MOST_S)
    urgency: float | None = Field(None, ge=0, le=1e3)

    def of(self, value: JobValue) -> JobValue:
        """Return the changed value."""
        return value.model_copy(update=self.model_dump(exclude_none=True))


class JobRequest(StrictModel):
    """A submitted job."""

    name: JobName
    config: dict[str, JsonValue] = Field(description="configuration of `geo-ray train`")
    spec: JobSpec
    value: JobValue = JobValue()
    working_dir: str | None = Field(
        None, description="directory with the job's code on the machine of the queue"
    )


Said = Annotated[str, Field(max_length=64)]
"""A job name in a request, not validated."""


class SubmitRequest(StrictModel):
    """Submits a job."""

    kind: Literal["submit"] = "submit"
    id: Said
    sent_unix_s: float
    job: JobRequest


class CancelRequest(StrictModel):
    """Cancels a job in any state."""

    kind: Literal["cancel"] = "cancel"
    id: Said
    sent_unix_s: float
    job: Said


class MoveRequest(StrictModel):
    """Changes a job's position (before another job, first or last) or its value."""

    kind: Literal["move"] = "move"
    id: Said
    sent_unix_s: float
    job: Said
    before: Said | None = None
    position: Literal["first", "last", "before"] | None = None
    value: ValueChange | None = None


AnyRequest = Annotated[SubmitRequest | CancelRequest | MoveRequest, Field(discriminator="kind")]

Workers = Mapping[str, int]
"""Counts by region; none of them 0."""


@dataclass(frozen=True, slots=True)
class JobHints:
    """Properties of a job that its configuration does not contain.

    Attributes:
        rows_per_s: speed of a worker; None: as profiled or emulated.
        anywhere: whether its data are available in every region of the queue.
        most_workers: maximum workers over all regions; None: as configured.
    """

    rows_per_s: float | None = None
    anywhere: bool = False
    most_workers: int | None = None
