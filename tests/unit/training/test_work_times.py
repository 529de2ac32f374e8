"""How long workers compute, and what is usual."""

from __future__ import annotations

from geo_ray.training.stragglers import Computing, WorkTimes


def made(times: WorkTimes, worker: int, began_s: float, took_s: float, attempt: int = 1) -> None:
    times.begin(worker, attempt, began_s, evaluates=False)
    times.end(worker, began_s + took_s)


def test_the_first_step_of_each_incarnation_is_not_usual() -> None:
    times = WorkTimes()
    made(times, 0, 0.0, 30.0)
    assert times.usual_s is None
    made(times, 0, 30.0, 2.0)
    made(times, 0, 32.0, 40.0, attempt=2)  # a replacement
    made(times, 0, 72.0, 4.0, attempt=2)
    assert times.usual_s == 3.0


def test_an_evaluation_is_not_part_of_a_step() -> None:
    times = WorkTimes()
    made(times, 0, 0.0, 1.0)
    times.begin(0, 1, 1.0, evaluates=True)
    assert times.computing(91.0) == {0: Computing(1, 90.0, False)}
    times.evaluated(0, 101.0)
    assert times.computing(103.0) == {0: Computing(1, 2.0, True)}
    times.end(0, 103.0)
    assert times.usual_s == 2.0
    times.begin(0, 1, 103.0, evaluates=True)  # it tells nothing, and pushes
    times.end(0, 203.0)
    assert times.usual_s == 2.0


def test_who_waits_or_is_gone_computes_nothing() -> None:
    times = WorkTimes()
    times.begin(0, 1, 0.0, evaluates=False)
    times.begin(1, 1, 0.0, evaluates=False)
    times.end(0, 1.0)
    times.forget(1)
    times.end(1, 2.0)
    times.evaluated(1, 2.0)
    assert times.computing(5.0) == {} and times.usual_s is None


def test_the_newest_steps_say_what_is_usual() -> None:
    times = WorkTimes()
    made(times, 0, 0.0, 1.0)
    for number in range(100):
        made(times, 0, float(number), 1.0 if number < 50 else 9.0)
    assert times.usual_s == 9.0
