"""Frames over TLS: received whole whatever the sizes of frames, records and socket buffers."""

from __future__ import annotations

import secrets
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from geo_ray.transport.connection import Stream
from geo_ray.transport.security.certs import Authority
from geo_ray.transport.security.tls import client_context, server_context
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.frames import Frame, FrameKind, FrameLimits
from geo_ray.transport.wire.handshake import Greeting

KEY = b"k" * 32
Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


@pytest.fixture(scope="module")
def contexts() -> Contexts:
    authority = Authority.create("test")
    return server_context(authority.issue("eu")), client_context(authority.issue("us"))


def _pair(stack: ExitStack, contexts: Contexts, buffer_bytes: int) -> tuple[Stream, Stream]:
    """Return the two ends of a TLS connection with small socket buffers."""
    near, far = socket.socketpair()
    for each in (near, far):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    found: list[ssl.SSLSocket] = []
    thread = threading.Thread(
        target=lambda: found.append(contexts[0].wrap_socket(near, server_side=True))
    )
    thread.start()
    dialed = contexts[1].wrap_socket(far)
    thread.join()
    greeting = Greeting({}, {}, KEY, KEY, secrets.token_hex(8))
    streams = [Stream(each, 0, greeting, None, 0) for each in (dialed, found[0])]
    for each in streams:
        stack.callback(each.close)
        each.open(
            FrameLimits(max_payload_bytes=2**22, payload_digest=False),
            lambda kind, meta, size_bytes: memoryview(bytearray(size_bytes)),
        )
    return streams[0], streams[1]


def _payload(number: int, size_bytes: int) -> bytes:
    return np.random.default_rng(number).integers(0, 256, size_bytes, np.uint8).tobytes()


def _received(stream: Stream) -> Iterator[Frame]:
    for frame, _ in stream.read(lambda _: None):
        yield frame


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.sampled_from([0, 1, 4000, 16300, 16384, 70_000, 1_200_000]), max_size=6),
    buffer_bytes=st.sampled_from([2**12, 2**16, 2**20]),
    lost_after=st.none() | st.integers(0, 40),
)
def test_frames_arrive_whole_and_none_after_the_connection_is_lost(
    contexts: Contexts, sizes: list[int], buffer_bytes: int, lost_after: int | None
) -> None:
    with ExitStack() as stack:
        near, far = _pair(stack, contexts, buffer_bytes)
        for number, size_bytes in enumerate(sizes):
            meta: Meta = {"number": number}
            near.put(Frame(FrameKind.CHUNK, meta, _payload(number, size_bytes)), "update")
        frames: list[Frame] = []
        turns = 0
        while len(frames) < len(sizes) and turns != lost_after:
            near.write()
            frames += _received(far)
            turns += 1
        near.close()
        with pytest.raises(OSError):
            while True:
                frames += _received(far)
        for number, frame in enumerate(frames):
            assert frame.meta == {"number": number}
            assert bytes(frame.payload) == _payload(number, sizes[number])
        assert len(frames) == len(sizes) or lost_after is not None
