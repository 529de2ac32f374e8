from __future__ import annotations

import pytest

from geo_ray.base.errors import FrameError
from geo_ray.transport.outbox import Chunk, Outbox
from geo_ray.transport.wire.message import CONTROL, DATA, LANES, Message

ALL = range(LANES)


def _message(n: int, size_bytes: int = 10, lane: int = DATA) -> Message:
    return Message("test", {"n": n}, bytes(size_bytes), "update", lane)


def _filled(count: int, size_bytes: int = 10, ahead_bytes: int = 10**9) -> Outbox:
    outbox = Outbox(10, 10_000, ahead_bytes)
    for n in range(count):
        assert outbox.add(_message(n, size_bytes)) == n + 1
    return outbox


def _drain(outbox: Outbox, chunk_bytes: int = 100, lanes: range = ALL) -> list[Chunk]:
    found = []
    while (chunk := outbox.next_chunk(lanes, chunk_bytes, 0.0)) is not None:
        found.append(chunk)
    return found


def test_room_is_bounded_by_messages_and_bytes_but_one_message_always_fits() -> None:
    outbox = Outbox(2, 100, 10**9)
    assert outbox.has_capacity(10**9)
    outbox.add(_message(0, 1000))
    assert not outbox.has_capacity(0)
    _drain(outbox)
    outbox.delivered(DATA, 1)
    outbox.add(_message(1, 60))
    assert outbox.has_capacity(40) and not outbox.has_capacity(41)
    outbox.add(_message(2, 0))
    assert not outbox.has_capacity(0)
    assert len(outbox) == 2 and outbox.size_bytes == 60


def test_chunks_cover_a_message_and_an_empty_one_is_one_empty_chunk() -> None:
    outbox = _filled(1, 250)
    outbox.add(_message(1, 0))
    chunks = _drain(outbox)
    assert [(c.entry.number, c.offset, c.size_bytes) for c in chunks] == [
        (1, 0, 100), (1, 100, 100), (1, 200, 50), (2, 0, 0)
    ]  # fmt: skip
    assert outbox.in_flight_bytes() == 250 and not outbox.has_chunk(ALL)
    first, second = chunks[0].frame(), chunks[1].frame()
    assert first.meta["_kind"] == "test" and first.meta["n"] == 0
    assert "_kind" not in second.meta and second.meta["_o"] == 100


def test_a_lower_lane_overtakes_at_every_chunk() -> None:
    outbox = _filled(1, 300)
    assert outbox.next_chunk(ALL, 100, 0.0).key == (DATA, 1, 0)  # type: ignore[union-attr]
    outbox.add(_message(1, 10, CONTROL))
    assert outbox.next_chunk(ALL, 100, 0.0).key == (CONTROL, 1, 0)  # type: ignore[union-attr]
    assert outbox.next_chunk(range(CONTROL, DATA), 100, 0.0) is None
    assert outbox.next_chunk(ALL, 100, 0.0).key == (DATA, 1, 100)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("size_bytes", "shares", "chunks"),
    [
        (30_000, 4, [7_500] * 4),
        (30_001, 4, [7_501, 7_501, 7_501, 7_498]),
        (30_000, 1, [20_000, 10_000]),
        (5_000, 4, [2_800, 2_200]),  # shorter ones cost more than they save
        (0, 4, [0]),
        (100_000, 4, [20_000] * 5),
    ],
)
def test_a_message_is_cut_into_a_chunk_for_each_stream(
    size_bytes: int, shares: int, chunks: list[int]
) -> None:
    outbox = _filled(1, size_bytes)
    found = iter(lambda: outbox.next_chunk(ALL, 20_000, 0.0, shares), None)
    assert [chunk.size_bytes for chunk in found if chunk is not None] == chunks


def test_returned_chunks_are_sent_first_unless_acknowledged() -> None:
    outbox = _filled(2, 200)
    chunks = [outbox.next_chunk(ALL, 100, 0.0) for _ in range(3)]
    held = [chunk for chunk in chunks if chunk is not None]
    assert outbox.acknowledge(held[1].key) is held[1]
    assert outbox.acknowledge(held[1].key) is None
    outbox.give_back(held[::-1])
    assert outbox.in_flight_bytes() == 0
    again = _drain(outbox)
    assert [(c.key, c.times_sent) for c in again] == [
        ((DATA, 1, 0), 2), ((DATA, 2, 0), 2), ((DATA, 2, 100), 1)
    ]  # fmt: skip


def test_after_a_reconnect_only_unacknowledged_data_is_resent() -> None:
    outbox = _filled(3, 200)
    for chunk in _drain(outbox)[:3]:
        outbox.acknowledge(chunk.key)
    outbox.rewind([0, 1, 0])
    assert len(outbox) == 2
    assert [c.key for c in _drain(outbox)] == [(DATA, 2, 100), (DATA, 3, 0), (DATA, 3, 100)]
    outbox.delivered(DATA, 3)
    assert len(outbox) == outbox.size_bytes == outbox.in_flight_bytes() == 0


def test_messages_are_begun_only_as_far_as_the_peer_can_hold_them() -> None:
    outbox = _filled(3, 100, ahead_bytes=150)
    assert [c.entry.number for c in _drain(outbox)] == [1]
    outbox.delivered(DATA, 1)
    assert [c.entry.number for c in _drain(outbox)] == [2]
    huge = _filled(1, 9000, ahead_bytes=10)
    assert sum(c.size_bytes for c in _drain(huge)) == 9000  # a single one always passes


def test_late_chunks_go_out_once_more_but_not_for_ever_and_not_where_they_are() -> None:
    outbox = _filled(2)
    first, second = _drain(outbox)
    assert outbox.straggler(0.0, 3, 1.0, ()) is None  # not late yet
    assert outbox.straggler(0.5, 3, 1.0, {first.key}) is second
    assert outbox.straggler(0.5, 3, 1.0, ()) is first
    assert outbox.straggler(0.5, 3, 1.0, ()) is None  # both were sent at 1.0
    assert outbox.straggler(2.0, 3, 2.0, ()) is first and first.times_sent == 3
    assert outbox.straggler(3.0, 3, 3.0, {second.key}) is None
    assert outbox.in_flight_bytes() == 50  # three copies and two


def test_acks_of_unsent_data_are_refused() -> None:
    outbox = _filled(3)
    outbox.next_chunk(ALL, 100, 0.0)
    with pytest.raises(FrameError, match="message 2 of lane 1, but only 1 were sent"):
        outbox.delivered(DATA, 2)
    with pytest.raises(FrameError, match="2 lanes"):
        outbox.rewind([0, 0])


def test_restart_drops_everything_and_counts_from_one() -> None:
    outbox = _filled(3)
    _drain(outbox)
    assert outbox.restart() == 3
    assert len(outbox) == outbox.size_bytes == outbox.in_flight_bytes() == 0
    assert outbox.add(_message(9)) == 1
    assert [(c.entry.number, c.times_sent) for c in _drain(outbox)] == [(1, 1)]
