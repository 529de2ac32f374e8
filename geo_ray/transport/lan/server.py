"""The server's end of connections inside a region: one blocking thread per connection."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TypeAlias

import numpy as np

from geo_ray.errors import (
    FrameError,
    GeoRayError,
    InvariantError,
    TransportError,
)
from geo_ray.transport.config import LanConfig
from geo_ray.transport.lan.frame_series import FrameSeries, lan_side
from geo_ray.transport.lan.shared_buffer import SharedBuffer
from geo_ray.transport.wire import sockets
from geo_ray.transport.wire.accept_pool import AcceptPool
from geo_ray.transport.wire.frames import Buffer, Frame, FrameKind, check_sendable, view_of
from geo_ray.transport.wire.handshake import Greeting, welcome
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.sockets import Address
from geo_ray.util.rate_limited_log import RateLimitedLog
from geo_ray.util.threads import Workers

_LOGGER = logging.getLogger(__name__)


class LanConnection:
    """The server's end of one connection.

    Attributes:
        peer: the client's id, from its hello.
        hello: the client's whole hello.
        shared: memory that both ends see, or None.
    """

    def __init__(self, sock: socket.socket, greeting: Greeting, config: LanConfig) -> None:
        self.hello = {
            name: value for name, value in greeting.hello.items() if not name.startswith("_")
        }
        self.peer = str(self.hello.get("peer"))
        self.shared: memoryview | None = None
        self._sock = sock
        self._frames = FrameSeries(sock, greeting, config)
        self._config = config
        self._memory: SharedBuffer | None = None
        self._scratch = memoryview(b"")

    def room(self, size_bytes: int) -> memoryview:
        """A buffer for an answer's payload; those of earlier requests are not needed any more."""
        return self._into(size_bytes, {})[:size_bytes]

    def is_open(self) -> bool:
        """Return whether the client is still connected; a handler that waits for long may ask."""
        try:
            return bool(self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _receive(self) -> Frame:
        return self._frames.receive(self._into)

    def _send(self, frame: Frame) -> None:
        self._frames.send(frame)

    def _into(self, size_bytes: int, _: Meta) -> memoryview:
        # The buffer is reused, because the kernel would have to clear fresh pages for every push.
        if self._scratch.nbytes < size_bytes:
            self._scratch = np.empty(size_bytes, np.uint8).data
        return self._scratch

    def _share(self, meta: Meta) -> Frame:
        """Accept the client's offer of shared memory, or give the memory up again."""
        name, nonce = meta.get("name"), meta.get("nonce")
        self._drop_shared()
        if self._config.shared_memory and isinstance(name, str) and isinstance(nonce, bytes):
            try:
                self._memory = SharedBuffer.attach(name, nonce)
                self.shared = self._memory.view
            except TransportError as error:
                _LOGGER.info("no shared memory with %s: %s", self.peer, error.message)
        return Frame(FrameKind.RESPONSE, {"attached": self._memory is not None})

    def _drop_shared(self) -> None:
        memory, self._memory, self.shared = self._memory, None, None
        if memory is not None:
            memory.close()


Handler: TypeAlias = Callable[[LanConnection, Meta, memoryview | None], tuple[Meta, Buffer | None]]


class LanServer:
    """Answers requests; a thread per connection calls ``handler``.

    Args:
        host: address of this machine to listen on.
        key: the run's key, 16 to 64 bytes.
        handler: ``(connection, meta, payload or None) -> (meta, payload or None)``. May block for
            long. The payload is valid, and may be written to, until the connection's next payload
            or `LanConnection.room`. An error
            of geo_ray's tree is raised again in the client; another one as InvariantError.
        on_close: called once per connection after its last request, in its thread.
        port: 0 takes any free one.
        config: None takes the defaults.

    Raises:
        PortInUseError: the port is taken.
        TransportError: the host is not one of this machine.
    """

    def __init__(
        self,
        host: str,
        key: bytes,
        handler: Handler,
        *,
        on_close: Callable[[LanConnection], None] | None = None,
        port: int = 0,
        config: LanConfig | None = None,
    ) -> None:
        self._key = key
        self._handler = handler
        self._on_close = on_close
        self._config = config or LanConfig()
        self._quiet = RateLimitedLog(_LOGGER)
        self._lock = threading.Lock()
        self._closed = False
        self._sockets: set[socket.socket] = set()
        self._workers = Workers()
        self._listener = sockets.listen(host, port)
        self.address: Address = sockets.address_of(self._listener)
        self._pool = AcceptPool(
            self._listener,
            self._serve,
            self._workers,
            name="lan-serve",
            most=self._config.max_handshakes,
            timeout_s=self._config.handshake_timeout_s,
        )
        self._workers.start("lan-accept", self._pool.run)

    def close(self, timeout_s: float = 5.0) -> None:
        """Close every connection and join the threads; release blocked handlers first.

        A handler that does not return within ``timeout_s`` is left to its daemon thread.
        """
        with self._lock:
            self._closed = True
            connected = list(self._sockets)
        self._pool.close()
        for sock in connected:
            sockets.hang_up(sock)
        self._workers.join(timeout_s)
        self._listener.close()

    def __enter__(self) -> LanServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, sock: socket.socket, _: str, admitted: Callable[[], None]) -> None:
        with sock:
            with self._lock:
                if self._closed:
                    return
                self._sockets.add(sock)
            try:
                connection = self._welcome(sock)
                admitted()
                if connection is not None:
                    self._answer_all(connection)
            finally:
                with self._lock:
                    self._sockets.discard(sock)

    def _welcome(self, sock: socket.socket) -> LanConnection | None:
        side = lan_side(sock, self._key, {}, self._config, self._config.handshake_timeout_s)
        try:
            sockets.tune(sock, silence_s=self._config.silence_timeout_s)
            greeting = welcome(sock, side)
            sock.settimeout(None)
        except (TransportError, OSError) as error:
            self._quiet.warning(type(error).__name__, f"refused a LAN connection: {error}")
            return None
        return LanConnection(sock, greeting, self._config)

    def _answer_all(self, connection: LanConnection) -> None:
        try:
            while True:
                request = connection._receive()
                if request.kind is FrameKind.SHARE:
                    connection._send(connection._share(request.meta))
                elif request.kind is FrameKind.REQUEST:
                    connection._send(self._answer(connection, request))
                else:
                    raise FrameError(f"a {request.kind.name} frame instead of a request")
        except OSError:
            _LOGGER.debug("%s is gone", connection.peer)
        except TransportError as error:
            self._quiet.warning(connection.peer, f"dropped {connection.peer}: {error}")
        finally:
            connection._drop_shared()
            if self._on_close is not None:
                try:
                    self._on_close(connection)
                except Exception:
                    _LOGGER.exception("on_close failed for %s", connection.peer)

    def _answer(self, connection: LanConnection, request: Frame) -> Frame:
        payload = request.payload if isinstance(request.payload, memoryview) else None
        try:
            meta, answer = self._handler(connection, request.meta, payload)
            view = view_of(b"" if answer is None else answer)
            check_sendable(meta, view.nbytes, self._config.limits())
            return Frame(FrameKind.RESPONSE, meta, view)
        except GeoRayError as error:
            failure: Meta = {"code": error.code, "message": error.message, "fix": error.fix}
        except Exception as error:
            _LOGGER.exception("the handler failed for %s", connection.peer)
            message = f"a LAN handler failed: {type(error).__name__}: {error}"
            failure = {"code": InvariantError.code, "message": message, "fix": None}
        return Frame(FrameKind.FAILURE, failure)
