"""The averager's log on its way to the standby, and what may be committed before it is there.

The averager gives every entry a number, ships it at once if somebody follows, and commits it
(carries it out and lets its answers go) when the standby has it, or earlier as long as what is
committed and not yet there stays within the bound: the sum of the entries' distances. With a bound
of 0 nothing is committed before the standby has it. Nor is the beginning of a checkpoint, or what
comes at the end of the training, or a change of members, whatever the bound: there one update's
answer hangs on others, and a standby that knows the update but not the others would answer
otherwise.

A new standby is won in the middle of a run: it is sent a copy of the averager (`StateSnapshot`),
behind it every entry, and the averager waits for nothing. Once it has caught up, one entry appoints
it (`Promote`): from there on nothing counts that it lacks, and whoever holds that entry has all
that came before. So it alone knows for certain whether it may take over; the averager may lose it
again at any time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

from geo_ray.base.errors import InvariantError
from geo_ray.training.averager import Averager
from geo_ray.training.command_log import (
    LogEntry,
    LogOutcome,
    Op,
    Promote,
    Skip,
    StateSnapshot,
    TakeIn,
    TakeSum,
    Wake,
    distance,
    execute_entry,
    snapshot_of,
)
from geo_ray.training.messages import UpdateMessage

_MOST_AHEAD: Final = 32  # entries, however small: regions keep what they may have to repeat


@dataclass(frozen=True, slots=True)
class ShipEntry:
    """Send an entry to the standby.

    Attributes:
        entry: the entry.
        counts: it is committed once it is there; else it may have been, and is its own copy.
    """

    entry: LogEntry
    counts: bool = True


@dataclass(frozen=True, slots=True)
class EntryCommitted:
    """An entry was carried out.

    Attributes:
        op: what it says.
        outcome: what it gave.
        number: its place in the log.
        stable: up to which number the standby has everything; all, if nobody stands by.
    """

    op: Op
    outcome: LogOutcome
    number: int
    stable: int


ReplicationStep = ShipEntry | EntryCommitted


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
        number: of the newest entry.
        ahead: how far it is ahead, at most.
    """

    averager: Averager
    bound: float = 0.0
    has_standby: bool = True
    number: int = 0
    ahead: float = 0.0
    _stable: int = 0
    _lines: deque[_Line] = field(default_factory=deque)
    _begins: int | None = None  # number at which the copy was made for who is to stand by

    def offer(self, op: Op, now_s: float = 0.0) -> list[ReplicationStep]:
        """Put ``op`` at the end of the log; what is there, or on its way there, is not repeated.

        Args:
            op: what to do.
            now_s: the host's time, which becomes the averager's when it is carried out.
        """
        if isinstance(op, TakeIn | Skip) and self._is_known(op):
            if self._is_waiting(op):
                return []
            # Its answer again; nothing changes.
            return [self._committed(LogEntry(self.number, op, self.averager.state.now_s))]
        self.averager.at(now_s)
        line = _Line(LogEntry(self.number + 1, op, self.averager.state.now_s))
        self.number += 1
        self._lines.append(line)
        return self._shipped(line.entry) + self._advance()

    def on_ack(self, number: int) -> list[ReplicationStep]:
        """The standby, or who is to become it, has everything up to ``number``."""
        if number > self.number:
            raise InvariantError(f"the standby has entry {number}; the log ends at {self.number}")
        if self._begins is not None:
            return self._promote() if self._has_caught_up(number) else []
        if self.has_standby:
            self._stable = max(self._stable, number)
        return self._advance()

    def begin_snapshot(self) -> StateSnapshot:
        """A copy for who is to stand by; every entry from now on is shipped."""
        if self.has_standby:
            raise InvariantError("there is a standby")
        self._begins = self.number
        return snapshot_of(self.averager)

    def release(self) -> list[ReplicationStep]:
        """Nobody stands by any more, or is to: nothing waits for that."""
        self.has_standby, self._begins = False, None
        return self._advance()

    @property
    def stable(self) -> int:
        """Up to which number the standby has everything."""
        return self._stable if self.has_standby else self.number

    @property
    def waiting(self) -> int:
        """Updates in the log that are not committed yet."""
        lines = [line.entry.op for line in self._lines if not line.is_committed]
        return sum(len(_names(op)) for op in lines if not isinstance(op, Skip))

    @property
    def is_waking(self) -> bool:
        """Whether what the averager asked for by its clock is in the log already."""
        return any(isinstance(o.entry.op, Wake) and not o.is_committed for o in self._lines)

    def _shipped(self, entry: LogEntry) -> list[ReplicationStep]:
        if self._begins is not None:  # what is sent late must not change meanwhile
            return [ShipEntry(replace(entry, op=_copied(entry.op)), counts=False)]
        return [ShipEntry(entry)] if self.has_standby else []

    def _has_caught_up(self, number: int) -> bool:
        """Whether little is on its way; or so much that it must be waited for."""
        if self._begins is None or number < self._begins:
            return False
        behind = self.number - number
        return behind <= len(self.averager.view.members) or behind > _MOST_AHEAD

    def _promote(self) -> list[ReplicationStep]:
        self.number += 1
        entry = LogEntry(self.number, Promote(), self.averager.state.now_s)
        self.has_standby, self._begins, self._stable = True, None, self.number
        return [ShipEntry(entry)]

    def _advance(self) -> list[ReplicationStep]:
        committed: list[ReplicationStep] = []
        for line in self._lines:
            if line.is_committed:
                continue
            if not self._may_commit(line):
                break
            line.is_committed = True
            committed.append(self._committed(line.entry))
        while self._lines and self._lines[0].is_committed and self._is_there(self._lines[0]):
            self._lines.popleft()
        ahead = [o for o in self._lines if o.is_committed and not self._is_there(o)]
        self.ahead = sum(line.distance for line in ahead)
        return committed

    def _committed(self, entry: LogEntry) -> EntryCommitted:
        outcome = execute_entry(self.averager, entry)
        return EntryCommitted(entry.op, outcome, entry.number, self.stable)

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
        combined = sum(other.distance for other in ahead) + line.distance
        return combined <= self.bound and len(ahead) < _MOST_AHEAD

    def _is_there(self, line: _Line) -> bool:
        return not self.has_standby or line.entry.number <= self._stable

    def _is_known(self, op: TakeIn | Skip) -> bool:
        region, name = _name(op)
        return name <= self.averager.last(region) or self._is_waiting(op)

    def _is_waiting(self, op: TakeIn | Skip) -> bool:
        return any(
            _name(op) in _names(line.entry.op) for line in self._lines if not line.is_committed
        )


