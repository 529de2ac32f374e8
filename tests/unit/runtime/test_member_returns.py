"""When lost regions come back, and when a run pauses."""

from __future__ import annotations

import pytest

from geo_ray.base.errors import RegionLostError
from geo_ray.runtime.policies import Quorum
from geo_ray.runtime.regions import FIRST_S, LONGEST_S, QUIET_S, Backoff


def test_the_first_return_is_at_once_and_the_next_ones_wait_twice_as_long() -> None:
    backoff, now_s, waits_s = Backoff(), 0.0, []
    for _ in range(9):
        waits_s.append(backoff.lost(now_s))
        assert not backoff.take(now_s + waits_s[-1] - 0.1)
        now_s += waits_s[-1]
        assert backoff.take(now_s)
        assert not backoff.take(now_s)  # it is on its way
        backoff.joined(now_s)
        now_s += 20.0  # it flaps
    expected_s = [0.0, *(min(LONGEST_S, FIRST_S * 2**n) for n in range(8))]
    assert waits_s == expected_s


def test_a_quiet_time_resets_the_backoff() -> None:
    backoff = Backoff()
    backoff.lost(0.0)
    backoff.take(0.0)
    backoff.joined(8.0)
    assert backoff.lost(8.0 + QUIET_S - 1) == FIRST_S
    back_s = 8.0 + QUIET_S + FIRST_S
    assert backoff.take(back_s)
    backoff.joined(back_s)
    assert backoff.lost(back_s + QUIET_S) == 0.0


def test_attempts_that_fail_slowly_count_like_others() -> None:
    backoff, now_s, waits_s = Backoff(), 0.0, []
    for _ in range(5):
        waits_s.append(backoff.lost(now_s))
        now_s += waits_s[-1]
        backoff.take(now_s)
        now_s += 2 * QUIET_S  # until it has failed
    assert waits_s == [0.0, *(FIRST_S * 2**n for n in range(4))]


def see(quorum: Quorum, here: str, awaited: str = "", now_s: float = 0.0, **flags: bool) -> bool:
    said = {"is_joining": False, "is_ending": False} | flags
    missing = quorum.see(here.split(), awaited.split(), now_s=now_s, **said)
    assert (missing is None) <= (not quorum.is_paused)
    return quorum.is_paused


def test_with_a_number_a_run_pauses_below_it() -> None:
    quorum = Quorum(2, 60.0)
    assert not see(quorum, "us eu", "ap")
    assert see(quorum, "us", "eu ap")
    assert not see(quorum, "us", "eu ap", is_joining=True)  # it comes to a border by training
    assert see(quorum, "us", "eu ap")
    assert not see(quorum, "us", "eu ap", is_ending=True)
    assert not see(quorum, "us eu", "ap")


def test_without_a_number_a_run_waits_for_all_that_are_to_come_back() -> None:
    quorum = Quorum(None, 60.0)
    assert not see(quorum, "us eu")
    assert see(quorum, "us", "eu")
    assert not see(quorum, "us")  # it has left, or nobody brings it back


def test_a_pause_has_an_end_and_attempts_do_not_make_it_longer() -> None:
    quorum = Quorum(2, 60.0)
    see(quorum, "us", "eu", 100.0)
    see(quorum, "us", "eu", 130.0, is_joining=True)
    missing = quorum.see(["us"], ["eu"], is_joining=False, is_ending=False, now_s=159.0)
    assert missing is not None and quorum.overdue(missing, 159.0) is None
    error = quorum.overdue(missing, 160.0)
    assert isinstance(error, RegionLostError)
    assert "members.min requires 2; lost: eu; they were not back within" in error.message
    see(quorum, "us eu", now_s=161.0)
    see(quorum, "us", "eu", 162.0)
    assert quorum.overdue(missing, 200.0) is None  # another pause


@pytest.mark.parametrize("least", [None, 2])
def test_an_ending_run_is_not_paused(least: int | None) -> None:
    assert not see(Quorum(least, 60.0), "us", "eu", is_ending=True)
