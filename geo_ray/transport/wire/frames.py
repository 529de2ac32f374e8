"""Frames: the wire format of every socket of the project.

A frame is a fixed header, a small msgpack map (*meta*), a raw payload and the payload's tag::

    magic 4 | version 1 | kind 1 | flags 2 | meta bytes 4 | payload bytes 8 | head digest 16
    meta | payload | payload tag 16 (only with a payload, and unless the sender left it out)

The head digest is keyed and covers header, meta and the number of earlier frames, which is never
sent: lost, repeated or swapped frames are detected. It is checked before memory is allocated for
the payload. Received bytes are never executed.

The payload's tag is AES-256-GMAC, or AES-256-GCM with encryption. Its key is derived from the
connection's key for this direction and the head digest, so that a payload belongs to its head and
no key is used for two frames: the nonce may be constant.

On blocking sockets parts are gathered on sending and received into the caller's buffer
(`send_frame`, `recv_frame`). On non-blocking ones `FrameReader` extracts frames from a byte stream
that arrives in pieces.
"""

from __future__ import annotations

import enum
import hmac
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, TypeAlias

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from geo_ray.base.errors import FrameError, PeerRefusedError
from geo_ray.transport.wire import sockets
from geo_ray.transport.wire.fields import Meta, decode_meta, encode_meta

TAG_BYTES: Final = 16
_NONCE: Final = bytes(12)


class PayloadSealer:
    """Takes in one payload, piece by piece; both ends end up with the same tag.

    Args:
        head_digest: of the frame.
        key: 1 to 64 bytes, shared with the other end.
    """

    def __init__(self, head_digest: bytes, key: bytes) -> None:
        self._sealer = _cipher(head_digest, key).encryptor()

    def update(self, piece: memoryview) -> None:
        """Take in the next piece, which stays readable."""
        self._sealer.authenticate_additional_data(piece)

    def encrypt(self, piece: memoryview) -> bytes:
        """Take in the next piece and return it encrypted."""
        return self._sealer.update(piece)

    def tag(self) -> bytes:
        """Return the tag of all pieces; nothing may follow."""
        self._sealer.finalize()
        return self._sealer.tag


class PayloadOpener:
    """Decrypts what `PayloadSealer.encrypt` returned; nothing may be used before `has_tag` is true.

    Args:
        head_digest: of the frame.
        key: 1 to 64 bytes, shared with the other end.
    """

    def __init__(self, head_digest: bytes, key: bytes) -> None:
        self._opener = _cipher(head_digest, key).decryptor()

    def update(self, piece: memoryview) -> None:
        """Decrypt the next piece in its place."""
        piece[:] = self._opener.update(piece)

    def has_tag(self, tag: bytes) -> bool:
        """Return whether the sender's tag is that of all pieces; nothing may follow."""
        try:
            self._opener.finalize_with_tag(tag)
        except InvalidTag:
            return False
        return True


class PayloadCheck:
    """Checks a payload that is not encrypted; used as `PayloadOpener` is.

    Args:
        head_digest: of the frame.
        key: 1 to 64 bytes, shared with the other end.
    """

    def __init__(self, head_digest: bytes, key: bytes) -> None:
        self._seal = PayloadSealer(head_digest, key)

    def update(self, piece: memoryview) -> None:
        """Take in the next piece."""
        self._seal.update(piece)

    def has_tag(self, tag: bytes) -> bool:
        """Return whether the sender's tag is that of all pieces; nothing may follow."""
        return hmac.compare_digest(self._seal.tag(), tag)


def _cipher(head_digest: bytes, key: bytes) -> Cipher[modes.GCM]:
    frame_key = blake2b(head_digest, key=key, digest_size=32, person=b"geo_ray payload").digest()
    return Cipher(algorithms.AES(frame_key), modes.GCM(_NONCE))


Buffer: TypeAlias = bytes | bytearray | memoryview

PROTOCOL_VERSION: Final = 5
HEADER: Final = struct.Struct("!4sBBHIQ16s")
DIGEST_BYTES: Final = 16
PIECE_BYTES: Final = (
    512 * 1024
)  # tagged and moved at a time: few calls, and still in a core's cache

