"""Faults that could stop the queue for all tenants, or end jobs that are not at fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from string import ascii_letters
from typing import Any

import pytest

from geo_ray.base.errors import ClusterError, LeaseLostError, QueueJournalError
from geo_ray.scheduler.queue import inbox
from geo_ray.scheduler.queue.inbox import sign
from geo_ray.scheduler.queue.job_spec import SubmitRequest
from geo_ray.scheduler.queue.journal import (
    OpenedEntry,
    PolicyGenerationEntry,
    QueueJournal,
    RequestEntry,
    piece_key,
)
from geo_ray.scheduler.queue.loop import Action, EndSubmission, Submit, target_of
from geo_ray.storage.conditional_store import ConditionalStore, LocalConditionalStore
from tests.support.queue_support import TOKENS, SimQueue, job, queue_config, sim_queue


def outcomes(queue: SimQueue) -> dict[str, str | None]:
    return {each.name: each.end and each.end.outcome for each in queue.state.jobs.values()}


# ---------------------------------------------------------------------- requests


def put(queue: SimQueue, text: str, id: str = "bad") -> None:
    """Put an arbitrary signed request into an inbox."""
    signature = sign(TOKENS["red"], queue.queue_id, text)
    inbox.submit(queue.store, "red", inbox.SignedRequest(id=id, text=text, signature=signature))


SPEC = ("job", "spec")
POISON: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "endless work": (SPEC, {"steps": 10**400}),
    "endless speed": (SPEC, {"speed": {"fixed_s": 0.0, "row_s": 1e-308, "model_bytes": 0.0}}),
    "no time at all": (SPEC, {"speed": {"fixed_s": 0.0, "row_s": 0.0, "model_bytes": 0.0}}),
    "endless workers": (SPEC, {"most_workers": 10**12}),
    "endless rows": ((*SPEC, "regions", "us"), {"rows": 10**12}),
    "endless needs": ((*SPEC, "regions", "us"), {"cpus": 1e308}),
    "endless worth": (("job", "value"), {"value": 1e308}),
    "no number": (("job", "value"), {"value": float("nan")}),
    "a long id": ((), {"id": "z" * 100_000}),
}


@pytest.mark.parametrize("what", POISON)
def test_an_invalid_request_is_dropped_and_others_are_processed(tmp_path: Path, what: str) -> None:
    queue = sim_queue(tmp_path, policy="pd_ors")
    queue.tick()
    tree = json.loads(SubmitRequest(id="bad", sent_unix_s=0.0, job=job("bad")).model_dump_json())
    where, change = POISON[what]
    place = tree
    for key in where:
        place = place[key]
    place.update(change)
    put(queue, json.dumps(tree), tree["id"])
    queue.submit("blue", job("good", seconds=10.0))
    assert any("or is invalid" in text for text in queue.tick())
    queue.run(60.0)
    assert outcomes(queue) == {"good": "finished"}
    assert not inbox.look(queue.store, "red")


def test_a_job_that_is_too_large_to_be_written_down_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = sim_queue(tmp_path)
    queue.tick()
    monkeypatch.setattr("geo_ray.scheduler.queue.inbox.MOST_JOB_BYTES", 600)
    big = job("big")
    big = big.model_copy(update={"config": big.config | {str(i): i**9 for i in range(200)}})
    asked = queue.submit("red", big)
    queue.submit("red", job("small", seconds=10.0))
    queue.run(40.0)
    answer = queue.state.answers[asked]
    assert answer.code == "QUEUE_REQUEST" and "too large" in str(answer.refused)
    assert outcomes(queue) == {"small": "finished"}


def test_what_is_refused_is_not_written_down_whole(tmp_path: Path) -> None:
    """Otherwise repeated refusals would fill the journal."""
    queue = sim_queue(tmp_path)
    full = job("a")
    full = full.model_copy(update={"config": full.config | {"notes": "x" * 5000}})
    queue.submit("red", full)
    again = queue.submit("red", full)
    queue.tick()
    taken = [each for each in QueueJournal(queue.store).read() if isinstance(each, RequestEntry)]
    answer = next(each.request for each in taken if each.request.id == again)
    assert isinstance(answer, SubmitRequest) and answer.job.config == {}
    assert queue.state.jobs["a"].request.config == full.config


class BrokenInbox:
    """A store in which one tenant's inbox is unreadable, or changes continually."""

    def __init__(self, inner: ConditionalStore, at: Callable[[str], None]) -> None:
        self._inner, self._at = inner, at

    def read(self, key: str) -> Any:
        if key == inbox.inbox_key("red"):
            self._at("read")
        return self._inner.read(key)

    def write(self, key: str, data: bytes, expected: str | None) -> str | None:
        if key == inbox.inbox_key("red"):
            self._at("write")
        return self._inner.write(key, data, expected)

    def unchanged(self, key: str, tag: str) -> Any:
        return self._inner.unchanged(key, tag)

    def remove(self, key: str) -> None:
        self._inner.remove(key)


