"""UDP sockets for lossy blocks: one receiving socket per endpoint, one sending thread per peer.

The socket uses the endpoint's TCP port number if free, so that a firewall needs one rule; the real
number is exchanged over the connection. Datagrams of unknown sessions are dropped first. A sender
waits until the reliable part of its update is acknowledged and then uses the remaining capacity
of the link. The next update stops it at once; unsent blocks are reported to the caller.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from geo_ray.base.clock import Clock
from geo_ray.base.errors import FrameError, TransportError
from geo_ray.transport.datagrams import (
    MAX_DATAGRAM_BYTES,
    REPORT_S,
    BlockGroup,
    Opener,
    Sealer,
    Secret,
    Seen,
    TokenBucket,
    YieldingRate,
    blocks_per_datagram,
    session_of,
)
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
    """Counters of a channel's received datagrams.

    Attributes:
        datagrams: count of authentic datagrams, each counted once.
        bytes_received: bytes of these by peer.
        strange: count of datagrams of no session, altered or malformed.
    """

    datagrams: int = 0
    bytes_received: Counter[str] = field(default_factory=Counter)
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
        is_revoked: whether a peer's session must end, because its certificate is revoked.

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
        self.counts.bytes_received[session.peer] += len(datagram)
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
                _LOGGER.exception(
                    "no report of arrived datagrams was sent to region %s", session.peer
                )


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


_GATE_S: Final = 0.25  # longest wait per check that reliable data are acknowledged
_NAP_S: Final = 0.002  # shortest sleep of the pacing


@dataclass(frozen=True, slots=True)
class LossyLoad:
    """The lossy blocks of an update.

    Attributes:
        attempt: attempt of the sender.
        seq: the update's number.
        ids: position of each block within the vector, by rank.
        data: the blocks' bytes, by rank, one after the other.
        block_bytes: size of each block.
        bands: ranges of rank, for marking.
    """

    attempt: int
    seq: int
    ids: Sequence[int]
    data: memoryview
    block_bytes: int
    bands: int = 1

    def group(self, first_rank: int, count: int) -> BlockGroup:
        """Return ``count`` blocks from ``first_rank`` on, or as many as there are."""
        stop = min(len(self.ids), first_rank + count)
        size = self.block_bytes
        blocks = [self.data[rank * size : (rank + 1) * size] for rank in range(first_rank, stop)]
        return BlockGroup(self.attempt, self.seq, first_rank, self.ids[first_rank:stop], blocks)


@dataclass(slots=True)
class SenderCounts:
    """Counters of a sender's datagrams.

    Attributes:
        datagrams: count of datagrams.
        bytes_sent: bytes of these datagrams.
        blocks: count of lossy blocks in them.
        unsent: count of blocks that were not sent before the next update.
    """

    datagrams: int = 0
    bytes_sent: int = 0
    blocks: int = 0
    unsent: int = 0


class UdpSender:
    """The sending thread of one peer; see the module's docstring.

    Args:
        send: takes (datagram, band, bands); must not block for long.
        is_drained: waits at most the given seconds; returns whether no reliable data are due to the
            peer.
        start_mbps: returns a first guess at the link's rate when a session begins.
        most_mbps: upper bound of the rate; None for no bound.
        clock: clock for pacing.
    """

    def __init__(
        self,
        send: Callable[[bytes, int, int], None],
        is_drained: Callable[[float], bool],
        start_mbps: Callable[[], float],
        most_mbps: float | None,
        clock: Clock,
    ) -> None:
        self.counts = SenderCounts()
        self._send = send
        self._is_drained = is_drained
        self._start_mbps = start_mbps
        self._most_mbps = most_mbps
        self._clock = clock
        self._changed = threading.Condition()  # guards the attributes below
        self._session: bytes | None = None
        self._sealer: Sealer | None = None
        self._rate = YieldingRate(1.0, most_mbps)
        self._bucket = TokenBucket(1.0)
        self._load: LossyLoad | None = None
        self._next_rank = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="wan-loose", daemon=True)
        self._thread.start()

    @property
    def mbps(self) -> float:
        """The present rate."""
        return self._rate.mbps

    @property
    def loss(self) -> float | None:
        """The share of datagrams lost recently; None if it is not known."""
        return self._rate.loss

    @property
    def sealed(self) -> int:
        """The count of datagrams under the present key."""
        sealer = self._sealer
        return 0 if sealer is None else sealer.number

    def use(self, secret: Secret) -> None:
        """Send under this session from now on."""
        start_mbps = self._start_mbps()
        with self._changed:
            if self._session == secret.session:
                return  # the numbers of one key must not begin again, since they are the nonce
            self._session, self._sealer = secret.session, Sealer(secret)
            self._rate = YieldingRate(start_mbps, self._most_mbps)
            self._bucket = TokenBucket(self._rate.mbps)
            self._changed.notify_all()

    def start(self, load: LossyLoad) -> None:
        """Send these blocks once reliable data are acknowledged; `stop` has ended the last ones."""
        with self._changed:
            self._load, self._next_rank = load, 0
            self._changed.notify_all()

    def stop(self) -> tuple[int, int] | None:
        """Stop sending the present update.

        Returns:
            The update's number and the first rank that was not sent; None if no update was being
            sent.
        """
        with self._changed:
            load, self._load = self._load, None
            self._changed.notify_all()
            if load is None:
                return None
            self.counts.unsent += len(load.ids) - self._next_rank
            return load.seq, self._next_rank

    def on_seen(self, session: bytes, seen: Seen) -> None:
        """Adapt the rate to the peer's report."""
        now_s = self._clock.now_s()
        with self._changed:
            if session == self._session:
                self._rate.on_seen(now_s, seen)
                self._bucket.set_rate(now_s, self._rate.mbps)

    def close(self) -> None:
        """End the sending thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._closed:
                    return
                load = self._load
            if load is not None and self._is_drained(_GATE_S):
                self._send_all(load)

    def _has_work(self) -> bool:
        load = self._load
        left = load is not None and self._next_rank < len(load.ids)
        return self._closed or (left and self._sealer is not None)

    def _send_all(self, load: LossyLoad) -> None:
        per_datagram = blocks_per_datagram(load.block_bytes)
        while (found := self._next(load, per_datagram)) is not None:
            datagram, rank = found
            self._send(datagram, rank * load.bands // len(load.ids), load.bands)

    def _next(self, load: LossyLoad, per_datagram: int) -> tuple[bytes, int] | None:
        """Wait for the next datagram's time; return it and its first rank, or None at the end."""
        with self._changed:
            while True:
                rank, sealer = self._next_rank, self._sealer
                if self._closed or self._load is not load or rank >= len(load.ids):
                    return None
                if sealer is None:
                    return None
                now_s = self._clock.now_s()
                group = load.group(rank, per_datagram)
                size_bytes = load.block_bytes * len(group.ids)
                wait_s = self._bucket.take(now_s, size_bytes)
                if wait_s <= 0.0:
                    break
                self._changed.wait(max(wait_s, _NAP_S))
            datagram = sealer.seal(group.pack(int(now_s * 1e6)))
            self._next_rank += len(group.ids)
            self._rate.on_sent(len(datagram))
            self.counts.datagrams += 1
            self.counts.bytes_sent += len(datagram)
            self.counts.blocks += len(group.ids)
            return datagram, rank
