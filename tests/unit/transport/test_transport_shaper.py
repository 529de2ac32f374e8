from __future__ import annotations

import socket
import time

from geo_ray.base.clock import SystemClock
from geo_ray.transport.connection import Stream
from geo_ray.transport.emulation import LinkModel, LinkSpec, Shaper, regroup
from geo_ray.transport.wire.frames import Frame, FrameKind, FrameLimits, encode, recv_frame
from geo_ray.transport.wire.handshake import Greeting

KEY = b"k" * 32


def test_regrouping_keeps_the_bytes() -> None:
    for sizes in ([], [5], [10], [3, 7, 10, 25, 1], [0, 4, 0, 40]):
        parts = [memoryview(bytes([n]) * size) for n, size in enumerate(sizes)]
        groups = list(regroup(parts, 10))
        assert b"".join(b"".join(group) for group in groups) == b"".join(parts)
        lengths = [sum(map(len, group)) for group in groups]
        assert all(length == 10 for length in lengths[:-1])
        assert all(0 < length <= 10 for length in lengths)


def test_a_shaped_stream_releases_whole_frames_in_order_on_time() -> None:
    spec = LinkSpec(rate_mbps=100.0, delay_s=0.02, outages=((0.05, 0.1),))
    clock = SystemClock()
    run_start_s = clock.now_s()
    shaper = Shaper(LinkModel(spec, 0), clock, run_start_s)
    sent = [Frame(FrameKind.CHUNK, {"n": n}, bytes([n]) * (200_000 * n + 1)) for n in range(4)]
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(30)
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * 1024**2)
        stream = Stream(left, 1, Greeting({}, {}, KEY, KEY), shaper, 0)
        for frame in sent:
            stream.put(frame, "update")
        assert not stream.is_idle and not stream.has_capacity()
        while not stream.is_idle:
            assert stream.write()
            time.sleep(min(0.01, stream.ready_in_s(has_chunk=False)))
        ended_s = clock.now_s() - run_start_s
        ideal, last_s = LinkModel(spec, 0), 0.0
        for number, frame in enumerate(sent):
            got = recv_frame(right, KEY, FrameLimits(), number=number)
            last_s = ideal.transfer(0.0, len(b"".join(encode(frame, KEY))))
            assert (got.meta, bytes(got.payload)) == (frame.meta, frame.payload)
        assert ended_s >= last_s - 1e-6  # all were ready at 0 or later
        assert stream.sent == {"update": sum(len(b"".join(encode(f, KEY))) for f in sent)}
        stream.close()
