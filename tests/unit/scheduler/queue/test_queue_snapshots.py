"""The journal of a queue stays short: snapshots, what they omit, and readers that lag."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_ray.base.errors import LeaseLostError, QueueJournalError, RunDirectoryError
from geo_ray.scheduler.queue import inbox
from geo_ray.scheduler.queue.job_spec import CancelRequest
from geo_ray.scheduler.queue.journal import (
    BASE_KEY,
    AnyEntry,
    EndedEntry,
    GoneEntry,
    LeaveEntry,
    ObservationEntry,
    OpenedEntry,
    QueueJournal,
    SlotEntry,
    SnapshotEntry,
    StartEntry,
    piece_key,
)
from geo_ray.scheduler.queue.report import report_of
from geo_ray.scheduler.queue.state import (
    SNAPSHOT_FORMAT,
    QueueLocation,
    QueueState,
    state_of,
)
from geo_ray.storage.conditional_store import LocalConditionalStore, StoredValue
from tests.support.queue_support import SimQueue, job, sim_queue
from tests.support.s3_support import new_prefix, s3_server, set_credentials


class Counting(LocalConditionalStore):
    """Counts the reads of a reader."""

    reads = 0

    def read(self, key: str) -> StoredValue | None:
        self.reads += 1
        return super().read(key)


def test_a_year_costs_a_reader_no_more_than_a_month(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot of four days; segments and generations are small for this test."""
    monkeypatch.setattr("geo_ray.scheduler.queue.journal._FULL_BYTES", 1000)
    monkeypatch.setattr("geo_ray.scheduler.queue.loop.GENERATION_SLOTS", 30)
    monkeypatch.setattr("geo_ray.scheduler.queue.state.KEPT_ENDED", 10)
    slot_s, slots = 4 * 86_400.0, 92
    patience = {"stall_s": 1e9, "overrun": 1e9}
    queue = sim_queue(tmp_path, capacity=8.0, slot_s=slot_s, patience=patience)
    for number in range(3):
        queue.submit("red", job(f"long-{number}", seconds=3 * slots * slot_s, most=1))
    loop, early, costs = queue.open(), QueueJournal(queue.store), list[int]()
    for slot in range(1, slots):
        queue.submit("blue", job(f"short-{slot}", ("eu",), seconds=3600.0))
        assert loop.tick(slot * slot_s) == ()
        loop.tick(slot * slot_s + 1.0)
        for each in queue.world.submissions.values():
            if each.request.name.startswith("short-"):
                each.is_over, each.end = True, "finished"
        if slot == 3:
            early.read()
        if slot % 10 == 0:
            store = Counting(tmp_path)
            assert report_of(state_of(QueueJournal(store).read())) == report_of(loop.state)
            costs.append(store.reads)
    assert loop.state.taken == 3 + slots - 1
    assert len(loop.state.jobs) < 3 + 10 + 2 * 30, "jobs that ended long ago are forgotten"
    assert loop._journal is not None
    written, there = loop._journal._number, len(list(tmp_path.glob("journal-*.z")))
    assert written > 2 * there, "segments are removed"
    assert max(costs[4:]) < 1.5 * max(costs[:4]) + 20, costs
    assert not (tmp_path / piece_key(1)).exists()
    assert report_of(state_of(early.read())) == report_of(loop.state), "it goes to the beginning"
    queue.die()
    assert queue.tick() == ()
    assert {"long-0", "long-1", "long-2"} <= {each.name for each in queue.state.living()}


def compacted(queue: SimQueue) -> QueueState:
    """Compact the journal; return the state of a new reader."""
    loop = queue.loop
    assert loop is not None and loop._journal is not None
    snapshot = loop.state.snapshot(queue.world.now_s)
    loop._journal.compact(snapshot)
    loop.state.feed(snapshot)
    return state_of(QueueJournal(queue.store).read())


