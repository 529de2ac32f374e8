"""A pull names one version and gets it from all shards, whatever happens in between.

The oracle is a list: a copy of the whole model for every version that there was.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import Tensor

from geo_ray.base.errors import InvariantError
from geo_ray.strategies.asgd_ga import AsgdGa
from geo_ray.strategies.diloco import DiLoCo
from geo_ray.training.messages import ReplyMessage
from geo_ray.training.optimizers import Sgd
from geo_ray.training.parameters import split_sizes
from geo_ray.training.shard import Contribution, Pull, RegionModel, Shard

NUM_PARAMS, WORKERS = 7, 3


@dataclass
class Fetching:
    """What a worker has of a version so far."""

    pull: Pull
    parts: dict[int, Tensor] = field(default_factory=dict)


class Pulling(RuleBasedStateMachine):
    """Steps, merges and pulls in any order; each shard is asked by itself."""

    @initialize(num_shards=st.integers(2, 4), judged=st.booleans())
    def begin(self, num_shards: int, judged: bool) -> None:
        strategy = DiLoCo(interval=3) if judged else AsgdGa(interval=2, wait="never")
        start_P = torch.linspace(-1, 1, NUM_PARAMS)
        pieces = split_sizes(NUM_PARAMS, num_shards)
        self.shards = [Shard.from_slice(start_P, piece, Sgd(lr=0.1), strategy) for piece in pieces]
        self.model = RegionModel(self.shards, NUM_PARAMS)
        self.pieces = pieces
        self.steps = 0
        self.fetching: dict[int, Fetching] = {}
        self.versions: dict[tuple[int, bool], Tensor] = {}
        self.step(0, sends=True)

    def _note(self) -> None:
        for judged in (False, True):
            slices = [s.eval_params_S if judged else s.params_S for s in self.shards]
            self.versions[self.model.pulls.version, judged] = torch.cat(slices)

    @rule(worker=st.integers(0, WORKERS - 1), sends=st.booleans())
    def a_step(self, worker: int, sends: bool) -> None:
        self.step(worker, sends=sends)

    def step(self, worker: int, *, sends: bool) -> None:
        self.steps += 1
        grad_P = torch.full((NUM_PARAMS,), float(self.steps))
        for shard, (i, j) in zip(self.shards, self.pieces, strict=True):
            shard.put(worker, grad_P[i:j])
        self.model.apply([Contribution(worker, 1)])
        self._note()
        if sends:
            self.model.outgoing()
            self._note()

    @rule()
    def merge(self) -> None:
        self.steps += 1
        reply_P = torch.full((NUM_PARAMS,), self.steps / 8)
        self.model.merge(ReplyMessage("here", 1, self.steps, 1, reply_P))
        self._note()

    @rule(worker=st.integers(0, WORKERS - 1), judged=st.booleans())
    def tell(self, worker: int, judged: bool) -> None:
        self.fetching[worker] = Fetching(self.model.pulls.tell(worker, judged=judged))

    @rule(worker=st.integers(0, WORKERS - 1))
    def replaced(self, worker: int) -> None:
        self.model.pulls.note_received(worker)
        self.fetching.pop(worker, None)

    @rule(worker=st.integers(0, WORKERS - 1), shard=st.integers(0, 3))
    def fetch(self, worker: int, shard: int) -> None:
        found = self.fetching.get(worker)
        if found is None or shard >= len(self.shards) or shard in found.parts:
            return
        found.parts[shard] = self.shards[shard].fetch(found.pull).clone()
        if len(found.parts) < len(self.shards):
            return
        whole_P = torch.cat([found.parts[i] for i in range(len(self.shards))])
        assert torch.equal(whole_P, self.versions[found.pull.version, found.pull.judged])
        self.model.pulls.note_received(worker)
        del self.fetching[worker]


TestPulling = Pulling.TestCase
TestPulling.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def cut_model() -> tuple[RegionModel, list[Shard]]:
    shards = [Shard(torch.zeros(16), Sgd(lr=0.1), AsgdGa()) for _ in range(2)]
    model = RegionModel(shards, 32)
    for shard in shards:
        shard.put(0, torch.zeros(16))
    model.apply([Contribution(0, 1)])
    return model, shards


def reply() -> ReplyMessage:
    return ReplyMessage("here", 1, 1, 1, torch.ones(32))


def test_a_merge_between_two_fetches_does_not_tear_a_pull() -> None:
    model, (first, second) = cut_model()
    pull = model.pulls.tell(0)
    before = first.fetch(pull).clone()
    model.merge(reply())
    assert torch.equal(second.fetch(pull), before)


def test_nothing_is_copied_for_pulls_that_were_served() -> None:
    model, shards = cut_model()
    pull = model.pulls.tell(0)
    for shard in shards:
        shard.fetch(pull)
    model.merge(reply())
    for shard in shards:
        with pytest.raises(InvariantError, match="no copy"):
            shard.fetch(pull)


def test_a_version_is_kept_only_until_its_worker_is_heard_of() -> None:
    model, shards = cut_model()
    pull = model.pulls.tell(0)
    model.merge(reply())
    assert torch.equal(shards[0].fetch(pull), torch.zeros(16))
    model.pulls.note_received(0)
    model.merge(reply())
    with pytest.raises(InvariantError, match="asks for version"):
        shards[1].fetch(pull)
