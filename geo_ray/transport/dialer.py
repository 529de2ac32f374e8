"""Dial, accept and authenticate the connections of an endpoint.

`Connector` turns a TCP connection into an authenticated connection of a session; `Dialer` runs
the threads that dial peers, accept connections and reconnect.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from geo_ray.base.clock import Clock
from geo_ray.base.errors import LinkDownError, PeerRefusedError, TransportError
from geo_ray.base.output import RateLimitedLog
from geo_ray.base.threads import Workers
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.connection import Connection, Stream
from geo_ray.transport.emulation import Shaper
from geo_ray.transport.security.tls import Encryption, refusal
from geo_ray.transport.session import Session
from geo_ray.transport.wire import sockets
from geo_ray.transport.wire.accept_pool import AcceptPool
from geo_ray.transport.wire.fields import Meta, count, text
from geo_ray.transport.wire.frames import Frame, FrameKind, encode
from geo_ray.transport.wire.handshake import Greeting, HandshakeSide, expect_same, greet, welcome
from geo_ray.transport.wire.message import EndpointIdentity
from geo_ray.transport.wire.sockets import Address

_SERVICE = "wan"
_REQUEST_BYTES: Final = 512  # a request for a connection, and the first frame


class Connector:
    """Dials and accepts connections for an endpoint.

    Args:
        identity: this endpoint.
        instance: id that is unique to this start of the endpoint.
        config: timeouts.
        clock: clock for emulated links.
        shapers: emulated links by destination region.
        encryption: which connections are encrypted.
        find: returns the session with a region, or None for an unknown one.

    Attributes:
        encryption: as given.
    """

    def __init__(
        self,
        identity: EndpointIdentity,
        instance: str,
        config: TransportConfig,
        clock: Clock,
        shapers: Mapping[str, Shaper],
        encryption: Encryption,
        find: Callable[[str], Session | None],
    ) -> None:
        self._identity = identity
        self._hello: Meta = {
            "service": _SERVICE,
            "run": identity.run_id,
            "region": identity.region,
            "attempt": identity.attempt,
            "instance": instance,
        }
        self._config = config
        self._clock = clock
        self._shapers = shapers
        self.encryption = encryption
        self._find = find
        self._lock = threading.Lock()
        self._pending: set[socket.socket] = set()
        self._closed = threading.Event()

    def dial(self, session: Session, address: Address, number: int, link_id: str) -> Stream:
        """Connect to a session's region and authenticate.

        Args:
            session: session with the region to dial.
            address: where the region listens.
            number: 0 for the control stream, else of a data stream.
            link_id: of the connection that a data stream belongs to.

        Raises:
            PeerRefusedError: one side refused the other.
            TransportError: the other side does not speak this protocol, or this one is closed.
            OSError: no process answers there.
        """
        # As on a real link, the request takes its time; the first frame arrives right after it.
        self._await_arrival(session.peer, _REQUEST_BYTES)
        sock = self._connect(address)

        def admit(theirs: Meta) -> Meta:
            self._check(theirs)
            expect_same("region", theirs.get("region"), session.peer)
            return {} if number else session.admit({**theirs, "stream": 0})

        with self._interruptible(sock):
            sock = self.encryption.dialed(sock)
        with self._interruptible(sock):  # wrapping a socket in TLS detaches the original
            self.encryption.shake_hands(sock)
            self.encryption.expect(sock, session.peer)
            hello: Meta = {"to": session.peer, "stream": number, "link": link_id}
            side = self._side(sock, hello, admit, lambda: session.peer, requested=True)
            with _explained(session.peer):
                greeting = greet(sock, side)
            return self._stream(sock, number, greeting, side)

    def reach(self, address: Address, is_over: Callable[[], bool]) -> bool:
        """Ask a listener for a TCP connection every second, and end it at once.

        Args:
            address: where the region listens.
            is_over: called ten times per second; True gives up.

        Returns:
            Whether the path works.
        """
        config = self._config
        try:
            sock = sockets.connect_first(
                sockets.resolve(address),
                0,
                config.peer_timeout_s + config.connect_timeout_s,
                lambda: self._closed.is_set() or is_over(),
            )
        except OSError:
            return False
        sock.close()
        return True

    def receive(self, sock: socket.socket) -> Stream:
        """Authenticate an accepted socket.

        Args:
            sock: closed on any error.

        Raises:
            PeerRefusedError: one side refused the other.
            TransportError: the other side does not speak this protocol, or this one is closed.
            OSError: the connection was lost, or the other side is too slow.
        """
        peer = ""

        def admit(theirs: Meta) -> Meta:
            nonlocal peer
            self._check(theirs)
            expect_same("destination", theirs.get("to"), self._identity.region)
            peer = text(theirs, "region")
            self.encryption.expect(sock, peer)
            number, session = count(theirs, "stream"), self._find(peer)
            if session is not None:
                return session.admit(theirs)
            if number:
                raise PeerRefusedError(f"a data stream of region {peer} came without connection")
            return Session.nothing_delivered()

        with self._interruptible(sock):
            sock.settimeout(self._config.handshake_timeout_s)
            self._tune(sock)
            sock = self.encryption.accepted(sock)
        with self._interruptible(sock):
            self.encryption.shake_hands(sock)
            side = self._side(sock, {}, admit, lambda: peer)
            with _explained("a stranger"):
                greeting = welcome(sock, side)
            return self._stream(sock, count(greeting.hello, "stream"), greeting, side)

    def close(self) -> None:
        """Interrupt handshakes under way, and refuse new ones."""
        self._closed.set()
        with self._lock:
            pending = list(self._pending)
        for sock in pending:
            sockets.hang_up(sock)

    # ------------------------------------------------------------------ sockets

    def _connect(self, address: Address) -> socket.socket:
        """Connect to the first of a name's addresses that answers."""
        config = self._config
        sock = sockets.connect_first(
            sockets.resolve(address),
            config.socket_buffer_bytes,
            config.connect_timeout_s,
            self._closed.is_set,
        )
        with self._interruptible(sock):
            self._tune(sock)
            sock.settimeout(config.handshake_timeout_s)
        return sock

    @contextlib.contextmanager
    def _interruptible(self, sock: socket.socket) -> Iterator[None]:
        """Let `close` interrupt the block; close the socket if the block fails."""
        with self._lock:
            self._pending.add(sock)
        try:
            if self._closed.is_set():
                raise LinkDownError("the endpoint is closed")
            yield
        except BaseException:
            sockets.hang_up(sock)
            sock.close()
            raise
        finally:
            with self._lock:
                self._pending.discard(sock)

    def _tune(self, sock: socket.socket) -> None:
        sockets.tune(sock, congestion=self._config.congestion_control)

    # ------------------------------------------------------------------ messages

    def _check(self, theirs: Meta) -> None:
        expect_same("service", theirs.get("service"), _SERVICE)
        expect_same("run", theirs.get("run"), self._identity.run_id)
        count(theirs, "attempt")
        text(theirs, "instance")
        if text(theirs, "region") == self._identity.region:
            # A reflected hello, or two endpoints for one region.
            expect_same("region", theirs["region"], f"another than {self._identity.region}")

    def _side(
        self,
        sock: socket.socket,
        more: Meta,
        admit: Callable[[Meta], Meta],
        peer: Callable[[], str],
        *,
        requested: bool = False,
    ) -> HandshakeSide:
        def send(frame: Frame, key: bytes) -> None:
            data = b"".join(encode(frame, key))
            if not (requested and frame.kind is FrameKind.HELLO):
                self._await_arrival(peer(), len(data))
            sock.sendall(data)

        timeout_s = self._config.handshake_timeout_s
        return HandshakeSide(self._identity.key, {**self._hello, **more}, admit, send, timeout_s)

    def _await_arrival(self, peer: str, size_bytes: int) -> None:
        """Wait until bytes have passed the emulated link to a region, if there is one."""
        shaper = self._shapers.get(peer)
        if shaper is not None:
            wait_s = shaper.arrival_s(shaper.now_s(), size_bytes) - shaper.now_s()
            self._closed.wait(max(0.0, wait_s))

    def _stream(
        self, sock: socket.socket, number: int, greeting: Greeting, side: HandshakeSide
    ) -> Stream:
        shaper = self._shapers.get(text(greeting.hello, "region"))
        return Stream(sock, number, greeting, shaper, side.count.wire_bytes)