@pytest.mark.parametrize("policy", ["fifo", "pd_ors"])
def test_a_snapshot_is_the_state(tmp_path: Path, policy: str) -> None:
    queue = sim_queue(tmp_path, policy=policy)
    queue.submit("red", job("a", ("us", "eu"), seconds=60.0, deadline_s=300.0))
    queue.submit("blue", job("b", seconds=12.0))
    queue.run(25.0)
    before = report_of(queue.state)
    read = compacted(queue)
    assert report_of(read) == before
    assert read == queue.state
    queue.run(100.0)
    assert {each.name: each.end and each.end.outcome for each in queue.state.jobs.values()} == {
        "a": "finished",
        "b": "finished",
    }
    assert report_of(state_of(QueueJournal(queue.store).read())) == report_of(queue.state)


def test_what_is_forgotten_is_not_heard_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geo_ray.scheduler.queue.state.KEPT_ENDED", 0)
    monkeypatch.setattr("geo_ray.scheduler.queue.state.KEPT_ANSWERS", 1)
    queue = sim_queue(tmp_path)
    queue.submit("red", job("a"))
    queue.run(2.0)
    old = queue.cancel("red", "a")
    signed = inbox.look(queue.store, "red")
    queue.run(30.0)
    assert queue.state.jobs["a"].end is not None
    loop = queue.loop
    assert loop is not None
    loop.state.generation.slots.clear()  # as at the beginning of an era
    queue.cancel("red", "nothing")
    queue.tick()
    read = compacted(queue)
    assert "a" not in read.jobs and old not in read.answers
    first = queue.submit("red", job("a", seconds=500.0))
    for each in signed:  # somebody who can write to the box puts the old request in again
        inbox.submit(queue.store, "red", each)
    queue.run(queue.world.now_s + 15.0)
    assert queue.state.answers[first].refused is None
    assert queue.state.jobs["a"].state in ("starting", "running"), (
        "the new job of the name is not cancelled"
    )
    assert queue.state.taken == 2


def test_a_request_from_the_future_is_refused(tmp_path: Path) -> None:
    queue = sim_queue(tmp_path)
    queue.submit("red", job("a"))
    queue.tick()
    asked = queue.ask("red", CancelRequest(id="early", sent_unix_s=1e9, job="a"))
    queue.tick()
    assert "in the future" in str(queue.state.answers[asked].refused)


