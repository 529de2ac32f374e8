"""When rounds of the relay are late, whose fault it was, and that nothing counts twice."""

from __future__ import annotations

import pytest

from geo_ray.lab.relay import LEAST_PAUSE_S, RoundTimer

QUANTUM_S = 0.0005


class Played:
    """A relay whose every time is given."""

    def __init__(self) -> None:
        self.notes: dict[str, int | float | bool] = {}
        self.timer = RoundTimer(QUANTUM_S, self.notes, 0.0)
        self.now_s = self.spent_s = 0.0

    def round(self, held_up_s: float = 0.0, takes_s: float = 0.0) -> float:
        """Sleep, be held up, begin, compute; how late the round was."""
        self.now_s += self.timer.pause_s(self.now_s) + held_up_s
        late_s = self.timer.begin(self.now_s, self.spent_s)
        self.now_s += takes_s
        self.spent_s += takes_s
        return late_s


def test_rounds_keep_their_distance() -> None:
    relay = Played()
    for number in range(1, 101):
        assert relay.round(takes_s=0.0001) == 0.0
        assert relay.now_s == pytest.approx(number * QUANTUM_S + 0.0001)
    assert relay.notes == {"late_s": 0.0, "own_s": 0.0, "late_max_s": 0.0}


def test_a_round_that_was_held_up_counts_once() -> None:
    relay = Played()
    relay.round()
    assert relay.round(held_up_s=0.004) == pytest.approx(0.004)
    for _ in range(20):  # while it catches up, too
        assert relay.round() == 0.0
    assert relay.notes["late_s"] == relay.notes["late_max_s"] == pytest.approx(0.004)
    assert relay.notes["own_s"] == 0.0


def test_a_long_round_makes_the_next_late_by_its_own_fault() -> None:
    relay = Played()
    assert relay.round(takes_s=0.010) == 0.0
    late_s = relay.round()
    assert late_s == pytest.approx(0.010 + LEAST_PAUSE_S - QUANTUM_S)
    assert relay.notes["own_s"] == pytest.approx(late_s, abs=LEAST_PAUSE_S)
    assert relay.round() == 0.0


def test_only_its_own_computation_counts() -> None:
    relay = Played()
    relay.round(takes_s=0.002)
    late_s = relay.round(held_up_s=0.006)
    assert late_s > 0.007
    assert relay.notes["own_s"] == pytest.approx(0.002 - QUANTUM_S)


def test_a_wait_for_a_packet_is_never_late_and_one_for_a_time_is() -> None:
    relay = Played()
    relay.timer.woke(5.0, None)
    assert relay.timer.begin(5.0001, 0.0) == 0.0
    relay.timer.woke(6.0, 5.997)
    assert relay.timer.begin(6.0001, 0.0) == pytest.approx(0.0031)
    relay.timer.woke(6.002, 6.0)  # due before the last round began
    assert relay.timer.begin(6.0020, 0.0) == pytest.approx(0.0019)
    relay.timer.woke(7.0, 7.5)  # a packet came before that
    assert relay.timer.begin(7.0, 0.0) == 0.0


def test_others_may_reset_the_counters() -> None:
    relay = Played()
    relay.round(held_up_s=0.01)
    relay.notes |= dict.fromkeys(relay.notes, 0)
    relay.round()
    relay.round(held_up_s=0.002)
    assert relay.notes["late_s"] == relay.notes["late_max_s"] == pytest.approx(0.002)
