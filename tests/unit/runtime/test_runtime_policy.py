"""What a run does about trouble, without a run."""

from __future__ import annotations

import pytest

from geo_ray.base.errors import (
    CheckpointConflictError,
    CheckpointError,
    GeoRayError,
    InterruptedRunError,
    LinkDownError,
    NonFiniteError,
    RegionLostError,
    TaskOutputError,
    WorkerLostError,
)
from geo_ray.runtime.policies import HALT_DEADLINE_S, PART_S, STALL_S, RunLimits, RunPolicy, Save

EVERY_S = 10.0
RETRY_S = 300.0


def policy(restarts: int = 1, every_s: float | None = EVERY_S) -> RunPolicy:
    return RunPolicy(RunLimits(restarts, 5, every_s, retry_s=RETRY_S), now_s=100.0)


# ------------------------------------------------------------------ workers


def loses(
    run: RunPolicy,
    rank: int,
    error: GeoRayError | None = None,
    *,
    is_present: bool = True,
    goes_on: bool = False,
    now_s: float = 100.0,
) -> str | GeoRayError:
    cause = "killed" if error is None else error.message
    return run.worker_lost(
        ("us", rank), cause, error, is_present=is_present, goes_on=goes_on, now_s=now_s
    )


def test_workers_are_replaced_as_often_as_allowed() -> None:
    run = policy(restarts=2)
    lost = LinkDownError("the server hung up")
    assert loses(run, 0) == "replace"
    assert loses(run, 1, lost) == "replace"
    last = loses(run, 0)
    assert isinstance(last, WorkerLostError)
    assert "us/0" in last.message and "train.max_worker_restarts = 2" in last.message


def test_an_error_of_the_task_ends_the_run_without_a_restart() -> None:
    run = policy(restarts=1)
    wrong = TaskOutputError("the loss is no scalar")
    assert loses(run, 0, wrong) is wrong
    assert loses(run, 0) == "replace"


def test_workers_of_a_lost_region_are_ignored() -> None:
    run = policy(restarts=0)
    wrong = TaskOutputError("the loss is no scalar")
    assert loses(run, 0, is_present=False) == "ignore"
    assert loses(run, 0, wrong, is_present=False) == "ignore"


def test_replacements_are_counted_in_a_window_of_time() -> None:
    run = RunPolicy(RunLimits(2, 5, None, restart_window_s=60.0), now_s=100.0)
    assert [loses(run, 0, now_s=t) for t in (100.0, 130.0)] == ["replace"] * 2
    assert "2 in 60 s is used up" in loses(run, 0, now_s=159.0).message
    assert loses(run, 0, now_s=160.0) == "replace"
    assert isinstance(loses(run, 0, now_s=161.0), WorkerLostError)


def test_a_replacement_waits_while_its_region_continues() -> None:
    run = RunPolicy(RunLimits(1, 5, None, restart_window_s=60.0), now_s=100.0)
    assert loses(run, 0, goes_on=True, now_s=100.0) == "replace"
    assert loses(run, 0, goes_on=True, now_s=110.0) == "later"
    assert run.worker_left(("us", 1), 111.0) == "later"
    assert run.replacements(159.0) == []
    assert run.replacements(160.0) == [("us", 0)]
    assert run.replacements(161.0) == []
    assert run.replacements(220.0) == [("us", 1)]
    assert run.replacements(500.0) == []


# ------------------------------------------------------------------ regions


PRESENT = {"eu": True, "us": False, "ap": True}


def test_a_region_that_can_be_spared_is_left_behind() -> None:
    gone = policy().regions_lost({"eu": "its bridge died"}, {}, PRESENT, ())
    assert gone == {"eu": "its bridge died"}


def test_a_region_that_is_needed_ends_the_run() -> None:
    with pytest.raises(RegionLostError, match="its bridge died"):
        policy().regions_lost({"us": "its bridge died"}, {}, PRESENT, ())