class Dies(LocalConditionalStore):
    """A store whose process dies at the write or removal with a number."""

    left = 0

    def point(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def write(self, key: str, data: bytes, expected: str | None) -> str | None:
        self.point()
        return super().write(key, data, expected)

    def remove(self, key: str) -> None:
        self.point()
        super().remove(key)


def test_a_snapshot_that_is_interrupted_anywhere_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geo_ray.scheduler.queue.journal._FULL_BYTES", 1500)
    for point in range(1, 40):
        root = tmp_path / str(point)
        root.mkdir()
        queue = sim_queue(root)
        for number in range(6):
            queue.submit("red", job(f"j{number}", seconds=200.0))
        queue.run(3.0)
        wanted = report_of(queue.state)
        store = Dies(root)
        journal = QueueJournal(store)
        journal.read()
        store.left = point
        try:
            journal.compact(queue.state.snapshot(3.0))
        except KeyboardInterrupt:
            pass
        else:
            break
        queue.die()
        assert report_of(state_of(QueueJournal(queue.store).read())) == wanted, point
        queue.tick()
        again = compacted(queue)
        assert report_of(again).jobs == report_of(queue.state).jobs, point
        assert len(again.jobs) == 6
    else:
        raise AssertionError("the snapshot has more writes than were tried")


class NoBase(LocalConditionalStore):
    """A store in which the start position cannot be written."""

    def write(self, key: str, data: bytes, expected: str | None) -> str | None:
        if key == BASE_KEY:
            raise RunDirectoryError("no space left on device")
        return super().write(key, data, expected)


def test_a_snapshot_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geo_ray.scheduler.queue.journal._FULL_BYTES", 300)
    queue = sim_queue(tmp_path, policy="pd_ors")
    loop = queue.open()
    loop.store = NoBase(tmp_path)
    message: list[str] = []
    for number in range(12):
        queue.submit("red", job(f"j{number}", seconds=8.0))
        message += loop.tick(queue.world.now_s)
        queue.world.advance(queue.world.now_s + 4.0)
    queue.run(280.0, every_s=2.0)
    assert [each for each in message if "the journal cannot be compacted" in each]
    assert len(queue.state.jobs) == 12
    assert all(each.end is not None for each in queue.state.jobs.values())


def test_who_was_overtaken_by_a_snapshot_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geo_ray.scheduler.queue.journal._FULL_BYTES", 600)
    queue = sim_queue(tmp_path)
    queue.submit("red", job("a"))
    queue.run(3.0)
    late, full = QueueJournal(queue.store), QueueJournal(queue.store)
    late.read()
    full.read()
    compacted(queue)
    entry = OpenedEntry(unix_s=9.0, token=9, queue_id="x", config=queue.config)
    for journal in (late, full):
        with pytest.raises(LeaseLostError):
            for _ in range(3):
                journal.add([entry])
    assert report_of(state_of(QueueJournal(queue.store).read())) == report_of(queue.state)


def test_a_snapshot_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_credentials(monkeypatch)
    with s3_server() as server:
        place = QueueLocation.at(new_prefix(server))
        store = place.store()
        monkeypatch.setattr(SimQueue, "store", property(lambda _: store))
        queue = sim_queue(tmp_path)
        queue.submit("red", job("a", seconds=100.0))
        queue.run(3.0)
        early = QueueJournal(store)
        early.read()
        read = compacted(queue)
        assert read == queue.state
        assert place.is_there()
        assert store.read(piece_key(1)) is None
        assert state_of(early.read()) == queue.state


# ---------------------------------------------------------------------- contradictions

NOBODY = "nobody"
CONTRADICTIONS: dict[str, AnyEntry] = {
    "an end": EndedEntry(unix_s=5.0, job=NOBODY, outcome="finished"),
    "a start": StartEntry(unix_s=5.0, job=NOBODY, attempt=1, workers={"us": 1}, averager="us"),
    "a leave": LeaveEntry(unix_s=5.0, job="waits", why="preempted", message=""),
    "an end of nothing": GoneEntry(unix_s=5.0, job="waits", attempt=1, how="saved"),
    "progress": ObservationEntry(unix_s=5.0, done={NOBODY: 0.5}),
    "a problem": ObservationEntry(unix_s=5.0, problems={NOBODY: "x"}),
    "a slot": SlotEntry(unix_s=5.0, slot=1, capacity={}, arrived=(NOBODY,)),
    "a payoff": SlotEntry(unix_s=5.0, slot=1, capacity={}, surpluses={NOBODY: 1.0}),
    "a snapshot of nothing": SnapshotEntry(
        unix_s=5.0, part=0, is_last=True, head={"format": SNAPSHOT_FORMAT, "token": "x"}
    ),
    "a headless snapshot": SnapshotEntry(unix_s=5.0, part=0, is_last=True),
}


def test_a_snapshot_of_another_format_is_rejected_by_name() -> None:
    with pytest.raises(QueueJournalError, match="snapshot of an earlier release"):
        state_of([SnapshotEntry(unix_s=5.0, part=0, is_last=True, head={"token": 1})])


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_journal_that_contradicts_itself_is_named(tmp_path: Path, what: str) -> None:
    queue = sim_queue(tmp_path, capacity=0.0)
    queue.submit("red", job("waits"))
    queue.tick()
    journal = QueueJournal(queue.store)
    journal.read()
    journal.add([CONTRADICTIONS[what]])
    with pytest.raises(QueueJournalError, match="contradicts itself"):
        QueueLocation.at(tmp_path).read()
    queue.die()
    with pytest.raises(QueueJournalError, match="contradicts itself"):
        queue.tick()
