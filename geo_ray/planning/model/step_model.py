"""A region's step time, linear in rows and workers, fitted to measurements.

``step = fixed_s + rows * row_s + lan_s * workers``, each coefficient at least 0, with one ``row_s``
per machine type. The fit minimises relative errors, so that short steps count like long ones.
Coefficients that the points cannot tell apart are fixed by AdaptDL's rules: with one number of
workers ``lan_s`` is 0, with one batch size half of the time counts as fixed.

Source: Scavenger's two lines, computing in the batch and synchronising in the workers (arXiv
2303.06659); pinning after AdaptDL's code, reconstructed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from geo_ray.errors import ExtrapolationError, ProfileError
from geo_ray.planning.profile import StepPoint


@dataclass(frozen=True, slots=True)
class StepModel:
    """See the module's docstring.

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
