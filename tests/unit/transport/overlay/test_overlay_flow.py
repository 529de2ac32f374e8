"""What may be under way to one region, and what is learned from it."""

from __future__ import annotations

from random import Random

import pytest

from geo_ray.base.errors import FrameError
from geo_ray.transport.overlay.node import PeerFlow

PART = 1000


def test_goodput_is_received_bytes_over_transfer_time() -> None:
    flow = PeerFlow(8)
    flow.push(PART, 10.0)
    flow.push(PART, 10.5)
    flow.ack(2, 12.0)
    flow.push(PART, 100.0)
    flow.ack(3, 101.0)
    assert flow.take() == (3 * PART, 3.0, False)
    assert flow.take() == (0, 0.0, False)


def test_pauses_without_data_are_reported() -> None:
    flow = PeerFlow(8)
    flow.push(PART, 0.0)
    flow.lacks(0.5)
    flow.push(PART, 3.0)
    flow.ack(2, 4.0)
    assert flow.take() == (2 * PART, 4.0, True)


def test_one_round_trip_is_taken_off() -> None:
    flow = PeerFlow(8)
    flow.rtt_s = 0.4
    flow.push(PART, 0.0)
    flow.ack(1, 1.0)
    assert flow.take()[1] == pytest.approx(0.6)


def test_the_limit_follows_rate_times_round_trip() -> None:
    flow = PeerFlow(1000)
    flow.rtt_s = 0.3
    now_s, limits = 0.0, []
    for _ in range(8):  # a path that takes whatever is sent: doubles until the window
        while flow.has_capacity:
            flow.push(PART, now_s)
            flow.ask(is_last=False)
        now_s += 0.4
        flow.ack(flow.sent, now_s)
        limits.append(flow.limit)
    assert limits == sorted(limits) and limits[-1] > 20 * limits[0]
    for _ in range(40):  # a path of ten parts per second
        flow.push(PART, now_s)
        now_s += 0.1
        flow.ack(flow.sent, now_s)
    assert flow.limit == pytest.approx(1 + 2.0 * 10 * 0.4, abs=1)


def test_more_than_was_sent_cannot_be_acknowledged_and_less_than_before_is_late() -> None:
    flow = PeerFlow(8)
    flow.push(PART, 0.0)
    with pytest.raises(FrameError):
        flow.ack(2, 1.0)
    flow.ack(1, 1.0)
    flow.ack(0, 2.0)
    assert flow.acked == 1


def test_whatever_the_answers_there_is_always_room_or_a_question_under_way() -> None:
    for seed in range(200):
        random = Random(seed)
        flow = PeerFlow(random.choice([1, 2, 5, 32]))
        flow.rtt_s = random.choice([0.0, 0.01, 0.3])
        now_s, asked = 0.0, 0
        for _ in range(300):
            now_s += random.choice([0.0, 0.001, 0.5])
            if random.random() < 0.7 and flow.has_capacity:
                flow.push(PART, now_s)
                if flow.ask(is_last=False):
                    asked = flow.sent
            elif asked > flow.acked:
                flow.ack(asked, now_s)
            assert flow.has_capacity or asked > flow.acked, seed