MAGIC: Final = b"GEOR"
_FIELDS: Final = struct.Struct("!4sBBHIQ")  # the header without its digest
_FLAG_TAG: Final = 1
_FLAG_ENCRYPTED: Final = 2


class FrameKind(enum.IntEnum):
    """What a frame is for."""

    HELLO = 1  # the sender's identity and a nonce; before there is a session key
    READY = 2  # proves that the sender has the key
    REFUSED = 3  # why the connection is not wanted
    CHUNK = 4  # WAN: a piece of a numbered message
    ACK = 5  # WAN: chunks that arrived, and up to where messages were delivered
    PING = 6
    PONG = 7
    REQUEST = 8  # LAN
    RESPONSE = 9
    FAILURE = 10  # LAN: the handler raised
    SHARE = 11  # LAN: an offer of shared memory
    STREAMS = 12  # WAN: how many streams the listener would like
    BYE = 13  # WAN: nothing more comes on this stream


_KINDS: Final = frozenset(int(kind) for kind in FrameKind)


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame.

    Attributes:
        kind: what it is for.
        meta: scalars and lists of scalars by name.
        payload: raw bytes, C-contiguous. Never copied on its way to the socket.
    """

    kind: FrameKind
    meta: Meta
    payload: Buffer = b""


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """What a receiver takes; checked before it allocates.

    Attributes:
        max_meta_bytes: largest meta.
        max_payload_bytes: largest payload.
        payload_digest: whether a payload without tag is refused.
        encrypted: whether payloads are encrypted; others are refused then, as these are otherwise.
    """

    max_meta_bytes: int = 64 * 1024
    max_payload_bytes: int = 4 * 1024**3
    payload_digest: bool = True
    encrypted: bool = False


@dataclass(frozen=True, slots=True)
class Header:
    """A received header, checked against limits but not authenticated.

    Attributes:
        kind: the frame's kind.
        meta_bytes: length of the meta that follows.
        payload_bytes: length of the payload after it.
        has_tag: whether a tag follows the payload.
        is_encrypted: whether the payload is encrypted.
        signed: the header's bytes that the digest covers, together with the meta.
        digest: the sender's digest of these bytes.
    """

    kind: FrameKind
    meta_bytes: int
    payload_bytes: int
    has_tag: bool
    is_encrypted: bool
    signed: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class FrameHead:
    """A received header with its meta, not yet authenticated.

    Attributes:
        header: the header.
        meta: the raw msgpack map.
    """

    header: Header
    meta: bytes

    def verified_meta(self, key: bytes, number: int = 0) -> Meta:
        """Authenticate the head and read its meta.

        Args:
            key: shared with the sender.
            number: how many frames came before, where both ends count.

        Raises:
            FrameError: the digest is wrong or the meta is no map of scalars.
        """
        digest = _head_digest(self.header.signed, self.meta, key, number)
        if not hmac.compare_digest(digest, self.header.digest):
            raise FrameError(
                "a frame's digest is wrong: damaged or lost on the way, or another key"
            )
        return decode_meta(self.meta)


def view_of(buffer: Buffer) -> memoryview:
    """Return the bytes of a contiguous buffer, without a copy.

    Raises:
        FrameError: the buffer is not C-contiguous.
    """
    view = memoryview(buffer)
    if view.nbytes == 0:
        return memoryview(b"")
    if not view.c_contiguous:
        raise FrameError("a payload must be C-contiguous", fix="Pass a contiguous array.")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def encode(
    frame: Frame,
    key: bytes,
    *,
    digest_payload: bool = True,
    encrypt: bool = False,
    number: int = 0,
) -> Iterator[memoryview]:
    """Yield the frame's bytes in order: head with meta, pieces of the payload, its tag.

    The tag takes in a piece only after the caller asked for the next one, so that its computation
    overlaps with sending.

    Args:
        frame: what to send.
        key: 1 to 64 bytes, shared with the receiver.
        digest_payload: False leaves the payload's tag out; the receiver must agree.
        encrypt: encrypt the payload, which has a tag then; the receiver must agree.
        number: how many frames went before, where both ends count.

    Raises:
        FrameError: the meta cannot be sent or the payload is not contiguous.
    """
    payload = view_of(frame.payload)
    meta = encode_meta(frame.meta)
    flags = 0
    if payload.nbytes and (digest_payload or encrypt):
        flags = _FLAG_TAG | _FLAG_ENCRYPTED if encrypt else _FLAG_TAG
    fields = _FIELDS.pack(MAGIC, PROTOCOL_VERSION, frame.kind, flags, len(meta), payload.nbytes)
    digest = _head_digest(fields, meta, key, number)
    yield memoryview(fields + digest + meta)
    if not flags:
        if payload.nbytes:
            yield payload
        return
    seal = PayloadSealer(digest, key)
    for start in range(0, payload.nbytes, PIECE_BYTES):
        piece = payload[start : start + PIECE_BYTES]
        if encrypt:
            yield memoryview(seal.encrypt(piece))
        else:
            yield piece
            seal.update(piece)
    yield memoryview(seal.tag())


def check_sendable(meta: Meta, payload_bytes: int, limits: FrameLimits) -> None:
    """Check before queueing a frame whether a receiver with these limits would take it.

    Raises:
        FrameError: it would not.
    """
    meta_bytes = len(encode_meta(meta))
    for what, size, limit in (
        ("meta", meta_bytes, limits.max_meta_bytes),
        ("payload", payload_bytes, limits.max_payload_bytes),
    ):
        if size > limit:
            raise FrameError(
                f"a frame's {what} has {size} bytes; limit {limit}",
                fix=f"Send less, or raise `max_{what}_bytes` on both sides.",
            )


def parse_header(header: Buffer, limits: FrameLimits) -> Header:
    """Read a header of `HEADER.size` bytes.

    Raises:
        FrameError: not a header, or over a limit.
        PeerRefusedError: the peer speaks another protocol version.
    """
    magic, version, kind, flags, meta_bytes, payload_bytes, digest = HEADER.unpack(header)
    if magic != MAGIC:
        raise FrameError(f"a frame begins with {bytes(magic)!r} instead of {MAGIC!r}")
    if version != PROTOCOL_VERSION:
        raise PeerRefusedError(
            f"the peer speaks protocol version {version}, this side version {PROTOCOL_VERSION}"
        )
    if kind not in _KINDS or flags & ~(_FLAG_TAG | _FLAG_ENCRYPTED):
        raise FrameError(f"a frame has the unknown kind {kind} or flags {flags:#x}")
    if meta_bytes > limits.max_meta_bytes:
        raise FrameError(f"a frame's meta has {meta_bytes} bytes; limit {limits.max_meta_bytes}")
    if payload_bytes > limits.max_payload_bytes:
        raise FrameError(
            f"a frame's payload has {payload_bytes} bytes; limit {limits.max_payload_bytes}"
        )
    has_tag, is_encrypted = bool(flags & _FLAG_TAG), bool(flags & _FLAG_ENCRYPTED)
    if limits.payload_digest and payload_bytes and not has_tag:
        raise FrameError("a frame's payload has no tag, but this side demands one")
    wants = limits.encrypted and payload_bytes > 0
    if is_encrypted != wants or (is_encrypted and not has_tag):
        sent = "encrypted" if is_encrypted else "not encrypted"
        raise FrameError(f"a frame's payload is {sent}; this side demands otherwise")
    return Header(
        kind=FrameKind(kind),
        meta_bytes=meta_bytes,
        payload_bytes=payload_bytes,
        has_tag=has_tag,
        is_encrypted=is_encrypted,
        signed=bytes(header[: _FIELDS.size]),
        digest=digest,
    )


def _head_digest(fields: bytes, meta: bytes, key: bytes, number: int) -> bytes:
    salt = number.to_bytes(blake2b.SALT_SIZE, "big")
    state = blake2b(fields, digest_size=DIGEST_BYTES, key=key, salt=salt, person=b"geo_ray head")
    state.update(meta)
    return state.digest()


Into: TypeAlias = Callable[[int, Meta], memoryview | None]


@dataclass(slots=True)
class WireCount:
    """Counts what passed a socket, also when a frame is cut off in the middle.

    Attributes:
        wire_bytes: all bytes so far.
    """

    wire_bytes: int = 0


def send_frame(
    sock: socket.socket,
    frame: Frame,
    key: bytes,
    *,
    digest_payload: bool = True,
    encrypt: bool = False,
    number: int = 0,
    count: WireCount | None = None,
) -> int:
    """Send a frame, gathering its parts without copying the payload.

    Args:
        sock: a connected stream socket, blocking or with a timeout.
        frame: what to send.
        key: 1 to 64 bytes, shared with the receiver.
        digest_payload: False leaves the payload's tag out; the receiver must agree.
        encrypt: see `encode`.
        number: see `encode`.
        count: called with the number of bytes that the kernel took, piece by piece.

    Returns:
        Bytes on the wire.

    Raises:
        FrameError: the frame cannot be encoded; nothing was sent.
        OSError: the connection is lost (`ConnectionError`) or slow (`TimeoutError`).
    """
    count = count or WireCount()
    before = count.wire_bytes
    pending: list[memoryview] = []
    pending_bytes = 0
    parts = encode(frame, key, digest_payload=digest_payload, encrypt=encrypt, number=number)
    for part in parts:
        pending.append(part)
        pending_bytes += part.nbytes
        if pending_bytes >= PIECE_BYTES:
            send_parts(sock, pending, count)
            pending, pending_bytes = [], 0
    if pending:
        send_parts(sock, pending, count)
    return count.wire_bytes - before


def send_plain(sock: socket.socket, frame: Frame, key: bytes) -> None:
    """`send_frame` with its defaults, for a handshake."""
    send_frame(sock, frame, key)


def send_parts(sock: socket.socket, parts: Iterable[memoryview], count: WireCount) -> None:
    """Send all of ``parts`` with as few calls as the kernel allows.

    Raises:
        OSError: the connection is lost or slow.
    """
    rest = list(parts)
    while rest:
        try:
            sent = sock.sendmsg(rest)
        except BlockingIOError as error:  # see `sockets.block`
            raise TimeoutError("the peer takes nothing") from error
        count.wire_bytes += sent
        while rest and sent >= rest[0].nbytes:
            sent -= rest.pop(0).nbytes
        if rest and sent:
            rest[0] = rest[0][sent:]


def recv_head(
    sock: socket.socket,
    limits: FrameLimits,
    *,
    timeout_s: float | None = None,
    count: WireCount | None = None,
) -> FrameHead:
    """Receive a header and its meta, unauthenticated; at most ``max_meta_bytes`` are allocated.

    Args:
        sock: a connected stream socket.
        limits: what is taken.
        timeout_s: for header and meta together; None leaves the socket's own timeout.
        count: called with the number of received bytes.

    Raises:
        FrameError: not a frame, or over a limit.
        PeerRefusedError: the peer speaks another protocol version.
        OSError: the connection ended or the time is up (`TimeoutError`).
    """
    count = count or WireCount()
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    header = bytearray(HEADER.size)
    _recv_exactly(sock, memoryview(header), deadline_s, count)
    parsed = parse_header(header, limits)
    meta = bytearray(parsed.meta_bytes)
    _recv_exactly(sock, memoryview(meta), deadline_s, count)
    return FrameHead(parsed, bytes(meta))


def recv_frame(
    sock: socket.socket,
    key: bytes,
    limits: FrameLimits,
    into: Into | None = None,
    *,
    timeout_s: float | None = None,
    number: int = 0,
    count: WireCount | None = None,
) -> Frame:
    """Receive a frame.

    After any error the stream is out of step: close the connection.

    Args:
        sock: a connected stream socket.
        key: shared with the sender.
        limits: what is taken, checked before any allocation.
        into: called with the payload's length in bytes and the authenticated meta; may return a
            writable buffer of at least that length, or None for a fresh one.
        timeout_s: for header and meta together, then for each pause within the payload; None
            leaves the socket's own timeout.
        number: see `encode`.
        count: called with the number of received bytes.

    Returns:
        The frame; its payload is a view of the buffer, of the payload's length.

    Raises:
        FrameError: not a frame, over a limit, or a digest or tag is wrong.
        PeerRefusedError: the peer speaks another protocol version.
        OSError: the connection ended or the time is up (`TimeoutError`).
    """
    count = count or WireCount()
    head = recv_head(sock, limits, timeout_s=timeout_s, count=count)
    meta = head.verified_meta(key, number)
    payload_bytes = head.header.payload_bytes
    if not payload_bytes:
        return Frame(head.header.kind, meta)
    target = into(payload_bytes, meta) if into is not None else None
    # Not zeroed: memory is only taken as it is filled.
    target = view_of(np.empty(payload_bytes, np.uint8).data if target is None else target)
    if target.nbytes < payload_bytes:
        raise FrameError(
            f"a payload of {payload_bytes} bytes does not fit its buffer of {target.nbytes}"
        )
    payload = target[:payload_bytes]
    if timeout_s is not None:
        sockets.block(sock, timeout_s)
    if head.header.has_tag:
        kind = PayloadOpener if head.header.is_encrypted else PayloadCheck
        _recv_checked(sock, payload, kind(head.header.digest, key), count)
    else:
        _recv_payload(sock, payload, count)
    return Frame(head.header.kind, meta, payload)


def _recv_checked(
    sock: socket.socket,
    payload: memoryview,
    check: PayloadCheck | PayloadOpener,
    count: WireCount,
) -> None:
    for start in range(0, payload.nbytes, PIECE_BYTES):
        piece = payload[start : start + PIECE_BYTES]
        _recv_payload(sock, piece, count)
        check.update(piece)
    tag = bytearray(TAG_BYTES)
    _recv_payload(sock, memoryview(tag), count)
    if not check.has_tag(bytes(tag)):
        raise FrameError("a payload's tag is wrong: damaged on the way")


def _recv_exactly(
    sock: socket.socket, view: memoryview, deadline_s: float | None, count: WireCount
) -> None:
    while view.nbytes:
        if deadline_s is not None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("no complete frame in time")
            sock.settimeout(left_s)
        view = view[_recv_some(sock, view, count) :]


def _recv_payload(sock: socket.socket, view: memoryview, count: WireCount) -> None:
    while view.nbytes:
        view = view[_recv_some(sock, view, count, socket.MSG_WAITALL) :]


def _recv_some(sock: socket.socket, view: memoryview, count: WireCount, flags: int = 0) -> int:
    try:
        got = sock.recv_into(view, 0, flags)
    except BlockingIOError as error:  # see `sockets.block`
        raise TimeoutError("the peer sends nothing") from error
    if not got:
        raise ConnectionResetError("the peer closed the connection")
    count.wire_bytes += got
    return got


Place: TypeAlias = Callable[[FrameKind, Meta, int], memoryview]
"""Takes a frame's kind, authenticated meta and payload length; returns a buffer for the payload."""
_SMALL_BYTES: Final = 4096


