"""A day of spot markets, played to the local cloud: prices, stock, machines taken back.

It follows the rules of the simulated cloud (`geo_ray/cloud/backtest/simulated_cloud.py`): who has
more machines of a pool than there are loses some, with a notice. And it keeps a bill of its own,
from what it sees of machines: neither the simulated cloud's nor the autoscaler's books.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from geo_ray.cloud.backtest.markets import MarketTrace
from geo_ray.cloud.local import LocalCatalog, LocalOffer, LocalProvider, write_catalog
from geo_ray.cloud.provider import Machine, MachineState, Market, Pool

_LOOK_S = 0.1


@dataclass
class PlayedMarket:
    """See the module; `with` plays it.

    Attributes:
        markets: by pool; the day begins at 0.
        root: directory of the cloud.
        catalog: of the cloud, without its offers.
        cluster: whose machines are taken.
        notice_s: before one is.
        began_unix_s: when the day began; until then it is as at its beginning.
        taken: machines that were.
        ended_unix_s: when machines were first seen to have ended.
    """

    markets: Mapping[Pool, MarketTrace]
    root: Path
    catalog: LocalCatalog
    cluster: str
    notice_s: float
    began_unix_s: float | None = None
    taken: set[str] = field(default_factory=set)
    ended_unix_s: dict[str, float] = field(default_factory=dict)
    _seen: dict[str, Machine] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> PlayedMarket:
        self._offer(0.0)
        self._thread = threading.Thread(target=self._play, name="market")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def day_s(self, unix_s: float) -> float:
        """Return how much of the day has passed."""
        return 0.0 if self.began_unix_s is None else max(0.0, unix_s - self.began_unix_s)

    def bill_usd(self, from_unix_s: float, until_unix_s: float) -> float:
        """Return what all machines have cost in a span, by the second."""
        total = 0.0
        for machine in self._seen.values():
            start_s = max(machine.launched_unix_s, from_unix_s)
            end_s = min(self.ended_unix_s.get(machine.id, until_unix_s), until_unix_s)
            if end_s > start_s:
                market = self.markets[machine.pool]
                total += market.usd_between(self.day_s(start_s), self.day_s(end_s))
        return total

    @property
    def launches(self) -> int:
        """How many machines there ever were."""
        return len(self._seen)

    # ------------------------------------------------------------------ parts

    def _play(self) -> None:
        cloud, before = LocalProvider(self.root), 0.0
        while not self._stop.wait(_LOOK_S):
            now_s = time.time()
            day_s = self.day_s(now_s)
            if any(_moves(market, before, day_s) for market in self.markets.values()):
                self._offer(day_s)
            before = day_s
            there: dict[Pool, list[Machine]] = {}
            for machine in cloud.list_machines(self.cluster):
                self._seen[machine.id] = machine
                if machine.state is MachineState.ENDED:
                    self.ended_unix_s.setdefault(machine.id, now_s)
                elif machine.pool.market is Market.SPOT:
                    there.setdefault(machine.pool, []).append(machine)
            for pool, machines in there.items():
                self._take_back(cloud, machines, self.markets[pool].available_at(day_s))

    def _take_back(self, cloud: LocalProvider, there: list[Machine], availability: int) -> None:
        free = [machine for machine in there if machine.id not in self.taken]
        excess = len(free) - availability
        for machine in sorted(free, key=lambda each: each.id)[: max(0, excess)]:
            self.taken.add(machine.id)
            cloud.preempt(machine.id, self.notice_s)

    def _offer(self, day_s: float) -> None:
        offers = tuple(
            LocalOffer(
                region=pool.region,
                zone=pool.zone,
                type=pool.type,
                market=pool.market,
                usd_per_hour=market.usd_at(day_s),
                capacity=market.available_at(day_s),
            )
            for pool, market in self.markets.items()
        )
        write_catalog(self.root, self.catalog.model_copy(update={"offers": offers}))


def _moves(market: MarketTrace, before_s: float, now_s: float) -> bool:
    return (market.usd_at(before_s), market.available_at(before_s)) != (
        market.usd_at(now_s),
        market.available_at(now_s),
    )
