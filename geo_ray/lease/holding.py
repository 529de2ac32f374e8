"""A lease in the hands of its holder. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from geo_ray.lease.record import LeaseRecord


@dataclass(slots=True)
class Holding:
    """What the holder knows.

    Attributes:
        record: as it last wrote it.
        until_s: when it stops to count, by the own clock.
        is_lost: whether somebody else has the lease; it never comes back.
    """

    record: LeaseRecord
    until_s: float
    is_lost: bool = False

    @classmethod
    def taken(cls, record: LeaseRecord, began_s: float) -> Holding:
        """The lease was written.

        Args:
            record: what was written.
            began_s: of the own clock, read before that: the lease counts from there.
        """
        return cls(record, began_s + record.lives_s)

    def may_write(self, now_s: float) -> bool:
        """Whether nobody else can have the lease at this moment of the own clock."""
        return not self.is_lost and now_s < self.until_s

    def next(self, doing: str, *, released: bool = False) -> LeaseRecord:
        """What to write to renew the lease, or to give it back."""
        return self.record.model_copy(
            update={"renewal": self.record.renewal + 1, "doing": doing, "released": released}
        )

    def renewed(self, record: LeaseRecord, began_s: float) -> None:
        """The lease was renewed; see `taken`."""
        self.record, self.until_s = record, began_s + record.lives_s

    def found(self, record: LeaseRecord) -> bool:
        """Judge what stands there although a write of the own was refused.

        Returns:
            Whether it is the own lease: an earlier write has arrived whose answer has not.
        """
        held = self.record
        if record.epoch == held.epoch and record.owner == held.owner:
            self.record = record
            return True
        self.is_lost = True
        return False