class FrameReader:
    """Parses one connection's bytes; payloads are received straight into their place.

    Usage: receive into `space()`, then call `took(n)`, which yields the complete frames.

    Args:
        key: shared with the sender, who numbers its frames from 0 in their digests.
        limits: what is taken, checked before any allocation.
        place: where payloads go.
    """

    def __init__(self, key: bytes, limits: FrameLimits, place: Place) -> None:
        self._key = key
        self._limits = limits
        self._place = place
        self._small = bytearray(_SMALL_BYTES)  # heads, tags, and the bytes right behind them
        self._begin = 0
        self._end = 0
        self._header: Header | None = None
        self._meta: Meta = {}
        self._payload: memoryview | None = None
        self._filled = 0
        self._check: PayloadCheck | None = None
        self._frame_bytes = 0
        self._count = 0  # frames whose head was authenticated

    @property
    def is_within_payload(self) -> bool:
        """Whether a payload has begun and is not complete."""
        return self._payload is not None and self._filled < self._payload.nbytes

    def space(self) -> memoryview:
        """Return the buffer for the next bytes; never empty."""
        if self.is_within_payload and self._begin == self._end and self._payload is not None:
            return self._payload[self._filled :]
        if self._begin == self._end:
            self._begin = self._end = 0
        if self._end == len(self._small):
            self._make_space()
        return memoryview(self._small)[self._end :]

    def took(self, count: int) -> Iterator[tuple[Frame, int]]:
        """Take in ``count`` bytes received into `space()`; yield the frames that are complete now.

        Yields:
            A frame, and its bytes on the wire.

        Raises:
            FrameError: not a frame, over a limit, or a digest or tag is wrong; the stream is out
                of step.
            PeerRefusedError: the peer speaks another protocol version.
        """
        if self.is_within_payload and self._begin == self._end and self._payload is not None:
            self._fill(self._payload[self._filled : self._filled + count])
        else:
            self._end += count
        while (frame := self._next()) is not None:
            yield frame, self._frame_bytes

    def divert(self) -> None:
        """Move the rest of the present payload to a fresh buffer, because its place is taken."""
        if self._payload is not None:
            self._payload = np.empty(self._payload.nbytes, np.uint8).data

    def _make_space(self) -> None:
        held = bytes(self._small[self._begin : self._end])
        size = len(self._small) if self._begin else 2 * len(self._small)  # a long meta
        self._small = bytearray(max(size, _SMALL_BYTES))
        self._small[: len(held)] = held
        self._begin, self._end = 0, len(held)

    def _fill(self, piece: memoryview) -> None:
        self._filled += piece.nbytes
        if self._check is not None:
            self._check.update(piece)

    def _take(self, count: int) -> bytes | None:
        if self._end - self._begin < count:
            return None
        taken = bytes(self._small[self._begin : self._begin + count])
        self._begin += count
        return taken

    def _next(self) -> Frame | None:
        """Return a frame of the received bytes, or None if more bytes are needed."""
        if self._header is None:
            head = self._take(HEADER.size)
            if head is None:
                return None
            self._header = parse_header(head, self._limits)
        if self._payload is None and not self._begin_payload(self._header):
            return None
        return self._finish(self._header)

    def _begin_payload(self, header: Header) -> bool:
        raw = self._take(header.meta_bytes)
        if raw is None:
            return False
        self._meta = FrameHead(header, raw).verified_meta(self._key, self._count)
        self._count += 1
        self._payload = self._place(header.kind, self._meta, header.payload_bytes)
        if self._payload.nbytes != header.payload_bytes:
            raise FrameError(
                f"a payload of {header.payload_bytes} bytes got a place of {self._payload.nbytes}"
            )
        self._filled = 0
        self._check = PayloadCheck(header.digest, self._key) if header.has_tag else None
        return True

    def _finish(self, header: Header) -> Frame | None:
        payload = self._payload
        if payload is None:
            return None
        early = min(payload.nbytes - self._filled, self._end - self._begin)
        if early:
            piece = payload[self._filled : self._filled + early]
            piece[:] = memoryview(self._small)[self._begin : self._begin + early]
            self._begin += early
            self._fill(piece)
        if self._filled < payload.nbytes:
            return None
        if self._check is not None:
            tag = self._take(TAG_BYTES)
            if tag is None:
                return None
            if not self._check.has_tag(tag):
                raise FrameError("a payload's tag is wrong: damaged on the way")
        tail_bytes = TAG_BYTES if self._check is not None and payload.nbytes else 0
        self._frame_bytes = HEADER.size + header.meta_bytes + payload.nbytes + tail_bytes
        frame = Frame(header.kind, self._meta, payload)
        self._header, self._payload, self._check = None, None, None
        return frame
