"""When a new run actor attaches to the processes of the previous one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_ray.runtime.attach import ProcessObservation, gone_reason, restart_reason
from geo_ray.training.membership import View

TRAINS = ProcessObservation(
    same_configuration=True,
    is_changing=False,
    view=View(("asia", "eu")),
    phases={"asia": "training", "eu": "must_send"},
    reported={
        "run_started",
        "step",
        "exchange",
        "worker_lost",
        "region_lost",
        "run_actor_attached",
    },
)


def test_a_training_run_continues() -> None:
    assert restart_reason(TRAINS) is None
    assert restart_reason(replace(TRAINS, view=None)) is None, "one region has no averager"


@pytest.mark.parametrize("phase", ["waiting", "finishing", "done"])
def test_a_run_near_its_end_continues(phase: str) -> None:
    assert restart_reason(replace(TRAINS, phases={"asia": phase, "eu": "done"})) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"same_configuration": False}, "another configuration"),
        ({"is_changing": True}, "members were changing"),
        ({"view": View(("asia", "eu"), joining=("eu",))}, "members were changing"),
        ({"phases": {}}, "no parameter server"),
        ({"phases": {"asia": "training", "eu": "halted"}}, "'eu' was paused"),
        ({"phases": {"asia": "starting"}}, "'asia' was paused"),
        ({"reported": {"run_started", "stop_requested"}}, "about to end"),
        ({"reported": {"run_started", "run_failed"}}, "about to end"),
        ({"reported": {"run_started", "run_finished"}}, "about to end"),
    ],
)
def test_state_known_only_to_the_previous_run_actor_prevents_attaching(
    changes: dict[str, object], why: str
) -> None:
    assert why in (restart_reason(replace(TRAINS, **changes)) or "")  # type: ignore[arg-type]


def test_the_reasons_why_there_are_no_processes_to_attach_to() -> None:
    assert gone_reason({"run_started", "stop_requested"}) == "they have ended with their supervisor"


@pytest.mark.parametrize(
    "told", [set(), {"run_started", "run_failed"}, {"run_started", "run_finished"}]
)
def test_a_run_that_never_trained_or_ended_itself_needs_no_reason(told: set[str]) -> None:
    assert gone_reason(told) is None
