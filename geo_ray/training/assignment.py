"""Assigns rows to a region's workers; tracks pushes, joins, departures and evaluations.

Rows are booked by batch partition of a step, never by the worker that computes them. Positions
are handed out in order; rows of a lost worker return to the pool and are handed out first, so
every row is applied once or discarded for a named reason (`Ledger`). While a worker's gradient
is still in its own memory, shards copy it before that worker computes another partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from geo_ray.base.errors import InvariantError
from geo_ray.base.types import Span, StepReport
from geo_ray.training.config import ElasticConfig
from geo_ray.training.effects import ActiveWorkersChanged, Assignment
from geo_ray.training.shard import Contribution
from geo_ray.training.stragglers import BackupWorkers, GradientCoding, Stragglers

Phase = Literal["training", "waiting", "must_send", "finishing", "done", "halted"]
"""waiting: for an answer; must_send: for an answer, then send; finishing: for the last answer."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """Plan of a region's parameter server.

    Attributes:
        region: region's name.
        num_workers: number of ranks.
        batch_size: rows per worker and step.
        batch_sizes: rows per step by worker, if unequal.
        steps: sync: region steps; async: mean pushes per worker. None: until the averager stops the
            run.
        mode: ``sync`` combines one gradient per worker into a step; ``async`` applies each alone.
        eval_every: steps between evaluations by worker 0; 0: only the last one.
        eval_rows: rows of all regions between evaluations, instead of steps.
        max_refused: consecutive refused steps that end the run.
        attempt: incarnation of this server.
        alone: no other region waits for this one, so it may pause when it is exhausted.
        worker_steps: steps of a worker's optimizer per push, which is their change; 0: workers push
            gradients, or make the optimizer's steps one by one.
        stragglers: rule for late workers.
        evaluates_outer: evaluate the parameters known to the averager, not the live ones.
        goal: description of the run's goal; a run resumed with another goal continues although it
            was asked to finish.
        last_round_is_final: the exchange of the last step may be the last one; it is then the final
            update, since codecs would lose what they owe.
        has_final_update: an exchange always follows the last step; a request of that step would
            only delay it.
        never_waits: training waits for no exchange but the last.
        round_steps: steps between exchanges, if equal in all regions; None otherwise.
        noise_every: steps between measurements of gradient noise; None: default.
        clip_mean_norm: largest norm of the mean of a step's gradients; None: any.
        elastic: rule for steps without missing workers; None: steps wait for them.
        state_every: 0: the server makes the optimizer's steps. Otherwise the workers make them, and
            an only worker sends its state after so many steps at the latest.
        reports_norms: updates are plain gradients, and the averager needs their norms.
    """

    region: str
    num_workers: int
    batch_size: int
    steps: int | None
    mode: Literal["sync", "async"] = "sync"
    eval_every: int = 0
    eval_rows: int | None = None
    max_refused: int = 3
    attempt: int = 1
    alone: bool = False
    worker_steps: int = 0
    stragglers: BackupWorkers | GradientCoding | None = None
    evaluates_outer: bool = False
    batch_sizes: tuple[int, ...] | None = None
    elastic: ElasticConfig | None = None
    reports_norms: bool = False
    goal: str = ""
    noise_every: int | None = None
    last_round_is_final: bool = False
    has_final_update: bool = False
    never_waits: bool = False
    round_steps: int | None = None
    clip_mean_norm: float | None = None
    state_every: int = 0

    @property
    def steps_per_round(self) -> int:
        """Region steps in which every worker's gradient is taken in once."""
        return 1 if self.mode == "sync" else self.num_workers

    @property
    def averages(self) -> bool:
        """Whether several workers make the optimizer's steps, and the server averages them."""
        return self.state_every > 0 and self.num_workers > 1

    @property
    def reads_optimizers(self) -> bool:
        """Whether checkpoints need the states of optimizers that stay with the workers.

        An only worker that makes the optimizer's steps sends its state with its parameters.
        """
        return self.averages or self.worker_steps > 0

    def rows_per_push(self, worker: int) -> int:
        """Return the rows of one push of a worker."""
        size = self.batch_sizes[worker] if self.batch_sizes else self.batch_size
        return size * max(1, self.worker_steps)

    def rate_of(self, rows: int) -> float:
        """Return the factor on the learning rate in a step of ``rows`` rows."""
        if self.elastic is None or self.elastic.rate == "same" or not rows:
            return 1.0
        return rows / sum(map(self.rows_per_push, range(self.num_workers)))


