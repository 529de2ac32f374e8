"""When a process may take a lease that another one has held. Pure.

Clocks of two machines are never compared. Who wants a lease watches it, and judges by its own clock
how long nothing has changed; who holds one judges by its own clock how long ago it last renewed it.
So only the rates of two clocks matter, and `PATIENCE` has room for rates that differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from geo_ray.lease.record import LeaseRecord, Owner

PATIENCE = 1.25
"""How many times its life a lease must stand unchanged before somebody else takes it."""


@dataclass(frozen=True, slots=True)
class Taking:
    """The lease is to be had.

    Attributes:
        record: to be written in its place, if it still is as it was seen.
        from_unknown: whether the holder before may still be there, unheard.
    """

    record: LeaseRecord
    from_unknown: bool


@dataclass(frozen=True, slots=True)
class Waiting:
    """It is not known yet whether the holder lives.

    Attributes:
        record: the lease as it stands.
        left_s: seconds until it is to be had, if nothing changes.
    """

    record: LeaseRecord
    left_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The holder lives.

    Attributes:
        record: the lease as it stands.
    """

    record: LeaseRecord


@dataclass(slots=True)
class Claim:
    """One process that wants the lease.

    Attributes:
        owner: the process.
        lives_s: for how long its own renewals are to count.
    """

    owner: Owner
    lives_s: float
    _first: LeaseRecord | None = field(default=None)
    _since_s: float = 0.0

    def see(
        self, record: LeaseRecord | None, now_s: float, *, has_ended: bool
    ) -> Taking | Waiting | Refused:
        """Judge what was just read.

        Args:
            record: the lease; None if there is none yet.
            now_s: of the own clock, read after ``record`` was.
            has_ended: whether the holder's process is known not to be there any more.
        """
        if record is None:
            return Taking(self._after(0), from_unknown=False)
        if record.released or has_ended:
            return Taking(self._after(record.epoch), from_unknown=False)
        if self._first is None:
            self._first, self._since_s = record, now_s
        if record != self._first:
            return Refused(record)
        left_s = self._since_s + PATIENCE * record.lives_s - now_s
        if left_s > 0:
            return Waiting(record, left_s)
        return Taking(self._after(record.epoch), from_unknown=True)

    def _after(self, epoch: int) -> LeaseRecord:
        return LeaseRecord(epoch=epoch + 1, renewal=0, owner=self.owner, lives_s=self.lives_s)