def test_a_region_that_was_cut_off_is_left_behind_and_one_that_fails_by_itself_is_not() -> None:
    down, wrong = LinkDownError("cut off"), TaskOutputError("the loss is no scalar")
    gone = RegionLostError("the others went on without it")
    assert policy().regions_lost({}, {"eu": down}, PRESENT, ()) == {"eu": "cut off"}
    assert policy().regions_lost({}, {"eu": gone}, PRESENT, ()) == {"eu": gone.message}
    # The averager has moved: the failure of the former leader follows from that.
    assert policy().regions_lost({}, {"eu": wrong}, PRESENT, ("eu",)) == {"eu": wrong.message}
    with pytest.raises(TaskOutputError):
        policy().regions_lost({}, {"eu": wrong}, PRESENT, ())
    with pytest.raises(LinkDownError):
        policy().regions_lost({}, {"us": down}, PRESENT, ())


def test_a_lost_region_is_not_asked_why_it_failed() -> None:
    wrong = TaskOutputError("the loss is no scalar")
    gone = policy().regions_lost({"eu": "its server died"}, {"eu": wrong}, PRESENT, ())
    assert gone == {"eu": "its server died"}


def test_a_run_ends_when_too_few_regions_are_left() -> None:
    run = RunPolicy(RunLimits(1, 5, None, min_regions=2), now_s=0.0)
    assert set(run.regions_lost({"eu": "a died"}, {}, PRESENT, ())) == {"eu"}
    with pytest.raises(RegionLostError, match=r"a died; b died; 1 of 3 .* members.min asks for 2"):
        run.regions_lost({"eu": "a died", "ap": "b died"}, {}, PRESENT, ())


# ------------------------------------------------------------------ saving and stopping


def test_saves_come_by_time_one_at_a_time() -> None:
    run = policy(every_s=10.0)
    assert run.due(109.9, is_open=False) is None
    assert run.due(110.0, is_open=True) is None
    assert run.due(111.0, is_open=False) == Save(halt=False)
    assert run.due(120.9, is_open=False) is None
    assert run.due(121.0, is_open=False) == Save(halt=False)
    assert policy(every_s=None).due(1e9, is_open=False) is None


def test_while_nothing_happens_no_checkpoint_pushes_older_ones_out() -> None:
    run = policy(every_s=10.0)
    assert run.due(110.0, is_open=False) == Save(halt=False), "the state is not saved yet"
    run.on_progress(110.5)  # in mid-save: the next one has more
    run.saved(1)
    assert run.due(120.0, is_open=False) == Save(halt=False)
    run.saved(2)
    assert run.due(130.0, is_open=False) is None and run.due(999.0, is_open=False) is None
    run.on_progress(1000.0)
    assert run.due(1000.0, is_open=False) == Save(halt=False)
    assert run.due(1011.0, is_open=False) == Save(halt=False), "the one before was not saved"
    run.saved(4)
    run.halt(InterruptedRunError("stop"), 1012.0)
    assert run.due(1012.0, is_open=False) == Save(halt=True), "regions stand still after it"


def test_checkpoints_that_take_long_take_half_of_the_time() -> None:
    run = policy(every_s=10.0)
    assert run.due(110.0, is_open=False) == Save(halt=False)
    assert run.due(118.0, is_open=True) is None
    run.saved(1)
    run.on_progress(119.0)
    assert run.due(125.9, is_open=False) is None  # 8 s, then 8 s without
    assert run.due(126.0, is_open=False) == Save(halt=False)
    assert run.due(129.0, is_open=True) is None
    run.saved(1)
    run.on_progress(130.0)
    assert run.due(136.0, is_open=False) == Save(halt=False)  # 3 s: in its time
    assert run.due(176.0, is_open=True) is None
    assert run.due(176.1, is_open=False) == Save(halt=False)  # it came to nothing


def test_a_halt_saves_at_once_and_ends_with_its_reason() -> None:
    run = policy(every_s=None)
    assert run.halt(InterruptedRunError("the run was interrupted"), 101.0)
    assert not run.halt(NonFiniteError("too late"), 101.0)
    assert run.due(101.0, is_open=False) == Save(halt=True)
    run.saved(1)
    assert run.due(102.0, is_open=False) is None
    with pytest.raises(InterruptedRunError, match="its state is saved"):
        run.check_end({"halted"})


