from __future__ import annotations

import pytest

from geo_ray.errors import FrameError
from geo_ray.wan.message import Message
from geo_ray.wan.outbox import Outbox


def _message(n: int) -> Message:
    return Message("test", {"n": n}, b"", "update")


def _sent(outbox: Outbox) -> list[tuple[int, int]]:
    found = []
    while (entry := outbox.next_to_send()) is not None:
        found.append((entry.number, entry.times_sent))
    return found


def _filled(count: int) -> Outbox:
    outbox = Outbox(10, 1000)
    for n in range(count):
        assert outbox.add(_message(n), 10) == n + 1
    return outbox


def test_room_is_bounded_by_messages_and_bytes_but_one_message_always_fits() -> None:
    outbox = Outbox(2, 100)
    assert outbox.has_room(10**9)
    outbox.add(_message(0), 10**9)
    assert not outbox.has_room(0)
    assert _sent(outbox) == [(1, 1)]
    outbox.acknowledge(1)
    outbox.add(_message(1), 60)
    assert outbox.has_room(40) and not outbox.has_room(41)
    outbox.add(_message(2), 0)
    assert not outbox.has_room(0)
    assert len(outbox) == 2 and outbox.size_bytes == 60


def test_acknowledged_messages_go_and_the_rest_is_sent_again_after_a_reconnect() -> None:
    outbox = _filled(5)
    assert [outbox.next_to_send().number for _ in range(3)] == [1, 2, 3]  # type: ignore[union-attr]
    outbox.acknowledge(1)
    outbox.acknowledge(1)
    outbox.acknowledge(0)
    assert len(outbox) == 4 and outbox.size_bytes == 40
    outbox.rewind(2)
    assert _sent(outbox) == [(3, 2), (4, 1), (5, 1)]


def test_an_ack_may_run_ahead_of_the_resends() -> None:
    outbox = _filled(4)
    _sent(outbox)
    outbox.rewind(1)
    outbox.acknowledge(3)  # the peer had got them through the old connection after all
    assert _sent(outbox) == [(4, 2)]
    outbox.acknowledge(4)
    assert len(outbox) == 0 and outbox.size_bytes == 0


def test_acks_of_what_was_never_sent_are_refused() -> None:
    outbox = _filled(3)
    outbox.next_to_send()
    for claim in (outbox.acknowledge, outbox.rewind):
        with pytest.raises(FrameError, match="message 2, but only 1 were sent"):
            claim(2)


def test_restart_drops_everything_and_counts_from_one() -> None:
    outbox = _filled(3)
    _sent(outbox)
    assert outbox.restart() == 3
    assert len(outbox) == outbox.size_bytes == 0
    assert outbox.add(_message(9), 5) == 1
    with pytest.raises(FrameError):
        outbox.acknowledge(1)
    assert _sent(outbox) == [(1, 1)]
