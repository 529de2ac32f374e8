"""The configuration of a queue: resources, policy and tenants."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from geo_ray.base.errors import ScheduleInputError
from geo_ray.base.model import MessageWords, PathText, StrictModel
from geo_ray.cloud.provider import Market
from geo_ray.experiment.regions import Name
from geo_ray.scheduler.policies.registry import policy_named


class QueueMachine(StrictModel):
    """Machines that may be launched in a region while the value of jobs covers them."""

    type: Name = Field(description="the cloud's name of the type")
    at: str = Field(description="the cloud's name of the region")
    cap: int = Field(ge=1, le=10_000, description="most machines")
    cpus: float = Field(gt=0, description="CPUs of one machine")
    gpus: float = Field(0.0, ge=0, description="GPUs of one machine")
    usd_per_hour: float = Field(ge=0, description="price of one machine that the queue assumes")
    spot: bool = Field(False, description="whether spot machines may be rented, too")

    @property
    def markets(self) -> tuple[Market, ...]:
        """Markets on which it may be launched."""
        return (Market.ON_DEMAND, Market.SPOT) if self.spot else (Market.ON_DEMAND,)


class QueueRegion(StrictModel):
    """Resources of a region of the cluster that the queue may use."""

    cpus: float | None = Field(
        None,
        ge=0,
        description="CPUs that the queue may use; null: those of living nodes that are not drained",
    )
    gpus: float | None = Field(None, ge=0, description="the same for GPUs")
    usd_per_hour: float = Field(0.0, ge=0, description="price of all these resources")
    inside_mbps: float = Field(10_000.0, gt=0, description="goodput between its machines")
    machines: QueueMachine | None = Field(
        None, description="machines to rent; `cpus` and `gpus` are then `cap` times theirs"
    )


class QueueLink(StrictModel):
    """A link between two regions, in both directions."""

    mbps: float = Field(100.0, gt=0, description="goodput")
    rtt_s: float = Field(0.05, ge=0, description="round trip in seconds")
    usd_per_gb: float = Field(0.0, ge=0, description="price of egress")


class TenantConfig(StrictModel):
    """Key, limits and rights of a tenant."""

    key: Annotated[
        str,
        Field(pattern=r"^[0-9a-f]{64}$"),
        MessageWords("64 digits of 0-9a-f, the key that `geo-ray queue token` prints"),
    ] = Field(description="public half of the token, as `geo-ray queue token` prints it")
    most_jobs: int = Field(100, ge=0, description="most jobs that have not ended")
    most_workers: int | None = Field(
        None, ge=1, description="most workers at the same time; null: any number"
    )
    max_value: float | None = Field(None, gt=0, description="highest value of a job; null: any")
    working_dirs: str | None = Field(
        None,
        description="absolute directory of the queue's machine with the code of this tenant's "
        "jobs (`--working-dir`); null: its jobs bring no code",
    )
    operator: bool = Field(False, description="whether it may also move and cancel jobs of others")

    @field_validator("working_dirs")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and (not value.startswith("/") or ".." in value.split("/")):
            raise ValueError("give an absolute directory without `..`, such as /srv/code/vision")
        return value


class PatienceConfig(StrictModel):
    """Limits after which the queue ends or gives up a job."""

    overrun: float = Field(
        3.0,
        gt=1,
        description="a job that has trained for this multiple of its expected time is ended",
    )
    stall_s: float = Field(
        900.0, gt=0, description="seconds without a step after which a job with machines is ended"
    )
    attempts: int = Field(4, ge=1, description="failures after which a job is given up")
    save_s: float = Field(
        120.0, gt=0, description="seconds in which a preempted job may save before it is ended"
    )
    resize_s: float = Field(
        60.0,
        ge=0,
        description="seconds that another number of workers in a region costs: a restart",
    )


class QueueConfig(StrictModel):
    """A queue."""

    name: Name = Field(description="name of the queue and its folder")
    policy: str = Field(
        "pd_ors",
        description="scheduling policy; docs/reference/scheduling-policies.md lists them",
    )
    value_per_usd: float = Field(
        0.0, ge=0, description="value that a dollar must bring; 0: money does not count"
    )
    slot_s: float = Field(300.0, gt=0, description="seconds of a slot")
    start_s: float = Field(
        30.0,
        ge=0,
        description="seconds from a job's submission to its first step, until starts were observed",
    )
    state: PathText = Field(
        "queues", description="directory or s3:// address that contains the queue's folder"
    )
    runs: PathText = Field(
        description="`run.dir` of all jobs: a directory that all nodes share, or s3://"
    )
    regions: dict[Name, QueueRegion] = Field(
        min_length=1, description="regions by the value of the node label"
    )
    link: QueueLink = Field(
        QueueLink(), description="link between regions that `links` does not name"
    )
    links: dict[str, QueueLink] = Field({}, description="links by pair, such as `us/eu`")
    tenants: dict[Name, TenantConfig] = Field(min_length=1, description="tenants by name")
    patience: PatienceConfig = PatienceConfig()
    autoscaler: str | None = Field(
        None, description="name of the cluster whose autoscaler rents `machines`"
    )

    @model_validator(mode="after")
    def _known(self) -> Self:
        try:
            policy_named(self.policy)
        except ScheduleInputError as error:
            raise ValueError(f"policy: {error.message}") from None
        if self.policy == "oasis":
            raise ValueError(
                "policy: oasis needs separate sites for parameter servers, but a region of a "
                "queue is one site: use pd_ors"
            )
        for pair in self.links:
            ends = pair.split("/")
            if len(ends) != 2 or ends[0] == ends[1] or not set(ends) <= set(self.regions):
                raise ValueError(f"links: '{pair}' names no two regions, as in `us/eu`")
        return self

    def link_between(self, here: str, there: str) -> QueueLink:
        """Return the link of a pair in either order."""
        return self.links.get(f"{here}/{there}") or self.links.get(f"{there}/{here}") or self.link