def test_a_save_from_before_the_halt_does_not_count_for_it() -> None:
    run = policy()
    run.saved(1)
    run.halt(InterruptedRunError("the run was interrupted"), 101.0)
    assert run.due(101.0, is_open=True) is None  # one from before is still open
    assert run.due(101.5, is_open=False) == Save(halt=True)


def test_a_save_that_is_open_when_the_halt_comes_does_not_count_for_it() -> None:
    """No region pauses after it: the run would continue to its end."""
    run = policy()
    assert run.due(111.0, is_open=False) == Save(halt=False)
    run.halt(InterruptedRunError("the run was interrupted"), 112.0)
    assert run.due(112.0, is_open=True) is None
    run.saved(1)
    assert not run.is_halt_saved
    assert run.due(112.5, is_open=False) == Save(halt=True)
    run.saved(1)
    assert run.is_halt_saved and run.due(113.0, is_open=False) is None


def test_regions_that_do_not_pause_in_time_end_the_run_unsaved() -> None:
    run = policy()
    run.halt(InterruptedRunError("the run was interrupted"), 101.0)
    assert run.due(101.0, is_open=False) == Save(halt=True)
    run.due(101.0 + HALT_DEADLINE_S, is_open=True)
    with pytest.raises(InterruptedRunError, match="no new checkpoint was made: the regions did"):
        run.due(101.1 + HALT_DEADLINE_S, is_open=True)


def test_the_time_to_pause_starts_with_its_checkpoint() -> None:
    """One that was open takes its own; and what it saved is said."""
    run = policy()
    assert run.due(110.0, is_open=False) == Save(halt=False)
    run.halt(InterruptedRunError("the run was interrupted"), 112.0)
    assert run.due(114.0 + HALT_DEADLINE_S, is_open=True) is None  # it is being written
    run.saved(7)
    begun_s = 115.0 + HALT_DEADLINE_S
    assert run.due(begun_s, is_open=False) == Save(halt=True)
    assert run.due(begun_s + 50.0, is_open=False) == Save(halt=True)  # the averager has moved
    assert run.due(begun_s + HALT_DEADLINE_S, is_open=True) is None
    with pytest.raises(InterruptedRunError, match="; checkpoint 7 is complete, no later one was"):
        run.due(begun_s + HALT_DEADLINE_S + 0.1, is_open=True)


def test_an_open_checkpoint_delays_a_halt_for_a_limited_time() -> None:
    run = policy()
    assert run.due(110.0, is_open=False) == Save(halt=False)
    run.halt(InterruptedRunError("the run was interrupted"), 112.0)
    run.on_part(111.0 + HALT_DEADLINE_S)
    assert run.overdue(111.9 + HALT_DEADLINE_S, awaits_parts=True) is None
    assert run.overdue(112.0 + HALT_DEADLINE_S, awaits_parts=False) is None  # it has them all
    assert "request to stop" in (run.overdue(112.0 + HALT_DEADLINE_S, awaits_parts=True) or "")
    assert run.due(112.0 + HALT_DEADLINE_S, is_open=False) == Save(halt=True)
    assert run.overdue(113.0 + HALT_DEADLINE_S, awaits_parts=True) is None  # the halting one

    run = policy()
    run.due(110.0, is_open=False)
    run.halt(InterruptedRunError("the run was interrupted"), 112.0)
    with pytest.raises(InterruptedRunError, match="the previous one was not complete"):
        run.due(112.1 + PART_S, is_open=True)


def test_a_save_from_before_the_halt_that_fails_does_not_end_the_run() -> None:
    run, full = policy(), CheckpointError("the disk is full")
    assert run.due(110.0, is_open=False) == Save(halt=False)
    run.halt(InterruptedRunError("the run was interrupted"), 112.0)
    assert run.save_failed(full, 112.5) == 1.0
    assert run.due(113.0, is_open=False) is None, "the pause is not over"
    assert run.due(113.5, is_open=False) == Save(halt=True)


def test_an_interrupt_that_came_after_the_end_is_none() -> None:
    run = policy()
    run.halt(InterruptedRunError("the run was interrupted"), 101.0)
    run.check_end({"done"})
    with pytest.raises(InterruptedRunError, match="no new checkpoint was made: the run was about"):
        run.check_end({"done", "halted"})


