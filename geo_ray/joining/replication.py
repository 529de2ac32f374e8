"""A `JoinService` whose inputs are a log, which a standby follows.

The service is deterministic: two that handle the same entries in the same order have the same state
and give the same messages. The server numbers every entry, sends it to its standby, and executes it
when the standby has it; so nothing that a rank or the run loop has seen is lost with the server. A
standby begins with a snapshot of the state. An entry `Attach` makes it the standby: it has
everything that was executed, and the server executes nothing more without it, until the run loop
releases it.

Messages to and from ranks are numbered (`geo_ray.joining.numbering`), and the counts are part of
the state: a promoted standby sends what a rank lacks, and drops what it has handled.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from geo_ray.base.errors import FrameError, GeoRayError, InvariantError
from geo_ray.joining.link import RECEIVED, REPLACED
from geo_ray.joining.numbering import (
    HAVE,
    INCARNATION,
    ReceivedCounts,
    UnconfirmedMessages,
    number_of,
)
from geo_ray.joining.pieces import LAST, PIECE
from geo_ray.joining.protocol import SERVER, JoinTerms, Outbound, region_of
from geo_ray.joining.service import JoinService
from geo_ray.joining.slices import SavedRun
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta, decode_meta, encode_meta
from geo_ray.transport.wire.message import CONTROL, LANES, Message

log = logging.getLogger(__name__)

ENTRY: Final = "entry"
"""Kind of the message to a standby that has an entry."""
_CONFIRMED_PIECES: Final = 8  # a rank keeps as many that have arrived


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a rank."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed.

    Attributes:
        wait_s: see `JoinService.check_late`.
        reported: events that the run loop has.
    """

    wait_s: float
    reported: int


@dataclass(frozen=True, slots=True)
class LoseRegion:
    """Continue without a region."""

    region: str
    cause: str


@dataclass(frozen=True, slots=True)
class LoseHolder:
    """End the run: a holder of slices is lost."""

    holder: int
    cause: str


@dataclass(frozen=True, slots=True)
class RequestStop:
    """Ask every region to finish."""


@dataclass(frozen=True, slots=True)
class EndRun:
    """End the run at once; see `JoinService.on_end`."""

    cause: str


@dataclass(frozen=True, slots=True)
class SetInterval:
    """Change the steps between exchanges; see `JoinService.set_interval`."""

    steps: int


@dataclass(frozen=True, slots=True)
class BeginSave:
    """Begin a checkpoint; see `JoinService.begin_save`."""

    checkpoint: int
    keep: tuple[int, ...]
    timeout_s: float
    halt: bool = False


@dataclass(frozen=True, slots=True)
class EndSave:
    """Forget a checkpoint that was being made; see `JoinService.end_save`."""

    checkpoint: int | None


@dataclass(frozen=True, slots=True)
class Attach:
    """Make the receiver of the log the standby."""


_Plain = (
    Tick
    | LoseRegion
    | LoseHolder
    | RequestStop
    | EndRun
    | SetInterval
    | BeginSave
    | EndSave
    | Attach
)
Op = Received | _Plain
_PLAIN: Final[dict[str, type[_Plain]]] = {
    each.__name__: each
    for each in (
        Tick,
        LoseRegion,
        LoseHolder,
        RequestStop,
        EndRun,
        SetInterval,
        BeginSave,
        EndSave,
        Attach,
    )
}


@dataclass(frozen=True, slots=True)
class ServiceEntry:
    """An entry of the log.

    Attributes:
        number: index, from 1.
        t_s: time of the run's clock at which it is executed.
        op: the input.
    """

    number: int
    t_s: float
    op: Op

    def to_message(self) -> Message:
        """Return the message that contains it; the payload of a rank's message is not copied."""
        meta: Meta = {"entry": self.number, "t_s": self.t_s, "op": type(self.op).__name__}
        if not isinstance(self.op, Received):
            meta["about"] = json.dumps(asdict(self.op))
            return Message(ENTRY, meta, b"", "standby")
        message = self.op.message
        meta |= {"peer": self.op.peer, "kind": message.kind, "meta": encode_meta(message.meta)}
        meta |= {"traffic": message.traffic, "lane": message.lane}
        return Message(ENTRY, meta, message.payload, "standby")

    @classmethod
    def read(cls, message: Message) -> ServiceEntry:
        """Read the result of `to_message`.

        Raises:
            FrameError: it cannot be read.
        """
        meta = message.meta
        number, t_s = fields.count(meta, "entry"), fields.number(meta, "t_s")
        name = fields.text(meta, "op")
        if name == Received.__name__:
            own = fields.data(meta, "meta")
            kind, traffic = fields.text(meta, "kind"), fields.text(meta, "traffic")
            lane = fields.below(LANES)(meta, "lane")
            received = Message(kind, decode_meta(own), message.payload, traffic, lane)
            return cls(number, t_s, Received(fields.text(meta, "peer"), received))
        try:
            about = json.loads(fields.text(meta, "about"))
            if name == BeginSave.__name__:
                about["keep"] = tuple(about["keep"])
            return cls(number, t_s, _PLAIN[name](**about))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise FrameError(f"an entry of the log cannot be read: {error!r}") from None


