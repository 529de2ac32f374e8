"""The profile of a job, and the step-time and start-up models fitted to it.

A profile is one JSON file of step times, exchanges, starts and gradient noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import Field

from geo_ray.base.errors import ExtrapolationError, OtherModelError, ProfileError, RunDirectoryError
from geo_ray.base.files import write_atomic
from geo_ray.base.load import load_json
from geo_ray.base.model import StrictModel
from geo_ray.planner.plan import ModelId
from geo_ray.transport.links import LinkTable


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


@dataclass(frozen=True, slots=True)
class StepModel:
    """A region's step time, linear in rows and workers, fitted to measurements.

    ``step = fixed_s + rows * row_s + lan_s * workers``, each coefficient at least 0, with one
    ``row_s`` per machine type. The fit minimises relative errors, so that short steps count like
    long ones. Coefficients that the points cannot tell apart are fixed by AdaptDL's rules: with one
    number of workers ``lan_s`` is 0, with one batch size half of the time counts as fixed.

    Source: Scavenger's two lines, computing in the batch and synchronising in the workers (arXiv
    2303.06659); pinning after AdaptDL's code, reconstructed.

    Attributes:
        region: whose steps.
        fixed_s: of every step.
        lan_s: of every worker.
        row_s: by machine type, of every row of one worker.
        rows: by machine type, least and most rows that were measured.
        workers: least and most that were measured.
        error: root mean square of the relative residuals, or the points' own spread if larger.
    """

    region: str
    fixed_s: float
    lan_s: float
    row_s: Mapping[str, float]
    rows: Mapping[str, tuple[int, int]]
    workers: tuple[int, int]
    error: float

    def step_s(self, machine: str, workers: int, rows: float) -> float:
        """Return the seconds of a step with ``rows`` rows on each of ``workers`` workers."""
        return self.fixed_s + self.row_s[machine] * rows + self.lan_s * workers

    def check(self, machine: str, workers: int, rows: int) -> None:
        """Refuse a step outside the measured range.

        Raises:
            ExtrapolationError: the message gives the measured range and the request.
        """
        low, high = self.rows[machine]
        if not low <= rows <= high:
            raise ExtrapolationError(
                f"region '{self.region}': {rows} rows on a {machine}; measured were {low} to {high}"
            )
        low, high = self.workers
        if not low <= workers <= high:
            raise ExtrapolationError(
                f"region '{self.region}': {workers} workers; measured were {low} to {high}"
            )


def fit_steps(region: str, points: Sequence[StepPoint]) -> StepModel:
    """Fit a region's points.

    Args:
        region: which.
        points: of any region; those of others are left out.

    Raises:
        ProfileError: there is none of this region.
    """
    from scipy.optimize import nnls  # slow to import

    own = [point for point in points if point.region == region]
    if not own:
        raise ProfileError(f"the profile has no steps of region '{region}'")
    machines = sorted({point.machine for point in own})
    counts = sorted({point.workers for point in own})
    by_type = {m: sorted({p.rows for p in own if p.machine == m}) for m in machines}
    time_s = np.array([point.step_s for point in own])
    columns = {m: np.array([p.rows * (p.machine == m) for p in own], float) for m in machines}
    is_one_batch = all(len(rows) == 1 for rows in by_type.values())
    pinned_s = float(time_s.mean()) / 2 if is_one_batch else 0.0
    if not is_one_batch:
        columns["fixed"] = np.ones(len(own))
    if len(counts) > 1:
        columns["lan"] = np.array([float(point.workers) for point in own])
    matrix = np.stack(list(columns.values()), axis=1) / time_s[:, None]
    found, residual = nnls(matrix, (time_s - pinned_s) / time_s)
    values = dict(zip(columns, (float(value) for value in found), strict=True))
    spread = float(np.median([point.spread for point in own]))
    return StepModel(
        region,
        fixed_s=values.get("fixed", 0.0) + pinned_s,
        lan_s=values.get("lan", 0.0),
        row_s={machine: values[machine] for machine in machines},
        rows={machine: (rows[0], rows[-1]) for machine, rows in by_type.items()},
        workers=(counts[0], counts[-1]),
        error=max(float(residual) / len(own) ** 0.5, spread),
    )


@dataclass(frozen=True, slots=True)
class StartModel:
    """The start-up time of a run, linear in its workers, fitted to measured starts.

    ``start = fixed_s + worker_s * workers``, both at least 0. If every worker has its own machine,
    they start in parallel and ``worker_s`` is about 0; on one machine's cores they queue.

    Attributes:
        fixed_s: of every start.
        worker_s: that every worker of any region adds.
    """

    fixed_s: float
    worker_s: float = 0.0

    def seconds(self, workers: int) -> float:
        """Return the seconds from the command to the first step, with so many workers in all."""
        return self.fixed_s + self.worker_s * workers


def fit_start(points: Sequence[StartPoint]) -> StartModel:
    """Fit the line; with a single number of workers, all time counts as fixed.

    Args:
        points: at least one point.
    """
    from scipy.optimize import nnls  # slow to import

    took_s = np.array([point.start_s for point in points])
    workers = np.array([float(point.workers) for point in points])
    if len(set(workers)) == 1:
        return StartModel(float(np.median(took_s)))
    found, _ = nnls(np.stack([np.ones(len(points)), workers], axis=1), took_s)
    return StartModel(float(found[0]), float(found[1]))
