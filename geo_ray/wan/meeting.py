"""How two endpoints get from a TCP connection to a session's connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping

from geo_ray.clock import Clock
from geo_ray.errors import LinkDownError
from geo_ray.wan import sockets
from geo_ray.wan.config import TransportConfig
from geo_ray.wan.connection import Connection
from geo_ray.wan.frame_io import WireCount
from geo_ray.wan.frames import Frame
from geo_ray.wan.handshake import Greeting, Side, expect_same, greet, welcome
from geo_ray.wan.message import TRANSPORT, Identity, natural, text
from geo_ray.wan.meta import Meta
from geo_ray.wan.session import Session
from geo_ray.wan.shaper import ShapedWriter, Shaper
from geo_ray.wan.sockets import Address
from geo_ray.wan.writer import DirectWriter, Writer

_SERVICE = "wan"


class Meeting:
    """Dials and receives on behalf of an endpoint.

    Args:
        identity: this endpoint.
        instance: unique to this start of it.
        config: timeouts.
        clock: for connections.
        shapers: emulated links by destination region.
        find: the session with a region, or None; asked about strangers as well.
    """

    def __init__(
        self,
        identity: Identity,
        instance: str,
        config: TransportConfig,
        clock: Clock,
        shapers: Mapping[str, Shaper],
        find: Callable[[str], Session | None],
    ) -> None:
        self._identity = identity
        self._hello: Meta = {
            "service": _SERVICE,
            "run": identity.run_id,
            "region": identity.region,
            "epoch": identity.epoch,
            "instance": instance,
        }
        self._config = config
        self._clock = clock
        self._shapers = shapers
        self._find = find
        self._lock = threading.Lock()
        self._pending: set[socket.socket] = set()
        self._closed = False

    def dial(self, session: Session, address: Address) -> Connection:
        """Connect, and have the session adopt the connection.

        Raises:
            PeerRefusedError: one side refused the other.
            TransportError: the other side does not speak this protocol, or this one is closed.
            OSError: nobody answers there.
        """
        with contextlib.ExitStack() as undo:
            buffer_bytes = self._config.socket_buffer_bytes
            sock = undo.enter_context(sockets.new_socket(address, buffer_bytes))
            with self._interruptible(sock):
                sockets.connect(sock, address, self._config.connect_timeout_s)
                self._tune(sock)
                writer = self._writer(sock, session.peer)
                undo.callback(writer.close)
                undo.callback(sockets.hang_up, sock)

                def admit(theirs: Meta) -> Meta:
                    self._check(theirs)
                    expect_same("region", theirs.get("region"), session.peer)
                    return session.admit(theirs)

                side = self._side({"to": session.peer}, admit, lambda: writer)
                greeting = greet(sock, side)
            connection = self._connection(sock, writer, greeting, side.count, dialed=True)
            session.adopt(connection)
            undo.pop_all()
        return connection

    def receive(
        self, sock: socket.socket, obtain: Callable[[str], Session]
    ) -> tuple[Session, Connection]:
        """Authenticate an accepted socket, and have a session adopt the connection.

        Args:
            sock: closed on any error.
            obtain: the session with a region, made if need be; asked after authentication.

        Raises:
            PeerRefusedError: one side refused the other.
            TransportError: the other side does not speak this protocol, or this one is closed.
            OSError: the connection was lost, or the other side is too slow.
        """
        with contextlib.ExitStack() as undo:
            undo.enter_context(sock)
            writer: Writer = DirectWriter(sock)
            undo.callback(lambda: writer.close())
            undo.callback(sockets.hang_up, sock)
            with self._interruptible(sock):
                self._tune(sock)

                def admit(theirs: Meta) -> Meta:
                    nonlocal writer
                    self._check(theirs)
                    expect_same("destination", theirs.get("to"), self._identity.region)
                    peer = text(theirs, "region")
                    session = self._find(peer)
                    ready: Meta = {"received": 0} if session is None else session.admit(theirs)
                    writer = self._writer(sock, peer)
                    return ready

                side = self._side({}, admit, lambda: writer)
                greeting = welcome(sock, side)
            session = obtain(text(greeting.hello, "region"))
            connection = self._connection(sock, writer, greeting, side.count, dialed=False)
            session.adopt(connection)
            undo.pop_all()
        return session, connection

    def close(self) -> None:
        """Interrupt what is under way, and refuse what comes."""
        with self._lock:
            self._closed = True
            pending = list(self._pending)
        for sock in pending:
            sockets.hang_up(sock)

    @contextlib.contextmanager
    def _interruptible(self, sock: socket.socket) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise LinkDownError("the endpoint is closed")
            self._pending.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._pending.discard(sock)

    def _check(self, theirs: Meta) -> None:
        expect_same("service", theirs.get("service"), _SERVICE)
        expect_same("run", theirs.get("run"), self._identity.run_id)
        natural(theirs, "epoch")
        text(theirs, "instance")
        if text(theirs, "region") == self._identity.region:
            # A reflected hello, or two endpoints for one region.
            expect_same("region", theirs["region"], f"another than {self._identity.region}")

    def _side(
        self, more: Meta, admit: Callable[[Meta], Meta], writer: Callable[[], Writer]
    ) -> Side:
        timeout_s = self._config.handshake_timeout_s

        def send(frame: Frame, key: bytes) -> None:
            writer().send(frame, key, TRANSPORT)
            writer().flush(timeout_s)

        return Side(self._identity.key, {**self._hello, **more}, admit, send, timeout_s)

    def _writer(self, sock: socket.socket, peer: str) -> Writer:
        shaper = self._shapers.get(peer)
        return DirectWriter(sock) if shaper is None else ShapedWriter(sock, shaper)

    def _tune(self, sock: socket.socket) -> None:
        sockets.tune(sock, congestion=self._config.congestion_control)

    def _connection(
        self,
        sock: socket.socket,
        writer: Writer,
        greeting: Greeting,
        count: WireCount,
        *,
        dialed: bool,
    ) -> Connection:
        return Connection(sock, writer, greeting, dialed=dialed, count=count, clock=self._clock)
