"""The threads that dial and accept connections, and the one that watches over them."""

from __future__ import annotations

import logging
import random
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from geo_ray.clock import Clock
from geo_ray.errors import TransportError
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.endpoint.connection import Connection
from geo_ray.transport.endpoint.connector import Connector
from geo_ray.transport.endpoint.session import Session
from geo_ray.transport.endpoint.stream import Stream
from geo_ray.transport.wire.accept_pool import AcceptPool
from geo_ray.transport.wire.fields import text
from geo_ray.transport.wire.sockets import Address
from geo_ray.util.rate_limited_log import RateLimitedLog
from geo_ray.util.threads import Workers

_LOGGER = logging.getLogger(__name__)
_STUCK_MIN_S: Final = 2.0  # a busy machine may keep a thread waiting
_FAILURES_TO_LOG: Final = 3  # at the end of a run, other regions may close earlier or later


class Dialer:
    """Dials and accepts for an endpoint, and keeps its sessions going.

    Every thread that dials or runs a connection can fail, for want of memory or threads or by a
    fault of this program. `watch` finds out by what is there, not by what was reported.

    Args:
        connector: makes streams of sockets.
        config: pauses and bounds.
        clock: clock for connections.
        workers: threads.
        session: returns the session with a region and makes it if need be; raises LinkDownError
            once closed.
        address: returns where a dialed region listens now.
    """

    def __init__(
        self,
        connector: Connector,
        config: TransportConfig,
        clock: Clock,
        workers: Workers,
        session: Callable[[str], Session],
        address: Callable[[str], Address],
    ) -> None:
        self._connector = connector
        self._config = config
        self._clock = clock
        self._workers = workers
        self._session = session
        self._address = address
        self._quiet = RateLimitedLog(_LOGGER)
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards the two below
        self._keepers: dict[
            str, object | None
        ] = {}  # by region that is dialed, the present thread's own
        self._probed: set[str] = set()  # regions to which a path is looked for
        self._pools: list[AcceptPool] = []

    def close(self) -> None:
        """Accept nothing more, and stop to watch."""
        self._closed.set()
        for pool in self._pools:
            pool.close()

    # ------------------------------------------------------------------ watching

    def watch(self, sessions: Callable[[], list[Session]]) -> None:
        """Prove until closed that every session makes progress; runs in a thread of its own.

        It also looks for certificates that have changed, and ends links whose peer's is revoked.
        A connection whose loop stands still is given up, and a region whose thread has ended or
        stands still is dialed by another thread.
        """
        every_s = self._config.heartbeat_s
        looked_s = self._clock.now_s()
        while not self._closed.wait(every_s):
            waited_s, looked_s = self._clock.now_s() - looked_s, self._clock.now_s()
            if waited_s > every_s + _STUCK_MIN_S / 2:
                continue  # the whole process stood still
            self._connector.encryption.refresh()
            for session in sessions():
                try:
                    self._check(session)
                except Exception as error:  # no thread to be had now
                    self._quiet.warning(f"watch {session.peer}", f"region {session.peer}: {error}")

    def _check(self, session: Session) -> None:
        session.give_up_revoked(self._connector.encryption.is_revoked)
        limit_s = self._config.silence_limit_s
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
        """Give up a connection once there is a path again which its TCP has not noticed.

        After an outage TCP tries again only when its pause is over, which is as long as the outage
        was. A request for another connection costs a packet and tells at once.
        """
        try:
            address = self._address(session.peer)
            is_cut = partial(_is_cut, session, connection)
            if self._connector.reach(address, lambda: not is_cut()) and is_cut():
                connection.end("the path is back before TCP has noticed; it is dialed anew")
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
        """Dial a session's region no more; a connection to it stays."""
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
            begun_s = self._clock.now_s()
            try:
                control = self._connector.dial(session, self._address(session.peer), 0, "")
                session.run(self._adopt(session, control, dialed=True))
            except Exception as error:
                failures += 1
                session.note_error(error)
                if failures >= _FAILURES_TO_LOG:
                    message = f"cannot connect to region {session.peer}: {error}"
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
        """Accept connections until closed, in a thread of its own that is started here."""
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


def _is_cut(session: Session, connection: Connection) -> bool:
    return session.cut_connection() is connection


def _attach(connection: Connection, stream: Stream) -> None:
    try:
        connection.attach(stream)
    except BaseException:
        stream.close()
        raise
