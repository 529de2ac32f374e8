"""The averager's log on its way to the standby, and what may be committed before it is there.

The averager gives every entry a number and ships it at once. It commits an entry (carries it out
and lets its answers go) when the standby has it, or earlier as long as what is committed and not
yet there stays within the bound: the sum of the entries' distances. With a bound of 0 nothing is
committed before the standby has it. Nor is the beginning of a checkpoint, or what comes at the end
of the training, whatever the bound: there one update's answer hangs on others, and a standby that
knows the update but not the others would answer otherwise.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from geo_ray.errors import InvariantError
from geo_ray.training.averager.averager import Averager
from geo_ray.training.averager.log import (
    LogEntry,
    LogOutcome,
    Op,
    Skip,
    TakeIn,
    TakeSum,
    carry_out,
    distance,
)

_MOST_AHEAD: Final = 32  # entries, however small: regions keep what they may have to repeat


@dataclass(frozen=True, slots=True)
class ShipEntry:
    """Send an entry to the standby."""

    entry: LogEntry


@dataclass(frozen=True, slots=True)
class EntryCommitted:
    """An entry was carried out.

    Attributes:
        op: what it says.
        outcome: what it gave.
        number: its place in the log.
        stable: up to which number the standby has everything.
    """

    op: Op
    outcome: LogOutcome
    number: int
    stable: int


@dataclass(slots=True)
class _Line:
    entry: LogEntry
    distance: float = 0.0
    is_committed: bool = False


@dataclass(slots=True)
class ReplicatedAverager:
    """The averager's end; see the module's docstring.

    Attributes:
        averager: whose log it is.
        bound: how far the averager may be ahead of the standby.
        has_standby: whether there is one; without one everything is committed at once.
        ahead: how far it is ahead, at most.
        stable: up to which number the standby has everything.
    """

    averager: Averager
    bound: float = 0.0
    has_standby: bool = True
    ahead: float = 0.0
    stable: int = 0
    _number: int = 0
    _lines: deque[_Line] = field(default_factory=deque)

    def offer(self, op: Op) -> list[ShipEntry | EntryCommitted]:
        """Put ``op`` at the end of the log; what is there, or on its way there, is not repeated."""
        if isinstance(op, TakeIn | Skip) and self._is_known(op):
            if self._is_waiting(op):
                return []
            outcome = carry_out(self.averager, op)  # its answer again; nothing changes
            return [EntryCommitted(op, outcome, self._number, self.stable)]
        self._number += 1
        line = _Line(LogEntry(self._number, op))
        self._lines.append(line)
        shipped: list[ShipEntry | EntryCommitted] = (
            [ShipEntry(line.entry)] if self.has_standby else []
        )
        return shipped + self._advance()

    def on_ack(self, number: int) -> list[ShipEntry | EntryCommitted]:
        """The standby has everything up to ``number``."""
        if number > self._number:
            raise InvariantError(f"the standby has entry {number}; the log ends at {self._number}")
        self.stable = max(self.stable, number)
        return self._advance()

    @property
    def waiting(self) -> int:
        """Updates in the log that are not committed yet."""
        lines = [line.entry.op for line in self._lines if not line.is_committed]
        return sum(len(_names(op)) for op in lines if not isinstance(op, Skip))

    def _advance(self) -> list[ShipEntry | EntryCommitted]:
        committed: list[ShipEntry | EntryCommitted] = []
        for line in self._lines:
            if line.is_committed:
                continue
            if not self._may_commit(line):
                break
            line.is_committed = True
            outcome = carry_out(self.averager, line.entry.op)
            committed.append(EntryCommitted(line.entry.op, outcome, line.entry.number, self.stable))
        while self._lines and self._lines[0].is_committed and self._is_there(self._lines[0]):
            self._lines.popleft()
        ahead = [o for o in self._lines if o.is_committed and not self._is_there(o)]
        self.ahead = sum(line.distance for line in ahead)
        return committed

    def _may_commit(self, line: _Line) -> bool:
        if self._is_there(line):
            return True
        op = line.entry.op
        is_plain = isinstance(op, TakeSum | Skip) or (
            isinstance(op, TakeIn) and not op.update.final
        )
        if self.bound == 0 or not (is_plain and self.averager.is_plain):
            return False
        ahead = [o for o in self._lines if o.is_committed and not self._is_there(o)]
        line.distance = distance(self.averager, line.entry.op)
        together = sum(other.distance for other in ahead) + line.distance
        return together <= self.bound and len(ahead) < _MOST_AHEAD

    def _is_there(self, line: _Line) -> bool:
        return not self.has_standby or line.entry.number <= self.stable

    def _is_known(self, op: TakeIn | Skip) -> bool:
        region, name = _name(op)
        return name <= self.averager.last(region) or self._is_waiting(op)

    def _is_waiting(self, op: TakeIn | Skip) -> bool:
        return any(
            _name(op) in _names(line.entry.op) for line in self._lines if not line.is_committed
        )


@dataclass(slots=True)
class ShadowAverager:
    """The standby's end: an averager that carries out the same entries and answers nobody.

    Attributes:
        averager: built, or restored, as the one at home.
        number: up to which it has everything.
    """

    averager: Averager
    number: int = 0

    def on_entry(self, entry: LogEntry) -> int:
        """Take in the next entry; one that is here already is passed over.

        Returns:
            Up to which number everything is here.
        """
        if entry.number == self.number + 1:
            self.number = entry.number
            carry_out(self.averager, entry.op)
            self.averager.snapshots.clear()  # the one at home writes them
            self.averager.noise.news()  # and tells these
        return self.number


def _name(op: TakeIn | Skip) -> tuple[str, tuple[int, int]]:
    if isinstance(op, TakeIn):
        return op.update.region, (op.update.epoch, op.update.seq)
    return op.region, (op.epoch, op.seq)


def _names(op: Op) -> list[tuple[str, tuple[int, int]]]:
    if isinstance(op, TakeSum):
        return [(part.region, (part.epoch, part.seq)) for part in op.parts]
    return [_name(op)] if isinstance(op, TakeIn | Skip) else []
