"""What a region asks before it ships an update, and what it may be told."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class UploadRequest:
    """One update that wants to go to the averager.

    Attributes:
        region: its sender; the helper region if it is a sum of several.
        epoch: incarnation of the sender.
        seq: its number within the epoch; the group's number if it is a sum.
        size_bytes: of its payload.
        base_version: the averager's version that it was computed from; of a sum, the oldest.
        norm: Euclidean norm of the payload; where one must be dropped, the smallest is.
        final: the sender's last word: always taken, and no commit before all have said theirs.
        again: an earlier averager had taken it in already: it is never dropped.
        parts: the asks that a sum is made of; empty for a plain update.
    """

    region: str
    epoch: int
    seq: int
    size_bytes: int
    base_version: int
    norm: float = field(default=0.0, compare=False)
    final: bool = False
    again: bool = False
    parts: tuple[UploadRequest, ...] = ()

    @property
    def key(self) -> tuple[str, bool]:
        """What tells it from others that are open at the same time."""
        return (f"{self.region}/{self.seq}", True) if self.parts else (self.region, False)

    @property
    def commits(self) -> int:
        """How many commits it will be."""
        return 0 if self.final else max(1, len(self.parts))

    def room(self, version: int, before: int, max_staleness: int | None) -> float:
        """How many more commits may come before it.

        Args:
            version: of the averager now.
            before: commits that come before it anyway.
            max_staleness: the bound; None for none.

        Returns:
            Negative if it would be too stale already; infinite without a bound.
        """
        if max_staleness is None or self.final or self.again:
            return math.inf
        # The parts of a sum are committed together: those beside it come before the last one.
        beside = self.commits - 1
        return max_staleness - (version + before + beside - self.base_version)


@dataclass(frozen=True, slots=True)
class Grant:
    """Send it to the averager now."""

    ask: UploadRequest


@dataclass(frozen=True, slots=True)
class Take:
    """It is here: commit it now, before anything else that is decided."""

    ask: UploadRequest


@dataclass(frozen=True, slots=True)
class Drop:
    """It would be too stale: do not send it; the sender keeps what is in it."""

    ask: UploadRequest


@dataclass(frozen=True, slots=True)
class Gather:
    """Send these to a helper region, which sums them and asks for the sum.

    Attributes:
        group: number of the sum, never used twice.
        helper: where they are summed; one of the senders.
        asks: what is summed, in this order.
    """

    group: int
    helper: str
    asks: tuple[UploadRequest, ...]


@dataclass(frozen=True, slots=True)
class Dissolve:
    """The sum did not come in time: it is refused from now on, its parts go by themselves."""

    group: int


Decision = Grant | Take | Drop | Gather | Dissolve
