"""Requests and replies within a region: a worker calls its server, a server its bridge.

`LanServer` runs one thread per connection; sockets are blocking and payloads are received in
place. If both ends run on one host they agree on a `SharedBuffer`: tensors then pass through
shared memory, and the socket carries only the signal. `multiprocessing.shared_memory` is not used
because its resource tracker unlinks segments that other processes still use. The file is unlinked
as soon as both sides have mapped it, so a killed process leaves nothing behind. Example::

    # handler(connection, meta, payload) -> (meta, payload)
    server = LanServer(host, key, handler, on_close=on_close)
    client = LanClient(
        server.address, key, {"peer": "worker-3"}, shared_bytes=4 * num_parameters
    )
    meta, payload = client.request({"op": "push"}, grad, into=params, timeout_s=60.0)
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import mmap
import os
import re
import secrets
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from geo_ray.base.errors import (
    DeadlineExceededError,
    FrameError,
    GeoRayError,
    InvariantError,
    LinkDownError,
    PeerRefusedError,
    TransportError,
    from_code,
)
from geo_ray.base.output import RateLimitedLog
from geo_ray.base.threads import Workers
from geo_ray.transport.config import LanConfig
from geo_ray.transport.wire import sockets
from geo_ray.transport.wire.accept_pool import AcceptPool
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.frames import (
    Buffer,
    Frame,
    FrameKind,
    Into,
    check_sendable,
    recv_frame,
    send_frame,
    send_plain,
    view_of,
)
from geo_ray.transport.wire.handshake import Greeting, HandshakeSide, expect_same, greet, welcome
from geo_ray.transport.wire.sockets import Address


class FrameSeries:
    """Sends and receives frames whose digests cover how many came before, each way.

    Every request has one answer, and the next request comes after it. So the count of an answer is
    that of its request: an answer to another one, and a request that comes twice, has a wrong
    digest.

    Args:
        sock: after the handshake.
        greeting: the handshake's outcome.
        config: of this end.
    """

    def __init__(self, sock: socket.socket, greeting: Greeting, config: LanConfig) -> None:
        self._sock = sock
        self._greeting = greeting
        self._config = config
        self._limits = config.limits()
        self._sent = self._received = 0

    def send(self, frame: Frame) -> None:
        """See `send_frame`."""
        number, self._sent = self._sent, self._sent + 1
        send_frame(
            self._sock,
            frame,
            self._greeting.send_key,
            digest_payload=self._config.digest_payload,
            encrypt=self._config.encrypt_payload,
            number=number,
        )

    def receive(self, into: Into | None, timeout_s: float | None = None) -> Frame:
        """See `recv_frame`."""
        number, self._received = self._received, self._received + 1
        key = self._greeting.recv_key
        return recv_frame(self._sock, key, self._limits, into, timeout_s=timeout_s, number=number)


def lan_side(
    sock: socket.socket, key: bytes, hello: Meta, config: LanConfig, timeout_s: float
) -> HandshakeSide:
    """Return one end's part in the handshake; it refuses a peer that protects otherwise.

    Args:
        sock: connected.
        key: the run's key.
        hello: identity of this end.
        config: of this end.
        timeout_s: for the whole handshake, in addition to that of ``config``.
    """
    ours: Meta = {"service": "lan", "payloads": config.protection}

    def admit(theirs: Meta) -> Meta:
        for name, value in ours.items():
            expect_same(name, theirs.get(name), value)
        return {}

    return HandshakeSide(
        key=key,
        hello={**hello, **ours},
        admit=admit,
        send=partial(send_plain, sock),
        timeout_s=min(timeout_s, config.handshake_timeout_s),
    )


_PAGE_BYTES: Final = 4096
_HEADER: Final = struct.Struct("<8s16s16sQ")  # magic, creator's nonce, attacher's proof, size
_MAGIC: Final = b"geo_ray1"
_PROOF_AT: Final = 24
_NONCE_BYTES: Final = 16
_CAN_RESERVE: Final = hasattr(os, "posix_fallocate")  # macOS has not
_NAME: Final = re.compile(r"geo_ray-[0-9a-f]{32}")


class SharedBuffer:
    """A block of zeroed memory shared by two processes; build it with `create` or `attach`.

    The data begin at a page's boundary, hence 64-byte aligned. Nothing orders the two sides'
    accesses: exchange a message before reading what the other wrote.

    Args:
        path: the backing file.
        mapping: the mapped file, a header page and then the data.
        nonce: the creator's, 16 bytes.
        size_bytes: length of the data.
    """

    def __init__(self, path: Path, mapping: mmap.mmap, nonce: bytes, size_bytes: int) -> None:
        self.name = path.name
        self.nonce = nonce
        self.size_bytes = size_bytes
        self._path = path
        self._mapping = mapping
        self._view = memoryview(mapping)[_PAGE_BYTES : _PAGE_BYTES + size_bytes]

    @classmethod
    def create(cls, size_bytes: int) -> SharedBuffer:
        """Reserve memory: in /dev/shm if that has space, else in the temp directory.

        Raises:
            TransportError: there is no space.
        """
        if size_bytes <= 0:
            raise TransportError(f"cannot share {size_bytes} bytes", fix="Share at least one.")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        name = f"geo_ray-{secrets.token_hex(16)}"
        problems = []
        for directory in _directories():
            path = directory / name
            try:
                mapping = _make(path, _PAGE_BYTES + size_bytes)
            except OSError as error:
                problems.append(f"{directory}: {error.strerror}")
                continue
            _HEADER.pack_into(mapping, 0, _MAGIC, nonce, bytes(_NONCE_BYTES), size_bytes)
            return cls(path, mapping, nonce, size_bytes)
        raise TransportError(
            f"no room for {size_bytes} shared bytes ({'; '.join(problems)})",
            fix="Free space in the named directories.",
        )

    @classmethod
    def attach(cls, name: str, nonce: bytes) -> SharedBuffer:
        """Map the buffer that another process of this host created, and leave a proof in it.

        Raises:
            TransportError: there is no such buffer here (another host or container), or it is
                not the one that the nonce belongs to.
        """
        if not _NAME.fullmatch(name):
            raise TransportError("a shared buffer's name is malformed")
        for directory in _directories():
            try:
                mapping = _open(directory / name)
            except OSError:
                continue
            size_bytes = _check(mapping, nonce)
            if size_bytes is None:
                mapping.close()
                break
            mapping[_PROOF_AT : _PROOF_AT + _NONCE_BYTES] = _proof(nonce)
            return cls(directory / name, mapping, nonce, size_bytes)
        raise TransportError(f"shared buffer {name} is not on this host")

    @property
    def view(self) -> memoryview:
        """Return the data as writable bytes."""
        return self._view

    def array(self) -> npt.NDArray[np.float32]:
        """The data as float32, shape (size_bytes // 4,), writable and without a copy."""
        return np.frombuffer(self._view[: self.size_bytes // 4 * 4], dtype=np.float32)

    def proven(self) -> bool:
        """Return whether the attacher's proof is visible here, so that both see the same memory."""
        seen = self._mapping[_PROOF_AT : _PROOF_AT + _NONCE_BYTES]
        return hmac.compare_digest(seen, _proof(self.nonce))

    def unlink(self) -> None:
        """Remove the file; processes that have mapped it keep it. Call once all have attached."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the mapping; while arrays are in use, the last of them releases it."""
        self._view.release()
        with contextlib.suppress(BufferError):
            self._mapping.close()


def _directories() -> list[Path]:
    memory = Path("/dev/shm")  # noqa: S108  (files there get random names and mode 0600)
    usual = Path(tempfile.gettempdir())
    return [memory, usual] if memory.is_dir() else [usual]


def _make(path: Path, size_bytes: int) -> mmap.mmap:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        # Reserves the pages now, so that a full /dev/shm is an error here and not a SIGBUS later.
        os.posix_fallocate(fd, 0, size_bytes) if _CAN_RESERVE else os.truncate(fd, size_bytes)
        return mmap.mmap(fd, size_bytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def _open(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{path} is no file of this user")
        if status.st_size < _PAGE_BYTES:
            raise OSError(f"{path} is too short")
        return mmap.mmap(fd, status.st_size)
    finally:
        os.close(fd)


def _check(mapping: mmap.mmap, nonce: bytes) -> int | None:
    magic, seen, _, size_bytes = _HEADER.unpack_from(mapping, 0)
    fits = len(mapping) == _PAGE_BYTES + size_bytes
    return (
        int(size_bytes) if magic == _MAGIC and hmac.compare_digest(seen, nonce) and fits else None
    )


def _proof(nonce: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in nonce)


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
        shared: memory that both ends see; None for another host or container, without space, or
            if it is not requested.

    Raises:
        LinkDownError: no server answered in time.
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
        """Send a request and wait for the answer.

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
        """Open another connection to the same server, with separate shared memory.

        Raises:
            TransportError: as for the first one.
        """
        return self._again(connect_timeout_s=connect_timeout_s)

    @property
    def is_closed(self) -> bool:
        """Return whether it was closed or lost."""
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
            sockets.tune(sock, ack_timeout_s=self._config.ack_timeout_s)
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

    def buffer(self, size_bytes: int) -> memoryview:
        """Return a buffer for an answer's payload; buffers of earlier requests become invalid."""
        return self._into(size_bytes, {})[:size_bytes]

    def is_open(self) -> bool:
        """Return whether the client is still connected; for handlers that wait for long."""
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
            or `LanConnection.buffer`. An error
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
            sockets.tune(sock, ack_timeout_s=self._config.ack_timeout_s)
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


__all__ = ["Address", "Handler", "LanClient", "LanConfig", "LanConnection", "LanServer", "Meta"]
