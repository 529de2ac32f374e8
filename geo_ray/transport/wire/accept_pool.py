"""Accept connections, and bound the resources of peers that are not authenticated yet.

A new connection waits without a thread until its first frame, or first TLS record, is complete.
Only then does it get one of a few handshake slots and a thread. Slots are shared fairly between
sources: a connection that takes too long is evicted, the oldest one of the source with most.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv6Address, ip_address
from typing import Final, Generic, TypeAlias, TypeVar

from geo_ray.base.errors import FrameError, PeerRefusedError
from geo_ray.base.output import RateLimitedLog
from geo_ray.base.threads import Workers
from geo_ray.transport.wire import sockets
from geo_ray.transport.wire.frames import HEADER, MAGIC, FrameKind, parse_header
from geo_ray.transport.wire.handshake import HELLO_LIMITS

Holder = TypeVar("Holder")


class Places(Generic[Holder]):
    """A bounded number of places with their holders and times.

    Nothing is refused while a place is free. After that the source with most places loses its
    oldest: unknown peers at one address do not affect a peer at another.

    Args:
        most: count of places.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[Holder, tuple[str, float]] = {}  # oldest first

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._held

    @property
    def is_full(self) -> bool:
        """Whether no place is free."""
        return len(self._held) >= self._most

    def holders(self) -> list[Holder]:
        """Return the holders of places, the oldest first."""
        return list(self._held)

    def count(self, source: str) -> int:
        """Return how many places a source has."""
        return sum(source == held for held, _ in self._held.values())

    def take(self, holder: Holder, source: str, now_s: float) -> None:
        """Give a free place to ``holder``."""
        self._held[holder] = source, now_s

    def leave(self, holder: Holder) -> None:
        """Free a place; nothing happens if the holder has none."""
        self._held.pop(holder, None)

    def victim(self, source: str, now_s: float, tenure_s: float = 0.0) -> Holder | None:
        """Return the holder that loses its place to a new connection, or None.

        Args:
            source: of the new connection.
            now_s: the time.
            tenure_s: a younger holder only loses its place to a new connection whose source has
                fewer places.
        """
        counts = Counter(held for held, _ in self._held.values())
        if not counts:
            return None
        greedy, most = counts.most_common(1)[0]
        holder, since_s = next(
            (holder, since_s) for holder, (held, since_s) in self._held.items() if held == greedy
        )
        is_fair = most > counts[source] + 1 or now_s - since_s >= tenure_s
        return holder if is_fair else None


Serve: TypeAlias = Callable[[socket.socket, str, Callable[[], None]], None]
"""Takes a socket, which it closes, its source, and what to call once the peer is authenticated."""

_LOGGER = logging.getLogger(__name__)
_HELLO_TIMEOUT_S: Final = 2.0  # until the first frame is complete
_TENURE_S: Final = 2.0  # several long round trips: the guaranteed time of a handshake
_LOBBY: Final = 512  # connections without a thread
_ACCEPTS: Final = 64  # in one turn of the loop
_LOOKS: Final = 64  # at a first frame that comes in pieces
_RETRY_S: Final = 0.05
_CROWDED_S: Final = 0.01
_WAITING_S: Final = 0.1
_IDLE_S: Final = 0.5
_IPV6_NETWORK_BITS: Final = 64
_TLS_HEAD_BYTES: Final = 5
_TLS_HANDSHAKE: Final = b"\x16\x03"
_TLS_RECORD_BYTES: Final = 16 * 1024


@dataclass(eq=False, slots=True)
class _PendingConnection:
    sock: socket.socket
    source: str
    deadline_s: float
    looks: int = 0
    is_ready: bool = False


@dataclass(eq=False, slots=True)
class _Place:
    # A separate handle of the connection: the thread may close its own at any time.
    handle: socket.socket
    is_evicted: bool = False