@dataclass(slots=True)
class Ledger:
    """Sample ledger: assigned = applied + in flight + returned + discarded, at every moment.

    Attributes:
        cursor: next position that was never assigned.
        returned: spans of lost workers, lowest first.
        in_flight: spans by worker rank.
        applied: rows whose gradient changed the model or took part in a round.
        discarded: rows by the reason for refusing their gradient.
    """

    cursor: int = 0
    returned: list[Span] = field(default_factory=list)
    in_flight: dict[int, Span] = field(default_factory=dict)
    applied: int = 0
    discarded: Counter[str] = field(default_factory=Counter)

    def assign(self, worker: int, count: int) -> Span:
        """Hand ``count`` rows to ``worker``: returned ones first, else the next of the stream.

        A worker that already holds a span (it was replaced) gets the same again.
        """
        if worker in self.in_flight:
            return self.in_flight[worker]
        if self.returned:
            span = self.returned.pop(0)
        else:
            span = Span(self.cursor, count)
            self.cursor += count
        self.in_flight[worker] = span
        return span

    def take_back(self, worker: int) -> None:
        """Return the span of a worker that is gone for good to the pool."""
        span = self.in_flight.pop(worker, None)
        if span is not None:
            self.returned.append(span)
            self.returned.sort(key=attrgetter("start"))

    def settle(self, worker: int, refused: str | None = None) -> Span:
        """Record ``worker``'s span as applied, or as discarded for the reason ``refused``.

        Raises:
            InvariantError: the worker has no span.
        """
        span = self.in_flight.pop(worker, None)
        if span is None:
            raise InvariantError(f"worker {worker} reported rows that it was not assigned")
        if refused is None:
            self.applied += span.count
        else:
            self.discarded[refused] += span.count
        return span

    def lose(self, count: int) -> None:
        """Record that applied rows were lost with the worker that trained on them."""
        self.applied -= count
        self.discarded["worker_lost"] += count

    def check(self) -> None:
        """Raise `InvariantError` unless the ledger balances."""
        open_rows = sum(s.count for s in self.in_flight.values())
        pool_rows = sum(s.count for s in self.returned)
        booked = self.applied + sum(self.discarded.values()) + open_rows + pool_rows
        if booked != self.cursor:
            raise InvariantError(f"sample ledger: {self.cursor} rows assigned, {booked} recorded")

    def export(self) -> dict[str, object]:
        """Plain values for a checkpoint."""
        spans = {str(w): [s.start, s.count] for w, s in self.in_flight.items()}
        return {
            "cursor": self.cursor,
            "returned": [[s.start, s.count] for s in self.returned],
            "in_flight": spans,
            "applied": self.applied,
            "discarded": dict(self.discarded),
        }

    @classmethod
    def restore(cls, data: dict[str, object]) -> Ledger:
        """The ledger of `export`. Spans in flight stay with their worker's rank."""
        raw: dict[str, object] = dict(data)
        in_flight = raw["in_flight"]
        returned = raw["returned"]
        discarded = raw["discarded"]
        if not (
            isinstance(in_flight, dict)
            and isinstance(returned, list)
            and isinstance(discarded, dict)
        ):
            raise InvariantError(f"sample ledger of another shape: {sorted(raw)}")
        return cls(
            cursor=int(str(raw["cursor"])),
            returned=[Span(int(s), int(n)) for s, n in returned],
            in_flight={int(w): Span(int(v[0]), int(v[1])) for w, v in in_flight.items()},
            applied=int(str(raw["applied"])),
            discarded=Counter({str(k): int(v) for k, v in discarded.items()}),
        )