@pytest.mark.parametrize("when", ["read", "write"])
def test_an_unreadable_inbox_does_not_affect_other_tenants(tmp_path: Path, when: str) -> None:
    queue = sim_queue(tmp_path)
    queue.tick()
    queue.submit("red", job("a", seconds=10.0))
    queue.submit("blue", job("b", seconds=10.0))

    def at(what: str) -> None:
        if what == when:
            raise ClusterError("its owner has seen to that")

    loop = queue.open()
    loop.store = BrokenInbox(loop.store, at)
    for _ in range(30):
        assert any("red" in text for text in queue.tick())
        queue.world.advance(queue.world.now_s + 1.0)
    wanted = {"b": "finished"} if when == "read" else {"a": "finished", "b": "finished"}
    assert outcomes(queue) == wanted


def test_invalid_data_written_while_an_inbox_is_emptied_is_ignored(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path)
    queue.tick()
    queue.submit("red", job("a", seconds=10.0))

    def at(what: str) -> None:
        if what == "write":
            (tmp_path / inbox.inbox_key("red")).write_bytes(b"nonsense")

    loop = queue.open()
    loop.store = BrokenInbox(loop.store, at)
    queue.run(30.0)
    assert outcomes(queue) == {"a": "finished"}


def test_a_job_may_be_moved_again_and_again(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, capacity=2.0)
    for name in ("first", "x", "y"):
        queue.submit("red", job(name, seconds=900.0))
    queue.tick()
    for number in range(120):
        one, other = ("x", "y") if number % 2 else ("y", "x")
        queue.move("red", one, position="before", before=other)
        queue.tick()
        assert [each.name for each in queue.state.living()] == ["first", one, other]


# ---------------------------------------------------------------------- what is done


def test_an_action_that_fails_in_whatever_way_stops_no_other(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path)

    def before(action: Action) -> None:
        if isinstance(action, Submit) and action.request.name == "bad":
            raise KeyError("regions")  # its configuration has none

    queue.world.before_act = before
    queue.submit("red", job("bad"))
    queue.submit("blue", job("good", seconds=10.0))
    queue.tick()
    assert any("KeyError" in text for text in queue.tick())
    queue.run(40.0)
    assert outcomes(queue) == {"bad": None, "good": "finished"}


@pytest.mark.parametrize("gone", ["us", "eu"])
@pytest.mark.parametrize("policy", ["fifo", "pd_ors", "drf", "tiresias"])
def test_a_region_that_the_queue_has_no_more_is_as_one_that_is_gone(
    tmp_path: Path, policy: str, gone: str
) -> None:
    queue = sim_queue(tmp_path, policy=policy, value_per_usd=0.001)
    queue.submit("red", job("two", ("us", "eu"), seconds=60.0, least=1))
    queue.submit("red", job("one", (gone,), seconds=60.0))
    queue.run(15.0)
    before = queue.state
    queue.die()
    left = {name: {"cpus": 8.0} for name in ("us", "eu", "asia") if name != gone}
    queue.config = queue.world.config = queue_config(
        policy=policy, value_per_usd=0.001, regions=left
    )
    queue.world.capacity = dict.fromkeys(left, (0.0, 8.0))
    assert not target_of(before, queue.config).regions, "nothing is rented there"
    queue.run(150.0)
    assert outcomes(queue) == {"two": "finished", "one": None}
    assert queue.state.jobs["one"].state == "waiting"


# ---------------------------------------------------------------------- time


def cold(queue: SimQueue, for_s: float) -> None:
    """The head is lost with its job server and all submissions, and is replaced."""
    queue.die()
    queue.world.submissions.clear()
    queue.world.now_s += for_s


def test_time_without_a_served_queue_does_not_count_against_jobs(
    tmp_path: Path,
) -> None:
    queue = sim_queue(tmp_path, patience={"stall_s": 60.0, "overrun": 2.0, "save_s": 30.0})
    queue.submit("red", job("a", seconds=40.0))
    queue.run(15.0)
    cold(queue, 5000.0)
    queue.run(queue.world.now_s + 80.0)
    assert outcomes(queue) == {"a": "finished"}
    assert queue.state.start_s == pytest.approx(3.0, abs=2.0), "no start took an hour"


def test_a_job_may_save_although_the_queue_died_before_it_asked(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path, patience={"save_s": 10.0})
    queue.submit("red", job("a", seconds=400.0))
    queue.run(15.0)
    queue.cancel("red", "a")

    def die(action: Action) -> None:
        raise LeaseLostError("killed")

    queue.world.before_act = die
    with pytest.raises(LeaseLostError):
        queue.tick()
    assert queue.state.jobs["a"].state == "leaving"
    queue.die()
    queue.world.before_act = lambda action: None
    queue.world.advance(queue.world.now_s + 60.0)
    queue.run(queue.world.now_s + 20.0)
    assert outcomes(queue) == {"a": "cancelled"}
    assert not any(isinstance(each, EndSubmission) for each in queue.world.acts)


