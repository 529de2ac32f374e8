"""Who is to stand by next for the averager. Pure.

Rule: the first that is there of those that the configuration names; after them the nearest, by the
shortest round trip that was seen. Only a member can, to which the averager has a connection.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf


def next_standby(
    preferred: Sequence[str], able: Collection[str], rtts_s: Mapping[str, float]
) -> str | None:
    """The region that is to stand by; None if there is none.

    Args:
        preferred: named by the configuration, the best first.
        able: the members to which the averager's region has a connection.
        rtts_s: shortest round trips by region, as far as there was one.
    """
    places = {name: place for place, name in enumerate(preferred)}
    return min(
        able, key=lambda n: (places.get(n, len(places)), rtts_s.get(n, inf), n), default=None
    )
