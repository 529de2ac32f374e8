"""A few regions and an averager without clock and network, that watch a strategy's messages.

Regions step in turn, and who does not stand still gets its answer some steps later. What is always
true of messages is looked at on the way: they are never live state, one request is open at a time,
nobody is left waiting who should not be.

Shape legend: P = parameters of the model; S = of one shard's slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from geo_ray.contract.findings import expect
from geo_ray.strategies.base import AveragerState, Outgoing, Reply, Strategy, Update, Wait
from geo_ray.training.averager.averager import Averager
from geo_ray.training.compute.flat import digest, split_sizes
from geo_ray.training.compute.optimizers import AdamW, Momentum, Sgd
from geo_ray.training.server.region_model import RegionModel
from geo_ray.training.server.shard import Contribution, Shard

NUM_PARAMS = 67
"""No multiple of a vector's length, and enough for three shards."""

SAMPLES: Mapping[str, int] = {"a": 16, "b": 8, "c": 4, "d": 2, "e": 12}
"""Rows behind a step, by region."""

DATA_ROWS: Mapping[str, float] = {"a": 100.0, "b": 300.0, "c": 200.0}
"""Rows of each region's training data; not in proportion to `SAMPLES`."""

LAG = 2
"""Steps until an answer that nobody stands still for is there."""

AnyOptimizer = Sgd | Momentum | AdamW
PLAIN = Sgd(lr=0.1)


def start() -> Tensor:
    """The parameters that all regions begin with, fp32 (P,)."""
    return torch.randn(NUM_PARAMS, generator=torch.Generator().manual_seed(0))


def gradients(steps: int, names: Sequence[str] = "ab", seed: int = 1) -> dict[str, list[Tensor]]:
    """One per region and step, (P,) each; far from each other, so that replicas drift apart."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: [torch.randn(NUM_PARAMS, generator=generator) for _ in range(steps)] for name in names
    }


@dataclass(slots=True)
class FleetRegion:
    """A region's shards, and what its server would count for them."""

    name: str
    shards: list[Shard]
    samples: int
    fragments: int
    seq: int = 0
    version: int = 0
    since: int = 0
    steps: int = 0
    age: int = 0
    waiting: bool = False
    stalled: bool = False  # for an answer, before it may speak again
    sent: Update | None = None
    inbox: list[Reply] = field(default_factory=list)
    model: RegionModel = field(init=False)

    def __post_init__(self) -> None:
        self.model = RegionModel(self.shards, NUM_PARAMS, self.fragments)

    @property
    def params_P(self) -> Tensor:
        """A copy of the region's parameters (P,)."""
        return torch.cat([shard.params_S for shard in self.shards])

    def storages(self) -> set[int]:
        """Where this region's live tensors are."""
        tensors = [t for s in self.shards for t in (s.params_S, *s.state.memory.values())]
        return _storages(tensors)


