"""Regions that go on while workers are missing, one event at a time; and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from geo_ray.base.types import Span, StepReport
from geo_ray.experiment.experiment import Experiment
from geo_ray.strategies.sma import Sma
from geo_ray.training.assignment import ServerPlan
from geo_ray.training.config import ElasticConfig
from geo_ray.training.effects import ActiveWorkersChanged, Assignment, Effect, StepDone
from geo_ray.training.optimizers import AdamW, InnerOptimizer, RateSchedule, Sgd
from geo_ray.training.payload_encoding import WirePlan
from geo_ray.training.server import Server
from geo_ray.training.shard import Shard


class Region:
    """A region without others whose workers push what the test says."""

    def __init__(self, workers: int = 3, *, steps: int = 4, eval_every: int = 0, **elastic: Any):
        self.shard = Shard(torch.zeros(2), Sgd(lr=1.0), Sma(), alone=True)
        plan = ServerPlan(
            "eu",
            workers,
            8,
            steps,
            alone=True,
            eval_every=eval_every,
            elastic=ElasticConfig(**elastic),
        )
        self.server = Server.over([self.shard], 2, plan, WirePlan())

    def gather(self) -> dict[int, Assignment]:
        effects: list[Effect] = []
        for rank in range(self.server.plan.num_workers):
            effects += self.server.join(rank)
        return given(effects)

    def push(self, worker: int, value: float = 1.0, compute_s: float = 1.0) -> list[Effect]:
        partition = self.server.partition_of(worker)
        span = self.server.ledger.in_flight[partition]
        self.shard.put(partition, torch.full((2,), value))
        return self.server.push(worker, StepReport(span, 0.5, compute_s))


def given(effects: list[Effect]) -> dict[int, Assignment]:
    return {e.worker: e for e in effects if isinstance(e, Assignment)}


def done(effects: list[Effect]) -> StepDone:
    (found,) = (e for e in effects if isinstance(e, StepDone))
    return found


def workers(effects: list[Effect]) -> ActiveWorkersChanged:
    (found,) = (e for e in effects if isinstance(e, ActiveWorkersChanged))
    return found


def test_whoever_is_free_computes_the_share_of_one_that_is_gone() -> None:
    region = Region()
    region.gather()
    assert given(region.push(0)) == {}
    effects = region.server.leave(1)
    assert workers(effects) == ActiveWorkersChanged(0, (0, 2), 24)
    assert given(effects)[0].span == Span(8, 8) and given(effects)[0].partition == 1
    region.push(2)
    effects = region.push(0)
    step = done(effects)
    assert step.samples == 24
    assert step.compute_s == 2.0, "one worker after the other share"
    assert {w: (a.span.start, a.partition) for w, a in given(effects).items()} == {
        0: (24, None),
        2: (40, None),
    }


def test_one_that_comes_back_gets_its_own_share_again() -> None:
    region = Region()
    region.gather()
    region.server.leave(1)
    assert given(region.server.join(1))[1] == Assignment(1, 0, Span(8, 8))


def test_with_too_few_nobody_gets_rows() -> None:
    region = Region(min_workers=2)
    region.gather()
    region.server.leave(1)
    assert given(region.server.leave(2)) == {}
    assert given(region.push(0)) == {}
    effects = region.server.join(1)
    assert {w: a.span for w, a in given(effects).items()} == {1: Span(8, 8), 0: Span(16, 8)}


def test_nobody_waits_for_one_that_never_came() -> None:
    region = Region()
    region.server.join(0), region.server.join(2)
    effects = region.server.leave(1)
    assert sorted(given(effects)) == [0, 2]


def test_the_one_that_is_sent_away_leaves_its_gradient_and_memory() -> None:
    region = Region(2)
    region.gather()
    assert given(region.server.drain(0)) == {}
    effects = region.push(0, value=3.0)
    assert given(effects)[0] == Assignment(0, 0, None, done=True)
    region.shard._grads[1] = torch.zeros(2)
    assert done(region.push(1, value=1.0)).samples == 16
    assert torch.equal(region.shard.params_S, torch.full((2,), -2.0))


def test_where_the_batch_follows_the_rest_makes_the_step_and_the_rate_goes_by_its_rows() -> None:
    region = Region(4, batch="follows", rate="linear")
    region.gather()
    for worker in (0, 1):
        region.push(worker)
    region.server.leave(3)
    effects = region.push(2)
    assert done(effects).samples == 24
    assert torch.allclose(region.shard.params_S, torch.full((2,), -0.75))
    assert given(effects)[0].span == Span(24, 8), "the rows of the one that is gone"


def test_where_the_batch_follows_a_joining_region_waits_for_the_next_step() -> None:
    region = Region(2, batch="follows")
    region.gather()
    region.server.leave(1)
    assert given(region.server.join(1)) == {}
    assert sorted(given(region.push(0))) == [0, 1]


@pytest.mark.parametrize("told", [True, False])
def test_whoever_takes_the_rows_of_the_one_that_evaluated_evaluates(told: bool) -> None:
    region = Region(2, eval_every=1)
    region.gather()
    region.push(1)
    assert given(region.push(0))[0].evaluate
    region.push(1)
    if told:
        region.server.work.evals.reported()
    again = given(region.server.leave(0))[1]
    assert (again.partition, again.version, again.evaluate) == (0, 1, not told)


def test_the_final_model_is_evaluated_once_whoever_is_there() -> None:
    region = Region(2, steps=1)
    region.gather()
    region.server.leave(0)
    region.push(1)
    last = given(region.push(1))[1]
    assert last.done and last.evaluate
    assert not given(region.server.join(0))[0].evaluate, "somebody does already"
    region.server.leave(1)  # without a word
    assert given(region.server.join(1))[1].evaluate
    region.server.work.evals.reported(final=True)
    region.server.leave(1)
    assert not given(region.server.join(1))[1].evaluate


@pytest.mark.parametrize("config", [Sgd(lr=0.5), AdamW(lr=0.5)])
def test_the_rate_of_a_step_is_a_factor_on_that_of_the_schedule(config) -> None:
    plain_S, twice_S = torch.zeros(3), torch.zeros(3)
    schedule = RateSchedule(kind="linear", steps=10)
    plain = InnerOptimizer(config.model_copy(update={"schedule": schedule, "lr": 1.0}), plain_S)
    twice = InnerOptimizer(config.model_copy(update={"schedule": schedule}), twice_S)
    twice.rate = 2.0
    for _ in range(3):
        plain.apply(torch.ones(3))
        twice.apply(torch.ones(3))
    assert torch.allclose(plain_S, twice_S) and plain_S.abs().min() > 0


# ------------------------------------------------------------------ configurations


def configured(strategy: str = "sma", **train: Any) -> Experiment:
    tree = {
        "name": "tiny",
        "task": {"use": "digits", "options": {"width": 2}},
        "data": {"generate": {}},
        "regions": [{"name": "a", "workers": 3}, {"name": "b", "workers": 2}],
        "strategy": {"kind": strategy},
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "train": {"steps": 4} | train,
    }
    return Experiment.model_validate_json(json.dumps(tree))


REFUSED = [
    ({"elastic": {"min_workers": 4}}, "no region has more than 3"),
    ({"elastic": {}, "stragglers": {"kind": "backup_workers"}}, "one of the two"),
    ({"elastic": {"batch": "follows"}, "mode": "async"}, "each push is a separate step"),
    ({"elastic": {"rate": "linear"}}, "always has the same rows"),
    ({"elastic": {"batch": "follows", "rate": "linear"}, "strategy": "dc_asgd"}, "use same"),
    ({"elastic": {"batch": "follows", "rate": "linear"}, "strategy": "hfa"}, "use same"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_does_not_go_together_is_refused_by_its_key(changes: dict, why: str) -> None:
    with pytest.raises(ValidationError, match=why) as caught:
        configured(**changes)
    assert "train.elastic" in str(caught.value)


def test_the_smallest_region_needs_no_more_than_it_has() -> None:
    elastic = configured(elastic={"min_workers": 2}).train.elastic
    assert elastic is not None
    assert [elastic.least(ranks) for ranks in (3, 2, 1)] == [2, 2, 1]
