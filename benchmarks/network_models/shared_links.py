"""Transfers that share the links of their ends, on the virtual clock.

`geo_ray.transport.emulation` gives every pair of regions a link of its own. Here a
region has an uplink and a downlink that all its transfers share, each getting its max-min fair
part, as long-lived TCP streams about do. Bytes flow as a fluid; propagation is added at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from geo_ray.simulator.clock import Scheduler

_NOTHING = 1e-9


@dataclass(slots=True, eq=False)
class _Flow:
    src: str
    dst: str
    left_mbit: float
    done: Callable[[], None]
    rate_mbps: float = 0.0


class Flows:
    """Starts transfers and calls back when they have arrived.

    Args:
        scheduler: virtual time.
        up_mbps: uplinks by region.
        down_mbps: downlinks by region.
        delay_s: one way between any two regions.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        up_mbps: Mapping[str, float],
        down_mbps: Mapping[str, float],
        delay_s: float = 0.0,
    ) -> None:
        self._scheduler = scheduler
        self._limits = {("up", r): v for r, v in up_mbps.items()}
        self._limits |= {("down", r): v for r, v in down_mbps.items()}
        self._delay_s = delay_s
        self._flows: list[_Flow] = []
        self._moved_s = 0.0
        self._plan = 0
        self.carried_mbit: dict[tuple[str, str], float] = {}

    def send(self, src: str, dst: str, size_bytes: float, done: Callable[[], None]) -> None:
        """Transfer ``size_bytes``; ``done`` is called when the last one is there."""
        self._move()
        mbit = size_bytes * 8e-6
        self.carried_mbit[src, dst] = self.carried_mbit.get((src, dst), 0.0) + mbit
        self._flows.append(_Flow(src, dst, mbit, done))
        self._share()

    def after(self, callback: Callable[[], None]) -> None:
        """Deliver something that has no size to speak of."""
        self._scheduler.after(self._delay_s, callback)

    def _move(self) -> None:
        passed_s = self._scheduler.now_s - self._moved_s
        self._moved_s = self._scheduler.now_s
        for flow in self._flows:
            flow.left_mbit -= flow.rate_mbps * passed_s
        finished = [f for f in self._flows if f.left_mbit <= _NOTHING]
        self._flows = [f for f in self._flows if f.left_mbit > _NOTHING]
        for flow in finished:
            self._scheduler.after(self._delay_s, flow.done)

    def _share(self) -> None:
        """Max-min fair rates by filling links up together; then wait for the next end."""
        left, open_flows = dict(self._limits), list(self._flows)
        while open_flows:
            users: dict[tuple[str, str], int] = {}
            for flow in open_flows:
                for link in (("up", flow.src), ("down", flow.dst)):
                    users[link] = users.get(link, 0) + 1
            tightest = min(users, key=lambda link: (left[link] / users[link], link))
            rate_mbps = max(_NOTHING, left[tightest] / users[tightest])
            for flow in [f for f in open_flows if tightest in (("up", f.src), ("down", f.dst))]:
                flow.rate_mbps = rate_mbps
                left["up", flow.src] -= rate_mbps
                left["down", flow.dst] -= rate_mbps
                open_flows.remove(flow)
        self._plan += 1
        plan = self._plan
        ends_s = [f.left_mbit / f.rate_mbps for f in self._flows]
        if ends_s:
            self._scheduler.after(min(ends_s), lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan == self._plan:
            self._move()
            self._share()