@dataclass(slots=True)
class AveragerReplica:
    """The standby's end: an averager that carries out the same entries and answers nobody.

    Attributes:
        averager: built, or restored, as the one at home, or a copy of it.
        number: up to which it has everything.
        is_promoted: whether nothing counts that it lacks: it may take over.
    """

    averager: Averager
    number: int = 0
    is_promoted: bool = True
    _early: dict[int, LogEntry] = field(default_factory=dict)  # overtook others on the way

    def on_entry(self, entry: LogEntry) -> int:
        """Take in the next entry; one that is here already is passed over.

        Returns:
            Up to which number everything is here.
        """
        if entry.number > self.number:
            self._early[entry.number] = entry
        while (known := self._early.pop(self.number + 1, None)) is not None:
            self.number = known.number
            self.is_promoted |= isinstance(known.op, Promote)
            execute_entry(self.averager, known)
            self.averager.snapshots.clear()  # the one at home writes them
            self.averager.noise.news()  # and tells these
        return self.number


def _copied(op: Op) -> Op:
    if isinstance(op, TakeIn):
        return TakeIn(copied_update(op.update))
    return TakeSum(op.parts, op.total_P.clone()) if isinstance(op, TakeSum) else op


def copied_update(update: UpdateMessage) -> UpdateMessage:
    """The update with a payload of its own."""
    buffers_E = update.buffers_E.clone() if update.buffers_E.numel() else update.buffers_E
    if update.coded is None:
        return replace(update, payload_P=update.payload_P.clone(), buffers_E=buffers_E)
    coded = replace(update.coded, data_B=update.coded.data_B.clone())
    return replace(update, coded=coded, buffers_E=buffers_E)


def _name(op: TakeIn | Skip) -> tuple[str, tuple[int, int]]:
    if isinstance(op, TakeIn):
        return op.update.region, (op.update.attempt, op.update.seq)
    return op.region, (op.attempt, op.seq)


def _names(op: Op) -> list[tuple[str, tuple[int, int]]]:
    if isinstance(op, TakeSum):
        return [(part.region, (part.attempt, part.seq)) for part in op.parts]
    return [_name(op)] if isinstance(op, TakeIn | Skip) else []
