"""A driver's line to the steward of its run: finds or starts it, and lets it hear that it lives."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayError

from geo_ray.errors import GeoRayError, LeaseLostError, RegionLostError, RunHeldError
from geo_ray.runtime.actors.introduction import BridgeKeys, Introduction
from geo_ray.runtime.cluster.demand import RegionDemand
from geo_ray.runtime.cluster.labels import in_region
from geo_ray.runtime.cluster.placement import PlacedRegion
from geo_ray.runtime.control.calls import Handle, collect, kill
from geo_ray.runtime.steward.book import Kept, RunBook
from geo_ray.runtime.steward.processes import ProcessOrder
from geo_ray.runtime.steward.steward_actor import StewardActor
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.security.own_certificate import SignedCertificate

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
    """See the module's docstring. It is a `ProcessMaker`, and has the methods of `RunKeys`.

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
