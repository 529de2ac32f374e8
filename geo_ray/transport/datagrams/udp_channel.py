"""One UDP socket of an endpoint, for blocks that may be lost: receives them and reports on them.

The socket has the number of the endpoint's TCP port if that is free, so that a firewall needs one
rule. The real number is sent over the connection, from whose keys both ends derive that of a
session. A datagram of no known session is dropped before anything else is done with it. One
thread, which sleeps while nothing arrives.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from geo_ray.clock import Clock
from geo_ray.errors import FrameError, TransportError
from geo_ray.transport.datagrams.datagram import (
    MAX_DATAGRAM_BYTES,
    BlockGroup,
    Opener,
    Secret,
    session_of,
)
from geo_ray.transport.datagrams.pacing import REPORT_S, Seen
from geo_ray.transport.wire import sockets
from geo_ray.transport.wire.sockets import Address

_LOGGER = logging.getLogger(__name__)
_BUFFER_BYTES: Final = 4 * 1024**2  # the kernel grants what it allows
_SO_RCVBUFFORCE: Final = 33  # of Linux; the module socket does not name it


@dataclass(slots=True)
class _Session:
    peer: str
    secret: Secret
    opener: Opener
    delay_s: float = 0.0  # shortest delay since the last report
    report_at_s: float | None = None


@dataclass(slots=True)
class UdpCounts:
    """What arrived at a channel.

    Attributes:
        datagrams: count of authentic datagrams, each counted once.
        bytes_in: bytes of these by peer.
        strange: count of datagrams of no session, altered or malformed.
    """

    datagrams: int = 0
    bytes_in: Counter[str] = field(default_factory=Counter)
    strange: int = 0


class UdpChannel:
    """The UDP socket of an endpoint and its receiving thread; see the module's docstring.

    Args:
        address: address of the endpoint's listener; the channel uses the same host, and the same
            port if it is free.
        on_group: called with (peer, blocks) in the receiving thread.
        on_report: called with (peer, session, what was seen) about every `REPORT_S` while datagrams
            arrive.
        clock: clock for delays and reports.
        is_revoked: whether a peer's session must end, because its certificate counts no more.

    Raises:
        TransportError: no UDP socket can be opened there.
    """

    def __init__(
        self,
        address: Address,
        on_group: Callable[[str, BlockGroup], None],
        on_report: Callable[[str, bytes, Seen], None],
        clock: Clock,
        is_revoked: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.counts = UdpCounts()
        self._on_group = on_group
        self._on_report = on_report
        self._clock = clock
        self._is_revoked = is_revoked
        self._lock = threading.Lock()
        self._sessions: dict[bytes, _Session] = {}
        self._closed = False
        self._tos = 0
        self._sock = _bind(*address)
        self._thread = threading.Thread(target=self._receive_all, name="wan-udp", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The bound port."""
        return sockets.address_of(self._sock)[1]

    def expect(self, peer: str, secret: Secret) -> None:
        """Begin a session for datagrams of ``peer``; older sessions of that peer end."""
        with self._lock:
            others = self._others(peer)
            self._sessions = {**others, secret.session: _Session(peer, secret, Opener(secret))}

    def forget(self, peer: str) -> None:
        """End the session of ``peer``: its datagrams are strange from now on."""
        with self._lock:
            self._sessions = self._others(peer)

    def _others(self, peer: str) -> dict[bytes, _Session]:
        return {name: each for name, each in self._sessions.items() if each.peer != peer}

    def send(self, datagram: bytes, address: Address, tos: int = 0) -> None:
        """Send a datagram; one that the system does not take counts as lost.

        Args:
            datagram: what `Sealer.seal` returned.
            address: numeric, see `resolve`.
            tos: TOS field of the IP header; callers in several threads must use the same value.
        """
        with contextlib.suppress(OSError):
            if tos != self._tos:
                _set_tos(self._sock, tos)
                self._tos = tos
            self._sock.sendto(datagram, address)

    def resolve(self, address: Address) -> Address:
        """Return a host's name and port as a numeric address of this socket's family.

        Raises:
            TransportError: the name is unknown.
        """
        try:
            found = socket.getaddrinfo(*address, family=self._sock.family, type=socket.SOCK_DGRAM)
        except OSError as error:
            raise TransportError(f"cannot send datagrams to {address}: {error}") from error
        host, port = found[0][4][:2]
        return str(host), int(port)

    def close(self) -> None:
        """End the thread and free the socket."""
        self._closed = True
        sockets.hang_up(self._sock)
        self._thread.join()
        self._sock.close()

    def _receive_all(self) -> None:
        while not self._closed:
            due_s = min(
                (s.report_at_s for s in self._sessions.values() if s.report_at_s is not None),
                default=None,
            )
            now_s = self._clock.now_s()
            if due_s is not None and due_s <= now_s:
                self._report(now_s)
                continue
            try:
                self._sock.settimeout(None if due_s is None else due_s - now_s)
                datagram = self._sock.recv(MAX_DATAGRAM_BYTES + 1)
            except TimeoutError:
                continue
            except OSError as error:  # such as an ICMP answer to something that was sent
                if not self._closed:
                    _LOGGER.debug("UDP socket: %s", error)
                continue
            if datagram:
                self._take(datagram)

    def _take(self, datagram: bytes) -> None:
        name = session_of(datagram)
        session = None if name is None else self._sessions.get(name)
        if session is not None and self._is_revoked(session.peer):
            _LOGGER.warning("datagrams of region %s: its certificate is revoked", session.peer)
            self.forget(session.peer)
            session = None
        body = None if session is None else session.opener.open(datagram)
        if session is None or body is None:
            self.counts.strange += 1
            return
        try:
            group = BlockGroup.unpack(body)
        except FrameError as error:
            self.counts.strange += 1
            _LOGGER.warning("a datagram of region %s: %s", session.peer, error)
            return
        self.counts.datagrams += 1
        self.counts.bytes_in[session.peer] += len(datagram)
        now_s = self._clock.now_s()
        delay_s = now_s - group.sent_us * 1e-6
        if session.report_at_s is None:
            session.report_at_s, session.delay_s = now_s + REPORT_S, delay_s
        session.delay_s = min(session.delay_s, delay_s)
        try:
            self._on_group(session.peer, group)
        except Exception:  # the thread also serves other regions
            _LOGGER.exception("blocks of region %s were not taken in", session.peer)

    def _report(self, now_s: float) -> None:
        for session in list(self._sessions.values()):
            if session.report_at_s is None or session.report_at_s > now_s:
                continue
            session.report_at_s = None
            opener = session.opener
            seen = Seen(opener.highest, opener.received, session.delay_s)
            try:
                self._on_report(session.peer, session.secret.session, seen)
            except Exception:
                _LOGGER.exception("region %s was not told what arrived", session.peer)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    with contextlib.suppress(OSError):  # only root may set a size beyond the system's bound
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    for wanted in (port, 0):
        try:
            sock.bind((host, wanted))
        except OSError as error:
            problem = error
        else:
            return sock
    sock.close()
    raise TransportError(f"no UDP socket can be had on {host}: {problem}")


def _set_tos(sock: socket.socket, tos: int) -> None:
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, tos)
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
