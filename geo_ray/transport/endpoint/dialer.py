"""The threads that dial and accept connections."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
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
from geo_ray.transport.wire.fields import text
from geo_ray.transport.wire.sockets import Address
from geo_ray.util.rate_limited_log import RateLimitedLog
from geo_ray.util.threads import Workers

_LOGGER = logging.getLogger(__name__)
_RETRY_S: Final = 0.05
_FAILURES_TO_LOG: Final = 3  # at the end of a run, other regions may close earlier or later


class Dialer:
    """Dials and accepts for an endpoint.

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
        self._handshakes = threading.BoundedSemaphore(config.max_handshakes)
        self._closed = False

    def close(self) -> None:
        """Accept nothing more; the caller closes the listener next."""
        self._closed = True

    # ------------------------------------------------------------------ dialing

    def keep_connected(self, session: Session) -> None:
        """Dial a session's region whenever it is disconnected; ends with the session."""
        config = self._config
        failures = 0
        while session.wait_disconnected():
            try:
                control = self._connector.dial(session, self._address(session.peer), 0, "")
                connection = self._adopt(session, control, dialed=True)
            except (TransportError, OSError) as error:
                failures += 1
                session.note_error(error)
                if failures >= _FAILURES_TO_LOG:
                    message = f"cannot connect to region {session.peer}: {error}"
                    self._quiet.warning(f"{session.peer} {type(error).__name__}", message)
            else:
                failures = 0
                session.run(connection)
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
        except TransportError:
            connection.discard()
            raise
        return connection

    def _start_dial(self, session: Session, connection: Connection, number: int) -> None:
        work = partial(self._dial_stream, session, connection, number)
        self._workers.start(f"wan-dial-{session.peer}", work)

    def _dial_stream(self, session: Session, connection: Connection, number: int) -> None:
        failure: Exception | None = None
        link_id = connection.greeting.link_id
        try:
            address = self._address(session.peer)
            _attach(connection, self._connector.dial(session, address, number, link_id))
        except (TransportError, OSError) as error:
            failure = error
        connection.dial_ended(failure)

    # ------------------------------------------------------------------ accepting

    def accept(self, listener: socket.socket) -> None:
        """Accept connections until closed; runs in a thread of its own."""
        while True:
            try:
                sock, source = listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_RETRY_S)  # out of file descriptors, most likely
                continue
            if self._handshakes.acquire(blocking=False):
                self._workers.start("wan-receive", partial(self._receive, sock, source[0]))
            else:
                sock.close()
                self._quiet.warning("full", f"too many connections, one of {source[0]} closed")

    def _receive(self, sock: socket.socket, source: str) -> None:
        try:
            welcomed = self._welcome(self._connector.receive(sock))
        except (TransportError, OSError) as error:
            self._quiet.warning(type(error).__name__, f"refused {source}: {error}")
            return
        finally:
            self._handshakes.release()
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
        except TransportError:
            stream.close()
            raise
        _attach(connection, stream)
        return None


def _attach(connection: Connection, stream: Stream) -> None:
    try:
        connection.attach(stream)
    except TransportError:
        stream.close()
        raise