class Fleet:
    """See the module's docstring.

    Args:
        strategy: what is looked at.
        optimizer: of every region.
        num_shards: of every region.
        names: the regions, of `SAMPLES`.
        lag: steps until an answer is there.
        spoil: overwrite every message that was answered: it is the carrier's again.
    """

    def __init__(
        self,
        strategy: Strategy,
        optimizer: AnyOptimizer = PLAIN,
        num_shards: int = 1,
        *,
        names: Sequence[str] = "ab",
        lag: int = LAG,
        spoil: bool = False,
    ) -> None:
        start_P, parts = start(), strategy.traits.exchange.fragments
        slices = split_sizes(NUM_PARAMS, num_shards)
        self.regions = {
            name: FleetRegion(
                name,
                [Shard.cut(start_P, piece, optimizer, strategy) for piece in slices],
                SAMPLES[name],
                parts,
            )
            for name in names
        }
        state = AveragerState(tuple(sorted(names)), data_rows=DATA_ROWS)
        self.averager = Averager(strategy, NUM_PARAMS, state)
        self.updates: list[Update] = []
        self.replies: list[Reply] = []
        self.waits: set[str] = set()  # regions that stood still since their answer was late
        self.stood_still: list[bool] = []  # of every request but the last
        self.answered: list[set[str]] = []  # by every request
        self._said: list[tuple[Tensor, Tensor]] = []
        self._strategy = strategy
        self._lag = lag
        self._spoil = spoil

    def step(self, grads: Mapping[str, Tensor | None]) -> None:
        """One step of every named region that does not stand still, in the order of the names."""
        for name, grad_P in grads.items():
            region = self.regions[name]
            if region.waiting:
                continue
            self.apply(region, grad_P)
            region.age += 1
            if region.age >= self._lag:
                self.merge(region)
            self._speak(region)
        if (
            self._strategy.traits.averager.on_release is None
            and grads.keys() == self.regions.keys()
        ):
            left = [region.name for region in self.regions.values() if region.waiting]
            expect(not left, f"regions {left} are not answered, and there is no on_release")

    def apply(self, region: FleetRegion, grad_P: Tensor | None) -> None:
        """The server's part of a step; None is a gradient that was refused."""
        if grad_P is not None:
            pairs = zip(region.shards, split_sizes(NUM_PARAMS, len(region.shards)), strict=True)
            for shard, (i, j) in pairs:
                shard.put(0, grad_P[i:j].clone())
        samples = 0 if grad_P is None else region.samples
        region.since += samples
        region.steps += 1
        region.model.apply([Contribution(0, samples)])

    def send(self, region: FleetRegion, out: Outgoing, *, final: bool = False) -> None:
        """Hand a message to the averager, and its answers to whom they are for."""
        expect(region.sent is None, "a region speaks while its last request is open")
        own = region.storages() | _storages(self.averager.state.memory.values())
        expect(not _storages([out.payload_P]) & own, "a message is live state, and no copy of it")
        self._said.append((out.payload_P, out.payload_P.clone()))
        region.seq += 1
        update = Update(
            region.name,
            1,
            region.seq,
            region.version,
            region.since,
            out.payload_P,
            final,
            fragment=out.fragment,
            steps=1,
        )
        region.since, region.sent, region.waiting, region.age = 0, update, out.wait, 0
        self.updates.append(update)
        if not final:
            self.stood_still.append(out.wait)
        replies = self.averager.on_update(update)
        self.answered.append({reply.to for reply in replies})
        self._take(replies)
        self._deliver()

    def merge(self, region: FleetRegion) -> bool:
        """Merge the answer, if it is there."""
        if not region.inbox:
            return False
        reply = region.inbox.pop()
        expect(
            region.sent is not None and reply.seq == region.sent.seq,
            "an answer is for another request than the open one",
        )
        before_P = reply.payload_P.clone()
        region.model.merge(reply)
        expect(torch.equal(reply.payload_P, before_P), "on_reply changes the answer's payload")
        held = region.storages() | _storages(self.averager.state.memory.values())
        expect(not _storages([reply.payload_P]) & held, "an answer's payload becomes live state")
        region.version, region.sent = reply.version, None
        region.waiting = region.stalled = False
        return True

    def settle(self) -> None:
        """Answer everybody, as before a checkpoint."""
        self._release()
        for region in self.regions.values():
            self.merge(region)

    def finish(self) -> None:
        """The last exchange."""
        self.settle()
        for region in self.regions.values():
            out = region.model.finish()
            if out is not None:
                self.send(region, out, final=True)
        open_ = [region.name for region in self.regions.values() if region.sent is not None]
        expect(not open_, f"regions {open_} are not answered at the end")
        changed = [said for said, then in self._said if not torch.equal(said, then)]
        expect(self._spoil or not changed, "a message changed after it was sent")

    def leave(self, name: str) -> None:
        """Go on without a region."""
        del self.regions[name]
        self._take(self.averager.leave(name))
        self._deliver()

    def run(self, grads: Mapping[str, Sequence[Tensor | None]], steps: range) -> Fleet:
        """Some steps."""
        for t in steps:
            self.step({name: g[t] for name, g in grads.items() if name in self.regions})
        return self

    def restore(self, other: Fleet) -> None:
        """Become what another fleet is, through its checkpoint."""
        self.averager.restore(*other.averager.export())
        for name, region in self.regions.items():
            twin = other.regions[name]
            for shard, theirs in zip(region.shards, twin.shards, strict=True):
                shard.restore(*theirs.export())
            region.seq, region.version, region.since = twin.seq, twin.version, twin.since

    def digests(self) -> list[str]:
        """Of the regions' parameters."""
        return [digest(region.params_P) for region in self.regions.values()]

    def _speak(self, region: FleetRegion) -> None:
        out = region.model.outgoing()
        if isinstance(out, Wait):
            expect(region.sent is not None, "a region stands still, and no request is open")
            self.waits.add(region.name)
            if not self.merge(region):
                region.waiting = region.stalled = True
                return
            out = region.model.outgoing()
            expect(not isinstance(out, Wait), "a region stands still although it has its answer")
        if isinstance(out, Outgoing):
            self.send(region, out)

    def _deliver(self) -> None:
        """Answers to those who stand still for them; who could not speak before, does."""
        for region in list(self.regions.values()):
            stalled = region.stalled
            if region.waiting and self.merge(region) and stalled:
                self._speak(region)

    def _release(self) -> None:
        on_release = self._strategy.traits.averager.on_release
        if on_release is None:
            return
        self._take(on_release(self.averager.state))
        left = sorted(self.averager.state.waiting)
        expect(not left, f"after on_release regions {left} still wait")

    def _take(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            self.replies.append(reply)
            region = self.regions[reply.to]
            region.inbox.append(reply)
            if self._spoil and region.sent is not None:
                region.sent.payload_P.fill_(float("nan"))


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
