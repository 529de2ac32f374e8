"""The run supervisor: an actor that owns processes, places and keys while drivers come and go.

One driver at a time, the one with the newest lease; calls of an earlier one are refused.
Without a heartbeat for `patience_s` it ends everything it owns. If it is killed, Ray ends the
same. Keys leave it only sealed for one process. `StewardLine` is its client. Source: ours.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayError

from geo_ray.base.errors import (
    GeoRayError,
    InvariantError,
    LeaseLostError,
    RegionLostError,
    RunHeldError,
)
from geo_ray.ray_cluster.calls import Handle, collect, kill
from geo_ray.ray_cluster.connect import head_answers
from geo_ray.ray_cluster.demand import RegionDemand
from geo_ray.ray_cluster.keys import BridgeKeys, Introduction, RunKeys
from geo_ray.ray_cluster.labels import in_region
from geo_ray.ray_cluster.placement import PlacedRegion, remove
from geo_ray.ray_cluster.ray_internals import actor_id
from geo_ray.runtime.launcher import Kept, OwnProcesses, ProcessOrder, RunBook
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.security.process_keys import SignedCertificate

log = logging.getLogger(__name__)

_TICK_S: Final = 0.5


class StewardActor:
    """Owns the processes, places and keys of a run while drivers come and go.

    Idea: Ray ends what a process has made when that process ends. So a run whose driver makes its
    processes ends with its driver. Here a small actor makes them, on the driver's order, and the
    next driver is told of them.

    Rules: one driver at a time, the one with the newest lease; calls of an earlier one are refused.
        If
    no driver is heard for `patience_s`, the steward ends all that it owns, and itself. If it is
    killed, Ray does: nothing is left either way. Keys never leave it, but sealed for one process.

    Source: ours.

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


_ANSWER_S: Final = 60.0
_END_S: Final = 15.0
_HEAR_EVERY_S: Final = 2.0


def steward_name(run: str) -> str:
    """The name of a run's steward among the actors of its namespace: there is at most one.

    Args:
        run: its directory or its address.
    """
    return f"steward-{hashlib.sha256(run.encode()).hexdigest()[:16]}"


