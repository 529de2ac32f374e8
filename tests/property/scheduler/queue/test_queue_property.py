"""A queue that dies at any point loses no job and runs none twice."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from geo_ray.scheduler.queue.journal import Outcome, QueueJournal, SlotEntry
from geo_ray.scheduler.queue.report import report_of
from geo_ray.scheduler.queue.state import state_of
from geo_ray.storage.conditional_store import ConditionalStore, LocalConditionalStore
from tests.support.queue_support import SimQueue, job, sim_queue

CPUS = 4.0
SLOTS = 400


class DiedError(BaseException):
    """The process was killed."""


@dataclass
class DyingStore:
    """A store whose process is killed before or after a write."""

    inner: ConditionalStore
    at: Callable[[str], None]

    def read(self, key: str) -> Any:
        return self.inner.read(key)

    def write(self, key: str, data: bytes, expected: str | None) -> str | None:
        self.at("before a write")
        tag = self.inner.write(key, data, expected)
        self.at("after a write")
        return tag

    def remove(self, key: str) -> None:
        self.at("before a removal")
        self.inner.remove(key)

    def unchanged(self, key: str, tag: str) -> Any:
        return self.inner.unchanged(key, tag)


class DyingQueue(SimQueue):
    """A queue that is killed at the point number ``left``; -1: never."""

    left: int = -1

    @property
    def store(self) -> ConditionalStore:
        return LocalConditionalStore(self.root)

    def point(self, _: object) -> None:
        if self.left == 0:
            self.left = -1
            raise DiedError
        self.left -= self.left > 0

    def open(self) -> Any:
        loop = super().open()
        loop.store = DyingStore(loop.store, self.point)
        self.world.before_act = self.world.after_act = self.point
        return loop

    def tick(self) -> tuple[str, ...]:
        try:
            return super().tick()
        except DiedError:
            self.die()
            return super().tick()  # started anew, at once


def dying_queue(root: Path, policy: str) -> DyingQueue:
    plain = sim_queue(root, capacity=CPUS, policy=policy)
    return DyingQueue(plain.root, plain.config, plain.world)


REGIONS = st.sampled_from([("us",), ("eu",), ("us", "eu"), ("us", "eu", "asia")])


class QueueHistory(RuleBasedStateMachine):
    """Jobs, requests, drained regions and kills in random order."""

    policy = "fifo"

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="queue-"))
        self.queue = dying_queue(self.root, self.policy)
        self.names: list[str] = []

    @rule(
        regions=REGIONS,
        seconds=st.sampled_from([5.0, 25.0, 60.0]),
        value=st.sampled_from([1.0, 20.0, 90.0]),
        deadline=st.sampled_from([None, 30.0, 200.0]),
        least=st.booleans(),
        anywhere=st.booleans(),
        tenant=st.sampled_from(["red", "blue"]),
    )
    def submit(
        self,
        regions: tuple[str, ...],
        seconds: float,
        value: float,
        deadline: float | None,
        least: bool,
        anywhere: bool,
        tenant: str,
    ) -> None:
        if len(self.names) >= 8:
            return
        name = f"j{len(self.names)}"
        self.names.append(name)
        self.queue.submit(
            tenant,
            job(
                name,
                regions[:1] if anywhere else regions,
                seconds=seconds,
                value=value,
                deadline_s=deadline,
                least=1 if least else None,
                anywhere=anywhere,
                most=3 if anywhere else None,
            ),
        )

    @precondition(lambda self: self.names)
    @rule(data=st.data(), who=st.sampled_from(["red", "blue", "boss"]))
    def cancel(self, data: st.DataObject, who: str) -> None:
        self.queue.cancel(who, data.draw(st.sampled_from(self.names)))

    @precondition(lambda self: self.names)
    @rule(data=st.data(), position=st.sampled_from(["first", "last"]))
    def move(self, data: st.DataObject, position: str) -> None:
        self.queue.move("boss", data.draw(st.sampled_from(self.names)), position=position)

    @rule(region=st.sampled_from(["us", "eu"]), there=st.booleans())
    def drain(self, region: str, there: bool) -> None:
        self.queue.world.capacity[region] = (0.0, CPUS if there else 0.0)

    @precondition(lambda self: self.names)
    @rule(data=st.data(), times=st.integers(1, 2))
    def break_job(self, data: st.DataObject, times: int) -> None:
        self.queue.world.fails[data.draw(st.sampled_from(self.names))] = times

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def kill_job(self, data: st.DataObject) -> None:
        self.queue.world.kill(data.draw(st.sampled_from(self.names)))

    @rule(point=st.integers(0, 12))
    def die_at(self, point: int) -> None:
        self.queue.left = point

    @rule(seconds=st.integers(1, 25))
    def go_on(self, seconds: int) -> None:
        self.queue.run(self.queue.world.now_s + seconds)

    @invariant()
    def the_journal_is_all_there_is(self) -> None:
        if self.queue.loop is None or self.queue.left >= 0:
            return
        read = state_of(QueueJournal(LocalConditionalStore(self.root)).read())
        assert report_of(read) == report_of(self.queue.state)

    @invariant()
    def nothing_has_more_than_there_is(self) -> None:
        used = self.queue.world.used_cpus()
        assert all(cpus <= CPUS + 1e-6 for cpus in used.values()), used

    @invariant()
    def ended_jobs_do_not_run(self) -> None:
        if self.queue.loop is None:
            return
        for each in self.queue.state.jobs.values():
            if each.end is not None:
                assert not self.queue.world.living(each.name)

    def teardown(self) -> None:
        queue = self.queue
        try:
            queue.left = -1
            queue.world.fails = {}
            queue.world.capacity = dict.fromkeys(queue.world.capacity, (0.0, CPUS))
            for _ in range(20):
                queue.run(queue.world.now_s + 60.0)
                if not queue.state.living():
                    break
            assert set(queue.state.jobs) == set(self.names)
            assert not queue.state.living(), report_of(queue.state)
            for each in queue.state.jobs.values():
                done = queue.world.runs.get(each.name)
                assert each.end is not None
                if each.end.outcome == "finished":
                    assert done is not None
                    assert done.done == pytest.approx(1.0)
                elif each.end.outcome == "rejected":
                    assert self.policy == "pd_ors"
                    assert done is None
                    assert each.name not in queue.state.generation.admitted
                else:
                    assert each.end.outcome in ("cancelled", "failed")
        finally:
            shutil.rmtree(self.root)


class PricedHistory(QueueHistory):
    """The same with prices, reservations and rejected jobs."""

    policy = "pd_ors"


class SharedHistory(QueueHistory):
    """The same with a policy that shares resources among all jobs."""

    policy = "drf"


few = settings(max_examples=12, stateful_step_count=14, deadline=None)
TestQueueHistory = QueueHistory.TestCase
TestQueueHistory.settings = few
TestPricedHistory = PricedHistory.TestCase
TestPricedHistory.settings = settings(few, max_examples=6)
TestSharedHistory = SharedHistory.TestCase
TestSharedHistory.settings = settings(few, max_examples=6)


@settings(max_examples=10, deadline=None)
@given(
    seconds=st.lists(st.sampled_from([15.0, 40.0, 90.0]), min_size=2, max_size=4),
    kills=st.lists(st.integers(5, 220), min_size=1, max_size=3, unique=True),
    start_s=st.sampled_from([2.0, 25.0]),
    deadline_s=st.sampled_from([None, 100.0, 400.0]),
    policy=st.sampled_from(["pd_ors", "pd_ors", "fifo"]),
)
def test_who_is_killed_comes_before_all_that_have_not_begun(
    seconds: list[float],
    kills: list[int],
    start_s: float,
    deadline_s: float | None,
    policy: str,
) -> None:
    """There is room for one at a time; whatever it is worth by then, and however often."""
    with tempfile.TemporaryDirectory(prefix="queue-") as root:
        queue = sim_queue(Path(root), capacity=2.0, policy=policy, start_s=start_s)
        behind: dict[str, set[str]] = {}
        for number, each_s in enumerate(seconds):
            asked = job(f"j{number}", seconds=each_s, value=10.0, deadline_s=deadline_s)
            queue.submit("red", asked)
        while queue.world.now_s < 1200.0 and (not queue.loop or queue.state.living()):
            queue.run(queue.world.now_s + 1.0)
            jobs = queue.state.jobs
            waiting = {name for name, each in jobs.items() if not each.progress.segments}
            for name, those in behind.items():
                assert jobs[name].end is not None or those <= waiting, (name, those - waiting)
            for name in jobs:
                if int(queue.world.now_s) in kills and queue.world.living(name):
                    queue.world.kill(name)
                    behind[name] = behind.get(name, set()) | waiting
        ends = {each.name: each.end and each.end.outcome for each in queue.state.jobs.values()}
        assert set(ends.values()) <= {"finished", "rejected"}
        assert all(ends[name] == "finished" for name in behind)


@pytest.mark.parametrize("policy", ["fifo", "pd_ors", "tiresias", "ones"])
def test_a_restarted_queue_decides_as_the_killed_one_would_have(
    tmp_path: Path, policy: str
) -> None:
    """The state of the policy is rebuilt from the journal."""

    def slots(root: Path, *, dies: bool) -> list[SlotEntry]:
        root.mkdir()
        queue = sim_queue(root, capacity=CPUS, policy=policy)
        for number in range(7):
            regions = [("us",), ("us", "eu"), ("eu",)][number % 3]
            asked = job(
                f"j{number}",
                regions,
                seconds=12.0 + 7 * number,
                value=5.0 + number,
                deadline_s=60.0 + 20 * number,
            )
            queue.submit("red", asked)
            queue.run(queue.world.now_s + 6.0)
            if dies:
                queue.die()
        while queue.world.now_s < 150.0:
            queue.run(queue.world.now_s + 9.0)
            if dies:
                queue.die()
        entries = QueueJournal(LocalConditionalStore(root)).read()
        return [each for each in entries if isinstance(each, SlotEntry)]

    assert slots(tmp_path / "dies", dies=True) == slots(tmp_path / "lives", dies=False)


@pytest.mark.parametrize("policy", ["fifo", pytest.param("pd_ors", marks=pytest.mark.slow)])
def test_killed_at_every_single_point(tmp_path: Path, policy: str) -> None:
    """One history with a drained region and a cancelled job, killed once at each point."""

    def history(root: Path, point: int) -> tuple[int, dict[str, Outcome]]:
        root.mkdir()
        queue = dying_queue(root, policy)
        queue.left = point
        count = 0

        def counted(_: object) -> None:
            nonlocal count
            count += 1
            DyingQueue.point(queue, _)

        queue.point = counted  # type: ignore[method-assign]
        queue.submit("red", job("a", ("us", "eu"), seconds=30.0, least=1))
        queue.submit("blue", job("b", seconds=20.0))
        queue.submit("blue", job("c", ("eu",), seconds=60.0))
        queue.run(12.0, every_s=3.0)
        queue.world.capacity["eu"] = (0.0, 0.0)
        queue.run(24.0, every_s=3.0)
        queue.cancel("blue", "c")
        queue.world.capacity["eu"] = (0.0, CPUS)
        queue.run(240.0, every_s=3.0)
        ends = {each.name: each.end.outcome for each in queue.state.jobs.values() if each.end}
        return count, ends

    points, wanted = history(tmp_path / "whole", -1)
    assert wanted == {"a": "finished", "b": "finished", "c": "cancelled"}
    for point in range(0, points, 3 if points > 60 else 1):
        _, ends = history(tmp_path / str(point), point)
        assert ends == wanted, point