class ActiveWorkers:
    """Active workers of a region, and the batch partition that each computes.

    A step consists of *partitions*, one per rank, with the rows assigned to that rank. With all
    workers present, each computes its own. A pushed gradient stays in its worker's memory until the
    step is complete: before that worker computes another partition, shards must copy it.

    Attributes:
        ranks: number of ranks of the region.
        elastic: rule for missing workers; None: steps wait for them.
        joined: present workers.
        awaited: ranks that the next step waits for.
        leaving: workers that exit after their present partition.
        idle: workers that wait for rows.
        computes: partition in progress by worker.
        uncopied: pushed partition in the worker's memory that no step has used, by worker.
        step: partitions of the step in progress; empty between steps.
    """

    def __init__(self, ranks: int, elastic: ElasticConfig | None = None) -> None:
        self.ranks = ranks
        self.elastic = elastic
        self.joined: set[int] = set()
        self.awaited = set(range(ranks))
        self.leaving: set[int] = set()
        self.idle: set[int] = set()
        self.computes: dict[int, int] = {}
        self.uncopied: dict[int, int] = {}
        self.step: set[int] = set()
        self._pushed_by: dict[int, int] = {}
        self._reported = set(range(ranks))

    # ------------------------------------------------------------- presence

    def join(self, worker: int) -> int | None:
        """Add a worker; returns the partition that was lost with its predecessor's memory."""
        self.leaving.discard(worker)
        self.awaited.discard(worker)
        self.joined.add(worker)
        self.idle.add(worker)
        return self.uncopied.pop(worker, None)

    def leave(self, worker: int) -> int | None:
        """Remove a worker; returns the partition that it was computing, if any."""
        self.joined.discard(worker)
        self.idle.discard(worker)
        if self.elastic is None:
            self.awaited.add(worker)
        else:
            self.awaited.discard(worker)
        return self.computes.pop(worker, None)

    def departing(self, stays: Collection[int] = ()) -> dict[int, int | None]:
        """Remove waiting workers that were asked to leave; returns their uncopied partitions.

        Those in ``stays`` leave later.
        """
        going = {
            worker: self.uncopied.pop(worker, None)
            for worker in sorted((self.leaving & self.waiting).difference(stays))
        }
        for worker in going:
            self.leave(worker)
            self.leaving.discard(worker)
        return going

    @property
    def present(self) -> set[int]:
        """Workers that take part: they are here, and stay."""
        return self.joined - self.leaving

    @property
    def may_work(self) -> bool:
        """Whether enough workers are present to assign rows."""
        least = 0 if self.elastic is None else self.elastic.least(self.ranks)
        return not self.awaited and len(self.present) >= least

    def changed_ranks(self) -> tuple[int, ...] | None:
        """Return the active ranks if they changed since the last call."""
        if self.elastic is None or self.awaited or self.present == self._reported:
            return None
        self._reported = self.present
        return tuple(sorted(self._reported))

    # ------------------------------------------------------------- partitions

    @property
    def follows(self) -> bool:
        """Whether a step has only the partitions of workers present at its beginning."""
        return self.elastic is not None and self.elastic.batch == "follows"

    def begin(self) -> None:
        """Begin a step, unless one is in progress."""
        if not self.step:
            self.step = self.present if self.follows else set(range(self.ranks))

    def give_up(self, partition: int) -> None:
        """Remove a partition from the step in progress."""
        self.step.discard(partition)

    def is_whole(self, pushed: Collection[int]) -> bool:
        """Tell whether these partitions complete the step in progress."""
        return bool(self.step) and self.step <= set(pushed)

    def deal(self, pushed: Collection[int]) -> dict[int, int]:
        """Return open partitions by the worker that should compute each: the own one, else any."""
        left = self.step - set(pushed) - set(self.computes.values())
        takers = self.idle & self.present
        dealt = {worker: worker for worker in sorted(takers & left)}
        if self.elastic is not None:
            helpers = sorted(takers - left) + sorted(self.present & self.uncopied.keys())
            dealt |= dict(zip(helpers, sorted(left - dealt.keys()), strict=False))
        return dealt

    def take(self, worker: int, partition: int) -> int | None:
        """Begin a partition; returns the worker's uncopied one, whose memory it needs."""
        self.idle.discard(worker)
        self.computes[worker] = partition
        return self.uncopied.pop(worker, None)

    def pushed(self, worker: int) -> None:
        """Record the push of a worker's partition."""
        partition = self.computes.pop(worker)
        self.uncopied[worker] = partition
        self._pushed_by[partition] = worker

    def applied(self, partitions: Iterable[int]) -> None:
        """Record that a step has used these partitions; workers that waited for it become idle."""
        used = set(partitions)
        for worker in [w for w, partition in self.uncopied.items() if partition in used]:
            del self.uncopied[worker]
            self.idle |= {worker} & self.joined
        self.step.clear()

    def compute_s(self, reports: Mapping[int, StepReport]) -> float:
        """Return the compute seconds of the slowest worker of a step."""
        took_s: dict[int, float] = {}
        for partition, report in reports.items():
            worker = self._pushed_by.get(partition, partition)
            took_s[worker] = took_s.get(worker, 0.0) + report.compute_s
        return max(took_s.values())

    def pushers(self, partitions: Iterable[int]) -> set[int]:
        """Return the present workers that have pushed these partitions."""
        return {self._pushed_by.get(each, each) for each in partitions} & self.joined

    @property
    def waiting(self) -> set[int]:
        """Workers that are here and compute nothing."""
        return (self.idle | self.uncopied.keys()) & self.joined


