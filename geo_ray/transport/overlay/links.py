"""The coordinator's knowledge of links between bridges, from the transfers of rounds.

Goodput is bytes over the wall-clock seconds in which something was in flight, smoothed over rounds
and dropped when it is old. An unknown link is assumed to be as fast as the median of known ones, so
it is neither avoided nor preferred.

Shape legend: N = regions; rows send, columns receive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

UNKNOWN_MBPS: Final = 1.0  # the same for every link while none is known: only ratios count
_BROKEN_MBPS: Final = 1e-3
_FAIR_SHARE: Final = 0.75  # a flow this near to its fastest neighbour was held back by the node


_MOST: Final = 0.75  # a flow with that part of a line's bytes was as good as alone there


@dataclass(frozen=True, slots=True)
class LinkFlow:
    """Measurements of one bridge's transfers to another in one phase of a round.

    Attributes:
        src: sending region.
        dst: receiving region.
        mbit: how much was sent, in 10^6 bit.
        busy_s: for how long something was in flight.
        starved: there was often nothing to send.
        ended_s: its end by any clock; flows of one phase that did not overlap in time shared no
            line.
    """

    src: int
    dst: int
    mbit: float
    busy_s: float = 1.0
    starved: bool = False
    ended_s: float = 0.0

    @property
    def mbps(self) -> float:
        """Goodput in 10^6 bit/s."""
        return self.mbit / self.busy_s

    def __add__(self, other: LinkFlow) -> LinkFlow:
        mbit, busy_s = self.mbit + other.mbit, self.busy_s + other.busy_s
        starved, ended_s = self.starved or other.starved, max(self.ended_s, other.ended_s)
        return LinkFlow(self.src, self.dst, mbit, busy_s, starved, ended_s)

    def meets(self, other: LinkFlow) -> bool:
        """Return whether another flow was active during at least half of this one."""
        began_s = max(self.ended_s - self.busy_s, other.ended_s - other.busy_s)
        return min(self.ended_s, other.ended_s) - began_s >= self.busy_s / 2


class Links:
    """See the module's docstring.

    Args:
        num_regions: N.
        forget_rounds: older measurements expire.
        smoothing: weight of a new measurement.
    """

    def __init__(self, num_regions: int, forget_rounds: int = 5, smoothing: float = 0.5) -> None:
        self.num_regions = num_regions
        self.down: set[int] = set()
        self._up_N = np.zeros(num_regions)
        self._down_N = np.zeros(num_regions)
        self._forget_rounds = forget_rounds
        self._smoothing = smoothing
        self._round = 0
        self._mbps_NN = np.full((num_regions, num_regions), np.nan)
        self._measured_NN = np.zeros((num_regions, num_regions), dtype=np.int64)
        self._broken: dict[tuple[int, int], int] = {}

    def seed(self, mbps: Mapping[tuple[int, int], float]) -> None:
        """Add measurements from before the run; they age like others."""
        for (src, dst), value in mbps.items():
            self._set(src, dst, value)

    def advance(self, rnd: int) -> None:
        """Advance to round ``rnd`` and drop expired measurements."""
        self._round = max(self._round, rnd)
        oldest = self._round - self._forget_rounds
        self._mbps_NN[self._measured_NN < oldest] = np.nan
        self._broken = {pair: at for pair, at in self._broken.items() if at >= oldest}

    def note(self, flows: Iterable[LinkFlow]) -> None:
        """Record the flows of one phase.

        A flow that was alone at both its ends, or clearly slower than others there, shows the rate
        of its link. Any other flow shared its sender's or receiver's line: its link carries at
        least as much, and at most as much as all flows there together, which is assumed until
        another measurement. A starved flow gives only a lower bound.
        """
        seen = [flow for flow in flows if flow.mbps > 0]
        up_N, down_N = np.zeros(self.num_regions), np.zeros(self.num_regions)
        for flow in seen:
            beside = [other for other in seen if flow.meets(other)]
            out = [other for other in beside if other.src == flow.src]
            into = [other for other in beside if other.dst == flow.dst]
            up_N[flow.src] = max(up_N[flow.src], sum(f.mbps for f in out))
            down_N[flow.dst] = max(down_N[flow.dst], sum(f.mbps for f in into))
            lines = [sum(f.mbps for f in end) for end in (out, into) if _shares(flow, end)]
            known, least = self._mbps_NN[flow.src, flow.dst], flow.mbps
            if flow.starved:
                if least >= (self._middle() if np.isnan(known) else known):
                    self._set(flow.src, flow.dst, least)
            elif np.isnan(known):
                self._set(flow.src, flow.dst, min(lines, default=least))
            elif not lines:
                smooth = self._smoothing
                self._set(flow.src, flow.dst, (1 - smooth) * known + smooth * least)
            else:
                most = max(least, *lines)
                self._set(flow.src, flow.dst, min(max(known, least), most))
        for line_N, seen_N in ((self._up_N, up_N), (self._down_N, down_N)):
            weight_N = np.where(line_N > 0, self._smoothing, 1.0) * (seen_N > 0)
            line_N += weight_N * (seen_N - line_N)

    def break_link(self, src: int, dst: int) -> None:
        """Avoid a link without progress, in both directions, for some rounds.

        If no path remains between reachable regions, some link was only slow: the link avoided
        first is tried again, until there is a path.
        """
        for pair in ((src, dst), (dst, src)):
            self._broken.pop(pair, None)
            self._broken[pair] = self._round  # the last one now
        while not self._is_connected():
            oldest = next(iter(self._broken))
            if oldest in ((src, dst), (dst, src)):
                return
            del self._broken[oldest], self._broken[oldest[::-1]]

    def is_broken(self, src: int, dst: int) -> bool:
        """Return whether the link should be avoided."""
        return (src, dst) in self._broken

    def _is_connected(self) -> bool:
        outside = set(range(self.num_regions)) - self.down
        reached = [outside.pop()] if outside else []
        for node in reached:  # grows while it is walked
            beside = {other for other in outside if not self.is_broken(node, other)}
            outside -= beside
            reached += beside
        return not outside

    def is_known(self, src: int, dst: int) -> bool:
        """Return whether the link was measured recently."""
        return not bool(np.isnan(self._mbps_NN[src, dst]))

    def mbps(self, src: int, dst: int) -> float:
        """Return the rate assumed for the link, in 10^6 bit/s."""
        return float(self.matrix()[src, dst])

    def age(self, src: int, dst: int) -> int:
        """Return the rounds since the link was measured; large if it never was."""
        return self._round - int(self._measured_NN[src, dst]) if self.is_known(src, dst) else 10**6

    def matrix(self) -> NDArray[np.float64]:
        """Return `mbps` of all links (N, N); the diagonal has no meaning."""
        filled_NN = np.where(np.isnan(self._mbps_NN), self._middle(), self._mbps_NN)
        for src, dst in self._broken:
            filled_NN[src, dst] = _BROKEN_MBPS
        return filled_NN

    def _middle(self) -> float:
        known = self._mbps_NN[~np.isnan(self._mbps_NN)]
        return median(known.tolist()) if known.size else UNKNOWN_MBPS

    def up_mbps(self) -> NDArray[np.float64]:
        """Return each region's assumed uplink rate (N,): the most that left it at a time."""
        return self._at_least(self._up_N, axis=1)

    def down_mbps(self) -> NDArray[np.float64]:
        """Return each region's assumed downlink rate (N,): the most that entered it at a time."""
        return self._at_least(self._down_N, axis=0)

    def _at_least(self, line_N: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        known_NN = np.where(np.isnan(self._mbps_NN), 0.0, self._mbps_NN)
        found_N = np.maximum(line_N, known_NN.max(axis=axis))
        return np.asarray(np.where(found_N > 0, found_N, self.matrix().max()))

    def _set(self, src: int, dst: int, mbps: float) -> None:
        self._mbps_NN[src, dst] = mbps
        self._measured_NN[src, dst] = self._round


def _shares(flow: LinkFlow, beside: list[LinkFlow]) -> bool:
    """Return whether other flows at one of its ends slowed down a flow."""
    mostly_alone = flow.mbit >= _MOST * sum(other.mbit for other in beside)
    return not mostly_alone and flow.mbps >= _FAIR_SHARE * max(other.mbps for other in beside)
