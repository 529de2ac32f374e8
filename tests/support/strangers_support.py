"""Connections of strangers that say something, or nothing, and wait."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from geo_ray.transport.wire import handshake
from geo_ray.transport.wire.frames import Frame, FrameKind, encode
from geo_ray.transport.wire.sockets import Address
from tests.support.wan_support import KEY, WAIT_S

TALK: dict[str, bytes] = {
    "silence": b"",
    "a byte of a frame": b"G",
    "half a frame": b"".join(encode(Frame(FrameKind.HELLO, {"service": "wan"}), b"any"))[:-3],
    "half a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60),
    "a TLS hello without its end": b"\x16\x03\x01\x00\xff\x01\x00\x04\x00" + bytes(251),
}


def true_hello(service: str, **more: str | int) -> bytes:
    """What somebody says who has listened to a peer, and then cannot prove to have the key."""
    hello = {"service": service, "_nonce": bytes(16), "_key_id": handshake._key_id(KEY)} | more
    return b"".join(encode(Frame(FrameKind.HELLO, hello), handshake._PLAIN_KEY))


@contextmanager
def strangers(address: Address, said: bytes, host: str, count: int) -> Iterator[None]:
    """Connections that say something, wait, and are not given up by the strangers."""
    with ExitStack() as stack:
        for _ in range(count):
            sock = socket.create_connection(address, WAIT_S, source_address=(host, 0))
            stack.enter_context(sock)
            with suppress(OSError):
                sock.sendall(said)
        yield
