"""Checkpoints at an averager that took over: they hold all that regions have merged."""

from __future__ import annotations

import pytest
import torch

from geo_ray.strategies.registry import STRATEGIES
from geo_ray.strategies.state import AveragerState
from geo_ray.training.averager import Averager
from geo_ray.training.command_log import BeginCheckpoint
from geo_ray.training.failover import (
    AnswerOwn,
    Caller,
    EntryDone,
    LivenessWatch,
    LogAppend,
    SendMessage,
    StandbyEffect,
    StandbyMessage,
    StandbyNode,
)
from geo_ray.training.membership import AveragerLeader
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.replication import AveragerReplica, ReplicatedAverager

MEMBERS = ("a", "b", "c")


def averager() -> Averager:
    strategy = STRATEGIES["asgd"].model_validate({"wait": "always"})
    return Averager(strategy, 2, AveragerState(MEMBERS))


def node(region: str) -> StandbyNode:
    return StandbyNode(
        region,
        Caller(lambda message: message.payload_P, keeps=True),
        LivenessWatch(region, AveragerLeader("a", 1), 5, 30),
        averager,
        bound=1e9,
        primary=ReplicatedAverager(averager(), bound=1e9) if region == "a" else None,
        replica=AveragerReplica(averager()) if region == "b" else None,
        standby="b" if region == "a" else None,
    )


class World:
    """Three regions; the log from `a` to its standby `b` is lost with `a`."""

    def __init__(self) -> None:
        self.nodes = {region: node(region) for region in MEMBERS}
        self.queue: list[tuple[str, str, StandbyMessage]] = []
        self.given: dict[str, list[ReplyMessage]] = {region: [] for region in MEMBERS}
        self.begun: list[bool] = []
        self.lost: str | None = None

    def run(self, source: str, effects: list[StandbyEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendMessage):
                if self.lost not in (source, effect.to) and not isinstance(
                    effect.message, LogAppend
                ):
                    self.queue.append((source, effect.to, effect.message))
            elif isinstance(effect, AnswerOwn):
                self.given[source].append(effect.reply)
            elif isinstance(effect, EntryDone) and isinstance(effect.committed.op, BeginCheckpoint):
                self.begun.append(effect.committed.outcome.done)

    def deliver(self, most: int | None = None) -> None:
        while self.queue and most != 0:
            source, to, message = self.queue.pop(0)
            self.run(to, self.nodes[to].on_message(source, message))
            most = None if most is None else most - 1

    def submit(self, region: str, seq: int, value: float) -> None:
        update = UpdateMessage(region, 1, seq, 0, 4, torch.full((2,), value))
        self.run(region, self.nodes[region].submit(update))

    def begin(self) -> bool:
        self.run("b", self.nodes["b"].offer(BeginCheckpoint(7, halt=False)))
        return self.begun[-1]


@pytest.fixture(params=[1, 2, 3])
def repeating(request) -> tuple[World, int]:
    """`c` has merged answers of a lost averager, and is about to repeat them at the new one."""
    world, merged = World(), request.param
    world.submit("a", 1, 100.0)
    world.deliver()
    for seq in range(1, merged + 1):
        world.submit("c", seq, float(seq))
        world.deliver()
    world.submit("c", merged + 1, 7.0)
    world.submit("b", 1, 0.5)
    world.queue.clear()
    world.lost = "a"
    world.run("b", world.nodes["b"].on_report_dead("a"))
    return world, merged


def test_no_checkpoint_begins_before_everything_is_repeated(repeating) -> None:
    world, merged = repeating
    while not world.begin():
        assert world.queue, "the checkpoint can never begin"
        world.deliver(1)
    averager = world.nodes["b"].averager
    assert averager is not None
    (snapshot,) = averager.snapshots
    restored = Averager(averager.strategy, 2, AveragerState(("b", "c")))
    restored.restore(snapshot.tensors, snapshot.control)
    world.deliver()
    last = world.given["c"][-1]
    assert last.seq == merged + 1 and last.checkpoint is None
    # The run goes on, and again from the checkpoint: c is told the same.
    world.submit("c", merged + 2, 9.0)
    world.deliver()
    again = restored.on_update(UpdateMessage("c", 1, merged + 2, 0, 4, torch.full((2,), 9.0)))
    assert torch.equal(world.given["c"][-1].payload_P, again[0].payload_P)
    # After an exchange more of each, both have the same model: nothing of `a` is left.
    for region, seq in (("b", 2), ("c", merged + 3), ("b", 3), ("c", merged + 4)):
        world.submit(region, seq, 0.0)
        world.deliver()
    own = {"b": 0.5, "c": 16.0 + sum(range(1, merged + 1))}  # applied by the regions themselves
    models = {
        name: torch.stack([reply.payload_P for reply in world.given[name]]).sum(0) + own[name]
        for name in own
    }
    assert torch.allclose(models["b"], models["c"]) and models["b"].abs().max() < 50


def test_the_mark_reaches_the_region(repeating) -> None:
    world, merged = repeating
    while not world.begin():
        world.deliver(1)
    world.deliver()
    for seq in (merged + 2, merged + 3):
        world.submit("c", seq, 9.0)
        world.deliver()
    assert [reply.checkpoint for reply in world.given["c"]][-2:] == [7, None]
