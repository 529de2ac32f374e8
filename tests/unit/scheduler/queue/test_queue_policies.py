"""Every policy serves a queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_ray.scheduler.policies.registry import POLICIES
from tests.support.queue_support import job, sim_queue


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "oasis"])
def test_a_policy_of_the_scheduler_serves_a_queue(tmp_path: Path, policy: str) -> None:
    queue = sim_queue(tmp_path, capacity=4.0, policy=policy)
    for number in range(5):
        regions = [("us",), ("us", "eu"), ("eu",)][number % 3]
        queue.submit("red", job(f"j{number}", regions, seconds=15.0 + 5 * number))
        queue.run(queue.world.now_s + 7.0)
    for _ in range(10):
        queue.run(queue.world.now_s + 30.0)
        if not queue.state.living():
            break
    ends = {each.name: each.end and each.end.outcome for each in queue.state.jobs.values()}
    assert ends == dict.fromkeys(ends, "finished")


def test_what_was_promised_to_a_job_that_is_gone_is_given_to_others(tmp_path: Path) -> None:
    """Prices: a cancelled job releases its future slots to later jobs."""

    def ends(root: Path, *, cancelled: bool) -> str | None:
        root.mkdir()
        queue = sim_queue(root, capacity=2.0, policy="pd_ors")
        queue.submit("red", job("long", seconds=200.0, value=90.0, deadline_s=200.0))
        queue.run(15.0)
        if cancelled:
            queue.cancel("red", "long")
            queue.run(20.0)
        queue.submit("red", job("next", seconds=20.0, value=5.0, deadline_s=40.0, urgency=5.0))
        queue.run(90.0)
        end = queue.state.jobs["next"].end
        return None if end is None else end.outcome

    assert ends(tmp_path / "kept", cancelled=False) == "rejected"
    assert ends(tmp_path / "gone", cancelled=True) == "finished"


def test_a_job_that_ends_early_lets_the_next_one_begin(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, capacity=2.0, policy="pd_ors")
    queue.world.speed["fast"] = 5.0
    for name in ("fast", "next"):
        queue.submit("red", job(name, seconds=95.0, value=50.0, deadline_s=400.0, urgency=1.0))
    queue.run(60.0)
    jobs = queue.state.jobs
    first, second = sorted(jobs.values(), key=lambda each: each.attempt is not None)
    assert first.name == "fast"
    assert first.end is not None
    assert second.progress.segments[0].since_unix_s - first.end.unix_s <= 11.0  # the next border


@pytest.mark.parametrize("slow", [1.0, 0.5])
def test_a_job_that_is_killed_keeps_its_turn(tmp_path: Path, slow: float) -> None:
    """Its slots are reserved for others by then, which have not begun: they are delayed."""
    queue = sim_queue(tmp_path, capacity=2.0, policy="pd_ors", start_s=20.0)
    queue.world.speed["a"] = slow
    queue.submit("red", job("a", seconds=100.0, value=30.0, deadline_s=300.0))
    queue.run(15.0)
    queue.submit("red", job("b", seconds=60.0, value=60.0, deadline_s=400.0))
    queue.submit("blue", job("c", seconds=60.0, value=60.0, deadline_s=600.0))
    queue.run(65.0)
    queue.world.kill("a")
    queue.run(66.0)
    assert queue.state.attempts == {"a": 2}, "what is left of it may be there still"
    queue.run(900.0)
    jobs = queue.state.jobs
    assert {each.end and each.end.outcome for each in jobs.values()} == {"finished"}
    assert queue.state.attempts == {"a": 2, "b": 1, "c": 1}
    ends, begins = jobs["a"].end, jobs["b"].progress.segments[0].since_unix_s
    assert ends is not None and ends.unix_s <= begins


def test_a_job_that_fails_by_its_own_doing_keeps_no_more_than_its_plan(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, capacity=2.0, policy="pd_ors", start_s=20.0)
    queue.submit("red", job("a", seconds=100.0, value=30.0, deadline_s=300.0))
    queue.run(15.0)
    queue.submit("red", job("b", seconds=60.0, value=60.0, deadline_s=400.0))
    queue.run(65.0)
    queue.world.fails["a"] = 1
    queue.run(900.0)
    a, b = queue.state.jobs["a"], queue.state.jobs["b"]
    assert a.end is not None and b.end is not None
    assert {a.end.outcome, b.end.outcome} == {"finished"}
    assert a.end.unix_s > b.progress.segments[0].since_unix_s


def test_an_admitted_job_is_not_rejected_when_a_region_leaves(tmp_path: Path) -> None:
    """It is late by then, and its value is below its price; it continues, before waiting jobs."""
    queue = sim_queue(tmp_path, capacity=2.0, policy="pd_ors", start_s=20.0)
    two = job("a", ("us", "eu"), seconds=100.0, deadline_s=130.0, urgency=20.0, least=1)
    queue.submit("red", two)
    queue.run(15.0)
    queue.submit("blue", job("b", ("us",), seconds=60.0, value=60.0, deadline_s=400.0))
    queue.run(65.0)
    queue.world.kill("a")
    queue.run(105.0)
    queue.world.capacity["eu"] = (0.0, 0.0)
    queue.run(600.0)
    first, again = (slot for slot in queue.state.generation.slots if "a" in slot.surpluses)
    assert (first.surpluses["a"] or 0.0) > 0 > (again.surpluses["a"] or 0.0)
    assert not any(slot.rejected for slot in queue.state.generation.slots)
    a, b = queue.state.jobs["a"], queue.state.jobs["b"]
    assert a.end is not None and b.end is not None
    assert {a.end.outcome, b.end.outcome} == {"finished"}
    assert queue.state.attempts == {"a": 2, "b": 1}
    assert a.end.unix_s <= b.progress.segments[0].since_unix_s
