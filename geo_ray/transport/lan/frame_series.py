"""Frames of one connection inside a region, which are counted, and how both ends agree on them."""

from __future__ import annotations

import socket
from functools import partial

from geo_ray.transport.config import LanConfig
from geo_ray.transport.wire.frame_io import Into, recv_frame, send_frame, send_plain
from geo_ray.transport.wire.frames import Frame
from geo_ray.transport.wire.handshake import Greeting, HandshakeSide, expect_same
from geo_ray.transport.wire.meta import Meta


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
        hello: who this end is.
        config: of this end.
        timeout_s: for the whole handshake, beside that of ``config``.
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
