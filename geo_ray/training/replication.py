"""Replication of the averager's log to the standby, and the rule for committing entries.

The leader numbers every entry, sends it at once if there is a standby, and commits it (executes it
and releases its answers) when the standby has it. With a divergence bound above 0, it commits
earlier as long as the distances of all committed entries that the standby lacks sum to at most the
bound. Some entries are never committed early: the beginning of a checkpoint, updates at the end of
training, and membership changes. There, one update's answer depends on others, and a standby that
knows only some of them would answer differently.

A new standby can be added at any time: it receives a state snapshot (`StateSnapshot`) and every
later entry, while the leader waits for nothing. Once it has caught up, a `Promote` entry makes it
the standby: it has everything that was committed. Only the standby knows for certain whether it may
take over; the leader may lose it at any time.
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

_MOST_AHEAD: Final = 32  # entries, however small: regions retain what they may have to repeat


@dataclass(frozen=True, slots=True)
class ShipEntry:
    """Send an entry to the standby.

    Attributes:
        entry: entry.
        counts: True if the entry is committed only after the standby has it; False if it may
            already be committed, and the message holds its own copy.
    """

    entry: LogEntry
    counts: bool = True


@dataclass(frozen=True, slots=True)
class EntryCommitted:
    """Report of an executed entry.

    Attributes:
        op: command.
        outcome: result.
        number: index in the log.
        stable: newest entry up to which the standby has everything; all without a standby.
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
    """Leader's end of the replication; see the module's docstring.

    Attributes:
        averager: averager.
        bound: largest distance of the averager's state from the standby's.
        has_standby: whether there is a standby; without one every entry is committed at once.
        number: number of the newest entry.
        ahead: upper bound of the present distance.
    """

    averager: Averager
    bound: float = 0.0
    has_standby: bool = True
    number: int = 0
    ahead: float = 0.0
    _stable: int = 0
    _lines: deque[_Line] = field(default_factory=deque)
    _begins: int | None = None  # number at which the snapshot for the candidate was taken

    def offer(self, op: Op, now_s: float = 0.0) -> list[ReplicationStep]:
        """Append ``op`` to the log, unless it is already there.

        Args:
            op: command.
            now_s: host's time, which becomes the averager's when the entry is executed.
        """
        if isinstance(op, TakeIn | Skip) and self._is_known(op):
            if self._is_waiting(op):
                return []
            # A repetition: changes nothing.
            return [self._committed(LogEntry(self.number, op, self.averager.state.now_s))]
        self.averager.at(now_s)
        line = _Line(LogEntry(self.number + 1, op, self.averager.state.now_s))
        self.number += 1
        self._lines.append(line)
        return self._sent(line.entry) + self._advance()

    def on_ack(self, number: int) -> list[ReplicationStep]:
        """Record that the standby, or a candidate, has everything up to ``number``."""
        if number > self.number:
            raise InvariantError(f"the standby has entry {number}; the log ends at {self.number}")
        if self._begins is not None:
            return self._promote() if self._has_caught_up(number) else []
        if self.has_standby:
            self._stable = max(self._stable, number)
        return self._advance()

    def begin_snapshot(self) -> StateSnapshot:
        """Copy the state for a candidate; every later entry is sent to it."""
        if self.has_standby:
            raise InvariantError("the averager already has a standby")
        self._begins = self.number
        return snapshot_of(self.averager)

    def release(self) -> list[ReplicationStep]:
        """Continue without a standby or candidate; commit what waited for it."""
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
        """Whether the log already has the requested `Wake`."""
        return any(isinstance(o.entry.op, Wake) and not o.is_committed for o in self._lines)

    def _sent(self, entry: LogEntry) -> list[ReplicationStep]:
        if self._begins is not None:  # a message that is sent late must not change
            return [ShipEntry(replace(entry, op=_copied(entry.op)), counts=False)]
        return [ShipEntry(entry)] if self.has_standby else []

    def _has_caught_up(self, number: int) -> bool:
        """Tell whether little is in flight, or so much that the candidate must be waited for."""
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
    """Standby's end: an averager that executes the same entries and sends no answers.

    Attributes:
        averager: averager with the leader's state at the start.
        number: newest entry up to which it has everything.
        is_promoted: whether it has every committed entry and may take over.
    """

    averager: Averager
    number: int = 0
    is_promoted: bool = True
    _early: dict[int, LogEntry] = field(default_factory=dict)  # overtook other entries

    def on_entry(self, entry: LogEntry) -> int:
        """Execute the next entry; ignore duplicates."""
        if entry.number > self.number:
            self._early[entry.number] = entry
        while (known := self._early.pop(self.number + 1, None)) is not None:
            self.number = known.number
            self.is_promoted |= isinstance(known.op, Promote)
            execute_entry(self.averager, known)
            self.averager.snapshots.clear()  # the leader writes them
            self.averager.noise.news()  # and reports these
        return self.number


def _copied(op: Op) -> Op:
    if isinstance(op, TakeIn):
        return TakeIn(copied_update(op.update))
    return TakeSum(op.parts, op.total_P.clone()) if isinstance(op, TakeSum) else op


def copied_update(update: UpdateMessage) -> UpdateMessage:
    """Return the update with its own copy of the payload."""
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
