from __future__ import annotations

import socket
import threading

import pytest

from geo_ray.clock import SystemClock
from geo_ray.wan.frame_io import recv_frame
from geo_ray.wan.frames import Frame, FrameKind, FrameLimits, encode
from geo_ray.wan.link_model import LinkModel, LinkSpec
from geo_ray.wan.shaper import ShapedWriter, Shaper, _regroup

KEY = b"k" * 32


def test_regrouping_keeps_the_bytes() -> None:
    for sizes in ([], [5], [10], [3, 7, 10, 25, 1], [0, 4, 0, 40]):
        parts = [memoryview(bytes([n]) * size) for n, size in enumerate(sizes)]
        groups = list(_regroup(parts, 10))
        assert b"".join(b"".join(group) for group in groups) == b"".join(parts)
        lengths = [sum(map(len, group)) for group in groups]
        assert all(length == 10 for length in lengths[:-1])
        assert all(0 < length <= 10 for length in lengths)


def test_frames_arrive_whole_in_order_and_not_before_the_model_says() -> None:
    spec = LinkSpec(rate_mbps=100.0, delay_s=0.02, outages=((0.05, 0.1),))
    clock = SystemClock()
    run_start_s = clock.now_s()
    shaper = Shaper(LinkModel(spec, 0), clock, run_start_s)
    sent = [Frame(FrameKind.MESSAGE, {"n": n}, bytes([n]) * (200_000 * n + 1)) for n in range(4)]
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(30)
        writer = ShapedWriter(left, shaper)
        threading.Thread(
            target=lambda: [writer.send(frame, KEY, "update") for frame in sent]
        ).start()
        ideal = LinkModel(spec, 0)
        for frame in sent:
            got = recv_frame(right, KEY, FrameLimits())
            arrived_s = clock.now_s() - run_start_s
            # All were ready at 0 or later, hence arrive no earlier than if they were ready at 0.
            assert arrived_s >= ideal.transfer(0.0, len(b"".join(encode(frame, KEY)))) - 1e-6
            assert (got.meta, bytes(got.payload)) == (frame.meta, frame.payload)
        assert writer.flush(30)
        assert writer.sent == {"update": sum(len(b"".join(encode(f, KEY))) for f in sent)}
        writer.close()


def test_closing_drops_what_is_under_way_and_wakes_the_sender() -> None:
    shaper = Shaper(LinkModel(LinkSpec(rate_mbps=0.1), 0), SystemClock(), 0.0)
    left, right = socket.socketpair()
    with left, right:
        writer = ShapedWriter(left, shaper)
        failed = threading.Event()

        def send() -> None:
            try:
                writer.send(Frame(FrameKind.MESSAGE, {}, bytes(1_000_000)), KEY, "update")
            except ConnectionError:
                failed.set()

        sender = threading.Thread(target=send)
        sender.start()
        writer.close()
        sender.join(30)
        assert failed.is_set()
        with pytest.raises(ConnectionError):
            writer.send(Frame(FrameKind.PING, {}), KEY, "transport")


def test_a_lost_connection_ends_the_delay_line() -> None:
    shaper = Shaper(LinkModel(LinkSpec(delay_s=0.01), 0), SystemClock(), 0.0)
    left, right = socket.socketpair()
    with left:
        right.close()
        writer = ShapedWriter(left, shaper)
        writer.send(Frame(FrameKind.PING, {}), KEY, "transport")
        assert writer.flush(30)
        with pytest.raises(ConnectionError):
            writer.send(Frame(FrameKind.PING, {}), KEY, "transport")
        writer.close()
