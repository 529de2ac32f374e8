"""The training plane without a clock: the test decides what happens next."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import torch
from torch import Tensor

from geo_ray.base.types import Span, StepReport
from geo_ray.codecs.base import Codec
from geo_ray.strategies.state import AveragerState, Reply, Update
from geo_ray.training.assignment import ServerPlan
from geo_ray.training.averager import Averager
from geo_ray.training.config import ElasticConfig
from geo_ray.training.effects import (
    ActiveWorkersChanged,
    Assignment,
    SendUpdate,
    Snapshot,
    StepDone,
)
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.optimizers import Momentum, Sgd
from geo_ray.training.parameters import digest, split_sizes
from geo_ray.training.payload_encoding import AveragerWire, WirePlan
from geo_ray.training.server import Server
from geo_ray.training.shard import Shard

NUM_PARAMS = 5
BATCH = 4


@dataclass(frozen=True)
class Setup:
    """What is run."""

    strategy: object
    optimizer: Sgd | Momentum
    workers: dict[str, int]
    mode: str
    steps: int
    refusals: bool
    num_shards: int = 1
    up: Codec | None = None
    down: Codec | None = None
    elastic: ElasticConfig | None = None

    @property
    def wire(self) -> WirePlan:
        traits = self.strategy.traits
        fragments = traits.exchange.fragments
        error = 0.03 if traits.in_rounds else 3e-7  # one by one: equal to rounding is checked
        return WirePlan(
            self.up,
            self.down,
            traits.sends,
            traits.in_rounds,
            fragments=fragments,
            last_error=error,
        )

    @property
    def rows(self) -> int | None:
        """After which all end together; None if each ends after its steps."""
        per_step = 1 if self.mode == "sync" else max(self.workers.values())
        rows = self.steps * per_step * BATCH * sum(self.workers.values())
        return rows if self.strategy.traits.region.ends_by_total_rows else None


class Watched:
    """A strategy that notes what the averager takes in and what regions merge."""

    def __init__(self, plane: Plane, region: str | None = None) -> None:
        self._plane = plane
        self._region = region
        inner = plane.setup.strategy
        self.on_gradient = inner.on_gradient
        self.after_step = inner.after_step
        self.on_finish = inner.on_finish
        self._trains_on = inner.traits.exchange.blocking != "always"
        self.on_finished, self.on_wake = inner.on_finished, inner.on_wake
        self.traits = inner.traits

    def on_reply(self, region, reply: Reply) -> None:
        self._plane.setup.strategy.on_reply(region, reply)
        # Regions that train on while a round is on its way get the same answer, at other points.
        same_P = reply.payload_P if self._trains_on else region.params_P
        self._plane.merged.setdefault(self._plane.merging, {}).setdefault(self._region, []).append(
            digest(same_P)
        )

    def on_update(self, state: AveragerState, update: Update) -> list[Reply]:
        before = state.version
        replies = self._plane.setup.strategy.on_update(state, update)
        self._plane.taken[update.region, *self._plane.averager.last(update.region)] += 1
        self._plane.order.append(update.region)
        self._note(replies)
        if self._plane.setup.strategy.traits.in_rounds:
            assert {r.to for r in replies} in (set(), set(state.members))
            assert state.version == before + bool(replies)
        return replies

    def on_release(self, state: AveragerState) -> list[Reply]:
        replies = self._plane.setup.strategy.on_release(state)
        self._note(replies)
        assert not state.waiting, "somebody still waits"
        return replies

    def _note(self, replies: list[Reply]) -> None:
        for reply in replies:
            seq = self._plane.averager.last(reply.to)[1]
            self._plane.answered[reply.to, seq] = len(self._plane.order)


@dataclass
class Region:
    server: Server
    shards: list[Shard]
    busy: dict[int, tuple[Span, Tensor]] = field(default_factory=dict)  # rank -> work
    here: set[int] = field(default_factory=set)  # ranks that wait or work
    exited: set[int] = field(default_factory=set)  # ranks that have exited
    memory: dict[int, Tensor] = field(default_factory=dict)  # rank -> where it leaves gradients
    sent: UpdateMessage | None = None
    last_answered: int = 0  # length of the averager's order at the last answer
    behind: int = 0  # commits between the region's part of a checkpoint and the averager's

    @property
    def params_P(self) -> Tensor:
        return torch.cat([shard.params_S for shard in self.shards])


@dataclass
class Saved:
    """The parts of a checkpoint, as far as they are there.

    `taken` is what the averager had taken in when it began.
    """

    regions: dict[str, tuple] = field(default_factory=dict)
    state: tuple | None = None
    taken: Counter[tuple[str, int, int]] = field(default_factory=Counter)


class Plane:
    """Regions, averager, a network that keeps nothing in order, and a disk."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.names = tuple(sorted(setup.workers))
        self.attempt = 0
        self.saves: dict[int, Saved] = {}
        self.next_save = 1
        self.stopped = False
        self.taken: Counter[tuple[str, int, int]] = Counter()
        self._begin()

    # ---------------------------------------------------------------- life

    def _begin(self) -> None:
        """Restart all processes; as they were saved, if there is a complete checkpoint."""
        self.attempt += 1
        self.halts: list[int] = []  # checkpoints after which the regions stand still
        self.marks: list[tuple[str, int, bool]] = []  # regions that are told of checkpoints apart
        self.taken.clear()
        self.updates: list[UpdateMessage] = []
        self.replies: list[ReplyMessage] = []
        self.old: list[UpdateMessage] = []
        self.order: list[str] = []
        self.answered: dict[tuple[str, int], int] = {}
        self.merged: dict[int, dict[str, list[str]]] = {}
        self.merging = 0  # version of the answer that is being merged
        members = AveragerState(self.names)
        wire = AveragerWire(self.setup.wire)
        self.averager = Averager(
            Watched(self),
            NUM_PARAMS,
            members,
            wire=wire,
            enough=self.setup.rows,
            goal=str(self.setup.steps),
        )
        whole = [save for save in self.saves.values() if self.complete(save)]
        self.regions = {name: self._region(name) for name in self.names}
        self.cut_version = 0
        if whole:
            self.averager.restore(*whole[-1].state)
            self.taken.update(whole[-1].taken)
            self.cut_version = self.averager.state.version
            for name, (control, tensors, shards) in whole[-1].regions.items():
                server = self.regions[name].server
                server.restore(control, tensors)
                self.regions[name].behind = self.averager.state.version - server.averager_version
                for shard, state in zip(self.regions[name].shards, shards, strict=True):
                    shard.restore(*state)
                self._take(name, server.resume())

    def _region(self, name: str) -> Region:
        start_P = torch.linspace(-1, 1, NUM_PARAMS)
        shards = [
            Shard.from_slice(start_P, piece, self.setup.optimizer, Watched(self, name))
            for piece in split_sizes(NUM_PARAMS, self.setup.num_shards)
        ]
        exchange = self.setup.strategy.traits.exchange
        plan = ServerPlan(
            name,
            self.setup.workers[name],
            BATCH,
            None if self.setup.rows else self.setup.steps,
            self.setup.mode,
            attempt=self.attempt,
            goal=str(self.setup.steps),
            elastic=self.setup.elastic,
            last_round_is_final=exchange.last != "always" and self.setup.wire.owes,
            has_final_update=exchange.last == "always",
            never_waits=exchange.blocking == "never",
        )
        return Region(Server.over(shards, NUM_PARAMS, plan, self.setup.wire), shards)

    def complete(self, save: Saved) -> bool:
        return save.state is not None and len(save.regions) == len(self.names)

    def crash(self) -> None:
        """Everything is lost but the disk."""
        self._begin()

    # ---------------------------------------------------------------- workers

    def join(self, name: str, rank: int) -> None:
        region = self.regions[name]
        region.here.add(rank)
        self._take(name, region.server.join(rank))

    def leave(self, name: str, rank: int) -> None:
        region = self.regions[name]
        region.here.discard(rank)
        region.busy.pop(rank, None)
        region.memory.pop(rank, None)
        self._take(name, region.server.leave(rank))

    def drain_worker(self, name: str, rank: int) -> None:
        self._take(name, self.regions[name].server.drain(rank))

    def push(self, name: str, rank: int) -> None:
        region = self.regions[name]
        span, params_P = region.busy.pop(rank)
        seed = hashlib.blake2b(f"{name}/{span.start}".encode(), digest_size=4).digest()
        noise = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
        grad_P = params_P + 0.3 * torch.randn(NUM_PARAMS, generator=noise)
        refused = "loss_not_finite" if self.setup.refusals and seed[0] % 5 == 0 else None
        if refused:
            grad_P = torch.full_like(grad_P, float("nan"))
        slices = split_sizes(NUM_PARAMS, self.setup.num_shards)
        partition = region.server.partition_of(rank)
        place_P = region.memory.setdefault(rank, torch.empty(NUM_PARAMS))  # as if it were shared
        place_P.copy_(grad_P)
        for shard, (i, j) in zip(region.shards, slices, strict=True):
            shard.put(partition, place_P[i:j])
        self._take(name, region.server.push(rank, StepReport(span, 1.0, 0.0, refused)))

    # ---------------------------------------------------------------- network

    def deliver_update(self, at: int) -> None:
        update = self.updates.pop(at)
        self.old.append(update)
        replies = self.averager.on_update(update)
        if update.attempt != self.attempt:  # of a life before: perhaps it was answered meanwhile
            replies = [r for r in replies if self.expects(r)]
            replies = [r for r in replies if r.seq not in self._under_way(r.to)]
        self._return(replies)

    def skip(self, update: UpdateMessage) -> None:
        """The averager answers an update that it does not take in; its content comes later."""
        if update.attempt != self.attempt:
            return  # of a life before: perhaps it was taken in
        self.updates.remove(update)
        self._return(self.averager.on_skip(update.region, update.attempt, update.seq))

    def repeat(self, update: UpdateMessage) -> None:
        """A message arrives once more: it changes nothing, and its answer may be given again."""
        before = self.averager.export()
        waiting = [u for u in self.updates if u is not update]
        first = len(waiting) == len(self.updates) and update in self.old
        replies = self.averager.on_update(update)
        after = self.averager.export()
        assert first and after[1] == before[1]
        assert all(torch.equal(v, after[0][k]) for k, v in before[0].items())
        assert len(replies) <= 1
        self._return([r for r in replies if self.expects(r) and r.seq not in self._under_way(r.to)])

    def expects(self, reply: ReplyMessage) -> bool:
        sent = self.regions[reply.to].sent
        return sent is not None and sent.seq == reply.seq

    def _under_way(self, name: str) -> set[int]:
        return {r.seq for r in self.replies if r.to == name}

    def _return(self, replies: list[ReplyMessage]) -> None:
        self.replies += replies
        for snapshot in self.averager.snapshots:
            self.saves[snapshot.id].state = (snapshot.tensors, snapshot.control)
        self.averager.snapshots.clear()

    def deliver_reply(self, at: int) -> None:
        reply = self.replies.pop(at)
        region = self.regions[reply.to]
        assert region.sent is not None and region.sent.seq == reply.seq
        staleness = max(0, reply.version - region.sent.base_version - 1)
        others = [n for n in self.order[region.last_answered :] if n != reply.to]
        if self.setup.strategy.traits.in_rounds:
            assert staleness == 0
        elif self.setup.strategy.kind in {"asgd", "asgd_ga", "ama"}:  # one version per update
            assert staleness <= len(others) + region.behind
        region.behind = max(0, self.cut_version - reply.version)
        # A skipped update is in no order of the averager's: the bound goes on from the last one.
        region.last_answered = self.answered.get((reply.to, reply.seq), region.last_answered)
        region.sent = None
        if reply.checkpoint is not None:
            self._take(reply.to, region.server.snapshot(reply.checkpoint, halt=reply.halt))
        if region.server.phase == "halted":
            return
        decoded = region.server.wire.decode(reply)
        self.merging = reply.version
        self._take(reply.to, region.server.on_reply(decoded))

    # ---------------------------------------------------------------- controller

    def request_checkpoint(self, *, halt: bool) -> bool:
        if self.halts:  # the controller begins no other then
            return False
        checkpoint, self.next_save = self.next_save, self.next_save + 1
        began = self.averager.begin_checkpoint(checkpoint, halt=halt)
        if began:
            self.saves[checkpoint] = Saved(taken=Counter(self.taken))
            self._return([])
            self.marks += [(name, checkpoint, halt) for name in self.names]
            self.halts += [checkpoint] if halt else []
        return began

    def deliver_mark(self, at: int) -> None:
        """Notify a region of a checkpoint; perhaps its next answer did so before."""
        name, checkpoint, halt = self.marks.pop(at)
        self._take(name, self.regions[name].server.snapshot(checkpoint, halt=halt))

    def request_stop(self) -> None:
        self.stopped = True
        self.averager.request_stop()

    # ---------------------------------------------------------------- effects

    def _take(self, name: str, effects) -> None:
        region = self.regions[name]
        for effect in effects:
            if isinstance(effect, Assignment):
                assert effect.worker in region.here and effect.worker not in region.busy
                if effect.span is None:
                    assert effect.done
                    region.here.discard(effect.worker)
                    if region.server.phase in {"done", "halted"}:
                        region.exited.add(effect.worker)
                else:
                    region.busy[effect.worker] = (effect.span, region.params_P)
            elif isinstance(effect, SendUpdate):
                assert region.sent is None, "one request is open already"
                update = region.server.wire.encode(effect.update)
                region.sent = replace(update, payload_P=update.payload_P.clone())
                self.updates.append(region.sent)
            elif isinstance(effect, Snapshot):
                state = [shard.take_snapshot(effect.id) for shard in region.shards]
                self.saves[effect.id].regions[name] = (effect.control, effect.tensors, state)
            else:
                assert isinstance(effect, StepDone | ActiveWorkersChanged)

    # ---------------------------------------------------------------- what must hold

    def check(self) -> None:
        assert max(self.taken.values(), default=0) <= 1, "an update was taken in twice"
        for name, region in self.regions.items():
            region.server.ledger.check()
            assert bool(torch.isfinite(region.params_P).all())
            open_now = [u for u in self.updates if u.region == name]
            again = [u for u in open_now if u.attempt != self.attempt]  # perhaps answered meanwhile
            assert len(again) <= 1 and len(self._under_way(name)) <= 1
            assert again or len(open_now) + len(self._under_way(name)) <= 1
            if region.server.phase != "halted":
                assert region.server.link_busy == (region.sent is not None)
        if self.setup.strategy.traits.in_rounds:
            for version, by_region in self.merged.items():
                assert len({tuple(d) for d in by_region.values()}) == 1, f"round {version}"

    def done(self) -> bool:
        return all(region.server.phase == "done" for region in self.regions.values())

    def drain(self) -> None:
        """Let everything go well, oldest first, until all regions have finished."""
        for _ in range(5_000):
            if self.done():
                return
            if not self._one():
                assert {r.server.phase for r in self.regions.values()} <= {"halted", "done"}, [
                    (n, r.server.phase, sorted(r.busy)) for n, r in self.regions.items()
                ]
                saves = [self.saves[checkpoint] for checkpoint in self.halts]
                assert any(self.complete(save) for save in saves), "halted, but not saved"
                self._begin()
        raise AssertionError("no end in sight")

    def shuffle(self, random: Random, events: int) -> None:
        """A number of events that go well, in any order."""
        for _ in range(events):
            possible = self._possible()
            if possible:
                random.choice(possible)()

    def _possible(self) -> list[Callable[[], None]]:
        """Joins, pushes and deliveries that could come next, oldest first."""
        found: list[Callable[[], None]] = []
        for name, region in self.regions.items():
            for rank in range(self.setup.workers[name]):
                if rank not in region.here and rank not in region.exited:
                    found.append(partial(self.join, name, rank))
                elif rank in region.busy:
                    found.append(partial(self.push, name, rank))
        found += [partial(self.deliver_update, i) for i in range(len(self.updates))]
        found += [partial(self.deliver_reply, i) for i in range(len(self.replies))]
        found += [partial(self.deliver_mark, i) for i in range(len(self.marks))]
        return found

    def _one(self) -> bool:
        """The next event, if there is any; what was lost on the way is sent again."""
        for event in self._possible():
            event()
            return True
        for region in self.regions.values():
            if region.sent is not None:
                self.repeat(region.sent)
                if self.replies:
                    return True
        return False
