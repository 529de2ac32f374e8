"""Runs: steps that workers with optimizers of their own make before they report them.

Pure. `Server` handles one push per step; a report has the pushes of several steps. Shells hand
assignments and reports through `WorkerRuns`, and events that may need the workers' state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from geo_ray.base.errors import InvariantError
from geo_ray.base.types import StepReport
from geo_ray.training.effects import Assignment, Effect
from geo_ray.training.server import Server


@dataclass(frozen=True, slots=True)
class Earlier:
    """Effects of a step that was made before the newest ones of a run.

    Attributes:
        effects: effects, without the assignments, which the workers know.
        ago_s: seconds since the step ended.
        exhausted: whether too many steps in a row, of which it is the last, had no usable gradient.
    """

    effects: Sequence[Effect]
    ago_s: float
    exhausted: bool


@dataclass(frozen=True, slots=True)
class Reported:
    """What a region has made in a run.

    Attributes:
        earlier: its steps but the last one, in order.
        effects: of the events that waited for the end of the run.
        last: reports of the last step by worker, which must be pushed next. Empty while other
            workers have not reported theirs.
    """

    earlier: Sequence[Earlier] = ()
    effects: Sequence[Effect] = ()
    last: Mapping[int, StepReport] = field(default_factory=dict)


class WorkerRuns:
    """The runs of a region's workers.

    A worker alone may end a run early, since it reports after `REPORT_EVERY_S`. Several workers
    make equal numbers of steps; their runs are limited to as many steps as they have made within
    `REPORT_EVERY_S`. The server counts the steps of a run when all have reported it. A worker that
    is lost in a run has made none of them, and its rows are discarded; its loss, and other events,
    are handled before the last step of the run.

    Args:
        server: the region's server.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._began_at = -1  # version at which the newest run or single step began, and its steps
        self._steps, self._members = 1, 1
        self._away: set[int] = set()  # workers of the run that have not reported it
        self._reports: dict[int, Sequence[StepReport]] = {}
        self._lost: set[int] = set()
        self._deferred: list[Callable[[], list[Effect]]] = []

    @property
    def in_progress(self) -> bool:
        """Whether a run of several steps is in progress."""
        return bool(self._away)

    def begin(self, answer: Assignment) -> Assignment:
        """Return the assignment of a worker that makes the steps, with the length of its run."""
        server = self._server
        if answer.span is None:
            return answer
        if self._began_at != server.version:  # for all workers, of which this is the first one
            self._began_at = server.version
            self._steps = server.run_length()
            if self._steps > 1:
                self._away = set(server.work.workers.computes)
                self._members = len(self._away)
        if answer.worker not in self._away:
            return answer
        return replace(answer, steps=self._steps, stride=server.work.step_rows)

    def handle(self, event: Callable[[], list[Effect]]) -> list[Effect]:
        """Handle an event now, or before the last step of the run that is in progress."""
        if self._away:
            self._deferred.append(event)
            return []
        return event()

    def report(self, worker: int, reports: Sequence[StepReport]) -> Reported:
        """Handle the reports of a worker on its run, or on a single step.

        Raises:
            InvariantError: the rows are not those of its assignment.
        """
        if worker not in self._away:
            return Reported(last={worker: reports[-1]})
        if self._members > 1 and len(reports) != self._steps:
            raise InvariantError(
                f"worker {worker} of region '{self._server.plan.region}' reported {len(reports)} "
                f"of {self._steps} steps"
            )
        self._away.discard(worker)
        self._reports[worker] = reports
        return self._end()

    def lose(self, worker: int, event: Callable[[], list[Effect]]) -> Reported:
        """Handle the loss or the replacement of a worker, once no other worker is in a run."""
        is_in_run = bool(self._away)
        self._away.discard(worker)
        if not is_in_run:
            return Reported(effects=event())
        self._lost.add(worker)
        self._deferred.append(event)
        return self._end()

    def _end(self) -> Reported:
        if self._away:
            return Reported()
        reports, self._reports = self._reports, {}
        lost, self._lost = self._lost, set()
        deferred, self._deferred = self._deferred, []
        self._began_at = -1
        earlier = self._replay(reports, lost) if reports else []
        effects = [effect for event in deferred for effect in event()]
        last = {worker: each[-1] for worker, each in reports.items() if worker not in lost}
        return Reported(earlier, effects, last)

    def _replay(self, reports: Mapping[int, Sequence[StepReport]], lost: set[int]) -> list[Earlier]:
        """Push all steps of a run but the last; workers that have not reported made none."""
        server, steps = self._server, min(map(len, reports.values()))
        took_s = [max(each[n].compute_s for each in reports.values()) for n in range(steps)]
        soon, server.average_soon = server.average_soon, False
        spans = dict(server.work.ledger.in_flight)
        found = []
        for number in range(steps - 1):
            effects: list[Effect] = []
            for worker in sorted(spans):
                if worker in reports:
                    report = reports[worker][number]
                elif worker in lost:
                    report = StepReport(spans[worker], None, 0.0, "worker_lost")
                else:
                    continue
                effects += server.push(worker, report)
            given = {each.worker: each for each in effects if isinstance(each, Assignment)}
            for worker, each in reports.items():
                answer = given.get(worker)
                if answer is None or answer.span != each[number + 1].span or answer.evaluate:
                    raise InvariantError(
                        f"worker {worker} of region '{server.plan.region}' trained on "
                        f"{each[number + 1].span}, it would have been assigned {answer}"
                    )
            spans = {worker: each.span for worker, each in given.items() if each.span is not None}
            others = [each for each in effects if not isinstance(each, Assignment)]
            found.append(Earlier(others, sum(took_s[number + 1 :]), server.exhausted))
        server.average_soon = soon
        return found
