"""The start-up time of a run, linear in its workers, fitted to measured starts.

``start = fixed_s + worker_s * workers``, both at least 0. If every worker has its own machine, they
start in parallel and ``worker_s`` is about 0; on one machine's cores they queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from geo_ray.planning.profile import StartPoint


@dataclass(frozen=True, slots=True)
class StartModel:
    """See the module's docstring.

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
