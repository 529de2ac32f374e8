"""A profile of a job: step times, exchanges, links, noise. One JSON file that plans read.

Source: Scavenger's profile of extreme configurations (arXiv 2303.06659), reused for the next run of
the same model, and refused for another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from geo_ray.config.base import StrictModel
from geo_ray.config.json_file import load_json
from geo_ray.errors import OtherModelError, ProfileError, RunDirectoryError
from geo_ray.planning.model_id import ModelId
from geo_ray.transport.links.table import LinkTable
from geo_ray.util.atomic_file import write_atomic


class StepPoint(StrictModel):
    """How long steps took with so many workers and rows."""

    region: str = Field(description="region of the run")
    machine: str = Field(description="instance type of its workers")
    workers: int = Field(ge=1, description="in the region")
    rows: int = Field(ge=1, description="of a step, of each worker")
    step_s: float = Field(gt=0, description="median")
    spread: float = Field(ge=0, description="median absolute deviation over the median")
    steps: int = Field(ge=1, description="that were measured")

    @property
    def key(self) -> tuple[str, str, int, int]:
        """The key of the point; a newer point of the same key replaces it."""
        return self.region, self.machine, self.workers, self.rows


class ExchangePoint(StrictModel):
    """The overhead of exchanges beside bytes and round trip, and their sizes."""

    codec: str | None = Field(description="of the updates; null: fp32")
    overhead_s: float = Field(ge=0, description="coding, handing over, waiting in queues: median")
    up_bytes: int = Field(ge=0, description="payload of one update")
    down_bytes: int = Field(ge=0, description="payload of one answer")
    count: int = Field(ge=1, description="exchanges that were measured")


class StartPoint(StrictModel):
    """How long a start took."""

    workers: int = Field(ge=1, description="of all regions together")
    start_s: float = Field(gt=0, description="from the command to the first step; newest")


class NoisePoint(StrictModel):
    """Gradient noise; see `planning.noise`."""

    grad_sq: float = Field(description="squared norm of the mean gradient, smoothed")
    trace: float = Field(description="trace of the covariance per row, smoothed")
    rows: int = Field(ge=1, description="of the step it was measured at")
    workers: int = Field(ge=2, description="whose gradients were compared")
    count: int = Field(ge=1, description="measurements behind the values")


class Profile(StrictModel):
    """All measurements of one model."""

    version: Literal[1] = 1
    model: ModelId
    hardware: str = Field(description="where it was measured")
    steps: tuple[StepPoint, ...] = ()
    exchanges: tuple[ExchangePoint, ...] = ()
    links: LinkTable = LinkTable()
    noise: NoisePoint | None = None
    starts: tuple[StartPoint, ...] = ()
    evaluation_s: float = Field(0.0, ge=0, description="that an evaluation adds to a step")
    spent_s: float = Field(0.0, ge=0, description="what measuring took")

    def with_steps(self, points: Iterable[StepPoint]) -> Self:
        """Return the profile with ``points`` in place of earlier ones of the same keys."""
        merged = {point.key: point for point in (*self.steps, *points)}
        return self.model_copy(update={"steps": tuple(merged[key] for key in sorted(merged))})

    def with_exchanges(self, points: Sequence[ExchangePoint]) -> Self:
        """Return the profile with ``points`` in place of earlier ones of the same codecs."""
        merged = {point.codec: point for point in (*self.exchanges, *points)}
        return self.model_copy(update={"exchanges": tuple(merged.values())})

    def with_start(self, point: StartPoint) -> Self:
        """The same for a start, by its number of workers."""
        merged = {each.workers: each for each in (*self.starts, point)}
        return self.model_copy(update={"starts": tuple(merged[key] for key in sorted(merged))})

    def check_model(self, model: ModelId) -> None:
        """Refuse the profile for another model.

        Raises:
            OtherModelError: says in what they differ.
        """
        difference = self.model.differs(model)
        if difference is not None:
            raise OtherModelError(f"the profile was measured with another model: {difference}")


def load_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ProfileError: there is none, or it is not valid.
    """
    return load_json(path, Profile, "profile", ProfileError)


def save_profile(profile: StrictModel, path: Path) -> None:
    """Write a profile of whatever, whole or not at all.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (profile.model_dump_json(indent=2) + "\n").encode())
    except OSError as error:
        raise RunDirectoryError(
            f"{path}: cannot be written: {error.strerror or error}",
            fix="Free space, or name another file with --out.",
        ) from error
