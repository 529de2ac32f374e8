"""How a machine's cluster, request, labels and end are written on it, in any cloud's tags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from geo_ray.providers.base import LaunchRequest

CLUSTER_TAG: Final = "geo-ray:cluster"
ID_TAG: Final = "geo-ray:cluster-id"
REQUEST_TAG: Final = "geo-ray:request"
ENDS_TAG: Final = "geo-ray:ends-unix-s"
_LABEL: Final = "geo-ray:label:"
_NAME: Final = "Name"


@dataclass(frozen=True, slots=True)
class MachineTags:
    """What was read of a machine's tags; a machine may bear wrong ones, since users can edit them.

    Attributes:
        cluster: its cluster; None: not one of geo_ray's.
        cluster_id: which of that name; empty: it is not said.
        request_id: of its launch.
        labels: of its Ray node.
        ends_unix_s: when it ends by itself.
    """

    cluster: str | None = None
    cluster_id: str = ""
    request_id: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    ends_unix_s: float | None = None


def tags_of(request: LaunchRequest) -> dict[str, str]:
    """Return the tags of a request's machines."""
    found = {
        _NAME: f"geo-ray {request.cluster}",
        CLUSTER_TAG: request.cluster,
        REQUEST_TAG: request.request_id,
    }
    if request.cluster_id:
        found[ID_TAG] = request.cluster_id
    if request.ends_unix_s is not None:
        found[ENDS_TAG] = f"{request.ends_unix_s:.0f}"
    return found | {f"{_LABEL}{key}": value for key, value in sorted(request.labels.items())}


def read_tags(tags: Mapping[str, str]) -> MachineTags:
    """Return what tags say."""
    ends = tags.get(ENDS_TAG, "")
    return MachineTags(
        cluster=tags.get(CLUSTER_TAG),
        cluster_id=tags.get(ID_TAG, ""),
        request_id=tags.get(REQUEST_TAG),
        labels={k.removeprefix(_LABEL): v for k, v in tags.items() if k.startswith(_LABEL)},
        ends_unix_s=float(ends) if ends.isdigit() else None,
    )
