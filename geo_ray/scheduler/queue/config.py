"""The configuration of a queue: what it schedules on, how, and for whom."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from geo_ray.base.errors import ScheduleInputError
from geo_ray.base.model import MessageWords, PathText, StrictModel
from geo_ray.cloud.provider import Market
from geo_ray.experiment.regions import Name
from geo_ray.scheduler.policies.registry import policy_named


class QueueMachine(StrictModel):
    """Machines that may be rented in a region while jobs pay for them."""

    type: Name = Field(description="the cloud's name of the type")
    at: str = Field(description="the cloud's name of the region")
    cap: int = Field(ge=1, le=10_000, description="most of them")
    cpus: float = Field(gt=0, description="of one")
    gpus: float = Field(0.0, ge=0, description="of one")
    usd_per_hour: float = Field(ge=0, description="of one, as the queue reckons")
    spot: bool = Field(False, description="whether it may be one of the spot market, too")

    @property
    def markets(self) -> tuple[Market, ...]:
        """Where it may be rented."""
        return (Market.ON_DEMAND, Market.SPOT) if self.spot else (Market.ON_DEMAND,)


class QueueRegion(StrictModel):
    """What the queue may use in a region of the cluster."""

    cpus: float | None = Field(None, ge=0, description="null: what its living nodes have")
    gpus: float | None = Field(None, ge=0, description="null: what its living nodes have")
    usd_per_hour: float = Field(0.0, ge=0, description="what all of that costs")
    inside_mbps: float = Field(10_000.0, gt=0, description="between its machines")
    machines: QueueMachine | None = Field(
        None, description="to be rented; `cpus` and `gpus` are then `cap` times theirs"
    )


class QueueLink(StrictModel):
    """Between two regions, in both directions."""

    mbps: float = Field(100.0, gt=0, description="goodput")
    rtt_s: float = Field(0.05, ge=0, description="round trip")
    usd_per_gb: float = Field(0.0, ge=0, description="egress")


class TenantConfig(StrictModel):
    """Who may submit, and how much."""

    key: Annotated[
        str,
        Field(pattern=r"^[0-9a-f]{64}$"),
        MessageWords("64 digits of 0-9a-f, the key that `geo-ray queue token` prints"),
    ] = Field(description="public half of the token, as `geo-ray queue token` prints it")
    most_jobs: int = Field(100, ge=0, description="jobs that have not ended")
    most_workers: int | None = Field(None, ge=1, description="at the same time; null: any number")
    max_value: float | None = Field(None, gt=0, description="of a job; null: any")
    working_dirs: str | None = Field(
        None,
        description="absolute directory of the queue's machine with the code of this tenant's "
        "jobs (`--working-dir`); null: its jobs bring no code",
    )
    operator: bool = Field(False, description="may also move and cancel the jobs of others")

    @field_validator("working_dirs")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and (not value.startswith("/") or ".." in value.split("/")):
            raise ValueError("give an absolute directory without `..`, such as /srv/code/vision")
        return value


class PatienceConfig(StrictModel):
    """What the queue puts up with."""

    overrun: float = Field(
        3.0, gt=1, description="a job that has trained for so many times what it said is ended"
    )
    stall_s: float = Field(
        900.0, gt=0, description="a job that has its machines and takes no step for so long, too"
    )
    attempts: int = Field(4, ge=1, description="failures of a job until it is given up")
    save_s: float = Field(
        120.0, gt=0, description="for so long a job that is to leave may save; then it is ended"
    )
    resize_s: float = Field(
        60.0, ge=0, description="what another number of workers in a region costs: a restart"
    )


class QueueConfig(StrictModel):
    """A queue."""

    name: Name = Field(description="of the queue, and of its folder")
    policy: str = Field(
        "pd_ors", description="who decides; docs/reference/scheduling-policies.md lists them"
    )
    value_per_usd: float = Field(
        0.0, ge=0, description="worth that a dollar costs; 0: money does not count"
    )
    slot_s: float = Field(300.0, gt=0, description="seconds of a slot")
    start_s: float = Field(
        30.0, ge=0, description="from a job's submission to its first step, as the queue reckons"
    )
    state: PathText = Field(
        "queues", description="directory, or s3:// address, with a folder a queue"
    )
    runs: PathText = Field(description="`run.dir` of its jobs: a directory of all nodes, or s3://")
    regions: dict[Name, QueueRegion] = Field(min_length=1)
    link: QueueLink = Field(QueueLink(), description="between regions that `links` does not name")
    links: dict[str, QueueLink] = Field({}, description="by pair, as in `us/eu`")
    tenants: dict[Name, TenantConfig] = Field(min_length=1)
    patience: PatienceConfig = PatienceConfig()
    autoscaler: str | None = Field(None, description="cluster whose autoscaler is asked for more")

    @model_validator(mode="after")
    def _known(self) -> Self:
        try:
            policy_named(self.policy)
        except ScheduleInputError as error:
            raise ValueError(f"policy: {error.message}") from None
        if self.policy == "oasis":
            raise ValueError(
                "policy: oasis keeps parameter servers on sites of their own, and a region of a "
                "queue is one site: use pd_ors"
            )
        for pair in self.links:
            ends = pair.split("/")
            if len(ends) != 2 or ends[0] == ends[1] or not set(ends) <= set(self.regions):
                raise ValueError(f"links: '{pair}' names no two regions, as in `us/eu`")
        return self

    def link_between(self, here: str, there: str) -> QueueLink:
        """Return the link of a pair, whichever pattern it is named."""
        return self.links.get(f"{here}/{there}") or self.links.get(f"{there}/{here}") or self.link
