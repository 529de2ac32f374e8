"""Bugs of geo_ray itself (exit code 70)."""

from __future__ import annotations

from geo_ray.errors.base import GeoRayError


class InvariantError(GeoRayError):
    """The software contradicts itself; this is a bug of geo_ray."""

    code = "INVARIANT"
    exit_code = 70
    chapter = "Bugs"
    causes = "Unknown, by definition. The message names the invariant that does not hold."
    advice = "Report it with the run directory; the message names the invariant."
    more = "The run directory has everything that is needed to find it."
