"""A plan: what would run where, and what is predicted of it, term by term. A value; prints, saves.

Shared by `geo-ray plan`, which makes it, and `geo-ray train --plan`, which follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError

from geo_ray.clouds.price import Market
from geo_ray.config.base import Model
from geo_ray.errors import PlanError

_MOST_BYTES: Final = 16 * 1024 * 1024


class Machines(Model):
    """Machines of one type in one market."""

    type: str = Field(description="instance type")
    market: Market = Field(description="how they are bought")
    count: int = Field(ge=1, description="how many")
    rows: int = Field(ge=1, description="rows of a step that each computes")
    usd_per_h: float = Field(ge=0, description="of one, mean over the job")


class RegionPlan(Model):
    """What runs in one region."""

    region: str
    machines: tuple[Machines, ...] = Field(min_length=1)
    step_s: float = Field(gt=0, description="how long a step takes there")

    @property
    def workers(self) -> int:
        """One per machine."""
        return sum(each.count for each in self.machines)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Rows of a step by worker, in the order of `machines`."""
        return tuple(each.rows for each in self.machines for _ in range(each.count))


class Plan(Model):
    """The whole decision, and what it is expected to take."""

    version: Literal[1] = 1
    policy: str = Field(description="who made it")
    regions: tuple[RegionPlan, ...] = Field(min_length=1)
    averager: str = Field(description="region that hosts it")
    interval: int = Field(ge=1, description="local steps between exchanges")
    codec: str | None = Field(description="of the updates; null: fp32")
    steps: float = Field(gt=0, description="local steps of every region")
    seconds: dict[str, float] = Field(description="predicted, by term")
    usd: dict[str, float] = Field(description="predicted, by term")
    gap: float = Field(0.0, ge=0, description="share by which another could be better at most")
    reason: str = Field("", description="why this one")
    notes: tuple[str, ...] = Field((), description="what to know before believing it")

    @property
    def total_s(self) -> float:
        """Predicted seconds of the job."""
        return sum(self.seconds.values())

    @property
    def total_usd(self) -> float:
        """Predicted dollars of the job."""
        return sum(self.usd.values())

    @property
    def usd_per_h(self) -> float:
        """What the machines cost per hour."""
        return sum(m.count * m.usd_per_h for region in self.regions for m in region.machines)


def shares(rows: int, speeds: Sequence[float]) -> list[int]:
    """Split rows by speed into whole numbers that add up; each gets at least one.

    Args:
        rows: at least as many as there are speeds.
        speeds: rows/s.
    """
    total = sum(speeds)
    exact = [rows * speed / total for speed in speeds]
    floors = [max(1, int(each)) for each in exact]
    # What is left goes where most was cut off; what is too much comes from where most was given.
    while sum(floors) < rows:
        floors[max(range(len(exact)), key=lambda i: (exact[i] - floors[i], -i))] += 1
    while sum(floors) > rows:
        able = [i for i in range(len(exact)) if floors[i] > 1]
        floors[max(able, key=lambda i: (floors[i] - exact[i], i))] -= 1
    return floors


def load_plan(path: Path) -> Plan:
    """Read a plan.

    Raises:
        PlanError: there is none, or it is not valid.
    """
    try:
        with path.open("rb") as file:
            return Plan.model_validate_json(file.read(_MOST_BYTES))
    except OSError as error:
        raise PlanError(
            f"plan {path} cannot be read: {error.strerror or error}",
            fix="Make one with `geo-ray plan`.",
        ) from None
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}"
            for item in error.errors(include_url=False, include_input=False)[:5]
        ]
        raise PlanError(
            f"plan {path} is not valid: {'; '.join(wrong)}",
            fix="Make it anew with `geo-ray plan`.",
        ) from None
