"""Whether an autoscaler serves the connected cluster: then machines come when work waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

NAMESPACE: Final = "geo_ray-autoscalers"
NAME_PREFIX: Final = "geo-ray-autoscaler-"
_ANSWER_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ServedRegions:
    """What an autoscaler rents machines for.

    Attributes:
        regions: of runs.
        longest_s: that a machine may take from its launch to a node.
    """

    regions: tuple[str, ...] = ()
    longest_s: float = 0.0


def served_regions() -> ServedRegions:
    """Ask the autoscalers of the connected cluster, if it has any."""
    query: Any = list_named_actors
    named: list[dict[str, str]] = query(all_namespaces=True)
    names = [
        each["name"]
        for each in named
        if each["namespace"] == NAMESPACE and str(each["name"]).startswith(NAME_PREFIX)
    ]
    return _merged([_asked(name) for name in names])


def _asked(name: str) -> ServedRegions:
    find: Any = ray.get_actor
    try:
        actor = find(name, namespace=NAMESPACE)
        found: Any = ray.get(actor.served.remote(), timeout=_ANSWER_S)
    except (ValueError, RayError):  # it has ended, or starts anew
        return ServedRegions()
    return found if isinstance(found, ServedRegions) else ServedRegions()


def _merged(found: Sequence[ServedRegions]) -> ServedRegions:
    names = dict.fromkeys(name for each in found for name in each.regions)
    return ServedRegions(tuple(names), max((each.longest_s for each in found), default=0.0))
