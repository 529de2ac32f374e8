"""Reliable, ordered messages between a bridge and other regions, over TCP.

There is one connection per pair of regions, used in both directions and made again when it breaks.
Between two living endpoints every message arrives exactly once and in order. `connection.py` moves
the bytes; see docs/design/transport.md. Example::

    endpoint = Endpoint(
        Identity(run_id, region, attempt, key), on_message, TransportConfig(...), on_peer=on_peer
    )
    endpoint.listen(host, port)  # returns the address; endpoint.advertised is for the others
    endpoint.connect("us-east", address)  # keeps connecting until closed
    endpoint.wait_connected(["us-east"], timeout_s)
    endpoint.send("us-east", Message("update", {"seq": 7}, payload, traffic="update"))
    endpoint.flush("us-east", timeout_s)  # until everything is acknowledged
    endpoint.forget("us-east")  # no longer dialed nor waited for
    endpoint.close(drain_s)
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Final

from geo_ray.base.clock import Clock, SystemClock
from geo_ray.base.errors import (
    DeadlineExceededError,
    LinkDownError,
    PeerRefusedError,
    TransportError,
)
from geo_ray.base.threads import Workers
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.dialer import Connector, Dialer
from geo_ray.transport.emulation import LinkModel, Shaper
from geo_ray.transport.security.tls import Encryption, TlsSource
from geo_ray.transport.session import Callbacks, HeldBytes, Session
from geo_ray.transport.wire import sockets
from geo_ray.transport.wire.message import EndpointIdentity, Message, PeerStats
from geo_ray.transport.wire.sockets import Address

__all__ = ["Address", "Endpoint", "EndpointIdentity", "Message", "PeerStats", "TransportConfig"]

_LOGGER = logging.getLogger(__name__)
_GOODBYE_S: Final = 0.5  # wait for the peer's end, which follows its last acks
_JOIN_S: Final = 10.0


class Endpoint:
    """One region's end of the WAN.

    Args:
        identity: identity of this endpoint.
        on_message: called with (peer's region, message) in a receiving thread, in order, and not
            again for that peer before it returns. Acks of the same peer wait meanwhile: move long
            work to another thread, and do not wait here for space in that peer's outbox.
        config: None takes the defaults; the same in every region.
        shaping: link models by destination region, new ones (see `build_links`); other regions
            are not shaped.
        clock: None takes the machine's.
        on_peer: called with (peer's region, its attempt, whether it is connected), in order with
            its messages. A higher attempt means that the peer restarted: messages that it had not
            acknowledged are dropped.
        run_start_s: the clock's time at which the link models' time is 0; None takes now.
        certificate: this region's, for TLS; None if it needs none (see ``transport.tls``).
        reuse: whether the memory of a large message is kept for the next one, which saves time.

    Raises:
        CertificateError: the certificate cannot be used.
    """

    def __init__(
        self,
        identity: EndpointIdentity,
        on_message: Callable[[str, Message], None],
        config: TransportConfig | None = None,
        shaping: Mapping[str, LinkModel] | None = None,
        clock: Clock | None = None,
        on_peer: Callable[[str, int, bool], None] | None = None,
        run_start_s: float | None = None,
        certificate: TlsSource | None = None,
        reuse: bool = True,
    ) -> None:
        self.identity = identity
        self._reuse = reuse
        self._config = config or TransportConfig()
        self._clock = clock or SystemClock()
        start_s = self._clock.now_s() if run_start_s is None else run_start_s
        self._shapers = {
            region: Shaper(model, self._clock, start_s) for region, model in (shaping or {}).items()
        }
        self._callbacks = Callbacks(on_message, on_peer or (lambda *_: None))
        self._connector = Connector(
            identity,
            secrets.token_hex(8),
            self._config,
            self._clock,
            self._shapers,
            Encryption(self._config.tls, certificate),
            self._find_or_refuse,
        )
        self._changed = threading.Condition()  # guards the attributes below
        self._sessions: dict[str, Session] = {}
        self._addresses: dict[str, tuple[Address, ...]] = {}
        self._listener: socket.socket | None = None
        self._closing = False
        self._closed = False
        self._is_watched = False
        self._held = HeldBytes(self._config.max_held_bytes)
        self._workers = Workers()
        self._dialer = Dialer(
            self._connector,
            self._config,
            self._clock,
            self._workers,
            self._session,
            self.dialed,
            self._skip,
        )

    # ------------------------------------------------------------------ links

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        """Start to accept connections; call once.

        Returns:
            The bound (host, port).

        Raises:
            PortInUseError: another process has the port.
            TransportError: the host is not one of this machine, or the endpoint listens already.
            LinkDownError: the endpoint is closed.
        """
        with self._changed:
            if self._closing:
                raise LinkDownError("the endpoint is closed")
            if self._listener is not None:
                raise TransportError("the endpoint listens already", fix="Use `advertised`.")
            listener = sockets.listen(host, port, self._config.socket_buffer_bytes)
            try:
                self._dialer.accept(listener)
            except BaseException:
                listener.close()
                raise
            self._listener = listener
        return sockets.address_of(listener)

    @property
    def advertised(self) -> Address:
        """The address for other regions: ``advertise_host``, else the address that it listens on.

        Raises:
            TransportError: it does not listen, or on every address without ``advertise_host``.
        """
        if self._listener is None:
            raise TransportError("the endpoint does not listen", fix="Call listen() first.")
        host, port = sockets.address_of(self._listener)
        host = self._config.advertise_host or host
        if host in ("0.0.0.0", "::"):  # noqa: S104  (refused, not bound)
            raise TransportError(
                f"{host} is no address that others could reach",
                fix="Set `transport.advertise_host`.",
            )
        return host, port

    def connect(self, peer: str, *addresses: Address, least_attempt: int = 0) -> None:
        """Maintain a connection to a region from now on; a second call changes the addresses.

        Returns at once; `wait_connected` waits. After a failed attempt, the next address is tried.

        Args:
            peer: the region.
            addresses: where it may listen, in order.
            least_attempt: earlier starts of the region are refused.

        Raises:
            LinkDownError: the endpoint is closed.
            TransportError: ``peer`` is this region.
        """
        if peer == self.identity.region:
            raise TransportError(f"region {peer} cannot connect to itself")
        session = self._session(peer)
        session.require(least_attempt)
        with self._changed:
            self._addresses[peer] = addresses
            if not self._closed:
                self._dialer.keep(session)

    def dialed(self, peer: str) -> Address:
        """Return the address at which a region is connected, or is tried next.

        Raises:
            LinkDownError: the region is not dialed.
        """
        with self._changed:
            if peer not in self._addresses:
                raise LinkDownError(f"region {peer} is not dialed")
            return self._addresses[peer][0]

    def expect(self, peer: str) -> None:
        """Queue messages for a region that will connect, from now on.

        Raises:
            LinkDownError: the endpoint is closed.
            TransportError: ``peer`` is this region.
        """
        if peer == self.identity.region:
            raise TransportError(f"region {peer} cannot connect to itself")
        self._session(peer)

    def forget(self, peer: str) -> None:
        """Forget a region: it is no longer dialed, and `close` does not wait for it.

        It may return, by its own connection or by `connect`; then the state is as before.
        """
        session = self._find(peer)
        if session is not None:
            self._dialer.drop(session)
            session.forget()

    def wait_connected(self, peers: Iterable[str], timeout_s: float) -> None:
        """Wait until all of ``peers`` are connected.

        Raises:
            LinkDownError: some are not connected in time; the message names them with the last
                cause.
        """
        wanted = sorted(set(peers))
        with self._changed:
            if self._changed.wait_for(lambda: not self._missing(wanted), timeout_s):
                return
            missing = self._missing(wanted)
        causes = []
        for peer in missing:
            session = self._sessions.get(peer)
            cause = session.stats()["last_error"] if session is not None else None
            causes.append(f"{peer} ({cause or 'never heard of'})")
        raise LinkDownError(f"not connected within {timeout_s} s: {', '.join(causes)}")

    def _missing(self, peers: list[str]) -> list[str]:
        return [
            peer
            for peer in peers
            if (session := self._sessions.get(peer)) is None or not session.is_connected
        ]

    # ------------------------------------------------------------------ messages

    def send(self, peer: str, message: Message, deadline_s: float | None = None) -> None:
        """Queue a message; it arrives once, after earlier ones, while both endpoints live.

        Args:
            peer: a region that was connected to, is expected, or has connected.
            message: its payload must stay unchanged until it is acknowledged (`flush`).
            deadline_s: how long to wait for space; None takes ``send_deadline_s``.

        Raises:
            DeadlineExceededError: the peer does not keep up; nothing was queued.
            FrameError: the message cannot be sent or is over a limit.
            LinkDownError: the region is unknown, or the endpoint closed.
        """
        wait_s = self._config.send_deadline_s if deadline_s is None else deadline_s
        self._known(peer).send(message, wait_s)

    def flush(self, peer: str, timeout_s: float) -> None:
        """Wait until ``peer`` has acknowledged every message.

        Raises:
            DeadlineExceededError: it has not in time.
            LinkDownError: the region is unknown.
        """
        if not self._known(peer).flush(timeout_s):
            raise DeadlineExceededError(
                f"region {peer} has not acknowledged everything within {timeout_s} s"
            )

    def link_key(
        self, peer: str, purpose: bytes, *, outgoing: bool, link_id: str | None = None
    ) -> tuple[str, bytes]:
        """Derive a key that only the two ends of a connection can have.

        Args:
            peer: the other region.
            purpose: name of the use; another purpose gives another key.
            outgoing: whether it protects what goes to the peer, or what comes from there.
            link_id: of the connection; None takes the present one.

        Returns:
            The connection's id, which the other end must name, and 32 bytes.

        Raises:
            LinkDownError: the region is unknown, or the connection is another one now, or none.
        """
        return self._known(peer).link_key(purpose, outgoing=outgoing, link_id=link_id)

    def is_revoked(self, peer: str) -> bool:
        """Return whether the certificate that a region showed last is revoked.

        Its connections are ended; other channels to it must be ended by their owners.
        """
        session = self._find(peer)
        return session is not None and session.is_revoked

    def use_certificate(self, certificate: TlsSource) -> None:
        """Use another certificate from the next handshake on; connections stay open.

        Raises:
            CertificateError: it cannot be used; the earlier one stays.
        """
        self._connector.encryption.use(certificate)

    def stats(self) -> dict[str, PeerStats]:
        """Return counters by peer region; see `PeerStats`."""
        with self._changed:
            sessions = dict(self._sessions)
        return {peer: session.stats() for peer, session in sorted(sessions.items())}

    # ------------------------------------------------------------------ the end

    def close(self, drain_s: float = 5.0) -> None:
        """Send what is queued, for at most ``drain_s`` seconds, then end all threads and sockets.

        Messages that are not acknowledged by then are lost, with a warning.
        """
        with self._changed:
            if self._closing:
                return
            self._closing = True
            sessions = list(self._sessions.values())
        deadline_s = time.monotonic() + drain_s
        for session in sessions:
            if session.is_forgotten:
                continue
            is_flushed = session.flush(max(0.0, deadline_s - time.monotonic()))
            # What only this side owes, such as its last acknowledgement, is no message lost.
            if not is_flushed and (left := session.stats()["outbox_messages"]):
                _LOGGER.warning("region %s has not acknowledged %d message(s)", session.peer, left)
        with self._changed:
            self._closed = True
            sessions = list(self._sessions.values())
            self._changed.notify_all()
        self._dialer.close()
        self._connector.close()
        for session in sessions:
            session.finish()
        deadline_s = time.monotonic() + min(drain_s, _GOODBYE_S)
        for session in sessions:
            session.wait_ended(max(0.0, deadline_s - time.monotonic()))
            session.end()
        self._workers.join(_JOIN_S)
        if self._listener is not None:
            self._listener.close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close(0.0 if error is not None else 5.0)

    # ------------------------------------------------------------------ sessions

    def _skip(self, peer: str, address: Address) -> None:
        """Try the next address of a region, unless its addresses were changed."""
        with self._changed:
            first, *others = self._addresses[peer]
            if first == address:
                self._addresses[peer] = (*others, first)

    def _find(self, peer: str) -> Session | None:
        with self._changed:
            return self._sessions.get(peer)

    def _find_or_refuse(self, peer: str) -> Session | None:
        """Return the session with a region that connects; None: it is made after the handshake.

        Raises:
            PeerRefusedError: there may be no further one.
        """
        with self._changed:
            session, most = self._sessions.get(peer), self._config.max_peers
            if session is None and len(self._sessions) >= most:
                raise PeerRefusedError(
                    f"{most} other peers have connected, and {peer} is a further one",
                    fix="Raise `transport.max_peers`, if all of them belong to the run.",
                )
            return session

    def _all_sessions(self) -> list[Session]:
        with self._changed:
            return list(self._sessions.values())

    def _session(self, peer: str) -> Session:
        with self._changed:
            if self._closed:
                raise LinkDownError("the endpoint is closed")
            if not self._is_watched:
                self._workers.start("wan-watch", partial(self._dialer.watch, self._all_sessions))
                self._is_watched = True
            if peer not in self._sessions:
                session = Session(
                    self.identity,
                    peer,
                    self._config,
                    self._callbacks,
                    self._notify,
                    is_shaped=peer in self._shapers,
                    held=self._held,
                    reuse=self._reuse,
                )
                self._workers.start(f"wan-deliver-{peer}", session.inbox.run)
                self._sessions[peer] = session  # last: only a session that delivers may accept
            return self._sessions[peer]

    def _known(self, peer: str) -> Session:
        session = self._find(peer)
        if session is None:
            known = ", ".join(sorted(self._sessions)) or "none"
            raise LinkDownError(
                f"there is no link to region {peer}; known are: {known}",
                fix="Connect to the region first, or wait until it has connected.",
            )
        return session

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
