"""Updates that take turns on their way to the averager, on the virtual clock.

The runtime's scheduler, driven by the simulator: asks and grants take one delay of the link each.
Sums at helper regions are not simulated; their updates go by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from geo_ray.sim.network import Network
from geo_ray.sim.scheduler import Scheduler
from geo_ray.strategies.base import Update
from geo_ray.transfers.config import TransfersConfig
from geo_ray.transfers.requests import Decision, Drop, Grant, Take, UploadRequest
from geo_ray.transfers.scheduler import TransferScheduler


class SimTurns:
    """Senders and the averager's desk at once.

    Args:
        config: how transfers take turns.
        averager_region: the averager's region.
        scheduler: virtual time.
        network: says how far away regions are.
        ship: sends an update of a region; it is handed to `arrived` when it is there.
        version: commits of the averager so far.
        take: lets the averager take in an update.
        skip: lets it answer one without taking it in: region, epoch, number.
    """

    def __init__(
        self,
        config: TransfersConfig,
        averager_region: str,
        scheduler: Scheduler,
        network: Network,
        ship: Callable[[str, Update], object],
        version: Callable[[], int],
        take: Callable[[Update], None],
        skip: Callable[[str, int, int], None],
    ) -> None:
        self._config = config
        self._averager_region = averager_region
        self._time = scheduler
        self._network = network
        self._ship = ship
        self._version = version
        self._take = take
        self._skip = skip
        self._line = TransferScheduler(config)
        self._updates: dict[str, Update] = {}  # open ones by region
        self._closed: set[str] = set()  # regions that must wait for a grant
        self._wakes_s = math.inf

    def send(self, name: str, update: Update) -> None:
        """A region has an update."""
        self._updates[name] = update
        if name == self._averager_region:
            self.arrived(update)
            return
        ask = self._ask_of(update)
        there_s = self._network.delay_s(name, self._averager_region)
        back_s = self._network.delay_s(self._averager_region, name)
        self._line.rates.latency_s[name] = there_s + back_s
        if name not in self._closed or update.size_bytes <= self._config.small_bytes:
            self._line.began(self._time.now_s + there_s, ask)
            self._ship(name, update)
        else:
            self._time.after(there_s, lambda: self._decide(self._asked(ask)))

    def arrived(self, update: Update) -> None:
        """An update is at the averager."""
        now_s, version = self._time.now_s, self._version()
        self._decide(self._line.arrived(now_s, version, self._ask_of(update)))

    def _asked(self, ask: UploadRequest) -> list[Decision]:
        return self._line.ask(self._time.now_s, self._version(), ask)

    @staticmethod
    def _ask_of(update: Update) -> UploadRequest:
        norm = float(update.payload_P.norm()) if update.coded is None else 0.0
        return UploadRequest(
            update.region,
            update.epoch,
            update.seq,
            update.size_bytes,
            update.base_version,
            norm,
            update.final,
        )

    def _decide(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Take(ask):
                    self._take(self._updates[ask.region])
                    self._note_gate(ask.region)
                case Drop(ask):
                    self._skip(ask.region, ask.epoch, ask.seq)
                    self._note_gate(ask.region)
                case Grant(ask):
                    back_s = self._network.delay_s(self._averager_region, ask.region)
                    self._time.after(back_s, partial(self._granted, ask.region))
        self._wake()

    def _granted(self, name: str) -> None:
        self._ship(name, self._updates[name])

    def _note_gate(self, name: str) -> None:
        (self._closed.discard if self._line.is_quiet else self._closed.add)(name)

    def _wake(self) -> None:
        deadline_s = self._line.next_deadline_s()
        if deadline_s is None or deadline_s >= self._wakes_s:
            return
        self._wakes_s = deadline_s

        def tick() -> None:
            if self._wakes_s == deadline_s:
                self._wakes_s = math.inf
                self._decide(self._line.tick(self._time.now_s, self._version()))

        self._time.idly_at(deadline_s, tick)
