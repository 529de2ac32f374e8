"""What a session lets its connections do, the replaced ones too; and copies in a stream's queue."""

from __future__ import annotations

import itertools
import math
import secrets
import select
import selectors
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from geo_ray.base.clock import SystemClock
from geo_ray.base.errors import FrameError
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.connection import ACK_META_BYTES, ChunkReceiver, Connection, Stream
from geo_ray.transport.flow import Heartbeat
from geo_ray.transport.outbox import Outbox
from geo_ray.transport.session import Callbacks, HeldBytes, Session
from geo_ray.transport.wire.fields import encode_meta
from geo_ray.transport.wire.frames import Frame, FrameKind, FrameLimits, FrameReader
from geo_ray.transport.wire.handshake import Greeting
from geo_ray.transport.wire.message import DATA, LANES, TRANSPORT, EndpointIdentity, Message

KEY = b"k" * 32
ALL = range(LANES)


class Bench:
    """A session with connections over socket pairs."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.news: list[tuple[int, bool]] = []
        callbacks = Callbacks(
            lambda *_: None, lambda _, attempt, up: self.news.append((attempt, up))
        )
        identity = EndpointIdentity("run", "us", 1, KEY)
        self.config = TransportConfig()
        self.session = Session(
            identity,
            "eu",
            self.config,
            callbacks,
            lambda: None,
            is_shaped=False,
            held=HeldBytes(),
        )

    def stream(self, attempt: int = 1) -> tuple[Stream, socket.socket]:
        near, far = socket.socketpair()
        self.stack.enter_context(far)
        hello: dict[str, Any] = {"region": "eu", "attempt": attempt, "instance": f"i{attempt}"}
        greeting = Greeting(hello, {"delivered": [0] * LANES}, KEY, KEY, secrets.token_hex(8))
        stream = Stream(near, 0, greeting, None, 0)
        self.stack.callback(stream.close)
        return stream, far

    def adopt(self, attempt: int = 1) -> Connection:
        made = Connection(
            "eu",
            self.session,
            self.stream(attempt)[0],
            dialed=False,
            config=self.config,
            clock=SystemClock(),
            dial_stream=lambda *_: None,
        )
        self.stack.callback(made.discard)
        self.session.adopt(made)
        return made

    def say(self, size_bytes: int = 10) -> None:
        self.session.send(Message("test", {}, bytes(size_bytes), "update"), 1.0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)


def test_acknowledgements_of_a_predecessor_do_not_count_for_its_successor(bench: Bench) -> None:
    session, old = bench.session, bench.adopt(attempt=1)
    bench.say()
    chunk = session.next_chunk(old.greeting.link_id, ALL, 100, 0.0)
    assert chunk is not None
    new = bench.adopt(attempt=2)
    bench.say()
    again = session.next_chunk(new.greeting.link_id, ALL, 100, 0.0)
    assert again is not None and again.key == chunk.key == (DATA, 1, 0)
    assert session.acknowledged(old.greeting.link_id, [chunk.key], [0, 1, 0]) == []
    assert session.stats()["outbox_messages"] == 1 and session.in_flight_bytes(ALL) == 10
    assert session.acknowledged(new.greeting.link_id, [again.key], [0, 1, 0]) == [again]
    assert session.stats()["outbox_messages"] == 0


def test_a_replaced_connection_neither_takes_chunks_nor_gives_any_back(bench: Bench) -> None:
    session, old = bench.session, bench.adopt()
    bench.say()
    held = session.next_chunk(old.greeting.link_id, ALL, 100, 0.0)
    new = bench.adopt()
    chunk = session.next_chunk(new.greeting.link_id, ALL, 100, 1.0)
    assert held is chunk and chunk is not None
    session.give_back(old.greeting.link_id, [chunk])
    assert session.in_flight_bytes(ALL) == 10 and not session.has_chunk(ALL)
    assert session.straggler(old.greeting.link_id, math.inf, 9, 2.0, ()) is None
    assert session.next_chunk(old.greeting.link_id, ALL, 100, 2.0) is None
    assert session.straggler(new.greeting.link_id, math.inf, 9, 2.0, ()) is chunk


def test_reports_alternate_although_the_old_connection_ends_last(bench: Bench) -> None:
    old, new = bench.adopt(), bench.adopt()
    old.end("late")
    bench.session.run(old)
    assert bench.session.is_connected
    new.end("done")
    bench.session.run(new)
    bench.session.inbox.close()
    bench.session.inbox.run()
    assert bench.news == [(1, True), (1, False), (1, True), (1, False)]


class WokenMeanwhile:
    """The end of a waker that a loop hears: another thread wakes it while it listens."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._end = connection, connection._woken

    def recv(self, size_bytes: int) -> bytes:
        self._connection.wake()
        return self._end.recv(size_bytes)

    def close(self) -> None:
        self._end.close()


