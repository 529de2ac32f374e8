"""A rank's or holder's connection to the server of its run, which its standby may replace.

The link dials the addresses of the run's endpoint list in order. When another server process
answers, the link tells it which messages it has received, and sends the messages again that the
earlier one had not confirmed: a standby continues where the lost server was. A server that does not
know the rank has begun again from a checkpoint; the rank's training ends then. A holder of slices
(`geo_ray.joining.holder`) continues in the same way with the orders of the server.

Payloads of slices that holders have go directly to these. The link tells the server which of them
it has no connection to.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from geo_ray.base.errors import DeadlineExceededError, GeoRayError, LinkDownError
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.endpoints import ENDPOINTS, EndpointBook
from geo_ray.joining.numbering import HAVE, INCARNATION, ReceivedCounts, UnconfirmedMessages
from geo_ray.joining.protocol import SERVER, holder_name, process_words, rank_of
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta, Scalar
from geo_ray.transport.wire.message import CONTROL, EndpointIdentity, Message
from geo_ray.transport.wire.sockets import Address

log = logging.getLogger(__name__)

RESUME: Final = "resume"
"""Message of a rank to another server process: what each side has of the other's messages."""
RECEIVED: Final = "received"
"""Answer of the server to a message: messages of each lane that it has."""
REPLACED: Final = "replaced"
"""Answer to `RESUME`: the server does not know the rank."""
UNREACHED: Final = "unreached"
"""Message of a rank: the holders that it has no connection to, and why."""
_LOOK_S: Final = 0.5
_LOOK: Final = -1  # in place of an attempt: a connection to a holder has changed
_BEGIN: Final = -2  # a training begins, whose server may know of other connections


