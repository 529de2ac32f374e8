"""What is seen at one moment: of the clouds, of the nodes, of the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from geo_ray.autoscale.demand.pending import PendingGroup
from geo_ray.providers.base import LaunchFailure, Machine, Pool, Stock


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """The node of a machine.

    Attributes:
        is_ready: whether it is part of the cluster and could compute.
        is_busy: whether anything runs there; unknown counts as busy.
        leaves_unix_s: when it will be gone, as it is being drained, whoever told it to; infinity:
            nobody said when. None: it is not.
        resources: that it has in all; empty: not known.
    """

    is_ready: bool
    is_busy: bool = True
    leaves_unix_s: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)


NO_NODE = NodeSeen(is_ready=False, is_busy=False)


@dataclass(frozen=True, slots=True)
class RegionSilence:
    """A region of a cloud does not answer.

    Attributes:
        since_unix_s: when it first did not.
        reason: why, as far as is known.
    """

    since_unix_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Observed:
    """What the policy decides on.

    Attributes:
        now_unix_s: when.
        machines: of the cluster, as the clouds list them; None: nothing is known, since Ray could
            not be asked for their nodes.
        nodes: by machine id; a machine without a node is not there.
        stocks: by pool, as far as they are known.
        failures: of launches, each told at least once.
        left_s: seconds that the rest of the job takes with the speed of the target; None: it has
            no known end. 0: it is over; another one may begin.
        pending: what waits for a place.
        silent: by the cloud's name, regions that did not answer; what runs there is not known.
        is_need_known: whether the job said how much is left of it, and Ray what waits.
        is_released: whether the cluster's owner has given up all machines.
    """

    now_unix_s: float
    machines: tuple[Machine, ...] | None
    nodes: Mapping[str, NodeSeen] = field(default_factory=dict)
    stocks: Mapping[Pool, Stock] = field(default_factory=dict)
    failures: tuple[LaunchFailure, ...] = ()
    left_s: float | None = None
    pending: tuple[PendingGroup, ...] = ()
    silent: Mapping[str, RegionSilence] = field(default_factory=dict)
    is_need_known: bool = True
    is_released: bool = False

    def node(self, machine_id: str) -> NodeSeen:
        """Return the node of a machine."""
        return self.nodes.get(machine_id, NO_NODE)