@contextlib.contextmanager
def _explained(peer: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:  # with TLS 1.3 a refusal comes with the first read
        raise refusal(error, peer) from None


_LOGGER = logging.getLogger(__name__)
_STUCK_MIN_S: Final = 2.0  # a busy machine may keep a thread waiting
_FAILURES_TO_LOG: Final = 3  # at the end of a run, other regions may close earlier or later


class Dialer:
    """Dials and accepts for an endpoint, and keeps its sessions going.

    Every thread that dials or runs a connection can fail, for lack of memory or threads or by a
    fault of this program. `watch` checks the present state, not reports.

    Args:
        connector: makes streams of sockets.
        config: pauses and bounds.
        clock: clock for connections.
        workers: threads.
        session: returns the session with a region and makes it if need be; raises LinkDownError
            once closed.
        address: returns where a dialed region listens now.
        skip: called with a region and the address of a failed dial; another one may be next.
    """

    def __init__(
        self,
        connector: Connector,
        config: TransportConfig,
        clock: Clock,
        workers: Workers,
        session: Callable[[str], Session],
        address: Callable[[str], Address],
        skip: Callable[[str, Address], None],
    ) -> None:
        self._connector = connector
        self._config = config
        self._clock = clock
        self._workers = workers
        self._session = session
        self._address = address
        self._skip = skip
        self._quiet = RateLimitedLog(_LOGGER)
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards the two below
        self._keepers: dict[
            str, object | None
        ] = {}  # by region that is dialed, the present thread's own
        self._probed: set[str] = set()  # regions to which a path is looked for
        self._pools: list[AcceptPool] = []

    def close(self) -> None:
        """Stop accepting and watching."""
        self._closed.set()
        for pool in self._pools:
            pool.close()

    # ------------------------------------------------------------------ watching

    def watch(self, sessions: Callable[[], list[Session]]) -> None:
        """Check until closed that every session makes progress; runs in a separate thread.

        It also reloads changed certificates, and ends links whose peer's is revoked. A connection
        whose loop is stuck is closed, and a region whose thread has ended or is stuck is dialed by
        another thread.
        """
        every_s = self._config.heartbeat_s
        looked_s = self._clock.now_s()
        while not self._closed.wait(every_s):
            waited_s, looked_s = self._clock.now_s() - looked_s, self._clock.now_s()
            if waited_s > every_s + _STUCK_MIN_S / 2:
                continue  # the whole process was stopped
            self._connector.encryption.refresh()
            for session in sessions():
                try:
                    self._check(session)
                except Exception as error:  # no thread to be had now
                    self._quiet.warning(f"watch {session.peer}", f"region {session.peer}: {error}")

    def _check(self, session: Session) -> None:
        session.give_up_revoked(self._connector.encryption.is_revoked)
        limit_s = self._config.unresponsive_after_s
        was_stuck = session.give_up_stuck(max(_STUCK_MIN_S, limit_s))
        with self._lock:
            is_dialed = session.peer in self._keepers
            if is_dialed and (was_stuck or self._keepers[session.peer] is None):
                self._start_keeper(session)
            connection = session.cut_connection() if is_dialed else None
            if connection is not None and session.peer not in self._probed:
                work = partial(self._look_for_path, session, connection)
                self._workers.start(f"wan-probe-{session.peer}", work)
                self._probed.add(session.peer)

    def _look_for_path(self, session: Session, connection: Connection) -> None:
        """Close a connection once the path works again and its TCP has not noticed.

        After an outage TCP retries only when its pause is over, which is as long as the outage
        was. A request for another connection costs a packet and shows the path at once.
        """
        try:
            address = self._address(session.peer)
            is_over = partial(_has_moved_on, session, connection)
            if self._connector.reach(address, is_over) and not is_over():
                connection.end("the path is back before TCP has noticed; it is redialed")
        finally:
            with self._lock:
                self._probed.discard(session.peer)

    def _start_keeper(self, session: Session) -> None:
        keeper = self._keepers[session.peer] = object()
        work = partial(self._keep_connected, session, keeper)
        try:
            self._workers.start(f"wan-{session.peer}", work)
        except BaseException:
            self._keepers[session.peer] = None  # `watch` tries again
            raise

    # ------------------------------------------------------------------ dialing

    def keep(self, session: Session) -> None:
        """Dial a session's region whenever it is disconnected, until the session is closed."""
        with self._lock:
            if session.peer not in self._keepers:
                self._start_keeper(session)

    def drop(self, session: Session) -> None:
        """Stop dialing a session's region; a connection to it stays."""
        with self._lock:
            self._keepers.pop(session.peer, None)

    def _keep_connected(self, session: Session, keeper: object) -> None:
        try:
            self._dial_again_and_again(session, keeper)
        finally:
            with self._lock:
                if self._keepers.get(session.peer) is keeper:
                    self._keepers[session.peer] = None

    def _dial_again_and_again(self, session: Session, keeper: object) -> None:
        config, failures = self._config, 0
        while session.wait_disconnected() and self._keepers.get(session.peer) is keeper:
            begun_s, address = self._clock.now_s(), self._address(session.peer)
            try:
                control = self._connector.dial(session, address, 0, "")
                session.run(self._adopt(session, control, dialed=True))
            except Exception as error:
                failures += 1
                self._skip(session.peer, address)
                session.note_error(error)
                if failures >= _FAILURES_TO_LOG:
                    message = f"cannot connect to {session.peer}: {error}; trying again"
                    self._quiet.warning(f"{session.peer} {type(error).__name__}", message)
            else:  # one that ends at once, again and again, must not keep the machine busy
                lasted_s = self._clock.now_s() - begun_s
                failures = 0 if lasted_s > config.reconnect_max_s else failures + 1
            longest_s = min(
                config.reconnect_max_s, config.reconnect_min_s * 2.0 ** min(failures, 30)
            )
            session.wait_closed(longest_s * random.uniform(0.5, 1.0))

    def _adopt(self, session: Session, control: Stream, *, dialed: bool) -> Connection:
        connection = Connection(
            session.peer,
            session,
            control,
            dialed=dialed,
            config=self._config,
            clock=self._clock,
            dial_stream=partial(self._start_dial, session),
        )
        try:
            session.adopt(connection)
        except BaseException:
            connection.discard()
            raise
        return connection

    def _start_dial(self, session: Session, connection: Connection, number: int) -> None:
        work = partial(self._dial_stream, session, connection, number)
        try:
            self._workers.start(f"wan-dial-{session.peer}", work)
        except RuntimeError as error:  # no thread to be had now
            connection.dial_ended(error)

    def _dial_stream(self, session: Session, connection: Connection, number: int) -> None:
        failure: Exception | None = None
        link_id = connection.greeting.link_id
        try:
            address = self._address(session.peer)
            _attach(connection, self._connector.dial(session, address, number, link_id))
        except Exception as error:
            failure = error
        connection.dial_ended(failure)

    # ------------------------------------------------------------------ accepting

    def accept(self, listener: socket.socket) -> None:
        """Start a thread that accepts connections until closed."""
        pool = AcceptPool(
            listener,
            self._receive,
            self._workers,
            name="wan-receive",
            most=self._config.max_handshakes,
            timeout_s=self._config.handshake_timeout_s,
        )
        self._pools.append(pool)
        self._workers.start("wan-accept", pool.run)

    def _receive(self, sock: socket.socket, source: str, admitted: Callable[[], None]) -> None:
        try:
            welcomed = self._welcome(self._connector.receive(sock))
        except (TransportError, OSError) as error:
            self._quiet.warning(type(error).__name__, f"refused {source}: {error}")
            return
        admitted()
        if welcomed is not None:
            session, connection = welcomed
            session.run(connection)

    def _welcome(self, stream: Stream) -> tuple[Session, Connection] | None:
        """Return a new connection to run; None for a data stream, which joins its own."""
        try:
            session = self._session(text(stream.greeting.hello, "region"))
            if not stream.number:
                return session, self._adopt(session, stream, dialed=False)
            connection = session.connection_of(stream.greeting.hello)
        except BaseException:
            stream.close()
            raise
        _attach(connection, stream)
        return None


def _has_moved_on(session: Session, connection: Connection) -> bool:
    return session.cut_connection() is not connection


def _attach(connection: Connection, stream: Stream) -> None:
    try:
        connection.attach(stream)
    except BaseException:
        stream.close()
        raise
