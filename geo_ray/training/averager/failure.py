"""What an averager has failed with."""

from __future__ import annotations

import traceback

from geo_ray.errors import AveragerFailedError, GeoRayError
from geo_ray.strategies.base import Strategy
from geo_ray.util.blame import summary


def failure_of(strategy: Strategy, error: Exception) -> GeoRayError:
    """The typed error of whatever a strategy, or what lies around it, has raised."""
    if isinstance(error, GeoRayError):
        return error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return AveragerFailedError(
        f"strategy '{strategy.kind}' failed in the averager: {summary(error)} "
        f"({frame.filename}:{frame.lineno})"
    )
