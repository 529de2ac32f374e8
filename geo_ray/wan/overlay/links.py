"""What the coordinator knows of the links between bridges, from transfers that it saw.

Goodput is bytes over wall-clock seconds in which something was under way, smoothed over rounds and
forgotten when it is old. What is not known is taken for the median of what is: neither shunned nor
preferred.

Shape legend: N = regions; rows send, columns receive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

UNKNOWN_MBPS: Final = 1.0  # for every link alike while nothing is known: only ratios count
_BROKEN_MBPS: Final = 1e-3
_FAIR_SHARE: Final = 0.75  # a flow this near to its fastest neighbour was held back by the node


_MOST: Final = 0.75  # a flow with that part of a line's bytes was as good as alone there


@dataclass(frozen=True, slots=True)
class Flow:
    """What one bridge saw of its transfers to another in one phase of a round.

    Attributes:
        src: who sent.
        dst: who received.
        mbps: goodput in 10^6 bit/s.
        mbit: how much was sent, in 10^6 bit.
    """

    src: int
    dst: int
    mbps: float
    mbit: float = 1.0


class Links:
    """See the module's docstring.

    Args:
        num_regions: N.
        forget_rounds: what was measured more rounds ago counts no more.
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
        """Take what was measured before the run; it ages like everything else."""
        for (src, dst), value in mbps.items():
            self._set(src, dst, value)

    def advance(self, rnd: int) -> None:
        """Go on to round ``rnd`` and forget what is too old."""
        self._round = max(self._round, rnd)
        oldest = self._round - self._forget_rounds
        self._mbps_NN[self._measured_NN < oldest] = np.nan
        self._broken = {pair: at for pair, at in self._broken.items() if at >= oldest}

    def note(self, flows: Iterable[Flow]) -> None:
        """Take in the flows that shared one phase.

        A flow that was alone at both its ends, or clearly slower than others there, shows what its
        link can do. Any other shared its sender's or receiver's line: its link is taken for as fast
        as all flows there together, until something else is seen.
        """
        seen = [flow for flow in flows if flow.mbps > 0]
        for flow in seen:
            out = [other for other in seen if other.src == flow.src]
            into = [other for other in seen if other.dst == flow.dst]
            lines = [sum(f.mbps for f in beside) for beside in (out, into) if _shares(flow, beside)]
            known = self._mbps_NN[flow.src, flow.dst]
            if np.isnan(known):
                self._set(flow.src, flow.dst, min(lines, default=flow.mbps))
            elif not lines:
                smooth = self._smoothing
                self._set(flow.src, flow.dst, (1 - smooth) * known + smooth * flow.mbps)
            else:
                # At least this, at most that; what was known is as good as ever in between.
                self._set(
                    flow.src, flow.dst, min(max(known, flow.mbps), max(min(lines), flow.mbps))
                )
        self._note_lines(seen)

    def break_link(self, src: int, dst: int) -> None:
        """A transfer made no progress: avoid the link, in both directions, for some rounds."""
        self._broken[src, dst] = self._broken[dst, src] = self._round

    def is_broken(self, src: int, dst: int) -> bool:
        """Whether the link is to be avoided."""
        return (src, dst) in self._broken

    def is_known(self, src: int, dst: int) -> bool:
        """Whether the link was measured lately."""
        return not bool(np.isnan(self._mbps_NN[src, dst]))

    def mbps(self, src: int, dst: int) -> float:
        """What the link is taken for, in 10^6 bit/s."""
        return float(self.matrix()[src, dst])

    def age(self, src: int, dst: int) -> int:
        """Rounds since the link was measured; large if it never was."""
        return self._round - int(self._measured_NN[src, dst]) if self.is_known(src, dst) else 10**6

    def matrix(self) -> NDArray[np.float64]:
        """`mbps` of all links (N, N); the diagonal means nothing."""
        known = self._mbps_NN[~np.isnan(self._mbps_NN)]
        middle = median(known.tolist()) if known.size else UNKNOWN_MBPS
        filled_NN = np.where(np.isnan(self._mbps_NN), middle, self._mbps_NN)
        for src, dst in self._broken:
            filled_NN[src, dst] = _BROKEN_MBPS
        return filled_NN

    def up_mbps(self) -> NDArray[np.float64]:
        """What each region's uplink is taken for (N,): the most that left it at a time."""
        return self._at_least(self._up_N, axis=1)

    def down_mbps(self) -> NDArray[np.float64]:
        """What each region's downlink is taken for (N,): the most that entered it at a time."""
        return self._at_least(self._down_N, axis=0)

    def _note_lines(self, seen: list[Flow]) -> None:
        out_N, into_N = np.zeros(self.num_regions), np.zeros(self.num_regions)
        for flow in seen:
            out_N[flow.src] += flow.mbps
            into_N[flow.dst] += flow.mbps
        for line_N, total_N in ((self._up_N, out_N), (self._down_N, into_N)):
            weight_N = np.where(line_N > 0, self._smoothing, 1.0) * (total_N > 0)
            line_N += weight_N * (total_N - line_N)

    def _at_least(self, line_N: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        known_NN = np.where(np.isnan(self._mbps_NN), 0.0, self._mbps_NN)
        found_N = np.maximum(line_N, known_NN.max(axis=axis))
        return np.asarray(np.where(found_N > 0, found_N, self.matrix().max()))

    def _set(self, src: int, dst: int, mbps: float) -> None:
        self._mbps_NN[src, dst] = mbps
        self._measured_NN[src, dst] = self._round


def _shares(flow: Flow, beside: list[Flow]) -> bool:
    """Whether others at one of its ends held a flow back."""
    mostly_alone = flow.mbit >= _MOST * sum(other.mbit for other in beside)
    return not mostly_alone and flow.mbps >= _FAIR_SHARE * max(other.mbps for other in beside)