class StewardLine:
    """A driver's connection to the supervisor of its run: finds or starts it, and sends heartbeats.

    It is a `ProcessMaker`, and has the methods of `RunKeys`.

    Args:
        steward: the actor.
        driver: epoch of this driver's lease.
    """

    def __init__(self, steward: Handle, driver: int) -> None:
        self._steward, self._driver = steward, driver
        self._over = threading.Event()
        self._hearing = threading.Thread(target=self._let_hear, name="steward", daemon=True)
        self._hearing.start()

    @classmethod
    def find(cls, name: str, namespace: str, driver: int) -> StewardLine | None:
        """The line to a run's living steward; None if it has none."""
        try:
            return cls(ray.get_actor(name, namespace=namespace), driver)
        except (ValueError, RayError):
            return None

    @classmethod
    def start(
        cls, name: str, namespace: str, driver: int, label: str, patience_s: float
    ) -> StewardLine:
        """Begin to start a run's steward; nothing is waited for.

        Args:
            name: of it.
            namespace: where the name counts.
            driver: epoch of this driver's lease.
            label: of the region whose loss would end the run's processes anyway: it lives there.
            patience_s: for how long no driver need be heard.

        Raises:
            RunHeldError: one that has ended keeps the name.
        """
        until_s = time.monotonic() + _END_S
        while True:
            try:
                made: Any = (
                    ray.remote(StewardActor)
                    .options(
                        name=name,
                        namespace=namespace,
                        lifetime="detached",
                        num_cpus=0,
                        max_restarts=0,
                        max_concurrency=16,
                        label_selector=in_region(label),
                    )
                    .remote(patience_s)
                )
                return cls(made, driver)
            except ValueError as error:  # the name is taken
                with suppress(ValueError):
                    kill(ray.get_actor(name, namespace=namespace))
                if time.monotonic() > until_s:
                    raise RunHeldError("the steward of the run before does not end") from error
                time.sleep(0.1)

    # ------------------------------------------------------------------ drivers

    def attach(self, wait_s: float = 0.0) -> Kept:
        """Come as the run's driver.

        Args:
            wait_s: for how long it may have no machine.

        Raises:
            RegionLostError: the steward has ended.
            LeaseLostError: another driver has come since.
        """
        kept: Kept = self._ask("attach", timeout_s=_ANSWER_S + wait_s)
        return kept

    def begin(self, run_id: str, regions: Sequence[str], transport: TransportConfig) -> None:
        """End whatever there is, and begin."""
        self._ask("begin", (run_id, tuple(regions), transport))

    def keep_only(self, handles: Sequence[Handle]) -> None:
        """End every process but these."""
        self._ask("keep_only", list(handles))

    def clear(self) -> None:
        """End all processes and give all places back."""
        self._ask("clear")

    def end(self) -> None:
        """End all that it owns, and the steward itself; never raises."""
        self.leave()
        try:
            self._ask("end", timeout_s=_END_S)
        except GeoRayError:
            return  # it has ended, or is another's

    def leave(self) -> None:
        """Send no more heartbeats."""
        self._over.set()
        self._hearing.join()

    # ------------------------------------------------------------------ processes and keys

    def make(self, orders: Sequence[ProcessOrder]) -> list[Handle]:
        """See `ProcessMaker.make`."""
        made: list[Handle] = self._ask("make", list(orders))
        return made

    def place(self, demands: Sequence[RegionDemand], timeout_s: float) -> dict[str, PlacedRegion]:
        """See `ProcessMaker.place`."""
        placed: dict[str, PlacedRegion] = self._ask(
            "place", list(demands), timeout_s, timeout_s=timeout_s + _ANSWER_S
        )
        return placed

    def remove(self, placed: Mapping[str, PlacedRegion]) -> None:
        """See `ProcessMaker.remove`; if the steward has ended, so have they."""
        with suppress(RegionLostError, LeaseLostError):
            self._ask("remove", dict(placed))

    def is_ours(self) -> bool:
        """See `ProcessMaker.is_ours`; if the steward has ended, they have."""
        try:
            return self.lives()
        except LeaseLostError:
            return False

    def lives(self) -> bool:
        """Whether the steward is there.

        Raises:
            LeaseLostError: another driver commands it by now.
        """
        try:
            self._ask("hear")
        except RegionLostError:
            return False
        return True

    def note(self, book: RunBook) -> None:
        """See `ProcessMaker.note`; nothing is waited for."""
        self._steward.note.remote(self._driver, book)

    def for_bridge(self, region: str, introduction: Introduction) -> BridgeKeys:
        """See `RunKeys.for_bridge`."""
        keys: BridgeKeys = self._ask("for_bridge", region, introduction)
        return keys

    def for_server(self, region: str, introduction: Introduction) -> bytes:
        """See `RunKeys.for_server`."""
        key: bytes = self._ask("for_server", region, introduction)
        return key

    def sign(self, region: str, request_pem: bytes) -> SignedCertificate | None:
        """See `RunKeys.sign`."""
        signed: SignedCertificate | None = self._ask("sign", region, request_pem)
        return signed

    # ------------------------------------------------------------------ inside

    def _ask(self, method: str, *arguments: Any, timeout_s: float = _ANSWER_S) -> Any:
        call = getattr(self._steward, method).remote(self._driver, *arguments)
        return collect({"steward": call}, timeout_s)["steward"]

    def _let_hear(self) -> None:
        while not self._over.wait(_HEAR_EVERY_S):
            with suppress(Exception):  # it is gone, or another's: who asks it next is told
                self._steward.hear.remote(self._driver)


def steward_of(run_dir: Path, address: str | None) -> str:
    """The name of the steward of a run."""
    return steward_name(address or str(run_dir.resolve()))
