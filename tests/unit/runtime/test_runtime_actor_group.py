"""The wait for actors: awaited ones are reported during the wait, and in the final error."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from geo_ray.base.clock import VirtualClock
from geo_ray.base.errors import RegionLostError
from geo_ray.ray_cluster.calls import watch


class Calls:
    """Calls that end at times of a virtual clock; the call ``1.5`` ends after 1.5 s.

    Args:
        clock: moved by waiting.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def wait(self, refs: Sequence[float], timeout_s: float) -> list[float]:
        last_s = min(max(refs), self._clock.now_s() + timeout_s)
        self._clock.advance_to_s(max(self._clock.now_s(), last_s))
        return [ref for ref in refs if ref <= self._clock.now_s()]


def watched(
    calls: dict[str, float], timeout_s: float
) -> tuple[list[str], list[tuple[object, ...]]]:
    clock, told = VirtualClock(), list[tuple[object, ...]]()

    def heard(done: int, total: int, names: Sequence[str]) -> None:
        told.append((clock.now_s(), done, total, *names))

    return watch(calls, timeout_s, heard, Calls(clock).wait, clock), told


def test_awaited_actors_are_reported_twice_a_second() -> None:
    late, told = watched({"eu/0": 0.2, "eu/ps": 0.7, "us/0": 1.1}, 60.0)
    assert late == []
    assert told == [
        (0.0, 0, 3, "eu/0", "eu/ps", "us/0"),
        (0.5, 1, 3, "eu/ps", "us/0"),
        (1.0, 2, 3, "us/0"),
        (1.1, 3, 3),
    ]


def test_a_wait_ends_in_time_and_names_missing_regions() -> None:
    late, told = watched({"eu/0": 0.2, "us/0": 90.0}, 2.25)
    assert late == ["us/0"]
    assert [row[0] for row in told] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.25]
    assert told[-1] == (2.25, 1, 2, "us/0")


def test_nothing_to_wait_for_is_done_at_once() -> None:
    assert watched({}, 5.0) == ([], [(0.0, 0, 0)])


def test_an_error_of_a_call_ends_the_wait() -> None:
    def fails(refs: Sequence[float], timeout_s: float) -> list[float]:
        raise RegionLostError("an actor is lost")

    with pytest.raises(RegionLostError, match="an actor is lost"):
        watch({"eu/0": 1.0}, 5.0, lambda *_: None, fails, VirtualClock())