class ServerLink:
    """See the module.

    Attributes:
        endpoint: the connections; those to the server are the link's.

    Args:
        name: name of this process's endpoint.
        incarnation: start of this process; grows with every start.
        credentials: of the region, or of the server for a holder.
        book: where the run is served.
        on_message: called with the endpoint of the sender and its message, in a receiving thread;
            with a message `REPLACED` if a server answers that does not know this process.
        transport: settings of the connection.
        reuse: see `Endpoint`; a loop may need the memory between exchanges.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        credentials: JoinCredentials,
        book: EndpointBook,
        on_message: Callable[[str, Message], None],
        transport: TransportConfig | None,
        reuse: bool = False,
    ) -> None:
        self._incarnation, self._book, self._on_message = incarnation, book, on_message
        self._lock = threading.Condition()  # guards the two below
        self._sent, self._received = UnconfirmedMessages(), ReceivedCounts()
        self._order = threading.Lock()  # of numbers and of messages in the endpoint
        self._server_attempt: int | None = None
        self._holders: list[str] = []
        self._events: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # attempts of servers
        self._reported: set[int] | None = set()  # holders, see `lacking`; None: not sent yet
        identity = EndpointIdentity(credentials.run_id, name, incarnation, credentials.key)
        self.endpoint = Endpoint(
            identity,
            self._receive,
            transport,
            on_peer=self._on_server,
            certificate=credentials.certificate,
            reuse=reuse,
        )
        self._thread = threading.Thread(target=self._run, name="geo-ray-link", daemon=True)
        self._thread.start()

    def connect(self, timeout_s: float) -> None:
        """Connect to the server.

        Raises:
            LinkDownError: no server answers in time.
        """
        self.dial()
        self._await_connected({SERVER: process_words(0)}, timeout_s)

    @property
    def is_connected(self) -> bool:
        """Whether the server is connected."""
        found = self.endpoint.stats().get(SERVER)
        return found is not None and found["connected"]

    def connect_holders(self, addresses: Sequence[Address], timeout_s: float) -> None:
        """Connect to the holders of slices, from holder 1 on, when a training begins.

        Raises:
            LinkDownError: one does not answer in time. The link tries on, and tells the server.
        """
        names = [holder_name(1 + index) for index in range(len(addresses))]
        for name, address in zip(names, addresses, strict=True):
            self.endpoint.connect(name, address)
        try:
            words = {name: process_words(1 + index) for index, name in enumerate(names)}
            self._await_connected(words, timeout_s)
        finally:
            self._holders = names
            if names:
                self._events.put(_BEGIN)

    def _await_connected(self, words: Mapping[str, str], timeout_s: float) -> None:
        """Wait until processes are connected.

        Args:
            words: what each is called in messages, by its endpoint.
            timeout_s: longest wait.

        Raises:
            LinkDownError: some are not; names them with the last cause.
        """
        try:
            self.endpoint.wait_connected(words, timeout_s)
        except LinkDownError:
            stats = self.endpoint.stats()
            away = {name: each for name, each in stats.items() if not each["connected"]}
            causes = [
                f"{words[n]} ({away[n]['last_error'] or 'no answer'})" for n in words if n in away
            ]
            raise LinkDownError(f"no connection to {', '.join(causes)}") from None

    @property
    def lacking(self) -> dict[int, str]:
        """The holders without a connection, and the last error of each."""
        stats = self.endpoint.stats()
        found = {rank_of(name): stats[name] for name in self._holders}
        return {h: each["last_error"] or "" for h, each in found.items() if not each["connected"]}

    def send_to(self, holder: int, message: Message, deadline_s: float | None = None) -> None:
        """Queue a message for the holder of a slice; see `send` for holder 0."""
        if holder:
            self.endpoint.send(holder_name(holder), message, deadline_s)
        else:
            self.send(message, deadline_s)

    def send(self, message: Message, deadline_s: float | None = None) -> None:
        """Queue a message; see `Endpoint.send`. It is kept until a server has confirmed it."""
        with self._order:
            with self._lock:
                have: list[Scalar] = [*self._received.counts]
                own: Meta = {INCARNATION: self._incarnation, HAVE: have}
                meta: Meta = {**message.meta, **own}
                numbered = self._sent.add(replace(message, meta=meta))
            try:
                self.endpoint.send(SERVER, numbered, deadline_s)
            except DeadlineExceededError:
                with self._lock:
                    self._sent.withdraw(numbered)
                raise

    def flush(self, timeout_s: float) -> None:
        """Wait until the server has handled every message, and holders have received theirs.

        Raises:
            DeadlineExceededError: they have not in time.
        """
        with self._lock:
            if not self._lock.wait_for(self._is_flushed, timeout_s):
                raise DeadlineExceededError(
                    f"the server has not confirmed everything within {timeout_s:g} s"
                )
        for holder in self._holders:
            self.endpoint.flush(holder, timeout_s)

    def _is_flushed(self) -> bool:
        return not self._sent.unconfirmed

    def close(self, drain_s: float) -> None:
        """Send what is queued, and close the connection."""
        self._events.put(None)
        self._thread.join(drain_s)
        self.endpoint.close(drain_s)

    def dial(self) -> None:
        """Connect to the server from now on, where it is served; see `connect`."""
        now = [self.endpoint.dialed(SERVER)] if self.is_connected else []
        addresses = self._book.addresses(now)
        self.endpoint.connect(SERVER, *addresses, least_attempt=self._book.term)

    def _receive(self, peer: str, message: Message) -> None:
        if peer != SERVER:
            self._on_message(peer, message)
            return
        if message.kind == ENDPOINTS:
            self.learn(bytes(message.payload))
            return
        if message.meta.get(INCARNATION) != self._incarnation:
            return  # for an earlier process
        if message.kind == RECEIVED:
            with self._lock:
                self._sent.confirm(fields.counts(message.meta, HAVE))
                self._lock.notify_all()
            return
        if message.kind == REPLACED:
            with self._lock:  # that server counts from the beginning
                self._sent, self._received = UnconfirmedMessages(), ReceivedCounts()
                self._lock.notify_all()
            self._on_message(SERVER, message)
            return
        with self._lock:
            taken = self._received.take(message)
        if taken is not None:
            self._on_message(SERVER, taken)

    def learn(self, data: bytes) -> None:
        """Keep a list of the run's addresses; refuse servers of earlier terms."""
        try:
            if self._book.take(data):
                self.dial()
        except GeoRayError as error:
            log.warning("%s", error.message)

    def _on_server(self, peer: str, attempt: int, connected: bool) -> None:
        if peer != SERVER:
            self._events.put(_LOOK)
        elif connected and attempt != self._server_attempt:
            if self._server_attempt is not None:
                self._events.put(attempt)
            self._server_attempt = attempt

    def _run(self) -> None:
        """Do what a receiving thread must not wait for: resume, and report missing connections."""
        while (event := self._next_event()) is not None:
            with suppress(LinkDownError):  # closed
                if event == _BEGIN:
                    self._reported = None
                elif event != _LOOK:
                    log.warning("another process serves the run now (term %d)", event)
                    self._resume()
                self._report()

    def _next_event(self) -> int | None:
        """Return the next event; `_LOOK` from time to time while a connection is missing."""
        try:
            return self._events.get(timeout=None if self._reported == set() else _LOOK_S)
        except queue.Empty:
            return _LOOK

    def _report(self) -> None:
        """Tell the server which holders have no connection, if it does not know that."""
        lacking = self.lacking
        if lacking.keys() == self._reported:
            return
        meta: Meta = {"holders": [*lacking], "causes": [*lacking.values()]}
        self._reported = None
        with suppress(DeadlineExceededError):
            self.send(Message(UNREACHED, meta, b"", "control", CONTROL), 0.0)
            self._reported = {*lacking}

    def _resume(self) -> None:
        """Tell a new server what each side has, and send again what it may lack."""
        with self._order:
            with self._lock:
                again = self._sent.unconfirmed
                meta: Meta = {INCARNATION: self._incarnation}
                meta |= {HAVE: [*self._received.counts], "sent": [*self._sent.confirmed]}
            self.endpoint.send(SERVER, Message(RESUME, meta, b"", "control", CONTROL))
            for message in again:
                self.endpoint.send(SERVER, message)
