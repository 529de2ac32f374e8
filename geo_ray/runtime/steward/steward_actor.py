"""Owns the processes, places and keys of a run while drivers come and go.

Idea: Ray ends what a process has made when that process ends. So a run whose driver makes its
processes ends with its driver. Here a small actor makes them, on the driver's order, and the next
driver is told of them.

Rules: one driver at a time, the one with the newest lease; calls of an earlier one are refused. If
no driver is heard for `patience_s`, the steward ends all that it owns, and itself. If it is killed,
Ray does: nothing is left either way. Keys never leave it, but sealed for one process.

Source: ours.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from geo_ray.errors import InvariantError, LeaseLostError
from geo_ray.runtime.actors.introduction import BridgeKeys, Introduction
from geo_ray.runtime.cluster.demand import RegionDemand
from geo_ray.runtime.cluster.head_watch import head_answers
from geo_ray.runtime.cluster.placement import PlacedRegion, remove
from geo_ray.runtime.cluster.ray_private import actor_id
from geo_ray.runtime.control.calls import Handle, kill
from geo_ray.runtime.control.run_keys import RunKeys
from geo_ray.runtime.steward.book import Kept, RunBook
from geo_ray.runtime.steward.processes import OwnProcesses, ProcessOrder
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.security.own_certificate import SignedCertificate

log = logging.getLogger(__name__)

_TICK_S: Final = 0.5


class StewardActor:
    """See the module's docstring.

    Args:
        patience_s: for how long no driver need be heard.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._heard_s = time.monotonic()
        self._driver = 0
        self._lock = threading.Lock()
        self._processes = OwnProcesses()
        self._made: dict[str, Handle] = {}  # by actor id
        self._placed: dict[str, PlacedRegion] = {}
        self._keys: RunKeys | None = None
        self._book: RunBook | None = None
        self._epochs: dict[tuple[str, int], int] = {}
        self._newest_epoch = 0
        threading.Thread(target=self._keep_watch, name="watch", daemon=True).start()

    # ------------------------------------------------------------------ drivers

    def attach(self, driver: int) -> Kept:
        """A driver comes; those before it are refused from now on.

        Args:
            driver: epoch of its lease.
        """
        with self._lock:
            self._check(driver)
            self._driver = driver
            return Kept(self._book, dict(self._epochs), self._newest_epoch)

    def hear(self, driver: int) -> None:
        """The driver lives."""
        self._check(driver)

    def begin(self, driver: int, run: tuple[str, Sequence[str], TransportConfig]) -> None:
        """End whatever there is and make keys for a run that begins.

        Args:
            driver: epoch of its lease.
            run: its id, its regions, and whether bridges need certificates.
        """
        self._check(driver)
        self.clear(driver)
        self._keys = RunKeys(*run)

    def note(self, driver: int, book: RunBook) -> None:
        """Keep what the driver knows."""
        self._check(driver)
        self._book = book

    def keep_only(self, driver: int, handles: Sequence[Handle]) -> None:
        """End every process but these: a driver that is gone had not finished with them."""
        self._check(driver)
        wanted = {actor_id(handle) for handle in handles}
        with self._lock:
            others = {key: each for key, each in self._made.items() if key not in wanted}
            self._made = {key: each for key, each in self._made.items() if key in wanted}
        if others and not head_answers():  # if it comes back, it ends what has no owner
            log.warning("%d processes of the run are not ended: no Ray head answers", len(others))
            return
        for handle in others.values():
            kill(handle)

    def clear(self, driver: int) -> None:
        """End all processes and give all places back."""
        self._check(driver)
        self.keep_only(driver, ())
        placed, self._placed, self._book = self._placed, {}, None
        self._remove(placed.values())

    def end(self, driver: int) -> None:
        """End all, and this process."""
        self.clear(driver)
        threading.Timer(0.2, os._exit, (0,)).start()  # after the answer

    # ------------------------------------------------------------------ what it owns

    def make(self, driver: int, orders: Sequence[ProcessOrder]) -> list[Handle]:
        """See `ProcessMaker.make`."""
        self._check(driver)
        made = self._processes.make(orders)
        with self._lock:
            self._made |= {actor_id(handle): handle for handle in made}
            for order in orders:
                self._newest_epoch = max(self._newest_epoch, order.epoch)
                if order.place is not None:
                    newest = max(self._epochs.get(order.place, 0), order.epoch)
                    self._epochs[order.place] = newest
        return made

    def place(
        self, driver: int, demands: Sequence[RegionDemand], timeout_s: float
    ) -> dict[str, PlacedRegion]:
        """See `ProcessMaker.place`."""
        self._check(driver)
        placed = self._processes.place(demands, timeout_s)
        self._placed |= placed
        return placed

    def remove(self, driver: int, placed: Mapping[str, PlacedRegion]) -> None:
        """See `ProcessMaker.remove`."""
        self._check(driver)
        self._remove(placed.values())
        self._placed = {name: each for name, each in self._placed.items() if name not in placed}

    def for_bridge(self, driver: int, region: str, introduction: Introduction) -> BridgeKeys:
        """See `RunKeys.for_bridge`."""
        self._check(driver)
        return self._held_keys.for_bridge(region, introduction)

    def for_server(self, driver: int, region: str, introduction: Introduction) -> bytes:
        """See `RunKeys.for_server`."""
        self._check(driver)
        return self._held_keys.for_server(region, introduction)

    def sign(self, driver: int, region: str, request_pem: bytes) -> SignedCertificate | None:
        """See `RunKeys.sign`."""
        self._check(driver)
        return self._held_keys.sign(region, request_pem)

    @property
    def _held_keys(self) -> RunKeys:
        if self._keys is None:
            raise InvariantError("the steward was asked for keys before a run began")
        return self._keys

    # ------------------------------------------------------------------ inside

    def _check(self, driver: int) -> None:
        if driver < self._driver:
            raise LeaseLostError(
                f"the run was taken over by holder {self._driver} of its lease; this process was "
                f"holder {driver}"
            )
        self._heard_s = time.monotonic()

    def _remove(self, placed: Iterable[PlacedRegion]) -> None:
        remove({each.region: each for each in placed})

    def _keep_watch(self) -> None:
        while time.monotonic() - self._heard_s < self._patience_s:
            time.sleep(_TICK_S)
        try:
            self.clear(self._driver)
        finally:
            os._exit(0)  # what could not be ended is this process's, and ends with it
