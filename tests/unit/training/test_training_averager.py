"""The averager, driven one update at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from geo_ray.base.errors import InvariantError, NonFiniteError
from geo_ray.strategies.asgd import Asgd
from geo_ray.strategies.asgd_ga import AsgdGa
from geo_ray.strategies.sma import Sma
from geo_ray.strategies.state import AveragerState
from geo_ray.training.averager import Averager
from geo_ray.training.membership import MemberChange
from geo_ray.training.messages import UpdateMessage


def make(strategy, members=("a", "b"), goal=""):
    return Averager(strategy, 2, AveragerState(tuple(members)), goal=goal)


def update(region, seq, values=(1.0, 2.0), samples=8, attempt=1, final=False):
    return UpdateMessage(region, attempt, seq, 0, samples, torch.tensor(values), final)


def test_a_round_is_answered_when_all_have_spoken():
    state = make(Sma(weights="samples"))
    assert state.on_update(update("a", 1, (0.0, 0.0), samples=24)) == []
    replies = state.on_update(update("b", 1, (4.0, 8.0), samples=8))
    assert [r.to for r in replies] == ["a", "b"]
    assert torch.equal(replies[0].payload_P, torch.tensor([1.0, 2.0]))
    assert state.state.version == 1


def test_a_repeated_update_changes_nothing_and_gets_its_answer_again():
    state = make(AsgdGa(combine="sum"))
    first = state.on_update(update("a", 1))
    outbox = state.state.memory["outbox/b"].clone()
    again = state.on_update(update("a", 1))
    assert again == first
    assert torch.equal(state.state.memory["outbox/b"], outbox)
    assert state.on_update(update("a", 1, attempt=0)) == []  # of an earlier incarnation


def test_a_repeat_while_the_round_is_open_is_no_second_vote():
    state = make(Sma())
    state.on_update(update("a", 1))
    assert state.on_update(update("a", 1)) == []
    assert len(state.on_update(update("b", 1))) == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_and_changes_nothing(bad):
    state = make(AsgdGa(combine="sum"))
    with pytest.raises(NonFiniteError, match="region 'a'"):
        state.on_update(update("a", 1, (bad, 0.0)))
    assert state.state.version == 0 and not state.state.memory
    assert state.on_update(update("a", 1))  # the number was not used up


def test_strangers_and_wrong_sizes_are_refused():
    state = make(Sma())
    with pytest.raises(InvariantError, match="no member"):
        state.on_update(update("c", 1))
    with pytest.raises(InvariantError, match="parameters"):
        state.on_update(update("a", 1, (1.0,)))


def test_a_stop_reaches_all_in_the_same_round():
    state = make(Sma())
    state.on_update(update("a", 1))
    state.request_stop()
    assert all(r.stop for r in state.on_update(update("b", 1)))


def test_a_checkpoint_is_copied_when_it_begins_and_holds_nobody_up():
    state = make(AsgdGa(combine="sum"))
    state.on_update(update("b", 1, (5.0, 5.0)))
    assert state.begin_checkpoint(7, halt=False)
    (snapshot,) = state.snapshots
    told = [state.on_update(update("a", seq))[0].checkpoint for seq in (1, 2, 3)]
    assert told == [7, None, None]  # said once, and what comes then is answered as ever
    assert state.begin_checkpoint(8, halt=True)
    (reply,) = state.on_update(update("b", 2))
    assert (reply.checkpoint, reply.halt) == (8, True)
    assert torch.equal(snapshot.tensors["outbox/a"], torch.tensor([5.0, 5.0]))
    again = make(AsgdGa(combine="sum"))
    again.restore(snapshot.tensors, snapshot.control)
    assert torch.equal(again.on_update(update("a", 1)).pop().payload_P, torch.tensor([5.0, 5.0]))


def test_an_open_round_and_answers_that_were_given_are_in_a_checkpoint():
    state = make(Sma())
    state.on_update(update("a", 1, (1.0, 2.0)))
    answers = state.on_update(update("b", 1, (3.0, 4.0)))
    state.on_update(update("b", 2, (7.0, 8.0)))
    state.begin_checkpoint(7, halt=False)
    (snapshot,) = state.snapshots
    again = make(Sma())
    again.restore(snapshot.tensors, snapshot.control)
    (known,) = again.on_update(update("a", 1, (1.0, 2.0)))  # its answer may not have arrived
    assert torch.equal(known.payload_P, answers[0].payload_P) and known.seq == 1
    assert again.on_update(update("b", 2, (7.0, 8.0))) == []  # it is there, and waits
    old = state.on_update(update("a", 2, (1.0, 0.0)))
    new = again.on_update(update("a", 2, (1.0, 0.0)))
    assert [(r.to, r.version) for r in new] == [(r.to, r.version) for r in old]
    assert torch.equal(new[0].payload_P, old[0].payload_P)


def test_a_final_update_that_waits_is_in_a_checkpoint():
    state = make(AsgdGa(combine="sum"))
    assert state.on_update(update("a", 1, final=True)) == []
    state.begin_checkpoint(7, halt=False)
    (snapshot,) = state.snapshots
    again = make(AsgdGa(combine="sum"))
    again.restore(snapshot.tensors, snapshot.control)
    assert again.on_update(update("a", 1, final=True)) == []
    replies = again.on_update(update("b", 1, final=True))
    assert {r.to for r in replies} == {"a", "b"} and all(r.final for r in replies)


def test_a_final_update_that_is_repeated_as_an_ordinary_one_is_answered_as_one():
    """After a resume with more steps to do."""
    state = make(AsgdGa(combine="sum"))
    state.on_update(update("a", 1, final=True))
    state.begin_checkpoint(7, halt=False)
    (snapshot,) = state.snapshots
    again = make(AsgdGa(combine="sum"))
    again.restore(snapshot.tensors, snapshot.control)
    (reply,) = again.on_update(update("a", 1))
    assert not reply.final and again.on_update(update("a", 1)) == [reply]
    assert again.on_update(update("a", 2, final=True)) == []
    assert {r.seq for r in again.on_update(update("b", 1, final=True))} == {1, 2}


def test_after_a_failover_a_checkpoint_waits_until_every_region_has_settled():
    state = make(AsgdGa(combine="sum"))
    state.on_failover("a")
    state.on_update(update("a", 1))
    assert not state.begin_checkpoint(7, halt=False), "it may have others to repeat"
    state.settle("a")
    assert not state.begin_checkpoint(7, halt=False)
    state.settle("b")
    assert state.begin_checkpoint(7, halt=False)


def stopped(goal: str, *, told: bool) -> Averager:
    """One of "steps 9" that was to stop, restored for a run with ``goal``."""
    state = make(AsgdGa(combine="sum"), goal="steps 9")
    state.request_stop()
    assert not told or state.on_update(update("a", 1))[0].stop
    state.begin_checkpoint(7, halt=False)
    (snapshot,) = state.snapshots
    again = make(AsgdGa(combine="sum"), goal=goal)
    again.restore(snapshot.tensors, snapshot.control)
    return again


def test_a_stop_is_in_a_checkpoint():
    again = stopped("steps 9", told=True)
    assert again.on_update(update("a", 1)).pop().stop and again.stopping


def test_a_stop_of_which_nobody_was_told_is_over_for_a_run_that_goes_further():
    again = stopped("steps 10", told=False)
    assert not again.on_update(update("a", 1)).pop().stop


def test_all_come_to_the_end_that_one_was_told_of_before_the_run_goes_further():
    again = stopped("steps 10", told=True)
    assert not again.stopping  # for good
    assert again.on_update(update("a", 1)).pop().stop
    assert again.on_update(update("b", 1)).pop().stop
    assert again.on_update(replace(update("a", 2), final=True)) == []
    last = again.on_update(replace(update("b", 2), final=True))
    assert [(reply.final, reply.stop) for reply in last] == [(True, False)] * 2
    assert not again.on_update(update("a", 3)).pop().stop


def test_the_averagers_clock_goes_on_after_a_resume():
    state = make(AsgdGa(combine="sum"))
    state.at(1000.0)
    state.state.wake_s = 1003.0
    state.begin_checkpoint(7, halt=False)
    (snapshot,) = state.snapshots
    again = make(AsgdGa(combine="sum"))
    again.restore(snapshot.tensors, snapshot.control)
    again.at(20.0)
    assert again.state.now_s == 1000.0 and again.wakes_s == 23.0
    again.at(21.5)
    assert again.state.now_s == 1001.5


def test_rows_of_sums_count_towards_the_end_as_those_of_single_updates() -> None:
    stopped = []
    for summed in (False, True):
        strategy = Asgd()
        averager = Averager(strategy, 4, AveragerState(("a", "b", "c")), enough=30)
        for seq in range(1, 20):
            version = averager.state.version
            parts = [UpdateMessage(name, 1, seq, version, 5, torch.ones(4)) for name in ("b", "c")]
            if summed:
                replies = averager.on_sum(parts, torch.full((4,), 2.0)) or []
            else:
                replies = [reply for part in parts for reply in averager.on_update(part)]
            if any(reply.stop for reply in replies):
                break
        stopped.append((seq, averager.samples))
    assert stopped == [(3, 30), (3, 30)]


@pytest.mark.parametrize("later", [False, True])
def test_who_begins_as_a_copy_of_a_later_incarnation_is_heard(later):
    """Two came up side by side: the epochs of the two do not say who enters first."""
    state = make(Sma(), ("a", "b", "c"))
    for name in ("b", "c"):
        state.leave(name)
    for number, (name, donor, attempt) in enumerate(
        [("b", "a", 2 + later), ("c", "b", 3 - later)], start=1
    ):
        state.change(MemberChange((name,), (), donor))
        known = [("a", 1), ("b", 2 + later)][:number]
        for member, own in known:
            state.on_update(update(member, number, attempt=own))
        assert name in state.view.members
        state.begun(name)
        assert state.last(name)[0] < attempt
    replies = []
    for member, own in [("a", 1), ("b", 2 + later), ("c", 3 - later)]:
        replies += state.on_update(update(member, 3, attempt=own))
    assert {reply.to for reply in replies} == {"a", "b", "c"}
    assert state.on_update(update("c", 3, attempt=3 - later)), "a repetition is answered again"
    assert state.on_update(update("c", 9, attempt=1)) == [], "of before it was lost"
