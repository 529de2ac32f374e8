"""Holds the lease of a run for this process: renews it, and refuses to write once it is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from geo_ray.clock import Clock
from geo_ray.errors import GeoRayError, LeaseLostError
from geo_ray.lease.holding import Holding
from geo_ray.lease.record import LEASE_KEY, LeaseRecord, decode_record, encode_record
from geo_ray.lease.store import ConditionalStore
from geo_ray.util.rate_limited_log import RateLimitedLog

_RENEWALS: Final = 5  # within a life
_log = logging.getLogger(__name__)


class LeaseKeeper:
    """The lease while this process holds it. Made by `LeaseSeeker`; any thread may call it.

    Args:
        store: where the lease lies.
        name: of the run, for messages.
        holding: what was written.
        tag: of what was written.
        clock: by which it counts.
        from_unknown: whether the holder before may still be there, unheard.
    """

    def __init__(
        self,
        store: ConditionalStore,
        name: str,
        holding: Holding,
        tag: str,
        clock: Clock,
        *,
        from_unknown: bool = False,
    ) -> None:
        self._store, self._name = store, name
        self._holding, self._tag = holding, tag
        self._clock = clock
        self.from_unknown = from_unknown
        self._doing = ""
        self._by = ""
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._renewer = threading.Thread(target=self._renew_often, name="lease", daemon=True)

    @property
    def epoch(self) -> int:
        """The how manieth holder of the run's lease this is."""
        return self._holding.record.epoch

    def start(self) -> None:
        """Renew the lease from now on, on a thread of its own."""
        self._renewer.start()

    def note(self, doing: str) -> None:
        """Say what is being done; it stands in the lease from the next renewal on."""
        self._doing = doing

    def check(self) -> None:
        """Return if nobody else can have the lease now; costs nothing as a rule.

        After a pause the lease is renewed first, which is refused if somebody has taken it.

        Raises:
            LeaseLostError: somebody has.
            RunDirectoryError: that cannot be found out.
        """
        if not self.may_write():
            self.renew()

    def check_known(self) -> None:
        """Return unless it is known that somebody else has the lease; asks nobody.

        For what is written where only this process reads it, while the store may be out of reach.

        Raises:
            LeaseLostError: somebody has.
        """
        if self._holding.is_lost:
            raise self._lost()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """For a small write that must not be late: nobody takes the lease while the block runs.

        Raises:
            LeaseLostError: somebody has taken it; the block is not run.
            RunDirectoryError: that cannot be found out.
        """
        with self._lock:
            self.check()
            with self._store.unchanged(LEASE_KEY, self._tag) as is_held:
                if is_held:
                    yield
                    return
            self._find_again()  # an earlier write may have arrived late
            with self._store.unchanged(LEASE_KEY, self._tag) as is_held:
                if not is_held:
                    raise self._lost()
                yield

    def may_write(self) -> bool:
        """Whether nobody else can have the lease now; looks at the own clock only."""
        return self._holding.may_write(self._clock.now_s())

    def renew(self) -> None:
        """Renew the lease.

        Raises:
            LeaseLostError: somebody else has it.
            RunDirectoryError: it cannot be written.
        """
        self._put(released=False)

    def close(self) -> None:
        """Give the lease back, so that the next process need not wait; never raises."""
        self._ended.set()
        if self._renewer.is_alive():
            self._renewer.join()
        if self._holding.is_lost:
            return
        try:
            self._put(released=True)
        except GeoRayError as error:
            _log.warning("the lease of %s runs out by itself: %s", self._name, error.message)

    def _put(self, *, released: bool) -> None:
        with self._lock:
            if self._holding.is_lost:
                raise self._lost()
            for _ in range(2):
                began_s = self._clock.now_s()
                record = self._holding.next(self._doing, released=released)
                tag = self._store.write(LEASE_KEY, encode_record(record), self._tag)
                if tag is not None:
                    self._tag = tag
                    self._holding.renewed(record, began_s)
                    return
                self._find_again()
            raise self._lost()

    def _find_again(self) -> None:
        found = self._store.read(LEASE_KEY)
        if found is None:
            raise self._lost()
        record = decode_record(found.data)
        if not self._holding.found(record):
            raise self._lost(record)
        self._tag = found.tag

    def _lost(self, record: LeaseRecord | None = None) -> LeaseLostError:
        self._holding.is_lost = True
        if record is not None:
            self._by = f" by {record.owner.text}, as holder {record.epoch}"
        return LeaseLostError(
            f"{self._name} was taken over{self._by}; this process was holder {self.epoch} and "
            "writes nothing to the run any more"
        )

    def _renew_often(self) -> None:
        told = RateLimitedLog(_log, 10.0)
        while not self._ended.wait(self._holding.record.lives_s / _RENEWALS):
            try:
                self.renew()
            except LeaseLostError:
                return  # who writes next is told
            except GeoRayError as error:
                told.warning("renew", f"{self._name}: its lease is not renewed: {error.message}")
