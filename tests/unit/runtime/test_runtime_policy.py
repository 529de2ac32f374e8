"""What a run does about trouble, without a run."""

from __future__ import annotations

import pytest

from geo_ray.errors import (
    CheckpointError,
    GeoRayError,
    InterruptedRunError,
    LinkDownError,
    NonFiniteError,
    RegionLostError,
    TaskOutputError,
    WorkerLostError,
)
from geo_ray.runtime.control.policy import (
    HALT_DEADLINE_S,
    MAX_FAILED_SAVES,
    PART_S,
    STALL_S,
    RunLimits,
    RunPolicy,
    Save,
)


def policy(restarts: int = 1, every_s: float | None = 10.0) -> RunPolicy:
    return RunPolicy(RunLimits(restarts, 5, every_s), now_s=100.0)


# ------------------------------------------------------------------ workers


def test_workers_are_replaced_as_often_as_allowed() -> None:
    run = policy(restarts=2)
    lost = LinkDownError("the server hung up")
    assert run.worker_lost("us/0", "killed", None, is_present=True) == "replace"
    assert run.worker_lost("us/1", lost.message, lost, is_present=True) == "replace"
    last = run.worker_lost("us/0", "killed", None, is_present=True)
    assert isinstance(last, WorkerLostError)
    assert "us/0" in last.message and "train.max_worker_restarts = 2" in last.message


def test_what_a_worker_found_wrong_ends_the_run_and_no_restart_is_spent() -> None:
    run = policy(restarts=1)
    wrong = TaskOutputError("the loss is no scalar")
    assert run.worker_lost("us/0", wrong.message, wrong, is_present=True) is wrong
    assert run.worker_lost("us/0", "killed", None, is_present=True) == "replace"


def test_workers_of_a_region_that_is_gone_are_nobodys_concern() -> None:
    run = policy(restarts=0)
    wrong = TaskOutputError("the loss is no scalar")
    assert run.worker_lost("us/0", "killed", None, is_present=False) == "ignore"
    assert run.worker_lost("us/0", wrong.message, wrong, is_present=False) == "ignore"


# ------------------------------------------------------------------ regions


def test_a_region_that_can_be_spared_is_left_behind() -> None:
    gone = policy().regions_lost({"eu": "its bridge died"}, {}, "eu", {"eu"})
    assert gone == {"eu": "its bridge died"}


def test_a_region_that_is_needed_ends_the_run() -> None:
    with pytest.raises(RegionLostError, match="its bridge died"):
        policy().regions_lost({"us": "its bridge died"}, {}, "eu", {"eu"})


def test_a_region_that_was_cut_off_is_left_behind_and_one_that_fails_by_itself_is_not() -> None:
    down, wrong = LinkDownError("cut off"), TaskOutputError("the loss is no scalar")
    assert policy().regions_lost({}, {"eu": down}, "eu", {"eu"}) == {"eu": "cut off"}
    # The averager has moved on: the old home's failure follows from that.
    assert policy().regions_lost({}, {"eu": wrong}, "us", {"eu"}) == {"eu": wrong.message}
    with pytest.raises(TaskOutputError):
        policy().regions_lost({}, {"eu": wrong}, "eu", {"eu"})
    with pytest.raises(LinkDownError):
        policy().regions_lost({}, {"us": down}, "eu", {"eu"})


def test_a_lost_region_is_not_asked_why_it_failed() -> None:
    wrong = TaskOutputError("the loss is no scalar")
    gone = policy().regions_lost({"eu": "its server died"}, {"eu": wrong}, "eu", {"eu"})
    assert gone == {"eu": "its server died"}


# ------------------------------------------------------------------ saving and stopping


def test_saves_come_by_time_one_at_a_time() -> None:
    run = policy(every_s=10.0)
    assert run.due(109.9, is_open=False) is None
    assert run.due(110.0, is_open=True) is None
    assert run.due(111.0, is_open=False) == Save(halt=False)
    assert run.due(120.9, is_open=False) is None
    assert run.due(121.0, is_open=False) == Save(halt=False)
    assert policy(every_s=None).due(1e9, is_open=False) is None


def test_a_halt_saves_at_once_and_ends_with_its_reason() -> None:
    run = policy(every_s=None)
    assert run.halt(InterruptedRunError("the run was interrupted"), 101.0)
    assert not run.halt(NonFiniteError("too late"), 101.0)
    assert run.due(101.0, is_open=False) == Save(halt=True)
    run.saved()
    assert run.due(102.0, is_open=False) is None
    with pytest.raises(InterruptedRunError, match="its state is saved"):
        run.check_end({"halted"})


def test_a_save_from_before_the_halt_does_not_count_for_it() -> None:
    run = policy()
    run.saved()
    run.halt(InterruptedRunError("the run was interrupted"), 101.0)
    assert run.due(101.0, is_open=True) is None  # one from before is still open
    assert run.due(101.5, is_open=False) == Save(halt=True)


def test_regions_that_do_not_stand_still_in_time_end_the_run_unsaved() -> None:
    run = policy()
    run.halt(InterruptedRunError("the run was interrupted"), 101.0)
    run.due(101.0 + HALT_DEADLINE_S, is_open=True)
    with pytest.raises(InterruptedRunError, match="no new checkpoint was made: the regions did"):
        run.due(101.1 + HALT_DEADLINE_S, is_open=True)


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


def test_failed_saves_are_borne_until_there_are_too_many_in_a_row() -> None:
    run, full = policy(), CheckpointError("the disk is full")
    for _ in range(MAX_FAILED_SAVES - 1):
        run.save_failed(full)
    run.saved()
    for _ in range(MAX_FAILED_SAVES - 1):
        run.save_failed(full)
    with pytest.raises(CheckpointError):
        run.save_failed(full)


def test_a_save_that_fails_while_the_run_must_stop_ends_it() -> None:
    run = policy()
    run.halt(InterruptedRunError("the run was interrupted"), 101.0)
    with pytest.raises(GeoRayError, match="disk"):
        run.save_failed(CheckpointError("the disk is full"))


def test_a_checkpoint_of_which_no_part_comes_for_long_is_given_up() -> None:
    run = policy()
    assert run.due(110.0, is_open=False) == Save(halt=False)
    assert not run.is_overdue(110.0 + PART_S - 1, awaits_parts=True)
    run.on_part(150.0)
    assert not run.is_overdue(150.0 + PART_S - 1, awaits_parts=True)
    assert run.is_overdue(150.0 + PART_S, awaits_parts=True)
    assert not run.is_overdue(150.0 + PART_S, awaits_parts=False)  # all are there, or none is open
    assert run.due(150.0 + PART_S, is_open=False) == Save(halt=False)
    assert not run.is_overdue(150.0 + PART_S, awaits_parts=True)  # the next one has its own time


def test_all_are_told_to_finish_once() -> None:
    run = policy()
    assert run.stop("loss reached 0.1") and not run.stop("accuracy reached 0.9")
    assert run.stopping == "loss reached 0.1"


# ------------------------------------------------------------------ waiting


def test_a_run_that_stands_still_is_told_of_now_and_then_and_never_ended() -> None:
    rules = policy(every_s=None)
    told = [rules.stalled(100.0 + t) for t in (10.0, STALL_S, STALL_S + 1, 2 * STALL_S)]
    assert told == [None, STALL_S, None, 2 * STALL_S]
    rules.on_progress(1000.0)
    assert rules.stalled(1000.0 + STALL_S - 1) is None
    assert rules.stalled(1000.0 + STALL_S) == STALL_S
