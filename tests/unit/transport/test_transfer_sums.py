"""Sums of updates, and updates that are given up: everybody ends with what all did, once."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from geo_ray.base.errors import InvariantError, NonFiniteError, RegionLostError
from geo_ray.strategies.ama import Ama
from geo_ray.strategies.asgd_ga import AsgdGa
from geo_ray.strategies.state import AveragerState
from geo_ray.training.averager import Averager
from geo_ray.training.messages import UpdateMessage

NAMES = ("a", "b", "c", "d")


class Replica:
    """A region under plain SGD: it applies its own change at once and sends it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.params_P = torch.zeros(16, dtype=torch.float32)
        self.open: UpdateMessage | None = None
        self.owed_P = torch.zeros(16)
        self.seq = 0

    def outgoing(self, random: Random, final: bool = False) -> UpdateMessage:
        change_P = torch.tensor([random.gauss(0, 1) for _ in range(16)])
        self.params_P -= change_P
        self.seq += 1
        self.open = UpdateMessage(self.name, 1, self.seq, 0, 4, change_P + self.owed_P, final)
        self.owed_P = torch.zeros(16)
        return self.open

    def merge(self, reply) -> None:
        assert self.open is not None and reply.seq == self.open.seq
        payload_P = reply.payload_P
        if reply.own:
            payload_P = payload_P - self.open.payload_P
        if reply.dropped:
            self.owed_P = self.owed_P + self.open.payload_P
        self.params_P = self.params_P - payload_P
        self.open = None


def hub_of(combine: str, names=NAMES) -> Averager:
    return Averager(AsgdGa(combine=combine), 16, AveragerState(tuple(names)))


def headers(parts: list[UpdateMessage]) -> list[UpdateMessage]:
    return [replace(part, payload_P=torch.empty(0)) for part in parts]


def total_of(parts: list[UpdateMessage]):
    return torch.stack([part.payload_P for part in parts]).sum(dim=0)


def run(seed: int, combine: str, sums: bool, drops: bool) -> dict[str, Replica]:
    """The same changes in the same order; in sums of random size, or one by one."""
    random, coins = Random(seed), Random(seed + 1)
    state, replicas = hub_of(combine), {name: Replica(name) for name in NAMES}
    for _ in range(12):
        order = coins.sample(NAMES, len(NAMES))
        cut = coins.randint(0, len(NAMES))
        updates = [replicas[name].outgoing(random) for name in order]
        straight, summed = updates[:cut], updates[cut:]
        giving_up = coins.random() < 0.3
        replies = []
        for update in straight:
            if drops and giving_up:
                replies += state.on_skip(update.region, update.attempt, update.seq)
            else:
                replies += state.on_update(update)
        if sums and len(summed) > 1:
            replies += state.on_sum(headers(summed), total_of(summed)) or []
        else:
            replies += [reply for update in summed for reply in state.on_update(update)]
        assert sorted(r.to for r in replies) == sorted(order)
        for reply in replies:
            replicas[reply.to].merge(reply)
    finals = [replicas[name].outgoing(random, final=True) for name in NAMES]
    for reply in [reply for update in finals for reply in state.on_update(update)]:
        replicas[reply.to].merge(reply)
    assert state.state.version == 13 * len(NAMES) or drops
    return replicas


@pytest.mark.parametrize("combine", ["sum", "mean"])
@pytest.mark.parametrize("seed", range(5))
def test_with_sums_all_end_where_they_end_without(seed: int, combine: str) -> None:
    plain = run(seed, combine, sums=False, drops=False)
    summed = run(seed, combine, sums=True, drops=False)
    for name in NAMES:
        torch.testing.assert_close(summed[name].params_P, summed["a"].params_P)
        torch.testing.assert_close(summed[name].params_P, plain[name].params_P)


@pytest.mark.parametrize("combine", ["sum", "mean"])
@pytest.mark.parametrize("seed", range(5))
def test_abandoned_updates_come_later_and_nothing_is_lost(seed: int, combine: str) -> None:
    plain = run(seed, combine, sums=False, drops=False)
    dropped = run(seed, combine, sums=True, drops=True)
    for name in NAMES:
        torch.testing.assert_close(dropped[name].params_P, plain["a"].params_P)


def test_equal_answers_are_one_tensor() -> None:
    state, random = hub_of("sum"), Random(0)
    replicas = {name: Replica(name) for name in NAMES}
    state.on_update(replicas["d"].outgoing(random))
    parts = [replicas[name].outgoing(random) for name in "abc"]
    replies = state.on_sum(headers(parts), total_of(parts))
    assert replies is not None
    assert all(reply.own and reply.payload_P is replies[0].payload_P for reply in replies)


def test_a_sum_with_a_part_that_is_known_changes_nothing() -> None:
    state, random = hub_of("sum"), Random(0)
    parts = [Replica(name).outgoing(random) for name in "ab"]
    state.on_update(parts[0])
    before = {k: v.clone() for k, v in state.state.memory.items()}
    assert state.on_sum(headers(parts), total_of(parts)) is None
    assert state.last("b") == (0, 0)
    assert before.keys() == state.state.memory.keys()
    assert all(torch.equal(before[k], state.state.memory[k]) for k in before)


def test_a_part_of_a_sum_that_comes_again_gets_its_answer_again() -> None:
    state, random = hub_of("mean"), Random(0)
    parts = [Replica(name).outgoing(random) for name in "ab"]
    (first, _) = state.on_sum(headers(parts), total_of(parts)) or []
    assert state.on_update(parts[0]) == [first]


def test_a_checkpoint_does_not_hold_sums_up() -> None:
    state, random = hub_of("sum"), Random(0)
    replicas = {name: Replica(name) for name in NAMES}
    state.begin_checkpoint(1, halt=False)
    replicas["a"].merge(state.on_update(replicas["a"].outgoing(random))[0])
    parts = [replicas[name].outgoing(random) for name in "ab"]
    replies = state.on_sum(headers(parts), total_of(parts))
    assert replies is not None and [r.checkpoint for r in replies] == [None, 1]
    (skipped,) = state.on_skip("c", 1, 1)
    assert skipped.dropped and skipped.checkpoint == 1


def test_bad_sums_are_refused() -> None:
    state, random = hub_of("sum"), Random(0)
    parts = [Replica(name).outgoing(random) for name in "ab"]
    with pytest.raises(NonFiniteError):
        state.on_sum(headers(parts), torch.full((16,), float("nan")))
    with pytest.raises(InvariantError, match="parameters"):
        state.on_sum(headers(parts), torch.zeros(3))
    with pytest.raises(InvariantError, match="sum of updates"):
        Averager(Ama(), 16, AveragerState(NAMES)).on_sum(headers(parts), total_of(parts))
    assert state.state.version == 0 and not state.state.memory


def test_a_leaving_region_is_not_waited_for() -> None:
    state, random = hub_of("sum", "abc"), Random(0)
    replicas = {name: Replica(name) for name in "abc"}
    for name in "ab":
        assert state.on_update(replicas[name].outgoing(random, final=True)) == []
    replies = state.leave("c")
    assert sorted(r.to for r in replies) == ["a", "b"] and all(r.final for r in replies)
    for reply in replies:
        replicas[reply.to].merge(reply)
    torch.testing.assert_close(replicas["a"].params_P, replicas["b"].params_P)
    with pytest.raises(RegionLostError, match="is no longer a member"):
        state.on_update(replicas["c"].outgoing(random))
