"""The averager is lost while members change, at every point: they change as a whole, or not."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import pytest
import torch

from geo_ray.base.errors import RegionLostError
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.strategies.state import AveragerState
from geo_ray.training.averager import Averager
from geo_ray.training.command_log import (
    Begun,
    ChangeInterval,
    ChangeMembers,
    TakeIn,
    execute,
    install_snapshot,
    snapshot_of,
)
from geo_ray.training.failover import (
    AnswerOwn,
    Caller,
    LivenessWatch,
    RefuseOwn,
    SendMessage,
    StandbyNode,
)
from geo_ray.training.membership import AveragerLeader, MemberChange
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.replication import AveragerReplica, ReplicatedAverager

MEMBERS, ALL = ("a", "b", "c"), ("a", "b", "c", "d")
MOST = 60  # updates of a region
KINDS = ("bsp", "asgd")  # a barrier at the end of a round, and one by final updates


def averager(kind: str = "bsp") -> Averager:
    options: dict[str, Any] = {"wait": "always"} if kind == "asgd" else {}
    strategy = STRATEGIES[kind].model_validate(options)
    return Averager(strategy, 2, AveragerState(MEMBERS))


class World:
    """Regions that send an update after every answer, and a final update when asked to."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.random = kind, Random(seed)
        self.queues: dict[tuple[str, str], deque[Any]] = {}
        self.dead: set[str] = set()
        self.seqs = dict.fromkeys(ALL, 0)
        self.barriers: dict[str, list[ReplyMessage]] = {name: [] for name in ALL}
        self.refused: list[str] = []
        self.begun = False
        self.nodes = {name: self._node(name) for name in ALL}
        for name in MEMBERS:
            self.speak(name)

    def _node(self, name: str) -> StandbyNode:
        node = StandbyNode(
            name,
            Caller(lambda message: message.payload_P, keeps=False),
            LivenessWatch(name, AveragerLeader("a"), 5.0, 30.0),
            lambda: averager(self.kind),
            preferred=("b",),
        )
        if name == "a":
            node.primary, node.standby = ReplicatedAverager(averager(self.kind)), "b"
        if name == "b":
            node.replica = AveragerReplica(averager(self.kind))
        return node

    def speak(self, name: str, *, final: bool = False, view: int = 0) -> None:
        self.seqs[name] += 1
        update = UpdateMessage(
            name, 1, self.seqs[name], 0, 4, torch.ones(2), final=final, view=view
        )
        self.execute(name, self.nodes[name].submit(update))

    def execute(self, name: str, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case SendMessage(to, message):
                    self.queues.setdefault((name, to), deque()).append(message)
                case AnswerOwn(reply):
                    self.answered(name, reply)
                case RefuseOwn():
                    self.refused.append(name)

    def answered(self, name: str, reply: ReplyMessage) -> None:
        if reply.barrier is not None:
            self.barriers[name].append(reply)
            if reply.barrier.is_donor and not self.begun:
                self.begun = True  # the joining region begins as its copy
                self.seqs["d"] = reply.seq
                self.speak("d", view=reply.view)
            if reply.barrier.leaves:
                return
        if self.seqs[name] < MOST:
            step = self.queues.setdefault((name, name), deque())  # it computes first
            step.append({"final": reply.flush, "view": reply.view})

    def deliver(self) -> bool:
        able = [p for p, q in self.queues.items() if q and not {*p} & self.dead]
        if not able:
            return False
        src, dst = self.random.choice(sorted(able))
        message = self.queues[src, dst].popleft()
        if src == dst:
            self.speak(src, **message)
        else:
            self.execute(dst, self.nodes[dst].on_message(src, message))
        return True

    def host(self) -> StandbyNode:
        return max(
            (n for n in self.nodes.values() if n.primary and n.region not in self.dead),
            key=lambda n: n.leader.term,
        )

    def ask(self, change: MemberChange) -> None:
        host = self.host()
        self.execute(host.region, host.offer(ChangeMembers(change)))

    def kill_leader(self) -> None:
        dead = self.host().region
        self.dead.add(dead)
        for name in sorted(set(ALL) - self.dead):
            self.execute(name, self.nodes[name].on_report_dead(dead))


@pytest.mark.parametrize(
    "change", [MemberChange(joins=("d",), preferred_donor="c"), MemberChange((), ("c",))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_leader_is_lost_at_every_point_of_a_change(kind: str, change: MemberChange) -> None:
    """The new leader has all of the change or nothing; asked again, it completes it once."""
    done_before = 0
    for when in range(60):
        world = World(kind, when)
        world.ask(change)
        for _ in range(when):
            world.deliver()
        changed = bool(change.joins) and "d" in world.host().members
        world.kill_leader()
        view = world.host().averager.view
        assert (("d" in view.members) if change.joins else ("c" in view.left)) == (
            view.generation > 2
        )
        done_before += view.generation > 2 or changed
        for _ in range(400):
            host = world.host().averager
            is_done = "d" in host.view.members if change.joins else "c" in host.view.left
            if not is_done and not host.is_changing:
                world.ask(change)  # as the controller does
            if not world.deliver():
                break
        after = world.host().averager.view
        there = ("b", "c", "d") if change.joins else ("b",)
        assert after.members == there and not after.joining, (when, after)
        assert not world.refused
        told = "c"  # the donor, or the leaving region, is notified of the barrier once
        marks = [
            r.barrier.is_donor if change.joins else r.barrier.leaves for r in world.barriers[told]
        ]
        assert marks == [True]
    assert done_before  # in some cases the leader was lost after the barrier


def test_what_was_said_before_a_region_was_lost_never_counts_after_its_return() -> None:
    hub = averager("asgd")
    hub.on_update(UpdateMessage("c", 1, 1, 0, 4, torch.ones(2)))
    hub.leave("c")
    late = UpdateMessage("c", 1, 2, 0, 4, torch.ones(2))
    with pytest.raises(RegionLostError, match="is no longer a member"):
        hub.on_update(late)
    hub.change(MemberChange(joins=("c",), preferred_donor="a"))
    replies = [
        r for n in "ab" for r in hub.on_update(UpdateMessage(n, 1, 1, 0, 4, torch.ones(2), True))
    ]
    assert {r.barrier.view for r in replies} == {r.view for r in replies} == {3}
    version = hub.state.version
    with pytest.raises(RegionLostError, match="since view 3"):
        hub.on_update(UpdateMessage("c", 1, 9, 0, 4, torch.ones(2), view=2))
    assert hub.state.version == version
    assert hub.on_update(UpdateMessage("c", 2, 10, 0, 4, torch.ones(2), view=3))


def test_who_leaves_may_ask_for_its_last_answer_again() -> None:
    hub = averager("bsp")
    hub.change(MemberChange((), ("c",)))
    updates = [UpdateMessage(name, 1, 1, 0, 4, torch.ones(2)) for name in MEMBERS]
    given = {r.to: r for u in updates for r in hub.on_update(u)}
    assert given["c"].barrier.leaves and hub.view.members == ("a", "b")
    assert [r.barrier for r in hub.on_update(updates[2])] == [given["c"].barrier]
    with pytest.raises(RegionLostError):
        hub.on_update(UpdateMessage("c", 1, 2, 0, 4, torch.ones(2)))


@pytest.mark.parametrize("kind", sorted(STRATEGIES))
def test_a_copy_answers_as_the_averager_does(kind: str) -> None:
    """At every point, with a change of members on its way, and a checkpoint that some know of."""
    strategy = STRATEGIES[kind].model_validate({})
    fragments = strategy.traits.exchange.fragments
    random = Random(kind)
    for seed in range(6):
        hub = Averager(strategy, 8, AveragerState(MEMBERS))
        copies: list[Averager] = []
        for number in range(1, 13):
            for name in random.sample(MEMBERS, 3):
                fragment = number % fragments if fragments > 1 else 0
                start, stop = hub.state.fragments[fragment]
                payload_P = torch.randn(stop - start)
                update = UpdateMessage(
                    name, 1, number, hub.state.version, 4, payload_P, fragment=fragment
                )
                given = execute(hub, TakeIn(update))
                for copy in copies:
                    assert same(execute(copy, TakeIn(update)), given)
                if random.random() < 0.15:
                    copy = Averager(strategy, 8, AveragerState(MEMBERS))
                    install_snapshot(copy, snapshot_of(hub))
                    copies.append(copy)
            if number == 4 and seed % 2:
                both = [hub, *copies]
                begun = [each.begin_checkpoint(7, halt=False) for each in both]
                assert len(set(begun)) == 1
            if number == 6:
                for each in [hub, *copies]:
                    execute(each, ChangeInterval(3))
            if number == 8:
                for each in [hub, *copies]:
                    execute(each, ChangeMembers(MemberChange(joins=("d",), preferred_donor="a")))
            if number == 11:
                for each in [hub, *copies]:
                    execute(each, Begun("d"))
        for copy in copies:
            assert copy.view == hub.view and copy.state.version == hub.state.version
            assert copy.state.memory.keys() == hub.state.memory.keys()
            assert all(torch.equal(v, hub.state.memory[k]) for k, v in copy.state.memory.items())


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or a.done != b.done or str(a.error) != str(b.error):
        return False
    pairs = list(zip(a.replies, b.replies, strict=True))
    return all(torch.equal(x.payload_P, y.payload_P) and told(x) == told(y) for x, y in pairs)


def told(reply: ReplyMessage) -> tuple[Any, ...]:
    return (
        *(reply.to, reply.seq, reply.version, reply.final, reply.stop, reply.checkpoint),
        *(reply.flush, reply.barrier, reply.view, reply.steps, reply.draining),
    )
