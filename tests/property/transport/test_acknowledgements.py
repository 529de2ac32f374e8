"""Received chunks are acknowledged once each, and soon, however they arrive."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from geo_ray.transport.config import TransportConfig
from geo_ray.transport.connection import ACK_META_BYTES, ChunkReceiver, Stream
from geo_ray.transport.session import Callbacks, HeldBytes, Session
from geo_ray.transport.wire.fields import counts
from geo_ray.transport.wire.frames import Frame, FrameKind, FrameLimits, FrameReader
from geo_ray.transport.wire.handshake import Greeting
from geo_ray.transport.wire.message import LANES, EndpointIdentity, Message, to_meta

KEY = b"k" * 32
MESSAGE_BYTES = 2**22
LONGEST_S = 0.002


def _session(*, one_address: bool) -> Session:
    callbacks = Callbacks(lambda *_: None, lambda *_: None)
    session = Session(
        EndpointIdentity("run", "us", 1, KEY),
        "eu",
        TransportConfig(),
        callbacks,
        lambda: None,
        is_shaped=False,
        held=HeldBytes(),
    )
    session.flow.connected(one_address=one_address)
    session.flow.on_rtt(0.0, 0.0001)
    return session


def _stream(stack: ExitStack) -> tuple[Stream, socket.socket]:
    near, far = (stack.enter_context(each) for each in socket.socketpair())
    greeting = Greeting({}, {"delivered": [0] * LANES}, KEY, KEY, secrets.token_hex(8))
    return Stream(near, 0, greeting, None, 0), far


def _acknowledged(far: socket.socket, reader: FrameReader) -> list[tuple[int, int, int]]:
    """Return the chunks that the frames in a socket acknowledge."""
    far.setblocking(False)
    found: list[tuple[int, int, int]] = []
    while True:
        try:
            count = far.recv_into(reader.space())
        except BlockingIOError:
            return found
        for frame, _ in reader.took(count):
            flat = counts(frame.meta, "chunks")
            found += zip(flat[::3], flat[1::3], flat[2::3], strict=True)


@given(
    one_address=st.booleans(),
    steps=st.lists(
        st.tuples(st.integers(0, 2**21), st.integers(1, 3), st.floats(0.0, 0.004)),
        min_size=1,
        max_size=12,
    ),
)
def test_every_chunk_is_acknowledged_once_and_soon(
    one_address: bool, steps: list[tuple[int, int, float]]
) -> None:
    """Steps: size of a chunk, how many of them, and the time until the loop turns."""
    with ExitStack() as stack:
        session = _session(one_address=one_address)
        receiver = ChunkReceiver(session, -1)
        stream, far = _stream(stack)
        reader = FrameReader(KEY, FrameLimits(ACK_META_BYTES, 0), lambda *_: memoryview(b""))
        now_s, number = 1.0, 0
        open_keys: dict[tuple[int, int, int], float] = {}
        for size_bytes, count, pause_s in steps:
            for _ in range(count):
                number += 1
                message = Message("test", {}, b"", "update")
                total_bytes = MESSAGE_BYTES if size_bytes else 0
                meta = to_meta(message.lane, number, 0, total_bytes, message)
                place = receiver.place(stream, FrameKind.CHUNK, meta, size_bytes)
                receiver.take(stream, Frame(FrameKind.CHUNK, meta, place), size_bytes)
                open_keys[message.lane, number, 0] = now_s
            receiver.acknowledge(stream, now_s)
            assert stream.write()
            for key in _acknowledged(far, reader):
                del open_keys[key]  # once
            assert receiver.owes is bool(open_keys)
            if open_keys:
                assert one_address, "only peers on one host wait"
                assert now_s < receiver.due_s <= min(open_keys.values()) + LONGEST_S
            now_s += pause_s
        receiver.acknowledge(stream, max(now_s, min(receiver.due_s, 10.0)))
        assert stream.write()
        for key in _acknowledged(far, reader):
            del open_keys[key]
        assert not open_keys and not receiver.owes
