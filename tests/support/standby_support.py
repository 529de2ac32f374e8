"""Regions, their bridges and an averager that may move, on a network that somebody shuffles.

Every local step changes one coordinate of its own, by exactly -1 in its own region. So each replica
shows which steps of which region have reached it, and how often.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from random import Random

import torch
from torch import Tensor

from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update, Wait
from geo_ray.training.averager import Averager
from geo_ray.training.command_log import BeginCheckpoint, Skip
from geo_ray.training.failover import (
    AnswerOwn,
    AveragerRequest,
    Caller,
    EntryDone,
    LivenessWatch,
    RefuseOwn,
    SendMessage,
    StandbyEvent,
    StandbyNode,
)
from geo_ray.training.membership import AveragerLeader
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.replication import AveragerReplica, ReplicatedAverager

TAKEOVER_S, REJOIN_S = 5.0, 20.0


@dataclass(frozen=True)
class Setup:
    """What is run."""

    strategy: object
    regions: int
    steps: int
    bound: float
    skips: bool = False
    checkpoints: bool = False


class Counted:
    """A strategy that adds up what an averager has taken in."""

    def __init__(self, inner, num_params: int) -> None:
        self.inner = inner
        told = replace(inner.traits.averager, releases=False, wakes=False)
        self.traits = replace(inner.traits, averager=told)
        self.on_finished = inner.on_finished
        self.num_params = num_params

    def on_update(self, state: AveragerState, update: Update) -> list[Reply]:
        if self.traits.sends == "change":
            taken_P = state.memory.setdefault("taken", torch.zeros(self.num_params))
            state.memory["taken"] = taken_P + update.payload_P
        return self.inner.on_update(state, update)


@dataclass
class Region:
    """A primary shard without parameters: it steps, sends, merges."""

    name: str
    first: int  # its coordinates begin here
    world: World
    phase: str = "training"  # must_speak, waiting, finishing, done, failed
    seq: int = 0
    averager_version: int = 0
    merged: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = RegionState(torch.zeros(self.world.num_params), self._apply)
        self.owed_P: Tensor | None = None
        self.sent: dict[int, Tensor] = {}

    def _apply(self, grad_P: Tensor) -> None:
        self.state.params_P.sub_(grad_P)

    def step(self) -> None:
        state, strategy = self.state, self.world.setup.strategy
        grad_P = torch.zeros(self.world.num_params)
        grad_P[self.first + state.step] = 1.0
        state.step += 1
        state.since_send += 1
        state.samples += 1
        strategy.on_gradient(state, grad_P)
        out = strategy.after_step(state)
        if isinstance(out, Wait):
            self.phase = "must_speak"
        elif out is not None:
            self.send(out, final=False)
        self.advance()

    def advance(self) -> None:
        """What follows by itself; see `Server`."""
        strategy = self.world.setup.strategy
        if self.phase == "must_speak" and not self.state.link_busy:
            self.phase = "training"
            out = strategy.after_step(self.state)
            if isinstance(out, Outgoing):
                self.send(out, final=False)
        if self.phase == "training" and self.state.step == self.world.setup.steps:
            if self.state.link_busy:
                self.phase = "waiting"
                return
            out = strategy.on_finish(self.state)
            if out is None:
                self.phase = "done"
                return
            self.send(out, final=True)

    def send(self, out: Outgoing, *, final: bool) -> None:
        state = self.state
        state.link_busy, state.since_send = True, 0
        self.seq += 1
        payload_P = out.payload_P if self.owed_P is None else out.payload_P + self.owed_P
        self.owed_P = None
        self.sent[self.seq] = payload_P
        if out.wait:
            self.phase = "finishing" if final else "waiting"
        update = UpdateMessage(
            self.name, 1, self.seq, self.averager_version, max(1, state.samples), payload_P, final
        )
        state.samples = 0
        self.world.execute(self.name, self.world.nodes[self.name].submit(update))

    def give(self, reply: ReplyMessage) -> None:
        assert reply.seq == self.seq and self.state.link_busy
        self.state.link_busy = False
        if reply.dropped:
            self.owed_P = self.sent[reply.seq]
        self.world.setup.strategy.on_reply(self.state, reply)
        self.averager_version = reply.version
        if not reply.dropped:
            self.merged.append(reply.seq)
        if self.phase == "waiting":
            self.phase = "training"
        elif self.phase == "finishing":
            self.phase = "done" if reply.final else "training"
        self.advance()


class World:
    """The first region hosts the averager, the second the standby."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup = setup
        self.random = Random(seed)
        self.names = tuple("abcdef"[: setup.regions])
        self.num_params = setup.regions * setup.steps
        self.now_s = 0.0
        self.queues: dict[tuple[str, str], deque] = {}
        self.cut: set[frozenset[str]] = set()
        self.dead: set[str] = set()
        self.events: list[StandbyEvent] = []
        self.nodes = {name: self._node(name) for name in self.names}
        self.regions = {
            name: Region(name, i * setup.steps, self) for i, name in enumerate(self.names)
        }
        self.checkpoints = 0
        self.tick(0.0)

    def _averager(self) -> Averager:
        strategy = Counted(self.setup.strategy, self.num_params)
        return Averager(strategy, self.num_params, AveragerState(self.names))

    def _node(self, name: str) -> StandbyNode:
        first, standby = self.names[:2]
        keeps = self.setup.strategy.traits.sends == "change"
        node = StandbyNode(
            name,
            Caller(lambda message: message.payload_P, keeps),
            LivenessWatch(name, AveragerLeader(first), TAKEOVER_S, REJOIN_S),
            self._averager,
            preferred=(standby,),
            bound=self.setup.bound,
        )
        if name == first:
            node.primary = ReplicatedAverager(self._averager(), self.setup.bound)
            node.standby = standby
        if name == standby:
            node.replica = AveragerReplica(self._averager())
        return node

    # ---------------------------------------------------------------- network

    def is_up(self, a: str, b: str) -> bool:
        return not {a, b} & self.dead and frozenset((a, b)) not in self.cut

    def execute(self, name: str, effects) -> None:
        for effect in effects:
            match effect:
                case SendMessage(to, message):
                    self.queues.setdefault((name, to), deque()).append(message)
                case AnswerOwn(reply):
                    self.regions[name].give(reply)
                case RefuseOwn():
                    self.regions[name].phase = "failed"
                case StandbyEvent():
                    self.events.append(effect)
                case EntryDone():
                    self.check()

    def movable(self) -> list[tuple[str, str]]:
        return [pair for pair, queue in self.queues.items() if queue and self.is_up(*pair)]

    def deliver(self, pair: tuple[str, str]) -> None:
        src, dst = pair
        message = self.queues[pair].popleft()
        node = self.nodes[dst]
        if isinstance(message, AveragerRequest) and self.setup.skips and node.primary is not None:
            message = self._maybe_skip(message)
        self.execute(dst, node.on_message(src, message))

    def _maybe_skip(self, request: AveragerRequest) -> AveragerRequest:
        """Now and then an update is too stale."""
        if request.again or request.op.update.final or self.random.random() > 0.3:
            return request
        update = request.op.update
        return AveragerRequest(Skip(update.region, update.attempt, update.seq))

    # ---------------------------------------------------------------- events

    def tick(self, passed_s: float) -> None:
        self.now_s += passed_s
        for name, node in self.nodes.items():
            if name not in self.dead:
                peers = [other for other in self.names if other != name and self.is_up(name, other)]
                self.execute(name, node.tick(self.now_s, peers))

    def kill(self, name: str, random: Random) -> None:
        """What it had sent may have arrived in part."""
        self.dead.add(name)
        for (src, dst), queue in list(self.queues.items()):
            if dst == name:
                queue.clear()
            elif src == name:
                arriving = random.randint(0, len(queue))
                messages = [queue.popleft() for _ in range(arriving)]
                queue.clear()
                for message in messages:
                    if dst not in self.dead:
                        self.execute(dst, self.nodes[dst].on_message(src, message))

    def report_dead(self, name: str) -> None:
        for other, node in self.nodes.items():
            if other not in self.dead:
                self.execute(other, node.on_report_dead(name))

    def checkpoint(self) -> None:
        self.checkpoints += 1
        node = self.host()
        if node is not None:
            self.execute(node.region, node.offer(BeginCheckpoint(self.checkpoints, halt=False)))

    def host(self) -> StandbyNode | None:
        """The leader of the highest term, if it is alive."""
        alive = [n for name, n in self.nodes.items() if name not in self.dead and n.primary]
        return max(alive, key=lambda n: n.leader.term, default=None)

    def successor(self) -> str | None:
        """The region that may take over from `host`."""
        host = self.host()
        if host is None:
            return None
        found = [
            name
            for name, node in self.nodes.items()
            if node.is_standby and node.leader == host.leader and name not in self.dead
        ]
        assert len(found) <= 1, found
        return found[0] if found else None

    def stepping(self) -> list[str]:
        return [
            name
            for name, region in self.regions.items()
            if name not in self.dead
            and region.phase == "training"
            and region.state.step < self.setup.steps
        ]

    def run_out(self) -> None:
        """Let everything that can still happen happen."""
        for _ in range(400):
            while self.movable() or self.stepping():
                while self.movable():
                    self.deliver(self.random.choice(self.movable()))
                    self.check()
                if self.stepping():
                    self.regions[self.random.choice(self.stepping())].step()
            if all(self.regions[name].phase == "done" for name in self.survivors()):
                return
            self.tick(1.0)
        phases = {name: region.phase for name, region in self.regions.items()}
        raise AssertionError(f"stuck: {phases}, dead {self.dead}, {self.events}")

    # ---------------------------------------------------------------- promises

    def survivors(self) -> list[str]:
        return [n for n, r in self.regions.items() if n not in self.dead and r.phase != "failed"]

    def check(self) -> None:
        host, standby = self.host(), self.successor()
        if host is not None:
            assert host.primary.ahead <= self.setup.bound
            if standby is not None and self.setup.strategy.traits.sends == "change":
                self._check_distance(host, self.nodes[standby])
        if self._is_exact:
            for name in self.survivors():
                params_P = self.regions[name].state.params_P
                assert bool(((params_P == 0) | (params_P == -1)).all()), (name, params_P)

    def _check_distance(self, host: StandbyNode, standby: StandbyNode) -> None:
        """The standby may be ahead by what is still held back; behind only by the bound."""
        assert host.primary is not None and standby.replica is not None
        if standby.replica.number > host.primary.stable or not host.primary.has_standby:
            return  # acknowledgements are on their way
        if all(line.is_committed for line in host.primary._lines):
            behind_P = known_to(host.primary.averager) - known_to(standby.replica.averager)
            assert float(behind_P.norm()) <= self.setup.bound + 1e-4

    @property
    def _is_exact(self) -> bool:
        traits = self.setup.strategy.traits
        return traits.sends == "change" and traits.averager.adds_up == "sum"

    def check_end(self) -> None:
        alive = self.survivors()
        first_P = self.regions[alive[0]].state.params_P
        for name in alive:
            params_P = self.regions[name].state.params_P
            torch.testing.assert_close(params_P, first_P)
            if self.setup.strategy.traits.sends == "model" or self.setup.strategy.traits.in_rounds:
                assert torch.equal(params_P, first_P)
        if not self._is_exact:
            return
        for name, region in self.regions.items():
            own_P = first_P[region.first : region.first + self.setup.steps]
            if name in alive:
                assert bool((own_P == -1).all()), (name, own_P)
                continue
            lost = [self._is_missing(region, seq, first_P) for seq in region.merged]
            norms = [float(region.sent[s].norm()) for s, m in zip(region.merged, lost, strict=True)]
            gone = sum(norm for norm, missing in zip(norms, lost, strict=True) if missing)
            assert gone <= self.setup.bound + 1e-4

    @staticmethod
    def _is_missing(region: Region, seq: int, params_P: Tensor) -> bool:
        return bool((params_P[region.sent[seq] != 0] == 0).any())


def known_to(averager: Averager) -> Tensor:
    """The sum of what an averager has taken in."""
    taken_P = averager.state.memory.get("taken")
    return torch.zeros(averager.num_params) if taken_P is None else taken_P