def test_refused_steps_halt_and_count_more_than_an_interrupt() -> None:
    run = policy()
    run.halt(InterruptedRunError("the run was interrupted"), 101.0)
    why = run.exhausted("us", 150.0)
    assert isinstance(why, NonFiniteError) and "'us' refused 5 steps" in why.message
    assert run.exhausted("eu", 151.0) is None
    run.due(101.1 + HALT_DEADLINE_S, is_open=True)  # counted from the newer reason
    with pytest.raises(NonFiniteError):
        run.check_end({"done"})


def test_a_run_that_trains_is_never_ended_by_a_store_or_a_full_disk() -> None:
    run, full, now_s = policy(), CheckpointError("the disk is full"), 110.0
    pauses = []
    for _ in range(200):
        assert run.due(now_s, is_open=False) == Save(halt=False)
        pauses.append(run.save_failed(full, now_s))
        assert run.is_failing
        assert run.due(now_s + pauses[-1] - 0.1, is_open=False) is None
        now_s += max(pauses[-1], EVERY_S)
    assert pauses[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0] and set(pauses[7:]) == {60.0}
    run.saved(1)
    assert not run.is_failing and run.save_failed(full, now_s) == 1.0


def test_a_run_with_foreign_checkpoints_ends_at_once() -> None:
    with pytest.raises(CheckpointConflictError):
        policy().save_failed(CheckpointConflictError("another writer"), 110.0)


def test_a_run_that_must_stop_is_tried_to_be_saved_for_a_time() -> None:
    run, full = policy(), CheckpointError("the disk is full")
    run.halt(InterruptedRunError("the run was interrupted"), 101.0)
    now_s, ends_s, tries = 101.0, 101.0 + RETRY_S, 0
    while now_s < ends_s:
        if run.due(now_s, is_open=False) is not None:
            run.save_failed(full, now_s)
            tries += 1
        now_s += 1.0
    assert tries > 5
    with pytest.raises(InterruptedRunError, match="no new checkpoint was made: it was retried for"):
        run.due(ends_s + 1.0, is_open=False)
    assert run.saves_until_s(ends_s) == ends_s


def test_a_checkpoint_of_which_no_part_comes_for_long_is_given_up() -> None:
    run = policy()
    assert run.due(110.0, is_open=False) == Save(halt=False)
    assert not run.overdue(110.0 + PART_S - 1, awaits_parts=True)
    run.on_part(150.0)
    assert not run.overdue(150.0 + PART_S - 1, awaits_parts=True)
    assert run.overdue(150.0 + PART_S, awaits_parts=True)
    assert not run.overdue(150.0 + PART_S, awaits_parts=False)  # all are there, or none is open
    assert run.due(150.0 + PART_S, is_open=False) == Save(halt=False)
    assert not run.overdue(150.0 + PART_S, awaits_parts=True)  # the next one has its own time


def test_parts_have_the_configured_time() -> None:
    run = RunPolicy(RunLimits(1, 5, 10.0, part_s=3 * PART_S), now_s=100.0)
    assert run.due(110.0, is_open=False) == Save(halt=False)
    assert not run.overdue(110.0 + 2 * PART_S, awaits_parts=True)
    assert "1800 s" in str(run.overdue(110.0 + 3 * PART_S, awaits_parts=True))


def test_all_regions_are_asked_to_finish_once() -> None:
    run = policy()
    assert run.stop("loss reached 0.1") and not run.stop("accuracy reached 0.9")
    assert run.stopping == "loss reached 0.1"


# ------------------------------------------------------------------ waiting


def test_a_stalled_run_is_reported_periodically_and_never_ended() -> None:
    rules = policy(every_s=None)
    told = [rules.stalled(100.0 + t) for t in (10.0, STALL_S, STALL_S + 1, 2 * STALL_S)]
    assert told == [None, STALL_S, None, 2 * STALL_S]
    rules.on_progress(1000.0)
    assert rules.stalled(1000.0 + STALL_S - 1) is None
    assert rules.stalled(1000.0 + STALL_S) == STALL_S
