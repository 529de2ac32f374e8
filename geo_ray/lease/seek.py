"""Watches the lease of a run until it is to be had, and takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from geo_ray.clock import BootClock, Clock
from geo_ray.errors import RunHeldError
from geo_ray.lease.claim import Claim, Refused, Taking, Waiting
from geo_ray.lease.holding import Holding
from geo_ray.lease.keeper import LeaseKeeper
from geo_ray.lease.process import has_ended, this_process
from geo_ray.lease.record import LEASE_KEY, LeaseRecord, decode_record, encode_record
from geo_ray.lease.store import ConditionalStore, StoredValue

LIVES_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.25


class LeaseSeeker:
    """One process that wants the lease of one run.

    Args:
        store: where the lease lies.
        name: of the run, for messages.
        tell: told why it waits.
        lives_s: for how long a renewal of its own is to count.
        clock: by which it judges; a `BootClock` if None, so that a lease also runs out while the
            machine is suspended.
    """

    def __init__(
        self,
        store: ConditionalStore,
        name: str,
        tell: Callable[[str], None],
        *,
        lives_s: float = LIVES_S,
        clock: Clock | None = None,
    ) -> None:
        self._store, self._name, self._tell = store, name, tell
        self._clock = clock or BootClock()
        self.claim = Claim(this_process(), lives_s)
        self._has_told = False

    def wait(self) -> None:
        """Return when the lease is to be had; writes nothing.

        Waits for the time that a lease lives if its holder may be alive and is not heard.

        Raises:
            RunHeldError: another process drives the run.
            RunDirectoryError: the lease cannot be read.
        """
        while isinstance(decision := self._see()[0], Waiting):
            self._wait_for(decision)

    def take(self) -> LeaseKeeper:
        """Take the lease, and keep it until `LeaseKeeper.close`; waits as `wait` does.

        Raises:
            RunHeldError: another process drives the run.
            RunDirectoryError: the lease cannot be read or written.
        """
        while isinstance(found := self.look(), Waiting):
            self._wait_for(found)
        found.start()
        return found

    def look(self) -> LeaseKeeper | Waiting:
        """Look at the lease once, and take it if it is to be had.

        Returns:
            The lease, which nobody renews yet; or what to wait for.

        Raises:
            RunHeldError, RunDirectoryError: as for `take`.
        """
        while True:
            decision, found, now_s = self._see()
            if isinstance(decision, Waiting):
                return decision
            mine = decision.record
            expected = None if found is None else found.tag
            tag = self._store.write(LEASE_KEY, encode_record(mine), expected)
            if tag is not None:
                return LeaseKeeper(
                    self._store,
                    self._name,
                    Holding.taken(mine, now_s),
                    tag,
                    self._clock,
                    from_unknown=decision.from_unknown,
                )
            # Somebody was quicker.

    def _see(self) -> tuple[Taking | Waiting, StoredValue | None, float]:
        found = self._store.read(LEASE_KEY)
        record = None if found is None else decode_record(found.data)
        gone = record is not None and bool(has_ended(record.owner))
        now_s = self._clock.now_s()
        decision = self.claim.see(record, now_s, has_ended=gone)
        if isinstance(decision, Refused):
            raise _held(self._name, decision.record)
        return decision, found, now_s

    def _wait_for(self, what: Waiting) -> None:
        if not self._has_told:
            self._has_told = True
            self._tell(
                f"{self._name} is driven by {what.record.owner.text}: looking for up to "
                f"{what.left_s:.0f} s whether that lives"
            )
        self._clock.sleep_s(min(what.left_s, _LOOK_EVERY_S))


def _held(name: str, record: LeaseRecord) -> RunHeldError:
    owner = record.owner
    return RunHeldError(
        f"{name} is being driven: {owner.text}",
        fix=f"See how it stands with `geo-ray status {name}`. To go on with it from here, stop it "
        f"first: `geo-ray stop {name}`.",
    )