def test_a_loop_that_was_woken_while_it_woke_can_be_woken_again(bench: Bench) -> None:
    connection = bench.adopt()
    woken = connection._woken
    connection._selector.register(woken, selectors.EVENT_READ, None)
    connection._open(connection._control)
    connection._woken = WokenMeanwhile(connection)  # type: ignore[assignment]
    connection.wake()
    connection._turn()
    connection.wake()
    assert select.select([woken], [], [], 0.0)[0] == [woken]


@pytest.mark.parametrize("delivered", [[], [0, 0], [0, 0, 0, 0]])
def test_an_acknowledgement_of_other_lanes_is_refused(bench: Bench, delivered: list[int]) -> None:
    connection = bench.adopt()
    with pytest.raises(FrameError, match="lanes"):
        bench.session.acknowledged(connection, [], delivered)


def test_acknowledged_lanes_that_do_not_exist_are_no_news(bench: Bench) -> None:
    connection = bench.adopt()
    assert bench.session.acknowledged(connection, [(7, 1, 0)], [0, 0, 0]) == []


def test_the_longest_acknowledgement_is_taken_whatever_metas_are(bench: Bench) -> None:
    stream, far = bench.stream()
    chunk_receiver = ChunkReceiver(bench.session, 1)
    chunk_receiver._acks += [2, 2**63, 2**63] * 1000
    chunk_receiver.acknowledge(stream, 0.0)
    assert stream.write() and not chunk_receiver.owes
    reader = FrameReader(KEY, FrameLimits(ACK_META_BYTES, 0), lambda *_: memoryview(b""))
    frames: list[Frame] = []
    while len(frames) < 2:
        frames += [frame for frame, _ in reader.took(far.recv_into(reader.space()))]
    assert max(len(encode_meta(frame.meta)) for frame in frames) > 0.5 * ACK_META_BYTES


@pytest.mark.parametrize("at_s", [math.nan, math.inf, -math.inf])
def test_heartbeats_without_a_time_are_refused(at_s: float) -> None:
    beat = Heartbeat(1.0)
    with pytest.raises(FrameError, match="time"):
        beat.pong({"at_s": at_s}, 1.0)
    with pytest.raises(FrameError, match="time"):
        beat.ping({"at_s": at_s})


def test_a_heartbeat_from_the_future_is_refused() -> None:
    beat = Heartbeat(1.0)
    with pytest.raises(FrameError, match="before it was sent"):
        beat.pong({"at_s": 1e9}, 1.0)
    assert beat.rtt_s is None and beat.rtt_min_s is None


# ------------------------------------------------------------------ buffers that change


def test_a_chunk_that_is_sent_again_is_a_copy() -> None:
    """The first one may arrive after all; then the buffer is the caller's again."""
    buffer = bytearray(b"before")
    outbox = Outbox(8, 1000, 1000)
    outbox.add(Message("test", {}, buffer, "update"))
    chunk = outbox.next_chunk(ALL, 100, 0.0)
    assert chunk is not None
    first = chunk.frame()
    outbox.give_back([chunk])
    assert outbox.next_chunk(ALL, 100, 0.0) is chunk
    second = chunk.frame()
    buffer[:] = b"after!"
    assert bytes(first.payload) == b"after!" and bytes(second.payload) == b"before"


def test_a_stream_that_keeps_copies_sends_what_the_buffer_was(bench: Bench) -> None:
    stream, far = bench.stream()
    buffer = bytearray(b"x" * 3_000_000)
    stream.put(Frame(FrameKind.CHUNK, {}, buffer), "update")
    assert not stream.write()  # the kernel has a part of it
    stream.keep_copies()
    buffer[:] = b"!" * len(buffer)
    place = bytearray(len(buffer))
    reader = FrameReader(KEY, FrameLimits(), lambda *_: memoryview(place))
    found: list[Frame] = []
    for _ in itertools.count():
        found += [frame for frame, _ in reader.took(far.recv_into(reader.space()))]
        if found:
            break
        stream.write()
    assert place == b"x" * len(buffer)
    assert stream.is_idle and sum(stream.sent.values()) > len(buffer)


def test_heartbeats_are_no_progress_of_a_streams_chunks(bench: Bench) -> None:
    """A chunk that vanished must not hide behind the pings that follow it."""
    stream, _ = bench.stream()
    stream.put(Frame(FrameKind.PING, {"at_s": 1.0}), TRANSPORT)
    assert stream.write() and not stream.has_moved
    stream.put(Frame(FrameKind.CHUNK, {}, b"piece"), "update")
    assert stream.write() and stream.has_moved
