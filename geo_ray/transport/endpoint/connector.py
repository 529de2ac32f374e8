"""Makes an authenticated connection of a session from a TCP connection."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping

from geo_ray.clock import Clock
from geo_ray.errors import LinkDownError, PeerRefusedError
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.emulation.shaper import Shaper
from geo_ray.transport.endpoint.session import Session
from geo_ray.transport.endpoint.stream import Stream
from geo_ray.transport.security.encryption import Encryption
from geo_ray.transport.security.tls_reasons import refusal
from geo_ray.transport.wire import sockets
from geo_ray.transport.wire.fields import count, text
from geo_ray.transport.wire.frames import Frame, encode
from geo_ray.transport.wire.handshake import Greeting, HandshakeSide, expect_same, greet, welcome
from geo_ray.transport.wire.message import EndpointIdentity
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.sockets import Address

_SERVICE = "wan"


class Connector:
    """Dials and accepts connections for an endpoint.

    Args:
        identity: this endpoint.
        instance: id that is unique to this start of the endpoint.
        config: timeouts.
        clock: clock for emulated links.
        shapers: emulated links by destination region.
        encryption: which connections are encrypted.
        find: returns the session with a region, or None; it is also asked about unknown regions.

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
            "epoch": identity.epoch,
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
            OSError: nobody answers there.
        """
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
            side = self._side(sock, hello, admit, lambda: session.peer)
            greeting = self._explained(lambda: greet(sock, side), session.peer)
            return self._stream(sock, number, greeting, side)

    def reach(self, address: Address, is_over: Callable[[], bool]) -> bool:
        """Ask a listener for a TCP connection every second, and end it at once.

        Args:
            address: where the region listens.
            is_over: asked ten times per second; True gives up.

        Returns:
            Whether there is a path.
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
            greeting = self._explained(lambda: welcome(sock, side), "a stranger")
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
        count(theirs, "epoch")
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
    ) -> HandshakeSide:
        def send(frame: Frame, key: bytes) -> None:
            data = b"".join(encode(frame, key))
            shaper = self._shapers.get(peer())
            if shaper is not None:
                wait_s = shaper.arrival_s(shaper.now_s(), len(data)) - shaper.now_s()
                self._closed.wait(max(0.0, wait_s))
            sock.sendall(data)

        timeout_s = self._config.handshake_timeout_s
        return HandshakeSide(self._identity.key, {**self._hello, **more}, admit, send, timeout_s)

    @staticmethod
    def _explained(step: Callable[[], Greeting], peer: str) -> Greeting:
        try:
            return step()
        except ssl.SSLError as error:  # with TLS 1.3 a refusal comes with the first read
            raise refusal(error, peer) from None

    def _stream(
        self, sock: socket.socket, number: int, greeting: Greeting, side: HandshakeSide
    ) -> Stream:
        shaper = self._shapers.get(text(greeting.hello, "region"))
        return Stream(sock, number, greeting, shaper, side.count.wire_bytes)
