"""When a new driver goes on with the processes of the one before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_ray.runtime.driver.attach import Living, why_anew, why_gone
from geo_ray.training.membership import View

TRAINS = Living(
    same_configuration=True,
    is_changing=False,
    view=View(("asia", "eu")),
    phases={"asia": "training", "eu": "must_send"},
    told={"run_started", "step", "exchange", "worker_lost", "region_lost", "driver_attached"},
)


def test_a_run_that_trains_goes_on() -> None:
    assert why_anew(TRAINS) is None
    assert why_anew(replace(TRAINS, view=None)) is None, "one region has no averager"


@pytest.mark.parametrize("phase", ["waiting", "finishing", "done"])
def test_a_run_that_comes_to_its_end_goes_on(phase: str) -> None:
    assert why_anew(replace(TRAINS, phases={"asia": phase, "eu": "done"})) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"same_configuration": False}, "another configuration"),
        ({"is_changing": True}, "members were changing"),
        ({"view": View(("asia", "eu"), joining=("eu",))}, "members were changing"),
        ({"phases": {}}, "no parameter server"),
        ({"phases": {"asia": "training", "eu": "halted"}}, "'eu' was standing still"),
        ({"phases": {"asia": "starting"}}, "'asia' was standing still"),
        ({"told": {"run_started", "stop_requested"}}, "about to end"),
        ({"told": {"run_started", "run_failed"}}, "about to end"),
        ({"told": {"run_started", "run_finished"}}, "about to end"),
    ],
)
def test_what_only_the_driver_before_knew_is_not_guessed(
    changes: dict[str, object], why: str
) -> None:
    assert why in (why_anew(replace(TRAINS, **changes)) or "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("patience_s", "silent_s", "why"),
    [
        (60.0, 55.0, "nobody drove it for 60 s, so they have ended"),
        (60.0, 54.9, "they have ended: a machine of theirs, or its Ray, may be gone"),
        (60.0, None, "they have ended: a machine of theirs, or its Ray, may be gone"),
        (None, 1.0, "they ended with their driver"),
    ],
)
def test_why_there_is_nobody_to_go_on_with(
    patience_s: float | None, silent_s: float | None, why: str
) -> None:
    assert why_gone({"run_started", "stop_requested"}, patience_s, silent_s) == why


@pytest.mark.parametrize("kind", ["run_failed", "run_finished"])
def test_a_driver_that_ended_the_run_itself_needs_no_reason(kind: str) -> None:
    assert why_gone({"run_started", kind}, 60.0, 600.0) is None