@dataclass(slots=True)
class EvalTimes:
    """Schedule of a region's evaluations.

    Attributes:
        every: region steps between two; 0 for none.
        rows: rows of all regions between two, instead of steps.
        by: worker that makes the newest one.
        last: state of the evaluation after the end.
    """

    every: int
    rows: int | None
    by: int | None = None
    last: Literal["owed", "open", "reported"] = "owed"
    _next: int = 0
    _open: bool = False  # an evaluation was requested, and its result is not reported yet
    _owed: bool = False

    @classmethod
    def of(cls, plan: ServerPlan) -> EvalTimes:
        """Return the schedule of a region's plan; there is no evaluation at the start."""
        every = plan.eval_every * plan.steps_per_round
        return cls(every, plan.eval_rows, _next=every if plan.eval_rows is None else 0)

    @property
    def is_owed(self) -> bool:
        """Whether an evaluation was requested from a worker that is gone."""
        return self._owed

    def is_due(self, version: int, seen: int) -> bool:
        """Tell whether to evaluate now; if so, schedule the next one.

        Args:
            version: steps that the region has applied.
            seen: rows that the averager has taken in.
        """
        due = self._pass(version, seen) or self._owed
        self._owed = False
        self._open |= due  # steps of a run are assigned before the loss of its worker is handled
        return due

    def steps_left(self, version: int, seen: int) -> int | None:
        """Return the steps after ``version`` until the next evaluation; None if no step decides.

        Args:
            version: steps that the region has applied.
            seen: rows that the averager has taken in; it stays until an answer is merged.
        """
        if self._owed or (self.rows is not None and seen // self.rows > self._next):
            return 1
        return self._next - version if self.rows is None and self.every else None

    def ask_last(self, worker: int) -> bool:
        """Assign the evaluation after the end to ``worker``; False if it is assigned or done."""
        if self.last != "owed":
            return False
        self.by, self.last = worker, "open"
        return True

    def skip_last(self) -> None:
        """Skip the evaluation after the end."""
        self.last = "reported"

    def reported(self, *, final: bool = False) -> None:
        """Record the result of the newest evaluation, or of the one after the end."""
        self._open = False
        if final:
            self.last = "reported"

    def lost(self, worker: int) -> None:
        """Remove a worker; its unfinished evaluation is owed."""
        if worker != self.by:
            return
        self._owed |= self._open
        self._open = False
        if self.last == "open":
            self.last = "owed"

    def _pass(self, version: int, seen: int) -> bool:
        """Tell whether a time to evaluate has been reached."""
        if self.rows is not None:
            due = seen // self.rows > self._next
            self._next = seen // self.rows
            return due
        if not self.every or version < self._next:
            return False
        self._next = (version // self.every + 1) * self.every
        return True

    def resume(self, version: int) -> None:
        """Continue at ``version``; an evaluation that is due there has not been made."""
        if self.rows is None and self.every:
            self._next = -(-max(version, 1) // self.every) * self.every


@dataclass(slots=True)
class RegionWork:
    """Assigns row ranges to a region's workers; tracks pushes, joins and departures.

    Rows are recorded by partition of a step, never by the worker that computes them.

    Attributes:
        plan: server's plan.
        copy_partition: copies a pushed partition in all shards before its memory is reused.
        ledger: sample ledger.
        pushes: pushed partitions that are in no step yet.
        workers: active workers.
        evals: schedule of evaluations.
        rule: rule for late workers.
    """

    plan: ServerPlan
    copy_partition: Callable[[int], None]
    ledger: Ledger = field(default_factory=Ledger)
    pushes: dict[int, StepReport] = field(default_factory=dict)
    workers: ActiveWorkers = field(init=False)
    evals: EvalTimes = field(init=False)
    rule: Stragglers = field(init=False)
    _late: dict[int, Span] = field(
        default_factory=dict
    )  # spans that a completed step did not wait for

    def __post_init__(self) -> None:
        plan = self.plan
        self.workers = ActiveWorkers(plan.num_workers, plan.elastic)
        self.evals = EvalTimes.of(plan)
        self.rule = Stragglers.of(plan.stragglers, plan.num_workers)

    # ------------------------------------------------------------- presence

    def join(self, worker: int) -> None:
        """See `Server.join`."""
        self.leave(worker)
        dropped = self.workers.join(worker)
        if dropped is not None:  # it was in the predecessor's memory
            self.pushes.pop(dropped, None)

    def leave(self, worker: int) -> None:
        """See `Server.leave`."""
        partition = self.workers.leave(worker)
        self._late.pop(worker, None)
        self.evals.lost(worker)
        if self.plan.elastic is None:
            return
        if self.plan.mode == "async" and worker not in self.pushes:
            self.ledger.take_back(worker)
        elif self.workers.follows and partition is not None:
            self.workers.give_up(partition)
            self.ledger.take_back(partition)

    def forget(self, worker: int) -> None:
        """Drop what a lost worker has pushed, whose effect was in its memory only."""
        if self.pushes.pop(worker, None) is not None:
            self.workers.uncopied.pop(worker, None)
            self.workers.give_up(worker)
            self.ledger.take_back(worker)

    def drain(self, worker: int) -> None:
        """See `Server.drain`."""
        if worker in self.workers.joined:
            self.workers.leaving.add(worker)

    def changed_ranks(self, version: int) -> ActiveWorkersChanged | None:
        """Return the active workers after ``version`` steps, if they changed."""
        ranks = self.workers.changed_ranks()
        if ranks is None:
            return None
        alone = self.plan.mode == "async" or self.workers.follows
        takers = ranks if alone else range(self.plan.num_workers)
        return ActiveWorkersChanged(version, ranks, sum(map(self.plan.rows_per_push, takers)))

    @property
    def is_computing(self) -> bool:
        """Whether any worker computes a gradient that may count."""
        return bool(self.workers.computes)

    @property
    def is_still(self) -> bool:
        """Whether all workers are present and none computes."""
        return not (self.workers.awaited or self.workers.computes or self._late)

    # ------------------------------------------------------------- work

    @property
    def step_rows(self) -> int:
        """Rows of the step in progress."""
        return sum(map(self.plan.rows_per_push, self.workers.step))

    @property
    def is_in_order(self) -> bool:
        """Whether the step in progress has the newest rows, and the next one those after them."""
        first, ledger = self.ledger.cursor - self.step_rows, self.ledger
        for partition in sorted(self.workers.step):
            if ledger.in_flight.get(partition) != Span(first, self.plan.rows_per_push(partition)):
                return False
            first += self.plan.rows_per_push(partition)
        return not ledger.returned and ledger.in_flight.keys() == self.workers.computes.keys()

    def partition_of(self, worker: int) -> int:
        """See `Server.partition_of`."""
        return self.workers.computes.get(worker, worker)

    def push(self, worker: int, report: StepReport) -> bool:
        """See `Server.push`; returns whether the push counts, since it is not too late."""
        if self._late.pop(worker, None) == report.span:
            self.workers.idle.add(worker)
            return False
        partition = self.partition_of(worker)
        held = self.ledger.in_flight.get(partition)
        if held != report.span or worker not in self.workers.computes:
            raise InvariantError(f"worker {worker} pushed {report.span}, it was assigned {held}")
        self.workers.pushed(worker)
        self.pushes[partition] = report
        return True

    def ready(self) -> list[int]:
        """Return the partitions of the next step, lowest rank first; empty if it is incomplete."""
        if self.plan.mode == "async":
            return sorted(self.pushes)[:1]
        waits = self.plan.stragglers is None
        is_enough = (
            self.workers.is_whole(self.pushes) if waits else self.rule.is_enough(self.pushes)
        )
        return sorted(self.pushes) if is_enough else []

    def settle(
        self, reports: Mapping[int, StepReport], contributions: list[Contribution]
    ) -> tuple[int, float]:
        """Record a completed step.

        Returns:
            Rows in the step, and the seconds of the slowest worker.
        """
        whole = self.rule.holds_all_rows(contributions)
        samples = 0
        for partition, report in reports.items():
            del self.pushes[partition]
            refused = None if whole else report.refused
            span = self.ledger.settle(partition, refused)
            samples += 0 if refused else span.count
        self.workers.applied(reports)
        if self.plan.mode == "sync":
            samples += self._do_without(None if whole else "late")
        return samples, self.workers.compute_s(reports)

    def _do_without(self, lost: str | None) -> int:
        """Record partitions that the step did not wait for; returns its rows of them."""
        samples = 0
        for worker in sorted(self.ledger.in_flight):
            span = self.ledger.settle(worker, lost)
            samples += 0 if lost else span.count
            if self.workers.computes.pop(worker, None) is not None:
                self._late[worker] = span
        return samples

    def assign(self, version: int, seen: int) -> list[Assignment]:
        """Assign rows to idle workers; in sync mode to all at once, so that ranks get their own.

        Args:
            version: steps that the parameters hold.
            seen: rows that the averager has taken in.
        """
        dealt, readers = self._dealt()
        rows_of = self.plan.rows_per_push
        spans = {
            partition: self.ledger.assign(partition, rows_of(partition)) for partition in readers
        }
        return [self._work(w, partition, spans, version, seen) for w, partition in dealt.items()]

    def _dealt(self) -> tuple[dict[int, int], list[int]]:
        """Return the partitions that begin now by worker, and all partitions of the step."""
        workers, stragglers = self.workers, self.plan.stragglers
        if self.plan.mode == "sync" and stragglers is None:
            if not workers.may_work:
                return {}, []
            workers.begin()
            for partition in [held for held in self.ledger.in_flight if held not in workers.step]:
                self.ledger.take_back(partition)  # of a rank that is absent since a resume
            return workers.deal(self.pushes), sorted(workers.step)
        ready = workers.elastic is None or workers.may_work
        if stragglers is not None:
            ready = len(workers.joined) >= self.rule.needed
        dealt = {worker: worker for worker in sorted(workers.idle & workers.present) if ready}
        return dealt, list(self.rule.readers(list(dealt)))

    def _work(
        self, worker: int, partition: int, spans: Mapping[int, Span], version: int, seen: int
    ) -> Assignment:
        uncopied = self.workers.take(worker, partition)
        if uncopied is not None:
            self.copy_partition(uncopied)
        evaluate = self._evaluates(worker) and self.evals.is_due(version, seen)
        if evaluate:
            self.evals.by = worker
        judged = evaluate and self.plan.evaluates_outer
        parts = self.rule.parts_of(partition, spans)
        other = None if partition == worker else partition
        return Assignment(
            worker,
            version,
            spans[partition],
            evaluate,
            eval_params=judged,
            parts=parts,
            partition=other,
        )

    def _evaluates(self, worker: int) -> bool:
        """Tell whether ``worker`` evaluates: the lowest present rank."""
        if self.plan.elastic is None:
            return worker == 0
        return worker == min(self.workers.present or self.workers.joined) or self.evals.is_owed

    # ------------------------------------------------------------- exit

    def departing(self, version: int, stays: Collection[int] = ()) -> list[Assignment]:
        """Let workers exit that were asked to leave, but for some; their pushes stay."""
        going = self.workers.departing(stays)
        for uncopied in going.values():
            if uncopied is not None:
                self.copy_partition(uncopied)
        return [Assignment(worker, version, None, done=True) for worker in going]

    def finish_all(self, version: int, *, done: bool) -> list[Assignment]:
        """Let all waiting workers exit, and those whose push arrives too late to count."""
        answers = []
        for partition in sorted(self.pushes):
            self.ledger.settle(partition, "after_end")
        for worker in sorted(self.workers.waiting):
            last = done and self._evaluates(worker) and self.evals.ask_last(worker)
            answers.append(Assignment(worker, version, None, evaluate=last, done=True))
        self.workers.joined -= self.workers.waiting
        self.workers.idle.clear()
        self.workers.uncopied.clear()
        self.pushes.clear()
        return answers

    def restore(self, ledger: dict[str, object], version: int) -> None:
        """Restore a saved ledger after ``version`` steps.

        Workers join again and get the rows that were in flight; rows of removed ranks go to the
        first workers that ask.
        """
        self.ledger = Ledger.restore(ledger)
        for partition in [s for s in self.ledger.in_flight if s >= self.plan.num_workers]:
            self.ledger.take_back(partition)
        self.evals.resume(version)