@dataclass(slots=True)
class _Session:
    """The numbered messages of one rank's process."""

    incarnation: int
    received: ReceivedCounts
    sent: UnconfirmedMessages


@dataclass(slots=True)
class ReplicatedService:
    """See the module.

    Attributes:
        service: the run's state machine.
        keeps: whether messages to ranks are kept until ranks have them, for a standby to send.
        t_s: time of the newest executed entry.
        number: newest entry.
        executed: newest executed entry.
        has_standby: whether entries wait for a standby.
        is_attached: at a standby: whether it has everything that was executed.
        reported: events that the run loop has.
    """

    service: JoinService = field(init=False)
    keeps: bool = False
    t_s: float = 0.0
    number: int = 0
    executed: int = 0
    has_standby: bool = False
    is_attached: bool = False
    reported: int = 0
    _events: deque[dict[str, Any]] = field(default_factory=deque)  # from number `reported` on
    _pending: deque[ServiceEntry] = field(default_factory=deque)
    _begins: int | None = None  # entry of the snapshot that a future standby has
    _sessions: dict[str, _Session] = field(default_factory=dict)

    @classmethod
    def new(
        cls, terms: JoinTerms, resumed: SavedRun | None, least: int, *, keeps: bool
    ) -> ReplicatedService:
        """Return the service of a run; see `JoinService`."""
        found = cls(keeps=keeps)
        found.service = JoinService(terms, found.now_s, resumed, least)
        return found

    def now_s(self) -> float:
        """Return the time of the entry that is being executed."""
        return self.t_s

    # ------------------------------------------------------------------ the server

    def offer(self, op: Op, t_s: float) -> tuple[list[ServiceEntry], list[Outbound]]:
        """Append an input to the log.

        Args:
            op: the input.
            t_s: present time of the run's clock.

        Returns:
            Entries for the standby, and messages to ranks.
        """
        self.number += 1
        entry = ServiceEntry(self.number, max(t_s, self.t_s), op)
        self._pending.append(entry)
        if self.has_standby:
            return [entry], []
        shipped = [_copied(entry)] if self._begins is not None else []
        return shipped, self._execute_until(entry)

    def on_ack(self, number: int) -> tuple[list[ServiceEntry], list[Outbound]]:
        """Handle that the standby, or a future one, has everything up to an entry.

        Raises:
            FrameError: there is no such entry.
        """
        if number > self.number:
            raise FrameError(f"the standby has entry {number}; the log ends at {self.number}")
        if self._begins is not None and number >= self._begins:
            self._begins, self.has_standby = None, True
            return self.offer(Attach(), self.t_s)
        if not self.has_standby:
            return [], []
        found: list[Outbound] = []
        while self._pending and self._pending[0].number <= number:
            found += self.execute(self._pending.popleft())
        return [], found

    def begin_snapshot(self) -> ReplicatedService:
        """Return a copy for a future standby, which gets all later entries, too.

        Raises:
            InvariantError: there is a standby.
        """
        if self.has_standby:
            raise InvariantError("the server already has a standby")
        for session in self._sessions.values():
            session.sent.copy_payloads()
        found = deepcopy(self)
        self._begins, found.is_attached = self.number, False
        return found

    def release(self) -> list[Outbound]:
        """Continue without a standby; execute what waited for it."""
        self.has_standby, self._begins = False, None
        return self._execute_until(self._pending[-1]) if self._pending else []

    @property
    def waits_since_s(self) -> float | None:
        """Time of the oldest entry that is not executed; None: there is none."""
        return self._pending[0].t_s if self._pending else None

    def events(self, start: int) -> list[dict[str, Any]]:
        """Return the events from a number on; see `Tick.reported`."""
        return list(self._events)[max(0, start - self.reported) :]

    def _execute_until(self, last: ServiceEntry) -> list[Outbound]:
        found: list[Outbound] = []
        while self._pending and self._pending[0].number <= last.number:
            found += self.execute(self._pending.popleft())
        return found

    # ------------------------------------------------------------------ the standby

    def follow(self, entry: ServiceEntry) -> None:
        """Execute an entry of the server, whose messages it sends itself.

        Raises:
            InvariantError: an entry is missing.
        """
        if entry.number <= self.number:
            return
        if entry.number != self.number + 1:
            raise InvariantError(f"entry {entry.number} follows entry {self.number}")
        self.number = entry.number
        self.execute(entry)

    def become_server(self) -> None:
        """Continue as the server, without a standby."""
        self.is_attached = self.has_standby = False

    # ------------------------------------------------------------------ both

    @property
    def peers(self) -> list[str]:
        """Endpoints of all ranks that have sent messages."""
        return list(self._sessions)

    def may_lack(self, peer: str) -> bool:
        """Return whether messages are kept that a rank has not confirmed."""
        session = self._sessions.get(peer)
        return session is not None and bool(session.sent.unconfirmed)

    def execute(self, entry: ServiceEntry) -> list[Outbound]:
        """Execute an entry; return messages to ranks.

        An error is recorded in the log of the process only: it must not keep back the messages of
        other entries, and a standby has the same error.
        """
        self.t_s, self.executed = entry.t_s, entry.number
        service, op = self.service, entry.op
        try:
            match op:
                case Received(peer, message):
                    return self._on_received(peer, message)
                case Tick(wait_s, reported):
                    while self.reported < reported and self._events:
                        self._events.popleft()
                        self.reported += 1
                    found = service.on_wake()
                    found += service.check_late(wait_s)
                    found += service.check_held(wait_s)
                    return self._numbered(found + service.check_save())
                case LoseRegion(region, cause):
                    return self._numbered(service.lose(region, cause))
                case RequestStop():
                    return self._numbered(service.request_stop())
                case SetInterval(steps):
                    return self._numbered(service.set_interval(steps))
                case BeginSave(checkpoint, keep, timeout_s, halt):
                    return self._numbered(
                        service.begin_save(checkpoint, keep, timeout_s, halt=halt)
                    )
                case EndRun(cause):
                    return self._numbered(service.on_end(cause))
                case LoseHolder(holder, cause):
                    return self._numbered(service.on_holder_lost(holder, cause))
                case EndSave(checkpoint):
                    return self._numbered(service.end_save(checkpoint))
                case Attach():
                    self.is_attached = True
        except GeoRayError:
            log.exception("entry %d failed", entry.number)
        finally:
            self._events += service.news()
        return []

    def resume(self, peer: str, message: Message) -> list[Outbound]:
        """Handle a rank that was connected to another server process; see `ServerLink`.

        Raises:
            FrameError: a field is missing or invalid.
        """
        incarnation, have = _sender(message)
        known = self._sessions.get(peer)
        if known is None or known.incarnation != incarnation:
            if not any((*have, *fields.counts(message.meta, "sent"))):
                return []  # nothing was handled yet, and it is sent again
            meta: Meta = {INCARNATION: incarnation}
            return [Outbound(peer, Message(REPLACED, meta, b"", "control", CONTROL))]
        known.sent.confirm(have)
        again = [Outbound(peer, each) for each in known.sent.unconfirmed]
        return [*again, self._receipt(peer, known)]

    def _on_received(self, peer: str, message: Message) -> list[Outbound]:
        if region_of(peer) == SERVER:  # a holder, which is lost if this process is
            return self._numbered(self.service.on_message(peer, message))
        incarnation, have = _sender(message)
        session = self._sessions.get(peer)
        if session is None or incarnation > session.incarnation:
            sent = UnconfirmedMessages(self.keeps)
            session = self._sessions[peer] = _Session(incarnation, ReceivedCounts(), sent)
        if incarnation < session.incarnation:
            return []  # of a process that was replaced
        session.sent.confirm(have)
        taken = session.received.take(message)
        if taken is None:
            return []
        receipts = [self._receipt(peer, session)] if needs_receipt(message) else []
        return [*receipts, *self._numbered(self.service.on_message(peer, taken))]

    def _receipt(self, peer: str, session: _Session) -> Outbound:
        meta: Meta = {INCARNATION: session.incarnation, HAVE: [*session.received.counts]}
        return Outbound(peer, Message(RECEIVED, meta, b"", "control", CONTROL))

    def _numbered(self, found: Sequence[Outbound]) -> list[Outbound]:
        """Return messages to ranks with their numbers; those to unknown ranks are dropped."""
        numbered = []
        for each in found:
            session = self._sessions.get(each.peer)
            if region_of(each.peer) == SERVER:
                numbered.append(each)
            elif session is not None:
                meta: Meta = {**each.message.meta, INCARNATION: session.incarnation}
                message = session.sent.add(replace(each.message, meta=meta))
                numbered.append(Outbound(each.peer, message))
        return numbered


def needs_receipt(message: Message) -> bool:
    """Return whether a numbered message is confirmed at once, and all before it.

    Of the pieces of a payload only some are: a receipt costs as much as a piece.
    """
    is_inner = message.kind == PIECE and LAST not in message.meta
    return not is_inner or number_of(message) % _CONFIRMED_PIECES == 0


def _copied(entry: ServiceEntry) -> ServiceEntry:
    """Return an entry with its own copy of a payload, which its execution may change."""
    if not isinstance(entry.op, Received):
        return entry
    message = replace(entry.op.message, payload=bytes(entry.op.message.payload))
    return replace(entry, op=replace(entry.op, message=message))


def _sender(message: Message) -> tuple[int, list[int]]:
    """Return the incarnation of a message's sender, and what it has received."""
    have = fields.counts(message.meta, HAVE)
    if len(have) != LANES:
        raise FrameError(f"a rank counts {len(have)} lanes")
    return fields.count(message.meta, INCARNATION), list(have)
