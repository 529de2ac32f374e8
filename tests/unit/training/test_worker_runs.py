"""Runs: steps that several workers make before they report them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from geo_ray.base.errors import InvariantError
from geo_ray.base.types import Span, StepReport
from geo_ray.strategies.sma import Sma
from geo_ray.training import server as server_module
from geo_ray.training.assignment import ServerPlan
from geo_ray.training.effects import Assignment, Effect, StepDone
from geo_ray.training.optimizers import Sgd
from geo_ray.training.payload_encoding import WirePlan
from geo_ray.training.server import Server
from geo_ray.training.shard import Shard
from geo_ray.training.worker_runs import Reported, WorkerRuns

ROWS, TOOK_S = 8, 0.5


@pytest.fixture(autouse=True)
def three_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three usual steps fit into the time between reports."""
    monkeypatch.setattr(server_module, "REPORT_EVERY_S", 3.2 * TOOK_S)


class Region:
    """A server and the assignments that its workers have."""

    def __init__(self, *, workers: int = 2, steps: int = 20) -> None:
        shard = Shard(torch.zeros(5), Sgd(lr=1.0), Sma(interval=100), optimizers=workers)
        plan = ServerPlan("eu", workers, ROWS, steps, state_every=100)
        self.server = Server.over([shard], 5, plan, WirePlan())
        self.runs = WorkerRuns(self.server)
        self.given: dict[int, Assignment] = {}
        for rank in range(workers):
            self.take(self.server.join(rank))

    def take(self, effects: list[Effect]) -> None:
        for each in effects:
            if isinstance(each, Assignment):
                self.given[each.worker] = self.runs.begin(each)

    def version(self) -> int:
        return self.server.version

    def is_in_run(self) -> bool:
        return self.runs.in_progress

    def reports(self, worker: int) -> list[StepReport]:
        return [StepReport(span, 0.25, TOOK_S) for _, span in self.given[worker].run()]

    def push(self, last: Mapping[int, StepReport]) -> None:
        for worker, report in last.items():
            self.take(self.server.push(worker, report))
        self.server.ledger.check()

    def make_step(self) -> None:
        """Make the first step, which is no run, since its time is not known."""
        assert {each.steps for each in self.given.values()} == {1}
        for worker in list(self.given):
            self.push(self.runs.report(worker, self.reports(worker)).last)


def versions(found: Reported) -> list[int]:
    """The steps that a report has completed before the last one of its run."""
    steps = [each for earlier in found.earlier for each in earlier.effects]
    return [each.step for each in steps if isinstance(each, StepDone)]


def test_a_run_has_the_steps_that_fit_and_the_rows_of_single_steps() -> None:
    region = Region()
    region.make_step()
    first, second = region.given[0], region.given[1]
    assert (first.steps, first.stride, second.steps) == (3, 2 * ROWS, 3)
    assert [span for _, span in first.run()] == [Span(16, 8), Span(32, 8), Span(48, 8)]
    assert [span for _, span in second.run()] == [Span(24, 8), Span(40, 8), Span(56, 8)]
    assert [step.version for step, _ in first.run()] == [1, 2, 3]


def test_steps_count_when_all_workers_have_reported_them() -> None:
    region = Region()
    region.make_step()
    assert region.is_in_run()
    assert region.runs.report(1, region.reports(1)) == Reported()
    assert region.version() == 1
    found = region.runs.report(0, region.reports(0))
    assert versions(found) == [2, 3] and region.version() == 3
    assert [each.ago_s for each in found.earlier] == [2 * TOOK_S, TOOK_S]
    assert set(found.last) == {0, 1} and not region.is_in_run()
    region.push(found.last)
    assert region.version() == 4
    assert region.server.ledger.applied == 4 * 2 * ROWS
    assert region.given[0].span == Span(4 * 2 * ROWS, ROWS)


def test_events_wait_for_the_end_of_a_run() -> None:
    region, handled = Region(), list[int]()
    region.make_step()

    def event() -> list[Effect]:
        handled.append(region.server.version)
        return []

    assert region.runs.handle(event) == [] and not handled
    region.runs.report(0, region.reports(0))
    assert not handled
    region.push(region.runs.report(1, region.reports(1)).last)
    assert handled == [3]  # before the last step of the run
    region = Region()
    region.runs.handle(event)  # in the first step, which is no run
    assert handled == [3, 0]


@pytest.mark.parametrize("reported", [(), (0,), (1,)])
def test_a_worker_that_is_lost_in_a_run_has_made_none_of_its_steps(
    reported: tuple[int, ...],
) -> None:
    """Nor the step before, since no mean has its parameters; the steps of the others count."""
    region = Region(workers=3)
    region.make_step()
    for rank in reported:
        region.runs.report(rank, region.reports(rank))
    rest = [rank for rank in (0, 2) if rank not in reported]
    found = region.runs.lose(1, lambda: region.server.leave(1))
    assert found == Reported()
    for rank in rest:
        found = region.runs.report(rank, region.reports(rank))
    assert versions(found) == [2, 3]
    assert set(found.last) == {0, 2}
    ledger = region.server.ledger
    assert ledger.discarded["worker_lost"] == 3 * ROWS
    assert ledger.applied == 3 * 2 * ROWS
    ledger.check()


def test_the_loss_of_the_last_worker_that_is_awaited_ends_the_run() -> None:
    region = Region()
    region.make_step()
    region.runs.report(0, region.reports(0))
    found = region.runs.lose(1, lambda: region.server.leave(1))
    assert versions(found) == [2, 3] and set(found.last) == {0}


def test_a_worker_alone_may_end_its_run_early() -> None:
    region = Region(workers=1)
    assert region.given[0].steps == 20  # no time is needed: it reports when it is due
    found = region.runs.report(0, region.reports(0)[:5])
    assert versions(found) == [1, 2, 3, 4] and set(found.last) == {0}


def test_other_steps_than_the_assigned_ones_are_refused() -> None:
    region = Region()
    region.make_step()
    with pytest.raises(InvariantError, match="worker 0 of region 'eu' reported 2 of 3 steps"):
        region.runs.report(0, region.reports(0)[:2])
    strange = [StepReport(Span(16 + 8 * n, 8), 0.25, TOOK_S) for n in range(3)]
    region.runs.report(1, region.reports(1))
    with pytest.raises(InvariantError, match="worker 0 of region 'eu' trained on"):
        region.runs.report(0, strange)
