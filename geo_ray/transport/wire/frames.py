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
"""

from __future__ import annotations

import enum
import hmac
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from geo_ray.base.errors import FrameError, PeerRefusedError
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

PROTOCOL_VERSION: Final = 4
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
