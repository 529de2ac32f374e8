"""The arithmetic of the benchmark of recoveries: steps, pauses, starts and checkpoints."""

from __future__ import annotations

import json

import pytest

from benchmarks.joining import recovery
from benchmarks.joining.recovery import INTERVAL, Mark
from geo_ray.experiment.experiment import Experiment

OLD, NEW = 1, 2


def steps(pid: int, first: int, last: int, from_s: float, every_s: float = 1.0) -> list[Mark]:
    """Steps that a process ends at even times."""
    return [
        Mark("step", pid, from_s + index * every_s, count)
        for index, count in enumerate(range(first, last + 1))
    ]


def replaced() -> list[Mark]:
    """Steps 1 to 12 until 12 s, 13 and 14 after the kill at 12.5 s; from step 8 again at 30 s."""
    return [
        *steps(OLD, 1, 14, 1.0),
        Mark("created", NEW, 20.0, -1),
        Mark("ready", NEW, 28.0, -1),
        Mark("joined", NEW, 29.5, 8),
        *steps(NEW, 9, 20, 30.0),
    ]


def test_steps_that_are_made_again() -> None:
    assert recovery.repeated_steps(replaced(), 12.5) == 4
    assert recovery.wasted_steps(replaced(), 12.5) == 2
    assert recovery.repeated_steps(replaced(), 14.5) == 6
    assert recovery.wasted_steps(replaced(), 14.5) == 0


def test_a_process_that_goes_on_repeats_nothing() -> None:
    marks = [*steps(OLD, 1, 12, 1.0), *steps(OLD, 13, 20, 40.0)]
    assert recovery.repeated_steps(marks, 12.5) == 0
    assert recovery.wasted_steps(marks, 12.5) == 0
    assert recovery.longest_pause_s(marks, 12.5, 45.0) == 28.0


def test_the_first_step_is_that_of_a_new_process_or_ends_an_exchange() -> None:
    assert recovery.first_step_s(replaced(), 12.5, starts=True) == 30.0
    assert recovery.first_step_s(steps(OLD, 1, 14, 1.0), 12.5, starts=True) is None
    going = steps(OLD, 1, 20, 1.0)
    assert INTERVAL == 8  # step 16 exchanges
    assert recovery.first_step_s(going, 12.5, starts=False) == 16.0
    assert recovery.first_step_s(going[:15], 12.5, starts=False) is None


def test_a_start_lasts_from_the_first_process_to_the_last_model() -> None:
    late = [Mark("created", 3, 21.0, -1), Mark("ready", 3, 29.0, -1)]
    assert recovery.start_times([replaced(), late], 12.5) == (20.0, 29.0)
    assert recovery.start_times([replaced(), late], 12.5, 15.0) == (15.0, 29.0)
    assert recovery.start_times([replaced(), late], 12.5, 3.0) == (12.5, 29.0)  # made in advance


def test_what_a_kill_would_cost_is_counted_from_the_newest_durable_checkpoint() -> None:
    marks = steps(OLD, 1, 24, 1.0)
    durable = {8: 10.0, 16: 18.0}
    found = recovery.risk_samples(marks, durable, [(9.5, 20.5)], every_s=1.0)
    # From 10.5 s on, step 10 and more are at risk; from 18.5 s on, step 18 and more.
    assert found == [count / 8 for count in (2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4)]
    assert recovery.late_s(marks, durable, [(0.0, 30.0)]) == [2.0, 2.0]
    assert recovery.late_s(marks, durable, [(9.0, 30.0)]) == [2.0]


def test_figures_of_a_case() -> None:
    kill = {
        "lost_rounds": 0.5,
        "wasted_rounds": 0.0,
        "pause_s": 3.0,
        "recovery_s": 30.0,
        "load": 1.0,
        "restart_s": 25.0,
        "noticed_s": 1.0,
        "joined_s": 2.0,
    }
    found = recovery.figures_of(
        "rounds1", 8.0, [kill, kill | {"lost_rounds": 1.25}], [0.5, 1.0, 1.5, 0.0], [0.1]
    )
    values = {each.name.removeprefix("rounds1: "): each for each in found}
    assert values["lost_rounds"].value == 1.25 and values["lost_rounds"].met is False
    assert values["own_s"].value == 22.0 and values["own_s"].met is False
    assert values["own_restart_s"].value == 5.0 and values["own_restart_s"].met is True
    assert values["at_risk mean"].value == 0.75
    assert values["at_risk above_one"].value == 0.25


@pytest.mark.parametrize("name", list(recovery.CASES))
def test_cases_are_configurations(name: str) -> None:
    Experiment.model_validate_json(json.dumps(recovery.config(recovery.CASES[name], "auto")))
