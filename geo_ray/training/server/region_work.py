"""Who of a region's workers computes which rows, what they have pushed, and who goes home when.

Rows are booked by share of a step (see `geo_ray.training.server.team`), never by who computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from geo_ray.errors import InvariantError
from geo_ray.training.server.effects import Assignment, TeamChanged
from geo_ray.training.server.eval_times import EvalTimes
from geo_ray.training.server.ledger import Ledger
from geo_ray.training.server.plan import ServerPlan
from geo_ray.training.server.shard import Contribution
from geo_ray.training.server.stragglers import Stragglers
from geo_ray.training.server.team import Team
from geo_ray.types import Span, StepReport


@dataclass(slots=True)
class RegionWork:
    """See the module's docstring.

    Attributes:
        plan: what the region is to do.
        keep: lets the shards copy what was pushed for a share, whose place is needed.
        ledger: the sample books.
        pushes: what was pushed and is in no step yet, by share.
        team: the workers.
        evals: when somebody evaluates.
        rule: of late workers.
    """

    plan: ServerPlan
    keep: Callable[[int], None]
    ledger: Ledger = field(default_factory=Ledger)
    pushes: dict[int, StepReport] = field(default_factory=dict)
    team: Team = field(init=False)
    evals: EvalTimes = field(init=False)
    rule: Stragglers = field(init=False)
    _late: dict[int, Span] = field(default_factory=dict)  # what the step was made without

    def __post_init__(self) -> None:
        plan = self.plan
        self.team = Team(plan.num_workers, plan.elastic)
        self.evals = EvalTimes.of(plan)
        self.rule = Stragglers.of(plan.stragglers, plan.num_workers)

    # -------------------------------------------------------------- who is there

    def join(self, worker: int) -> None:
        """See `Server.join`."""
        self.leave(worker)
        dropped = self.team.join(worker)
        if dropped is not None:  # it lay in the memory of the one before
            self.pushes.pop(dropped, None)

    def leave(self, worker: int) -> None:
        """See `Server.leave`."""
        share = self.team.leave(worker)
        self._late.pop(worker, None)
        self.evals.lost(worker)
        if self.plan.elastic is None:
            return
        if self.plan.mode == "async" and worker not in self.pushes:
            self.ledger.take_back(worker)
        elif self.team.follows and share is not None:
            self.team.give_up(share)
            self.ledger.take_back(share)

    def dismiss(self, worker: int) -> None:
        """See `Server.dismiss`."""
        if worker in self.team.joined:
            self.team.leaving.add(worker)

    def news(self, version: int) -> TeamChanged | None:
        """Who takes part after ``version`` steps, if that has changed."""
        ranks = self.team.news()
        if ranks is None:
            return None
        alone = self.plan.mode == "async" or self.team.follows
        takers = ranks if alone else range(self.plan.num_workers)
        return TeamChanged(version, ranks, sum(map(self.plan.rows_per_push, takers)))

    @property
    def is_computing(self) -> bool:
        """Whether anybody computes what may still count."""
        return bool(self.team.computes)

    @property
    def is_still(self) -> bool:
        """Whether all workers are here, and none of them computes anything."""
        return not (self.team.awaited or self.team.computes or self._late)

    # -------------------------------------------------------------- what they compute

    def share_of(self, worker: int) -> int:
        """See `Server.share_of`."""
        return self.team.computes.get(worker, worker)

    def push(self, worker: int, report: StepReport) -> None:
        """See `Server.push`."""
        if self._late.pop(worker, None) == report.span:
            self.team.idle.add(worker)
            return
        share = self.share_of(worker)
        held = self.ledger.in_flight.get(share)
        if held != report.span or worker not in self.team.computes:
            raise InvariantError(f"worker {worker} pushed {report.span}, it was assigned {held}")
        self.team.pushed(worker)
        self.pushes[share] = report

    def ready(self) -> list[int]:
        """The shares whose gradients make the next step, lowest rank first; empty if not yet."""
        if self.plan.mode == "async":
            return sorted(self.pushes)[:1]
        waits = self.plan.stragglers is None
        is_enough = self.team.is_whole(self.pushes) if waits else self.rule.is_enough(self.pushes)
        return sorted(self.pushes) if is_enough else []

    def settle(
        self, reports: Mapping[int, StepReport], contributions: list[Contribution]
    ) -> tuple[int, float]:
        """Book a step that was made of these.

        Returns:
            The rows in it, and the seconds of the worker that computed longest.
        """
        whole = self.rule.holds_all_rows(contributions)
        samples = 0
        for share, report in reports.items():
            del self.pushes[share]
            refused = None if whole else report.refused
            span = self.ledger.settle(share, refused)
            samples += 0 if refused else span.count
        self.team.applied(reports)
        if self.plan.mode == "sync":
            samples += self._do_without(None if whole else "late")
        return samples, self.team.compute_s(reports)

    def _do_without(self, lost: str | None) -> int:
        """Book what workers hold that the step did not wait for; how many rows are in it anyway."""
        samples = 0
        for worker in sorted(self.ledger.in_flight):
            span = self.ledger.settle(worker, lost)
            samples += 0 if lost else span.count
            if self.team.computes.pop(worker, None) is not None:
                self._late[worker] = span
        return samples

    def assign(self, version: int, seen: int) -> list[Assignment]:
        """Next rows for idle workers; in sync mode to all together, so that ranks get their own.

        Args:
            version: steps that the parameters hold.
            seen: rows that the averager has taken in.
        """
        dealt, readers = self._dealt()
        rows_of = self.plan.rows_per_push
        spans = {share: self.ledger.assign(share, rows_of(share)) for share in readers}
        return [self._work(w, share, spans, version, seen) for w, share in dealt.items()]

    def _dealt(self) -> tuple[dict[int, int], list[int]]:
        """Shares by who begins them now, and all shares that have rows in this step."""
        team, stragglers = self.team, self.plan.stragglers
        if self.plan.mode == "sync" and stragglers is None:
            if not team.may_work:
                return {}, []
            team.begin()
            for share in [held for held in self.ledger.in_flight if held not in team.step]:
                self.ledger.take_back(share)  # of somebody who was there before a resume
            return team.deal(self.pushes), sorted(team.step)
        ready = team.elastic is None or team.may_work
        if stragglers is not None:
            ready = len(team.joined) >= self.rule.needed
        dealt = {worker: worker for worker in sorted(team.idle & team.present) if ready}
        return dealt, list(self.rule.readers(list(dealt)))

    def _work(
        self, worker: int, share: int, spans: Mapping[int, Span], version: int, seen: int
    ) -> Assignment:
        lent = self.team.take(worker, share)
        if lent is not None:
            self.keep(lent)
        evaluate = self._evaluates(worker) and self.evals.is_due(version, seen)
        if evaluate:
            self.evals.by = worker
        judged = evaluate and self.plan.evaluates_outer
        parts = self.rule.parts_of(share, spans)
        other = None if share == worker else share
        return Assignment(
            worker, version, spans[share], evaluate, eval_params=judged, parts=parts, share=other
        )

    def _evaluates(self, worker: int) -> bool:
        """Whether it falls to ``worker`` to evaluate: the first one, or whoever is there."""
        if self.plan.elastic is None:
            return worker == 0
        return worker == min(self.team.present or self.team.joined) or self.evals.is_owed

    # -------------------------------------------------------------- who goes home

    def goers(self, version: int) -> list[Assignment]:
        """Send home those that are to leave; what they pushed stays."""
        going = self.team.goers()
        for lent in going.values():
            if lent is not None:
                self.keep(lent)
        return [Assignment(worker, version, None, done=True) for worker in going]

    def send_home(self, version: int, *, done: bool) -> list[Assignment]:
        """Send workers home: those that wait, and those that come back too late to count.

        Args:
            version: steps that the parameters hold.
            done: the region is at its end: somebody evaluates the final model.
        """
        answers = []
        for share in sorted(self.pushes):
            self.ledger.settle(share, "after_end")
        for worker in sorted(self.team.waiting):
            last = done and self._evaluates(worker) and self.evals.ask_last(worker)
            answers.append(Assignment(worker, version, None, evaluate=last, done=True))
        self.team.joined -= self.team.waiting
        self.team.idle.clear()
        self.team.lent.clear()
        self.pushes.clear()
        return answers

    def restore(self, ledger: dict[str, object], version: int) -> None:
        """Go on with saved books, after ``version`` steps.

        Workers join anew and get the rows that were in flight; those of ranks that are no more go
        to whoever asks first.
        """
        self.ledger = Ledger.restore(ledger)
        for share in [s for s in self.ledger.in_flight if s >= self.plan.num_workers]:
            self.ledger.take_back(share)
        self.evals.resume(version)
