"""The averager, driven one update at a time."""

from __future__ import annotations

import pytest
import torch

from geo_ray.errors import InvariantError, NonFiniteError
from geo_ray.strategies.asgd_ga import AsgdGa
from geo_ray.strategies.base import AveragerState, Update
from geo_ray.strategies.sma import Sma
from geo_ray.training.averager.averager import Averager


def make(strategy, members=("a", "b")):
    return Averager(strategy, 2, AveragerState(tuple(members)))


def update(region, seq, values=(1.0, 2.0), samples=8, epoch=1, final=False):
    return Update(region, epoch, seq, 0, samples, torch.tensor(values), final)


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
    assert state.on_update(update("a", 1, epoch=0)) == []  # of an earlier incarnation


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


def test_a_checkpoint_of_an_asynchronous_run_is_of_one_moment():
    state = make(AsgdGa(combine="sum"))
    assert state.request_checkpoint(7, halt=False)
    assert not state.request_checkpoint(8, halt=False)
    (told,) = state.on_update(update("a", 1))
    assert told.checkpoint == 7
    assert state.on_update(update("a", 2, (100.0, 100.0))) == []  # held: not before b is told
    assert not state.snapshots
    replies = state.on_update(update("b", 1, (5.0, 5.0)))
    assert {(r.to, r.checkpoint) for r in replies} == {("b", 7), ("a", None)}
    (snapshot,) = state.snapshots
    assert torch.equal(snapshot.tensors["outbox/a"], torch.tensor([5.0, 5.0]))
    assert "outbox/b" not in snapshot.tensors  # a's first was delivered with b's answer
    again = make(AsgdGa(combine="sum"))
    again.restore(snapshot.tensors, snapshot.control)
    assert torch.equal(again.on_update(update("a", 2)).pop().payload_P, torch.tensor([5.0, 5.0]))


def test_a_final_update_does_not_end_an_open_checkpoint():
    state = make(AsgdGa(combine="sum"))
    state.request_checkpoint(7, halt=True)
    (told_a,) = state.on_update(update("a", 1))
    (told_b,) = state.on_update(update("b", 1, final=True))
    assert not told_b.final and told_b.checkpoint == told_a.checkpoint == 7 and told_b.halt
    assert [s.id for s in state.snapshots] == [7]
    assert state.on_update(update("b", 2, final=True)) == []  # said again; waits for a's
    replies = state.on_update(update("a", 2, final=True))
    assert {r.to for r in replies} == {"a", "b"} and all(r.final for r in replies)
    assert not state.request_checkpoint(8, halt=False)


def test_a_region_that_has_finished_does_not_end_checkpoints():
    state = make(AsgdGa(combine="sum"))
    assert state.on_update(update("a", 1, final=True)) == []
    assert state.request_checkpoint(7, halt=False)
    replies = state.on_update(update("b", 1))
    assert {(r.to, r.seq, r.checkpoint, r.final) for r in replies} == {
        ("a", 1, 7, False),
        ("b", 1, 7, False),
    }
    assert state.on_update(update("a", 1, final=True)) == [r for r in replies if r.to == "a"]
    assert state.on_update(update("a", 2, final=True)) == []
    assert len(state.on_update(update("b", 2, final=True))) == 2
