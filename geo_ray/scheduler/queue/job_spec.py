"""A job of the queue: its configuration, what it is worth, and what the schedulers must know."""

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
"""What a job may be called: it is a part of its run's and of its submission's name."""


def is_job_name(text: str) -> bool:
    """Whether a job may be called so."""
    return re.fullmatch(_NAME, text) is not None


# A tenant says these of its job, and all jobs are decided about together: what is beyond any job
# would stop the queue for everybody.
_MOST_WORKERS: Final = 10_000
_MOST_UNITS: Final = 1e6
_MOST_ROWS: Final = 10**9
_MOST_STEPS: Final = 10**12
_MOST_S: Final = 1e9
_MOST_BYTES: Final = 1e15
_MOST_WORTH: Final = 1e12
LEAST_STEP_S: Final = 1e-9


class RegionNeeds(StrictModel):
    """What a job wants in one of its regions."""

    workers: int = Field(ge=1, le=_MOST_WORKERS, description="as configured")
    rows: int = Field(ge=1, le=_MOST_ROWS, description="of a step of all of them")
    cpus: float = Field(ge=0, le=_MOST_UNITS, description="of a worker")
    gpus: float = Field(ge=0, le=_MOST_UNITS, description="of a worker")
    server_cpus: float = Field(
        ge=0, le=_MOST_UNITS, description="of the region's servers and bridge together"
    )

    @classmethod
    def of(cls, region: RegionConfig, batch_size: int) -> RegionNeeds:
        """Return what a region of a configuration takes.

        Args:
            region: as configured.
            batch_size: `data.batch_size`.
        """
        return cls(
            workers=region.workers,
            rows=region.rows_per_step(batch_size),
            cpus=region.cpus_per_worker,
            gpus=region.gpus_per_worker,
            server_cpus=region.cpus_per_server * (region.ps_shards + 1),
        )

    def cpus_of(self, workers: int) -> float:
        """Return what so many workers need, with the servers beside them."""
        return workers * self.cpus + self.server_cpus if workers else 0.0


class JobPace(StrictModel):
    """How fast a job is: the planner's step model and timing."""

    fixed_s: float = Field(ge=0, le=_MOST_S, description="of every step")
    row_s: float = Field(ge=0, le=_MOST_S, description="of a row on one worker")
    lan_s: float = Field(0.0, ge=0, le=_MOST_S, description="of every worker")
    model_bytes: float = Field(ge=0, le=_MOST_BYTES, description="of a push, and of a pull")
    every: float = Field(
        1.0, ge=1e-3, le=_MOST_S, description="steps from one exchange to the next"
    )
    hides: float | None = Field(
        0.0, ge=0, le=_MOST_S, description="steps that hide one; null: any number"
    )

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if self.fixed_s + self.row_s < LEAST_STEP_S:
            raise ValueError("a step takes no time")
        return self


class JobSpec(StrictModel):
    """What the schedulers must know of a job."""

    regions: dict[Name, RegionNeeds] = Field(min_length=1)
    steps: int = Field(ge=1, le=_MOST_STEPS, description="of a region")
    pace: JobPace
    averager: Name = Field(description="where it lives, as configured")
    anywhere: bool = Field(False, description="whether its data are in every region of the queue")
    least_regions: int = Field(ge=1, description="with fewer of its regions it does not train")
    most_workers: int = Field(ge=1, le=_MOST_WORKERS, description="in all regions")

    @property
    def rows_per_step(self) -> int:
        """Rows of a step of all regions."""
        return sum(each.rows for each in self.regions.values())

    @property
    def rows(self) -> float:
        """All of its work."""
        return float(self.steps * self.rows_per_step)

    @property
    def workers(self) -> int:
        """As configured, of all regions."""
        return sum(each.workers for each in self.regions.values())

    def among(self, regions: Collection[str]) -> JobSpec:
        """Return the job as it is while only these of its regions take part: fewer rows a step."""
        if self.anywhere or all(name in regions for name in self.regions):
            return self
        there = {name: each for name, each in self.regions.items() if name in regions}
        if not there:
            return self
        away = self.workers - sum(each.workers for each in there.values())
        most = max(len(there), self.most_workers - away)
        return self.model_copy(update={"regions": there, "most_workers": most})

    def needs(self, region: str) -> RegionNeeds:
        """Return what it wants in a region; anywhere: the same as in its first."""
        return self.regions.get(region) or next(iter(self.regions.values()))


class JobValue(StrictModel):
    """What a job is value by when it is done."""

    value: float = Field(1.0, gt=0, le=_MOST_WORTH, description="if it is done at once")
    deadline_s: float | None = Field(
        None,
        gt=0,
        le=_MOST_S,
        description="from its submission, when half of the worth is gone; null: never",
    )
    urgency: float = Field(
        2.0,
        ge=0,
        le=1e3,
        description="per slot: 0 does not mind, 1 minds, 5 is worth nothing when late",
    )

    def of(self, slots: float, slot_s: float) -> float:
        """Return what ending ``slots`` after the slot of arrival is worth."""
        if self.deadline_s is None:
            return self.value
        late = self.urgency * (slots - self.deadline_s / slot_s)
        return self.value / (1 + math.exp(min(700.0, late)))


class ValueChange(StrictModel):
    """What becomes another; null: as it was."""

    value: float | None = Field(None, gt=0, le=_MOST_WORTH)
    deadline_s: float | None = Field(None, gt=0, le=_MOST_S)
    urgency: float | None = Field(None, ge=0, le=1e3)

    def of(self, value: JobValue) -> JobValue:
        """Return what a job is value from now on."""
        return value.model_copy(update=self.model_dump(exclude_none=True))


class JobRequest(StrictModel):
    """A job as it is submitted."""

    name: JobName
    config: dict[str, JsonValue] = Field(description="of `geo-ray train`")
    spec: JobSpec
    value: JobValue = JobValue()
    working_dir: str | None = Field(
        None, description="directory of the job's own code that the queue's machine sees"
    )


Said = Annotated[str, Field(max_length=64)]
"""A name as somebody says it, who may have made it up."""


class SubmitRequest(StrictModel):
    """Take a job in."""

    kind: Literal["submit"] = "submit"
    id: Said
    sent_unix_s: float
    job: JobRequest


class CancelRequest(StrictModel):
    """End a job, wherever it stands."""

    kind: Literal["cancel"] = "cancel"
    id: Said
    sent_unix_s: float
    job: Said


class MoveRequest(StrictModel):
    """Change a job's place: before another one (null: first of all), or what it is worth."""

    kind: Literal["move"] = "move"
    id: Said
    sent_unix_s: float
    job: Said
    before: Said | None = None
    position: Literal["first", "last", "before"] | None = None
    value: ValueChange | None = None


AnyRequest = Annotated[SubmitRequest | CancelRequest | MoveRequest, Field(discriminator="kind")]

Workers = Mapping[str, int]
"""How many, by region; none of them 0."""


@dataclass(frozen=True, slots=True)
class JobHints:
    """What a configuration does not say of a job.

    Attributes:
        rows_per_s: of a worker; None: as a profile has measured, or as it is emulated.
        anywhere: whether its data are in every region of the queue.
        most_workers: that it may have in all; None: as configured.
    """

    rows_per_s: float | None = None
    anywhere: bool = False
    most_workers: int | None = None
