"""State changes of a job by the entries of the journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_ray.base.errors import QueueJournalError
from geo_ray.scheduler.queue.journal import (
    AnyEntry,
    EndedEntry,
    GoneEntry,
    LeaveEntry,
    ObservationEntry,
    ReshapeEntry,
    StartEntry,
)
from geo_ray.scheduler.queue.state import JobState, QueueState
from tests.support.queue_support import job, sim_queue

START = StartEntry(unix_s=2.0, job="a", attempt=1, workers={"eu": 1}, averager="eu")
STEP = ObservationEntry(unix_s=3.0, done={"a": 0.1})
LEAVE = LeaveEntry(unix_s=4.0, job="a", why="preempted", message="")
GONE = GoneEntry(unix_s=5.0, job="a", attempt=1, how="saved")
RESHAPE = ReshapeEntry(unix_s=5.0, job="a", workers={"eu": 2})
END = EndedEntry(unix_s=6.0, job="a", outcome="finished")


@pytest.fixture
def state(tmp_path: Path) -> QueueState:
    queue = sim_queue(tmp_path, capacity=0.0)
    queue.submit("red", job("a"))
    queue.tick()
    return queue.state


def test_an_attempt_starts_steps_is_saved_and_the_job_waits_again(state: QueueState) -> None:
    found = [state.jobs["a"].state]
    for entry in (START, STEP, RESHAPE, LEAVE, GONE, START, END):
        state.feed([entry])
        found.append(state.jobs["a"].state)
    assert found == [
        JobState.WAITING,
        JobState.STARTING,
        JobState.RUNNING,
        JobState.RUNNING,
        JobState.LEAVING,
        JobState.WAITING,
        JobState.STARTING,
        JobState.ENDED,
    ]


def test_a_first_step_does_not_keep_a_job_that_leaves(state: QueueState) -> None:
    state.feed([START, LEAVE, STEP])
    assert state.jobs["a"].state is JobState.LEAVING


@pytest.mark.parametrize(
    "entries",
    [[START, START], [LEAVE], [GONE], [START, LEAVE, RESHAPE], [END, START], [END, END]],
    ids=["twice", "leave", "gone", "reshape", "after its end", "two ends"],
)
def test_impossible_entries_are_named(state: QueueState, entries: list[AnyEntry]) -> None:
    with pytest.raises(QueueJournalError, match="contradicts itself"):
        state.feed(entries)
