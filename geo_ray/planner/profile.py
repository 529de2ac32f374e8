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
    """Measured step time with a number of workers and rows."""

    region: str = Field(description="region of the run")
    machine: str = Field(description="instance type of its workers")
    workers: int = Field(ge=1, description="workers in the region")
    rows: int = Field(ge=1, description="rows per step and worker")
    step_s: float = Field(gt=0, description="median")
    spread: float = Field(ge=0, description="median absolute deviation over the median")
    steps: int = Field(ge=1, description="measured steps")

    @property
    def key(self) -> tuple[str, str, int, int]:
        """The key of the point; a newer point of the same key replaces it."""
        return self.region, self.machine, self.workers, self.rows


class ExchangePoint(StrictModel):
    """Overhead of exchanges in addition to transfer and round trip, and their sizes."""

    codec: str | None = Field(description="codec of the updates; null: fp32")
    overhead_s: float = Field(ge=0, description="median seconds of coding and queueing")
    up_bytes: int = Field(ge=0, description="payload of one update")
    down_bytes: int = Field(ge=0, description="payload of one reply")
    count: int = Field(ge=1, description="measured exchanges")


class StartPoint(StrictModel):
    """Measured start-up time."""

    workers: int = Field(ge=1, description="workers of all regions")
    start_s: float = Field(gt=0, description="from the command to the first step; newest")


class NoisePoint(StrictModel):
    """Gradient noise; see `planner.progress`."""

    grad_sq: float = Field(description="squared norm of the mean gradient, smoothed")
    trace: float = Field(description="trace of the covariance per row, smoothed")
    rows: int = Field(ge=1, description="rows of the measured step")
    workers: int = Field(ge=2, description="workers with compared gradients")
    count: int = Field(ge=1, description="measurements behind the values")


class Profile(StrictModel):
    """All measurements of one model."""

    version: Literal[1] = 1
    model: ModelId
    hardware: str = Field(description="hardware of the measurement")
    steps: tuple[StepPoint, ...] = ()
    exchanges: tuple[ExchangePoint, ...] = ()
    links: LinkTable = LinkTable()
    noise: NoisePoint | None = None
    starts: tuple[StartPoint, ...] = ()
    evaluation_s: float = Field(0.0, ge=0, description="seconds that an evaluation adds to a step")
    spent_s: float = Field(0.0, ge=0, description="seconds spent on measurements")

    def with_steps(self, points: Iterable[StepPoint]) -> Self:
        """Return the profile with ``points`` in place of earlier ones of the same keys."""
        merged = {point.key: point for point in (*self.steps, *points)}
        return self.model_copy(update={"steps": tuple(merged[key] for key in sorted(merged))})

    def with_exchanges(self, points: Sequence[ExchangePoint]) -> Self:
        """Return the profile with ``points`` in place of earlier ones of the same codecs."""
        merged = {point.codec: point for point in (*self.exchanges, *points)}
        return self.model_copy(update={"exchanges": tuple(merged.values())})

    def with_start(self, point: StartPoint) -> Self:
        """Return the profile with a start, which replaces one with the same number of workers."""
        merged = {each.workers: each for each in (*self.starts, point)}
        return self.model_copy(update={"starts": tuple(merged[key] for key in sorted(merged))})

    def check_model(self, model: ModelId) -> None:
        """Reject a profile of another model.

        Raises:
            OtherModelError: states the difference.
        """
        difference = self.model.differs(model)
        if difference is not None:
            raise OtherModelError(f"the profile was measured with another model: {difference}")


def load_profile(path: Path) -> Profile:
    """Read a profile file.

    Raises:
        ProfileError: the file is missing or invalid.
    """
    return load_json(path, Profile, "profile", ProfileError)


def save_profile(profile: StrictModel, path: Path) -> None:
    """Write a profile atomically.

    Raises:
        RunDirectoryError: the file cannot be written.
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
    ``row_s`` per machine type. The fit minimizes relative errors, so that short steps weigh as much
    as long ones. Coefficients that the points cannot separate are fixed by the rules of AdaptDL:
    with one number of workers ``lan_s`` is 0, with one batch size half of the time counts as fixed.

    Source: Scavenger's two lines, computation in the batch and synchronization in the workers
    (arXiv 2303.06659); pinning as in AdaptDL's code, reconstructed.

    Attributes:
        region: the region.
        fixed_s: constant seconds per step.
        lan_s: seconds per worker.
        row_s: seconds per row on one worker, by machine type.
        rows: smallest and largest measured number of rows, by machine type.
        workers: smallest and largest measured number of workers.
        error: root mean square of the relative residuals, or the points' spread if larger.
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
        """Reject a step outside the measured range.

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
    """Fit the model to a region's points.

    Args:
        region: the region.
        points: points; those of other regions are ignored.

    Raises:
        ProfileError: the region has no points.
    """
    from scipy.optimize import nnls  # slow import

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
        fixed_s: constant seconds.
        worker_s: seconds per worker of any region.
    """

    fixed_s: float
    worker_s: float = 0.0

    def seconds(self, workers: int) -> float:
        """Return the seconds from the command to the first step."""
        return self.fixed_s + self.worker_s * workers


def fit_start(points: Sequence[StartPoint]) -> StartModel:
    """Fit the model; with a single number of workers, all time counts as fixed.

    Args:
        points: at least one point.
    """
    from scipy.optimize import nnls  # slow import

    took_s = np.array([point.start_s for point in points])
    workers = np.array([float(point.workers) for point in points])
    if len(set(workers)) == 1:
        return StartModel(float(np.median(took_s)))
    found, _ = nnls(np.stack([np.ones(len(points)), workers], axis=1), took_s)
    return StartModel(float(found[0]), float(found[1]))
