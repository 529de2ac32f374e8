"""What may be under way to one region, and what is learned from it."""

from __future__ import annotations

from random import Random

import pytest

from geo_ray.base.errors import FrameError
from geo_ray.transport.overlay.node import Pace

PART = 1000


def test_goodput_is_what_arrived_over_the_time_it_was_under_way() -> None:
    pace = Pace(8)
    pace.push(PART, 10.0)
    pace.push(PART, 10.5)
    pace.ack(2, 12.0)
    pace.push(PART, 100.0)
    pace.ack(3, 101.0)
    assert pace.take() == (3 * PART, 3.0, False)
    assert pace.take() == (0, 0.0, False)


def test_pauses_in_which_nothing_was_there_to_send_are_told() -> None:
    pace = Pace(8)
    pace.push(PART, 0.0)
    pace.lacks(0.5)
    pace.push(PART, 3.0)
    pace.ack(2, 4.0)
    assert pace.take() == (2 * PART, 4.0, True)


def test_one_round_trip_is_taken_off() -> None:
    pace = Pace(8)
    pace.rtt_s = 0.4
    pace.push(PART, 0.0)
    pace.ack(1, 1.0)
    assert pace.take()[1] == pytest.approx(0.6)


def test_the_limit_follows_rate_times_round_trip() -> None:
    pace = Pace(1000)
    pace.rtt_s = 0.3
    now_s, limits = 0.0, []
    for _ in range(8):  # a path that takes whatever is sent: doubles until the window
        while pace.has_capacity:
            pace.push(PART, now_s)
            pace.ask(is_last=False)
        now_s += 0.4
        pace.ack(pace.sent, now_s)
        limits.append(pace.limit)
    assert limits == sorted(limits) and limits[-1] > 20 * limits[0]
    for _ in range(40):  # a path of ten parts per second
        pace.push(PART, now_s)
        now_s += 0.1
        pace.ack(pace.sent, now_s)
    assert pace.limit == pytest.approx(1 + 2.0 * 10 * 0.4, abs=1)


def test_more_than_was_sent_cannot_be_acknowledged_and_less_than_before_is_late() -> None:
    pace = Pace(8)
    pace.push(PART, 0.0)
    with pytest.raises(FrameError):
        pace.ack(2, 1.0)
    pace.ack(1, 1.0)
    pace.ack(0, 2.0)
    assert pace.acked == 1


def test_whatever_the_answers_there_is_always_room_or_a_question_under_way() -> None:
    for seed in range(200):
        random = Random(seed)
        pace = Pace(random.choice([1, 2, 5, 32]))
        pace.rtt_s = random.choice([0.0, 0.01, 0.3])
        now_s, asked = 0.0, 0
        for _ in range(300):
            now_s += random.choice([0.0, 0.001, 0.5])
            if random.random() < 0.7 and pace.has_capacity:
                pace.push(PART, now_s)
                if pace.ask(is_last=False):
                    asked = pace.sent
            elif asked > pace.acked:
                pace.ack(asked, now_s)
            assert pace.has_capacity or asked > pace.acked, seed