@pytest.mark.parametrize("jump_s", [7200.0, -7200.0, 1e9, -1e9])
@pytest.mark.parametrize("policy", ["fifo", "pd_ors"])
def test_a_clock_that_jumps_costs_no_job_anything(
    tmp_path: Path, policy: str, jump_s: float
) -> None:
    """The clock was corrected, or the machine was suspended; cluster and jobs are unaffected."""
    queue = sim_queue(
        tmp_path, capacity=2.0, policy=policy, patience={"stall_s": 60.0, "overrun": 2.0}
    )
    for name in ("a", "b"):
        queue.submit("red", job(name, seconds=40.0))
    world, ahead_s = queue.world, 2e9
    loop = queue.open()
    for second in range(200):
        ahead_s += jump_s if second == 20 else 0.0
        loop.tick(world.now_s + ahead_s)
        world.advance(world.now_s + 1.0)
    assert outcomes(queue) == {"a": "finished", "b": "finished"}
    assert queue.state.attempts == {"a": 1, "b": 1}
    assert 0.8 < queue.state.jobs["a"].progress.factor < 1.3
    eras = [e for e in QueueJournal(queue.store).read() if isinstance(e, PolicyGenerationEntry)]
    assert len(eras) <= 2


# ---------------------------------------------------------------------- the journal


def entry(number: int, size: int = 0) -> RequestEntry:
    request = SubmitRequest(id=f"r{number}", sent_unix_s=0.0, job=job(f"j{number}"))
    noise = "".join(Random(number).choices(ascii_letters, k=size))
    full = request.job.model_copy(update={"config": {"noise": noise}})
    return RequestEntry(unix_s=1.0, tenant="red", request=request.model_copy(update={"job": full}))


def test_who_was_overtaken_does_not_write_on_in_the_next_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment fills up while a fenced process writes to it."""
    monkeypatch.setattr("geo_ray.scheduler.queue.journal._FULL_BYTES", 2000)
    old, new = (QueueJournal(LocalConditionalStore(tmp_path)) for _ in range(2))
    old.add([entry(1)])
    new.read()
    new.add([OpenedEntry(unix_s=2.0, token=2, queue_id="x", config=queue_config())])
    with pytest.raises(LeaseLostError):
        old.add([entry(2, 6000)])
    new.add([entry(3)])
    read = QueueJournal(LocalConditionalStore(tmp_path)).read()
    assert [e.request.id for e in read if isinstance(e, RequestEntry)] == ["r1", "r3"]


@pytest.mark.parametrize("dies", ["before", "after", "between"])
def test_recovery_after_a_kill_between_two_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    monkeypatch.setattr("geo_ray.scheduler.queue.journal._FULL_BYTES", 2000)

    class Dying:
        def __init__(self) -> None:
            self.inner, self.writes = LocalConditionalStore(tmp_path), 0

        def read(self, key: str) -> Any:
            return self.inner.read(key)

        def write(self, key: str, data: bytes, expected: str | None) -> str | None:
            self.writes += 1
            if self.writes == {"before": 2, "between": 3, "after": 99}[dies]:
                raise KeyboardInterrupt
            return self.inner.write(key, data, expected)

        def unchanged(self, key: str, tag: str) -> Any:
            return self.inner.unchanged(key, tag)

    old = QueueJournal(Dying())
    old.add([entry(1)])
    if dies == "after":
        old.add([entry(2, 6000)])
    else:
        with pytest.raises(KeyboardInterrupt):
            old.add([entry(2, 6000)])
    new = QueueJournal(LocalConditionalStore(tmp_path))
    wanted = [entry(1), entry(2, 6000)] if dies == "after" else [entry(1)]
    assert new.read() == wanted
    new.add([entry(3)])
    new.add([entry(4, 6000)])
    with pytest.raises(LeaseLostError):
        old.add([entry(5)])
    reader = QueueJournal(LocalConditionalStore(tmp_path))
    assert reader.read() == [*wanted, entry(3), entry(4, 6000)]
    assert reader.read() == []


def test_a_reader_misses_nothing_that_is_written_as_it_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest segment gets an entry and fills up between two reads."""
    monkeypatch.setattr("geo_ray.scheduler.queue.journal._FULL_BYTES", 2000)
    writer = QueueJournal(LocalConditionalStore(tmp_path))
    writer.add([entry(1)])

    class Slow(LocalConditionalStore):
        def read(self, key: str) -> Any:
            if key == piece_key(2) and not (tmp_path / key).exists():
                writer.add([entry(2)])
                writer.add([entry(3, 6000)])
            return super().read(key)

    reader = QueueJournal(Slow(tmp_path))
    assert [*reader.read(), *reader.read()] == [entry(1), entry(2), entry(3, 6000)]


@pytest.mark.parametrize("lost", [1, 2])
def test_a_journal_that_lacks_a_piece_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """Otherwise all running submissions would count as orphans and be ended."""
    monkeypatch.setattr("geo_ray.scheduler.queue.journal._FULL_BYTES", 500)
    queue = sim_queue(tmp_path)
    queue.submit("red", job("a", seconds=400.0))
    queue.run(60.0)
    assert (tmp_path / piece_key(3)).exists()
    queue.die()
    (tmp_path / piece_key(lost)).unlink()
    with pytest.raises(QueueJournalError, match=f"{piece_key(lost)}.*is missing"):
        queue.tick()
    assert queue.world.living("a")
