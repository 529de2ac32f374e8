"""The client's end of connections inside a region."""

from __future__ import annotations

import logging
import socket
import threading
import time
from functools import partial
from types import TracebackType
from typing import Final

from geo_ray.errors import (
    DeadlineExceededError,
    FrameError,
    GeoRayError,
    LinkDownError,
    PeerRefusedError,
    TransportError,
    from_code,
)
from geo_ray.transport.config import LanConfig
from geo_ray.transport.lan.frame_series import FrameSeries, lan_side
from geo_ray.transport.lan.shared_buffer import SharedBuffer
from geo_ray.transport.wire import sockets
from geo_ray.transport.wire.frames import Buffer, Frame, FrameKind, check_sendable, view_of
from geo_ray.transport.wire.handshake import greet
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.sockets import Address

_LOGGER = logging.getLogger(__name__)
_RETRY_S: Final = 0.05


class LanClient:
    """One connection to a `LanServer`; requests are answered one after the other.

    Args:
        address: the server's (host, port).
        key: the run's key.
        hello: describes this client; ``peer`` is the id that the server's callbacks see.
        connect_timeout_s: seconds for which it keeps trying to connect.
        shared_bytes: size of the shared memory to offer; 0 offers none.
        config: None takes the defaults.

    Attributes:
        shared: memory that both ends see; None for another host or container, without room, or if
            it is not wanted.

    Raises:
        LinkDownError: nobody answered in time.
        PeerRefusedError: the server belongs to another run or release.
    """

    def __init__(
        self,
        address: Address,
        key: bytes,
        hello: Meta,
        *,
        connect_timeout_s: float = 10.0,
        shared_bytes: int = 0,
        config: LanConfig | None = None,
    ) -> None:
        self.address = address
        self.shared: memoryview | None = None
        self._config = config or LanConfig()
        self._again = partial(
            LanClient, address, key, hello, shared_bytes=shared_bytes, config=config
        )
        self._lock = threading.Lock()
        self._memory: SharedBuffer | None = None
        self._closed = False
        self._sock, self._frames = self._connect(key, hello, connect_timeout_s)
        if shared_bytes and self._config.shared_memory:
            try:
                self._offer_shared(shared_bytes, connect_timeout_s)
            except BaseException:
                self.close()
                raise

    def request(
        self,
        meta: Meta,
        payload: Buffer | None = None,
        *,
        into: memoryview | None = None,
        timeout_s: float = 60.0,
    ) -> tuple[Meta, memoryview | None]:
        """Ask and wait for the answer.

        Args:
            meta: scalars and lists of scalars by name.
            payload: C-contiguous; not copied.
            into: buffer for the answer's payload; None allocates one.
            timeout_s: until the answer begins, then for each pause within it.

        Returns:
            The answer's meta and payload (None if empty; a view of ``into`` if that was given).

        Raises:
            GeoRayError: the one that the handler raised; the connection stays usable.
            FrameError: the request cannot be sent; the connection stays usable.
            DeadlineExceededError: no answer in time; the connection is closed.
            LinkDownError: the connection is lost or was closed.
        """
        view = view_of(b"" if payload is None else payload)
        check_sendable(meta, view.nbytes, self._config.limits())
        answer = self._exchange(Frame(FrameKind.REQUEST, meta, view), into, timeout_s)
        if answer.kind is FrameKind.FAILURE:
            raise _error_of(answer.meta)
        return answer.meta, answer.payload if isinstance(answer.payload, memoryview) else None

    def again(self, connect_timeout_s: float) -> LanClient:
        """Another connection to the same server, with shared memory of its own.

        Raises:
            TransportError: as for the first one.
        """
        return self._again(connect_timeout_s=connect_timeout_s)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or is lost."""
        return self._closed

    def close(self) -> None:
        """Close the connection; a request that waits in another thread fails."""
        self._closed = True
        sockets.hang_up(self._sock)
        with self._lock:
            self._drop()

    def __enter__(self) -> LanClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def _connect(
        self, key: bytes, hello: Meta, timeout_s: float
    ) -> tuple[socket.socket, FrameSeries]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return self._connect_once(key, hello, max(_RETRY_S, deadline_s - time.monotonic()))
            except OSError as error:
                if time.monotonic() + _RETRY_S >= deadline_s:
                    host, port = self.address
                    raise LinkDownError(
                        f"no LAN server answers at {host}:{port} within {timeout_s} s: {error}"
                    ) from error
            time.sleep(_RETRY_S)

    def _connect_once(
        self, key: bytes, hello: Meta, timeout_s: float
    ) -> tuple[socket.socket, FrameSeries]:
        sock = sockets.dial(self.address, timeout_s)
        try:
            sockets.tune(sock, silence_s=self._config.silence_timeout_s)
            greeting = greet(sock, lan_side(sock, key, hello, self._config, timeout_s))
            return sock, FrameSeries(sock, greeting, self._config)
        except BaseException:
            sock.close()
            raise

    def _exchange(self, frame: Frame, into: memoryview | None, timeout_s: float) -> Frame:
        host, port = self.address
        with self._lock:
            if self._closed:
                raise LinkDownError(f"the connection to {host}:{port} is closed")
            try:
                sockets.block(self._sock, timeout_s)
                self._frames.send(frame)
                return self._frames.receive(None if into is None else lambda *_: into, timeout_s)
            except TimeoutError as error:
                self._drop()
                raise DeadlineExceededError(
                    f"no answer from {host}:{port} within {timeout_s} s (timeout_s)"
                ) from error
            except OSError as error:
                self._drop()
                raise LinkDownError(f"lost the connection to {host}:{port}: {error}") from error
            except (FrameError, PeerRefusedError):
                self._drop()
                raise

    def _offer_shared(self, size_bytes: int, timeout_s: float) -> None:
        try:
            memory = SharedBuffer.create(size_bytes)
        except TransportError as error:
            _LOGGER.warning("no shared memory: %s", error)
            return
        try:
            offer: Meta = {"name": memory.name, "nonce": memory.nonce}
            answer = self._exchange(Frame(FrameKind.SHARE, offer), None, timeout_s)
            if answer.meta.get("attached") is True and memory.proven():
                self._memory, self.shared = memory, memory.view
                return
            # Without a proof both ends see different files: a network file system, say.
            self._exchange(Frame(FrameKind.SHARE, {}), None, timeout_s)
        finally:
            memory.unlink()
            if self._memory is None:
                memory.close()

    def _drop(self) -> None:
        self._closed = True
        self._sock.close()
        memory, self._memory, self.shared = self._memory, None, None
        if memory is not None:
            memory.close()


def _error_of(meta: Meta) -> GeoRayError:
    """Return the error of geo_ray's tree that a FAILURE frame describes."""
    fix = meta.get("fix")
    message = str(meta.get("message"))
    return from_code(str(meta.get("code")), message, fix if isinstance(fix, str) else None)
