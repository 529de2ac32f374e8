"""Times of machines whose clocks are off are put right; whatever else a message took is not."""

from __future__ import annotations

import logging
from random import Random
from typing import Any

import pytest

from geo_ray.runtime.controller import TOLERATED_S, Skews

EU = ("ps", "eu")


def told(now_s: float | None, *events: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {EU: {"status": {}, "events": list(events), "now_s": now_s}}


@pytest.mark.parametrize("ahead_s", [600.0, -600.0])
def test_ten_minutes_are_corrected_and_reported_once(
    ahead_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    skews, event = Skews(), {"kind": "exchange", "t_s": 50.0 + ahead_s, "start_s": 48.0 + ahead_s}
    (first,) = skews.events(told(100.0 + ahead_s, event), 100.0)
    assert first == {"kind": "exchange", "t_s": 50.0, "start_s": 48.0}
    (again,) = skews.events(told(101.0 + ahead_s, event), 101.0)
    assert again == first and len(caplog.records) == 1
    assert f"600 s {'ahead of' if ahead_s > 0 else 'behind'}" in caplog.text


def test_agreeing_or_unknown_clocks_are_not_corrected(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    event = {"kind": "step", "t_s": 90.0}
    for now_s in (100.0, 100.0 - 0.9 * TOLERATED_S, None):
        assert Skews().events(told(now_s, event), 100.0) == [event]
    assert not caplog.records and event["t_s"] == 90.0


@pytest.mark.parametrize("seed", range(20))
def test_late_answers_add_at_most_the_smallest_delay(seed: int) -> None:
    draw = Random(seed)
    ahead_s, skews = draw.choice((-1.0, 1.0)) * draw.uniform(120.0, 6000.0), Skews()
    quickest_s = float("inf")
    for number in range(30):
        now_s, took_s = 10.0 * number, draw.expovariate(1.0)
        quickest_s = min(quickest_s, took_s)
        event = {"kind": "step", "t_s": now_s - took_s + ahead_s}
        (found,) = skews.events(told(now_s - took_s + ahead_s, event), now_s)
        assert found["t_s"] == pytest.approx(now_s - took_s + quickest_s)


def test_a_replacement_has_its_own_clock_correction() -> None:
    skews, event = Skews(), {"kind": "step", "t_s": 700.0}
    assert skews.events(told(700.0, event), 100.0)[0]["t_s"] == 100.0
    for now_s in (700.0, 701.0):
        assert skews.events(told(now_s, event), now_s) == [event]
