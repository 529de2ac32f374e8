"""What is on machines that are about to be taken away, as far as Ray knows.

A cloud gives notice before it takes a spot instance; what hears it tells Ray to drain the node. Ray
starts nothing there any more and tells no actor, so it has to be asked.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from geo_ray.runtime.cluster.ray_threads import RayThreads

Key = TypeVar("Key")
log = logging.getLogger(__name__)

EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class _Told:
    """Nodes that are being drained, and when servers of regions will be gone with them."""

    nodes: Collection[str] = ()
    regions: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class DrainNotices:
    """See the module's docstring.

    Attributes:
        ask: gives when nodes that are being drained will be gone, in unix ms (0: nobody knows), by
            their ids.
        where: gives the ids of the nodes of each region's servers and bridge.
        threads: starts the thread that asks.
    """

    ask: Callable[[], Mapping[str, int]]
    where: Callable[[], Mapping[str, Collection[str]]] = dict
    threads: RayThreads = field(default_factory=RayThreads)
    _told: _Told = _Told()
    _asked_s: float | None = None
    _asking: Future[None] | None = None

    def concern(self, nodes: Mapping[Key, str], now_s: float) -> list[Key]:
        """Those of ``nodes`` that are being drained, as far as Ray has told.

        It is asked every few seconds, and not waited for: its control service may be gone.

        Args:
            nodes: ids of nodes, by whatever lives there.
            now_s: the present time.
        """
        due = self._asked_s is None or now_s - self._asked_s >= EVERY_S
        if due and (self._asking is None or self._asking.done()):
            self._asked_s = now_s
            self._asking = self.threads.submit("drain-notices", self._ask)
        return [key for key, node in nodes.items() if node in self._told.nodes]

    @property
    def regions(self) -> Mapping[str, float]:
        """When servers or bridges of regions will be gone, in unix s, as far as Ray has told."""
        return self._told.regions

    def _ask(self) -> None:
        try:
            until_ms = self.ask()
            where = self.where() if until_ms else {}
        except Exception as error:  # whatever it is: training goes on without notices
            log.warning("no notice of drains: %s", error)
            return
        until_s = {node: at_ms / 1e3 if at_ms else math.inf for node, at_ms in until_ms.items()}
        regions = {
            region: min(until_s[node] for node in nodes if node in until_s)
            for region, nodes in where.items()
            if any(node in until_s for node in nodes)
        }
        self._told = _Told(frozenset(until_ms), regions)