class AcceptPool:
    """Accepts a listener's connections until closed, despite any errors.

    Args:
        listener: a listening socket; its owner closes it.
        serve: serves one connection in its own thread, its handshake first.
        workers: threads.
        name: of these threads.
        most: handshakes at the same time.
        timeout_s: for the whole wait of a connection that has sent its first frame.
    """

    def __init__(
        self,
        listener: socket.socket,
        serve: Serve,
        workers: Workers,
        *,
        name: str,
        most: int,
        timeout_s: float,
    ) -> None:
        self._listener = listener
        self._serve = serve
        self._workers = workers
        self._name = name
        self._timeout_s = timeout_s
        self._quiet = RateLimitedLog(_LOGGER)
        self._closed = threading.Event()
        self._lobby: Places[_PendingConnection] = Places(_LOBBY)  # only the loop's thread uses it
        self._lock = threading.Lock()  # guards the places, which other threads leave
        self._places: Places[_Place] = Places(most)

    def close(self) -> None:
        """Stop accepting; shutting the listener down ends `run` at once."""
        self._closed.set()
        sockets.hang_up(self._listener)

    def run(self) -> None:
        """Accept connections until closed; only one thread may run it."""
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, None)
            while not self._closed.is_set():
                try:
                    self._turn(selector)
                except Exception as error:  # no descriptors, threads or memory, most likely
                    if self._closed.wait(_RETRY_S):
                        break
                    self._quiet.warning(type(error).__name__, f"accepting connections: {error!r}")
            for pending in self._lobby.holders():
                pending.sock.close()

    def _turn(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(self._patience_s()):
            if key.data is None:
                self._accept(selector)
            elif key.data in self._lobby:
                self._look(selector, key.data)
        now_s = time.monotonic()
        for pending in self._lobby.holders():
            if now_s > pending.deadline_s:
                self._turn_away(selector, pending, "sent nothing valid in time")
        self._seat(selector, now_s)

    def _patience_s(self) -> float:
        waiting = self._lobby.holders()
        if any(pending.is_ready for pending in waiting):
            return _CROWDED_S
        return _WAITING_S if waiting else _IDLE_S

    # ------------------------------------------------------------------ without a thread

    def _accept(self, selector: selectors.BaseSelector) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            try:
                sock.setblocking(False)
                now_s = time.monotonic()
                hello_timeout_s = min(_HELLO_TIMEOUT_S, self._timeout_s)
                pending = _PendingConnection(
                    sock, source_of(str(address[0])), now_s + hello_timeout_s
                )
                while self._lobby.is_full:
                    victim = self._lobby.victim(pending.source, now_s)
                    if victim is not None:
                        self._turn_away(selector, victim, "waited while many others came")
                selector.register(sock, selectors.EVENT_READ, pending)
                self._lobby.take(pending, pending.source, now_s)
            except BaseException:
                sock.close()
                raise

    def _look(self, selector: selectors.BaseSelector, pending: _PendingConnection) -> None:
        """Check whether the first frame is complete, without reading from the socket."""
        pending.looks += 1
        try:
            start = pending.sock.recv(HELLO_LIMITS.max_meta_bytes, socket.MSG_PEEK)
            needed = first_frame_bytes(start)
            arrived = len(pending.sock.recv(needed, socket.MSG_PEEK))
            is_ready = arrived >= needed
            # The selector need not report again what is there already.
            lowest = 1 if is_ready else needed
            pending.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, lowest)
        except BlockingIOError:
            return
        except (FrameError, OSError) as error:
            self._turn_away(selector, pending, f"is no peer: {error}")
            return
        if is_ready:
            pending.is_ready = True
            pending.deadline_s = time.monotonic() + self._timeout_s
            selector.unregister(pending.sock)
        elif not start or pending.looks > _LOOKS:
            self._turn_away(selector, pending, "ended before its first frame")

    def _turn_away(
        self, selector: selectors.BaseSelector, pending: _PendingConnection, why: str
    ) -> None:
        self._lobby.leave(pending)
        if not pending.is_ready:
            selector.unregister(pending.sock)
        pending.sock.close()
        self._quiet.warning(why[:12], f"a connection of {pending.source} {why}")

    # ------------------------------------------------------------------ with a thread

    def _seat(self, selector: selectors.BaseSelector, now_s: float) -> None:
        """Give places to ready connections, first to those whose sources have fewest."""
        ready = [pending for pending in self._lobby.holders() if pending.is_ready]
        while ready:
            with self._lock:
                pending = min(ready, key=lambda each: self._places.count(each.source))
                if self._places.is_full:
                    self._evict(pending.source, now_s)
                    return
            ready.remove(pending)
            self._lobby.leave(pending)
            self._begin(pending, now_s)

    def _evict(self, source: str, now_s: float) -> None:
        """End a handshake for a new connection, which gets the place when its thread has ended."""
        victim = self._places.victim(source, now_s, _TENURE_S)
        if victim is not None and not victim.is_evicted:
            victim.is_evicted = True
            sockets.hang_up(victim.handle)

    def _begin(self, pending: _PendingConnection, now_s: float) -> None:
        sock, place = pending.sock, None
        try:
            sock.setblocking(True)
            place = _Place(sock.dup())
            with self._lock:
                self._places.take(place, pending.source, now_s)
            self._workers.start(self._name, partial(self._run, sock, pending.source, place))
        except BaseException:
            sock.close()
            if place is not None:
                self._leave(place)
            raise

    def _run(self, sock: socket.socket, source: str, place: _Place) -> None:
        try:
            self._serve(sock, source, partial(self._leave, place))
        except Exception:
            _LOGGER.exception("a connection of %s failed", source)
        finally:
            self._leave(place)

    def _leave(self, place: _Place) -> None:
        with self._lock:
            self._places.leave(place)
            place.handle.close()


def source_of(host: str) -> str:
    """Return the source of a connection: an IPv4 address, or the network of an IPv6 address."""
    address = ip_address(host.split("%")[0])
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    network = int(address) >> _IPV6_NETWORK_BITS << _IPV6_NETWORK_BITS
    return f"{IPv6Address(network)}/{_IPV6_NETWORK_BITS}"


def first_frame_bytes(start: bytes) -> int:
    """Return the length of a connection's first frame, or TLS record, as its start shows.

    Raises:
        FrameError: neither a hello nor a TLS handshake begins like that.
    """
    if start[: len(_TLS_HANDSHAKE)] == _TLS_HANDSHAKE[: len(start)] and start:
        if len(start) < _TLS_HEAD_BYTES:
            return _TLS_HEAD_BYTES
        record_bytes = int.from_bytes(start[3:_TLS_HEAD_BYTES])
        if record_bytes > _TLS_RECORD_BYTES:
            raise FrameError(f"a TLS handshake begins with a record of {record_bytes} bytes")
        return _TLS_HEAD_BYTES + record_bytes
    if len(start) < HEADER.size:
        if not MAGIC.startswith(start[: len(MAGIC)]):
            raise FrameError(f"a connection begins with {start[:4]!r}")
        return HEADER.size
    try:
        header = parse_header(start[: HEADER.size], HELLO_LIMITS)
    except PeerRefusedError:
        return HEADER.size  # of another version: the handshake tells it so
    if header.kind is not FrameKind.HELLO:
        raise FrameError(f"a connection begins with a {header.kind.name} frame")
    return HEADER.size + header.meta_bytes
