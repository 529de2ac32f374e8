"""The last steps of a run where a store or a disk takes nothing."""

from __future__ import annotations

import pytest

from geo_ray.errors import GeoRayError, InvariantError, RunDirectoryError, StoreError
from geo_ray.runtime.control.interruption import Interruption
from geo_ray.runtime.driver import ending
from geo_ray.runtime.driver.ending import Retrying


class Clock:
    """Time that passes while it is slept."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


class Trial:
    """A step that fails for a time."""

    def __init__(self, clock: Clock, until_s: float, error: GeoRayError) -> None:
        self.told: list[str] = []
        self.interruption = Interruption()
        self.tries = 0
        self._clock, self._until_s, self._error = clock, until_s, error

    def run(self, seconds: float) -> str:
        retrying = Retrying(seconds, self.told.append, self.interruption)
        return retrying.until_done("the model", self._step)

    def _step(self) -> str:
        self.tries += 1
        if self._clock.now_s < self._until_s:
            raise self._error
        return "done"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ending, "time", clock)
    return clock


@pytest.mark.parametrize("error", [StoreError("no answer"), RunDirectoryError("disk full")])
def test_a_step_is_tried_again_by_duration(clock: Clock, error: GeoRayError) -> None:
    trial = Trial(clock, 250.0, error)
    assert trial.run(600.0) == "done"
    assert clock.slept == [1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 4]
    assert trial.told[0] == f"the model is tried again for 600 s: {error.message}"


def test_it_ends_when_the_time_is_over(clock: Clock) -> None:
    trial = Trial(clock, float("inf"), StoreError("no answer"))
    with pytest.raises(StoreError, match="no answer"):
        trial.run(100.0)
    assert clock.now_s == 200.0, "to the end of the time, and no longer"


def test_nobody_has_to_wait_and_other_errors_are_not_repeated(clock: Clock) -> None:
    trial = Trial(clock, float("inf"), StoreError("no answer"))
    trial.interruption.set()
    with pytest.raises(StoreError):
        trial.run(600.0)
    broken = Trial(clock, float("inf"), InvariantError("a bug"))
    with pytest.raises(InvariantError):
        broken.run(600.0)
    assert (trial.tries, broken.tries, clock.slept) == (1, 1, [])
