"""The handshake, by which two ends of a connection verify that they belong to the same run.

::

    dialer                                   listener
    HELLO who, nonce, key id   ----------->  compares; REFUSED with the reason, or
                               <-----------  HELLO who, nonce, key id
    READY, session key         ----------->  proves that the dialer has the run's key
                               <-----------  READY, session key

The hellos are readable by anyone, so that a mismatch can be named in words. The session keys, one
per direction, are derived (HKDF) from the run's key and both hellos, whose nonces are fresh: a
recorded or reflected connection is worthless. All frames after the hellos carry a digest under a
session key.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from geo_ray.base.errors import FrameError, PeerRefusedError
from geo_ray.transport.wire.fields import Meta, encode_meta
from geo_ray.transport.wire.frames import Frame, FrameKind, FrameLimits, WireCount, recv_head

HELLO_LIMITS: Final = FrameLimits(max_meta_bytes=4096, max_payload_bytes=0)
"""What the frames of a handshake may have."""

_PLAIN_KEY: Final = b"geo_ray hello"  # no secret: it only finds damage
_REASON_CHARS: Final = 300
_LAST_READ_S: Final = 0.2
_NONCE: Final = "_nonce"
_KEY_ID: Final = "_key_id"


@dataclass(frozen=True, slots=True)
class HandshakeSide:
    """One end's part in a handshake.

    Attributes:
        key: the run's key.
        hello: identity of this end; names must not begin with an underscore.
        admit: given the other end's hello, returns this end's READY meta; raises PeerRefusedError
            to refuse the other end.
        send: sends a frame with a key's digest.
        timeout_s: for the whole handshake.
        count: called with the number of received bytes.
    """

    key: bytes
    hello: Meta
    admit: Callable[[Meta], Meta]
    send: Callable[[Frame, bytes], None]
    timeout_s: float
    count: WireCount = field(default_factory=WireCount)


@dataclass(frozen=True, slots=True)
class Greeting:
    """The result of a handshake.

    Attributes:
        hello: identity of the other end.
        ready: what the other end sent in its READY.
        send_key: session key for frames to it; never shown.
        recv_key: session key for frames from it; never shown.
        link_id: id of the connection, known to both ends only.
    """

    hello: Meta
    ready: Meta
    send_key: bytes = field(repr=False)
    recv_key: bytes = field(repr=False)
    link_id: str = ""

    def derive_key(self, purpose: bytes, *, outgoing: bool) -> bytes:
        """Return 32 bytes for another use; the other end gets the same for the other direction.

        The session keys are derived from both hellos, which only the two ends know under TLS, and
        from the run's key. Python's `ssl` does not offer TLS's own exporter.
        """
        key = self.send_key if outgoing else self.recv_key
        return HKDF(SHA256(), 32, salt=None, info=b"geo_ray derived: " + purpose).derive(key)


def greet(sock: socket.socket, side: HandshakeSide) -> Greeting:
    """The dialer's handshake.

    Raises:
        PeerRefusedError: either end refused the other; the message has both values.
        FrameError: the other end does not speak this protocol.
        OSError: the connection was lost or the handshake took too long.
    """
    deadline_s = time.monotonic() + side.timeout_s
    mine = _signed_hello(side)
    side.send(Frame(FrameKind.HELLO, mine), _PLAIN_KEY)
    with _telling(sock, side):
        theirs, raw = _receive(sock, side, FrameKind.HELLO, None, deadline_s)
        ready = _admit(side, theirs)
        dial_key, listen_key = _session_keys(side.key, encode_meta(mine), raw)
        side.send(Frame(FrameKind.READY, ready), dial_key)
        answer, _ = _receive(sock, side, FrameKind.READY, listen_key, deadline_s)
    return Greeting(theirs, answer, dial_key, listen_key, _link_id(dial_key, listen_key))


def welcome(sock: socket.socket, side: HandshakeSide) -> Greeting:
    """The listener's handshake.

    Raises:
        PeerRefusedError: either end refused the other; the message has both values.
        FrameError: the other end does not speak this protocol.
        OSError: the connection was lost or the handshake took too long.
    """
    deadline_s = time.monotonic() + side.timeout_s
    with _telling(sock, side):
        theirs, raw = _receive(sock, side, FrameKind.HELLO, None, deadline_s)
        ready = _admit(side, theirs)
        mine = _signed_hello(side)
        side.send(Frame(FrameKind.HELLO, mine), _PLAIN_KEY)
        dial_key, listen_key = _session_keys(side.key, raw, encode_meta(mine))
        answer, _ = _receive(sock, side, FrameKind.READY, dial_key, deadline_s)
        side.send(Frame(FrameKind.READY, ready), listen_key)
    return Greeting(theirs, answer, listen_key, dial_key, _link_id(dial_key, listen_key))


def _signed_hello(side: HandshakeSide) -> Meta:
    return {**side.hello, _NONCE: secrets.token_bytes(16), _KEY_ID: _key_id(side.key)}


def _admit(side: HandshakeSide, theirs: Meta) -> Meta:
    expect_same("key", theirs.get(_KEY_ID), _key_id(side.key))
    return side.admit(theirs)


def expect_same(what: str, theirs: object, ours: object) -> None:
    """Compare a value of a hello with the wanted one.

    Raises:
        PeerRefusedError: they differ; the message has both.
    """
    if theirs != ours or type(theirs) is not type(ours):
        raise PeerRefusedError(f"the peer's {what} is {_short(theirs)}, this side's {_short(ours)}")


@contextlib.contextmanager
def _telling(sock: socket.socket, side: HandshakeSide) -> Iterator[None]:
    """Tell the other end why it is refused, then raise."""
    try:
        yield
    except PeerRefusedError as error:
        with contextlib.suppress(OSError):
            reason: Meta = {"reason": error.message[:_REASON_CHARS]}
            side.send(Frame(FrameKind.REFUSED, reason), _PLAIN_KEY)
            # Closing with unread bytes would reset the connection and destroy the reason.
            sock.settimeout(_LAST_READ_S)
            sock.recv(HELLO_LIMITS.max_meta_bytes)
        raise


def _receive(
    sock: socket.socket,
    side: HandshakeSide,
    wanted: FrameKind,
    key: bytes | None,
    deadline_s: float,
) -> tuple[Meta, bytes]:
    left_s = max(0.0, deadline_s - time.monotonic())
    head = recv_head(sock, HELLO_LIMITS, timeout_s=left_s, count=side.count)
    if head.header.kind is FrameKind.REFUSED:
        reason = head.verified_meta(_PLAIN_KEY).get("reason")
        raise PeerRefusedError(f"the peer refused: {_short(reason)}")
    if head.header.kind is not wanted:
        raise FrameError(f"expected a {wanted.name} frame, got {head.header.kind.name}")
    try:
        return head.verified_meta(key or _PLAIN_KEY), head.meta
    except FrameError as error:
        if key is None:
            raise
        raise PeerRefusedError("the peer could not prove that it has the run's key") from error


def _session_keys(key: bytes, dial_hello: bytes, listen_hello: bytes) -> tuple[bytes, bytes]:
    transcript = blake2b(dial_hello).digest() + blake2b(listen_hello).digest()  # has both nonces
    dial, listen = (
        HKDF(SHA256(), 32, salt=transcript, info=role).derive(key)
        for role in (b"geo_ray dialer", b"geo_ray listener")
    )
    return dial, listen


def _link_id(dial_key: bytes, listen_key: bytes) -> str:
    return blake2b(dial_key, key=listen_key, digest_size=16, person=b"geo_ray link").hexdigest()


def _key_id(key: bytes) -> str:
    """Return an id of a key that does not reveal it: four bytes of its hash."""
    return blake2b(b"", key=key, digest_size=4, person=b"geo_ray key id").hexdigest()


def _short(value: object) -> str:
    # An unknown peer may have sent the value, which goes into errors and logs.
    return repr(value)[:_REASON_CHARS]
