"""The request that a region makes before it sends an update, and the decisions about it."""

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
        norm: Euclidean norm of the payload; if one must be dropped, it is the smallest.
        final: whether it is the sender's final update, which is never dropped; it is committed when
            all final updates are there.
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
        """The key among requests that are open at the same time."""
        return (f"{self.region}/{self.seq}", True) if self.parts else (self.region, False)

    @property
    def commits(self) -> int:
        """The number of commits that it will be."""
        return 0 if self.final else max(1, len(self.parts))

    def slack(self, version: int, before: int, max_staleness: int | None) -> float:
        """Return how many more commits may come before it.

        Args:
            version: the averager's present version.
            before: commits that come before it anyway.
            max_staleness: the bound; None for none.

        Returns:
            The number; negative if the update would be too stale already; infinite without a bound.
        """
        if max_staleness is None or self.final or self.again:
            return math.inf
        # The parts of a sum are committed together: those beside it come before the last one.
        beside = self.commits - 1
        return max_staleness - (version + before + beside - self.base_version)


@dataclass(frozen=True, slots=True)
class Grant:
    """An order to send an update to the averager now."""

    ask: UploadRequest


@dataclass(frozen=True, slots=True)
class Take:
    """An order to commit an update that is here, before carrying out later decisions."""

    ask: UploadRequest


@dataclass(frozen=True, slots=True)
class Drop:
    """An order not to send an update that would be too stale; the sender keeps its content."""

    ask: UploadRequest


@dataclass(frozen=True, slots=True)
class Gather:
    """An order to send updates to a helper region, which sums them and asks for the sum.

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
    """An order to send a group's parts by themselves; its late sum is refused from now on."""

    group: int


Decision = Grant | Take | Drop | Gather | Dissolve
